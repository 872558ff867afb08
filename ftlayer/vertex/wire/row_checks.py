"""Checks of columns that several calls have."""

from __future__ import annotations

from collections.abc import Sized

import numpy as np

from ftlayer.errors import MalformedRequestError
from ftlayer.vertex.calls import I32, MAX_ROWS, U64, EventIds, RowRoots
from ftlayer.vertex.calls.event_ids import check_event_ids


def check_rows(rows: int, where: str) -> None:
    """Raise `MalformedRequestError` for more rows than a call may have."""
    if rows > MAX_ROWS:
        raise MalformedRequestError(f"{where}: {rows} rows in one call; send {MAX_ROWS} at most")


def check_ids(ids: U64, where: str) -> None:
    """Raise `MalformedRequestError` for an id of 0."""
    # Twice as fast as `all`, and four times for a few ids.
    if np.count_nonzero(ids) != ids.size:
        index = int(np.flatnonzero(ids == 0)[0])
        raise MalformedRequestError(f"{where}[{index}]: 0 is never an id")


def check_lengths(call: str, rows: int, **columns: Sized) -> None:
    """Raise `MalformedRequestError` unless all columns have ``rows`` rows."""
    for name, column in columns.items():
        if len(column) != rows:
            raise MalformedRequestError(
                f"{call}.{name}: expected {rows} rows, as {call}.roots has, got {len(column)}"
            )


def check_key_hashes(key_hashes: I32 | None, rows: int, where: str) -> None:
    """Raise `MalformedRequestError` unless there are numbers for ``rows`` rows, or none at all."""
    if key_hashes is None:
        return
    if len(key_hashes) != rows:
        raise MalformedRequestError(f"{where}: expected {rows} rows, as roots has, got {len(key_hashes)}")
    if key_hashes.ndim not in (1, 2) or 0 in key_hashes.shape[1:]:
        raise MalformedRequestError(
            f"{where}: expected shape (n,) or (n, selectors), got {key_hashes.shape}; leave it out without keys"
        )


def check_values(roots: RowRoots, values: U64 | None, ids: EventIds | None, where: str) -> None:
    """Raise `MalformedRequestError` for values or ids that do not fit their roots."""
    if values is not None:
        check_lengths(where, len(roots), values=values)
        check_event_ids(ids, values, f"{where}.ids")
    elif ids is not None:
        raise MalformedRequestError(f"{where}.ids: they need the values that were folded from them")
