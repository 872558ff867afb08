"""The lines of a part of a file, some megabytes at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ftlayer.config import MIB
from ftlayer.errors import SourceError

CHUNK_BYTES = MIB
MAX_LINE = 64 * MIB


def line_blocks(file: Any, start: int, end: int, newline: bytes = b"\n") -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in the bytes [start, end), many at a time: where they begin, and they themselves.

    ``file`` is at its beginning. The last line of the file may be without a newline. Raises `SourceError` for a line
    of more than 64 MiB.
    """
    at = _first_line(file, start, newline)
    rest = b""
    while at < end:
        chunk = file.read(CHUNK_BYTES)
        data = rest + chunk if rest else chunk
        # The line that has the last byte before the end is the last one.
        stop = data.find(newline, end - at - 1) + 1 if len(data) >= end - at else 0
        if not chunk or stop:
            if data:
                yield at, data[:stop] if stop else data
            return
        whole = data.rfind(newline) + 1
        if whole:
            yield at, data[:whole]
        at, rest = at + whole, data[whole:]
        if len(rest) > MAX_LINE:
            raise SourceError(f"the line at byte {at} is longer than {MAX_LINE} bytes")


def _first_line(file: Any, start: int, newline: bytes) -> int:
    """Go to the first line that begins at ``start`` or behind it; return where that is."""
    if not start:
        return 0
    at = start - 1
    file.seek(at)
    while chunk := file.read(CHUNK_BYTES):
        found = chunk.find(newline)
        if found >= 0:
            file.seek(at + found + 1)
            return int(at + found + 1)
        at += len(chunk)
    return at
