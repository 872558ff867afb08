"""Checks of the calls of `ftlayer.vertex.calls.ranges`, beyond their types."""

from __future__ import annotations

import numpy as np

from ftlayer.config import MIB
from ftlayer.errors import MalformedRequestError
from ftlayer.vertex.calls import (
    U64,
    AskRanges,
    NoteRange,
    Register,
    RootRange,
    RowRange,
    StoreRows,
    TakeOver,
)
from ftlayer.vertex.wire.bounds import MAX_RUN_BYTES, check_least, check_name
from ftlayer.vertex.wire.row_checks import (
    check_ids,
    check_key_hashes,
    check_rows,
    check_values,
)

MAX_PARTITIONS = 65_536
MAX_HOLDER_BYTES = 2 * MAX_RUN_BYTES
MAX_DIGEST_BYTES = 64
MAX_PLANNED_BYTES = 16 * MIB
"""Offsets of all splits of a source, as text."""


def check_note(call: NoteRange) -> None:
    """Raise `MalformedRequestError` naming the field, if ``call`` cannot be meant."""
    check_name(call.stream, "NoteRange.stream")
    check_least(call.first, 0, "NoteRange.first")
    check_least(call.number, call.first, "NoteRange.number")
    if call.number >= 1 << 63:
        raise MalformedRequestError(f"NoteRange.number: expected less than 2^63, got {call.number}")
    if len(call.planned) > MAX_PLANNED_BYTES:
        raise MalformedRequestError(
            f"NoteRange.planned: expected {MAX_PLANNED_BYTES} bytes at most, got {len(call.planned)}"
        )


def check_range_call(call: TakeOver | Register | AskRanges | StoreRows) -> None:
    """Raise `MalformedRequestError` naming the field, if ``call`` cannot be meant."""
    where = type(call).__name__
    check_name(call.stream, f"{where}.stream")
    check_name(call.holder, f"{where}.holder", MAX_HOLDER_BYTES)
    match call:
        case TakeOver():
            if len(call.partitions) > MAX_PARTITIONS:
                raise MalformedRequestError(
                    f"TakeOver.partitions: expected {MAX_PARTITIONS} at most, got {len(call.partitions)}"
                )
            for index, partition in enumerate(call.partitions):
                check_name(partition, f"TakeOver.partitions[{index}]")
        case Register():
            _check_range(call.range)
            check_rows(len(call.roots), "Register")
            if not isinstance(call.roots, RootRange):
                check_ids(call.roots, "Register.roots")
            check_values(call.roots, call.values, call.ids, "Register")
            if call.range.rows != len(call.roots):
                raise MalformedRequestError(
                    f"Register.range.rows: expected {len(call.roots)}, as Register.roots has, got {call.range.rows}"
                )
        case StoreRows():
            check_least(call.segment, 0, "StoreRows.segment")
            check_rows(len(call.rows), "StoreRows")
            if call.payload.num_rows != len(call.rows):
                raise MalformedRequestError(
                    f"StoreRows.payload: expected {len(call.rows)} rows, as StoreRows.rows has, got "
                    f"{call.payload.num_rows}"
                )
            check_key_hashes(call.key_hashes, len(call.rows), "StoreRows.key_hashes")
            _check_ascending(call.rows)


def _check_range(facts: RowRange) -> None:
    where = "Register.range"
    check_name(facts.partition, f"{where}.partition")
    check_least(facts.number, 0, f"{where}.number")
    check_least(facts.first, 0, f"{where}.first")
    check_least(facts.span, facts.rows, f"{where}.span")
    if len(facts.digest) > MAX_DIGEST_BYTES:
        raise MalformedRequestError(
            f"{where}.digest: expected {MAX_DIGEST_BYTES} bytes at most, got {len(facts.digest)}"
        )


def _check_ascending(rows: U64) -> None:
    if len(rows) and (int(rows[-1]) >= 1 << 20 or np.any(rows[1:] <= rows[:-1])):
        raise MalformedRequestError("StoreRows.rows: expected places below 2^20 in ascending order")
