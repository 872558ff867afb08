"""Numbers and times as people read them; None and NaN are a dash."""

from __future__ import annotations

import math
import re

DASH = "–"
_ISO = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}")
_STEPS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BYTES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_DAY_S, _HOUR_S, _MINUTE_S = 86_400, 3_600, 60


def count(value: float | None) -> str:
    return DASH if value is None or not math.isfinite(value) else f"{value:,.0f}"


def short(value: float | None) -> str:
    """Return a number in three or four digits: ``12``, ``1.23k``, ``45.6M``."""
    if value is None or not math.isfinite(value):
        return DASH
    for step, unit in _STEPS:
        if abs(value) >= step:
            return f"{_three(value / step)}{unit}"
    return f"{value:.0f}" if value == round(value) or abs(value) >= 100 else f"{value:.1f}"


def rate(per_s: float | None) -> str:
    return DASH if per_s is None or not math.isfinite(per_s) else f"{short(per_s)}/s"


def share(value: float | None) -> str:
    """Return a share from 0 to 1 in percent; of a little it says that it is some."""
    if value is None or not math.isfinite(value):
        return DASH
    return "<1 %" if 0 < value < 0.005 else f"{value * 100:.0f} %"


def size(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return DASH
    for step, unit in _BYTES:
        if abs(value) >= step:
            return f"{_three(value / step)} {unit}"
    return f"{value:.0f} B"


def seconds(value: float | None) -> str:
    """Return a duration in its largest two units; below a minute with what is behind the point."""
    if value is None or not math.isfinite(value):
        return DASH
    if value < 0:
        return f"-{seconds(-value)}"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < _MINUTE_S:
        return f"{value:.1f} s"
    whole = int(value)
    for unit_s, unit, smaller_s, smaller in (
        (_DAY_S, "d", _HOUR_S, "h"),
        (_HOUR_S, "h", _MINUTE_S, "min"),
        (_MINUTE_S, "min", 1, "s"),
    ):
        if whole >= unit_s:
            rest = whole % unit_s // smaller_s
            return f"{whole // unit_s} {unit} {rest} {smaller}" if rest else f"{whole // unit_s} {unit}"
    raise AssertionError("a duration of a minute or more has minutes")


def moment(iso: str | None) -> str:
    """Return a time (ISO 8601 in UTC) to the second; what is none, as it is; a dash for none."""
    if not iso:
        return DASH
    return iso[:19].replace("T", " ") if _ISO.match(iso) else iso


def of(number: int, one: str, many: str) -> str:
    return f"{count(number)} {one if number == 1 else many}"


def _three(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
