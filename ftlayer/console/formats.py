"""Numbers and times as people read them."""

from __future__ import annotations

import math
from datetime import UTC, datetime

DASH = "–"
_STEPS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BYTES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_DAY_S, _HOUR_S, _MINUTE_S = 86_400, 3_600, 60


def count(value: float) -> str:
    """Return a whole number with its thousands set off."""
    return f"{value:,.0f}" if math.isfinite(value) else DASH


def short(value: float) -> str:
    """Return a number in three or four digits: ``12``, ``1.23k``, ``45.6M``."""
    if not math.isfinite(value):
        return DASH
    for step, unit in _STEPS:
        if abs(value) >= step:
            return f"{_three(value / step)}{unit}"
    return f"{value:.0f}" if value == round(value) or abs(value) >= 100 else f"{value:.1f}"


def rate(per_s: float) -> str:
    """Return a number a second."""
    return f"{short(per_s)}/s" if math.isfinite(per_s) else DASH


def share(value: float) -> str:
    """Return a share from 0 to 1 in percent."""
    return f"{value * 100:.0f} %" if math.isfinite(value) else DASH


def size(value: float) -> str:
    """Return bytes in powers of 1,024."""
    if not math.isfinite(value):
        return DASH
    for step, unit in _BYTES:
        if abs(value) >= step:
            return f"{_three(value / step)} {unit}"
    return f"{value:.0f} B"


def seconds(value: float) -> str:
    """Return a duration in its largest two units; below a minute with what is behind the point."""
    if not math.isfinite(value):
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


def millis(value: float) -> str:
    """Return a duration that is given in milliseconds."""
    return seconds(value / 1_000)


def moment(wall_ms: float) -> str:
    """Return a moment (Unix ms) to the second, in UTC; a dash for 0."""
    return _utc(wall_ms).strftime("%Y-%m-%d %H:%M:%S") if wall_ms else DASH


def clock(wall_ms: float) -> str:
    """Return the time of day of a moment (Unix ms), in UTC; a dash for 0."""
    return _utc(wall_ms).strftime("%H:%M:%S") if wall_ms else DASH


def iso(wall_ms: float) -> str:
    """Return a moment (Unix ms) as ISO 8601 has it, in UTC, with milliseconds."""
    return _utc(wall_ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _three(value: float) -> str:
    """Return three digits of a number below 1,024."""
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def _utc(wall_ms: float) -> datetime:
    return datetime.fromtimestamp(wall_ms / 1_000, UTC)
