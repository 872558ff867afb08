"""Spans of time that may be nothing or negative: bounds of joins and of disorder."""

from __future__ import annotations

from ftlayer.config import duration_ms
from ftlayer.errors import ConfigError


def span_ms(value: str | int, option: str, *, least: int | None = None) -> int:
    """Return milliseconds for what `duration_ms` takes, a 0, and either with a minus in front.

    Raises `ConfigError` naming ``option``, also below ``least``.
    """
    milliseconds = _milliseconds(value, option)
    if least is not None and milliseconds < least:
        raise ConfigError(f"{option}: expected at least {least} ms, got {value!r}")
    return milliseconds


def _milliseconds(value: str | int, option: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, str):
        return duration_ms(value, option)
    text = value.strip()
    if text.startswith("-"):
        return -_milliseconds(text[1:], option)
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
    if number and not number.strip("0."):
        # `duration_ms` knows no 0; its rules for the unit hold all the same.
        duration_ms(f"1{text[len(number) :]}", option)
        return 0
    return duration_ms(text, option)
