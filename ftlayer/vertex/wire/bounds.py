"""Bounds that names and numbers of any call keep to."""

from __future__ import annotations

from ftlayer.errors import MalformedRequestError

# Names become parts of the store's keys, which LMDB limits to 511 bytes.
MAX_NAME_BYTES = 200
# A job's name with some more.
MAX_RUN_BYTES = 256
# A run's name, and the number of a checkpoint.
MAX_FILE_BYTES = MAX_RUN_BYTES + 20


def check_name(name: str, where: str, most: int = MAX_NAME_BYTES) -> None:
    """Raise `MalformedRequestError` unless ``name`` has 1 to ``most`` bytes and no NUL."""
    size = len(name.encode("utf-8", "surrogatepass"))
    if not 1 <= size <= most or "\0" in name:
        raise MalformedRequestError(f"{where}: expected 1 to {most} bytes without NUL, got {size} bytes")


def check_least(value: int, least: int, where: str) -> None:
    """Raise `MalformedRequestError` unless ``value`` is ``least`` or more, and a signed 64-bit number."""
    if not least <= value < 1 << 63:
        raise MalformedRequestError(f"{where}: expected {least} to 2^63-1, got {value}")
