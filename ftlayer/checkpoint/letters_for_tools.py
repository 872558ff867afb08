"""A dead letter of barrier mode as tools of the vertex show letters: a row, and attempts."""

from __future__ import annotations

import pyarrow as pa

from ftlayer.checkpoint.letters import ChainLetter, LetterKind
from ftlayer.errors import CheckpointDamagedError
from ftlayer.records.ipc import UNREADABLE, read_one_batch
from ftlayer.vertex.calls import Attempt


def payload_of(letter: ChainLetter) -> pa.RecordBatch:
    """Return the one row of a letter; a timer has one with its time and its key, as that is packed.

    Raises `CheckpointDamagedError` for a payload that is no row.
    """
    if letter.kind is LetterKind.TIMER:
        time = pa.array([letter.event_time_ms], pa.timestamp("ms", "UTC"))
        return pa.RecordBatch.from_arrays([time, pa.array([letter.key], pa.binary())], ["timer", "key"])
    try:
        return read_one_batch(letter.payload)
    except UNREADABLE as error:
        raise CheckpointDamagedError(
            f"a dead letter of {letter.chain!r} has a record that cannot be read: {error}"
        ) from error


def attempts_of(letter: ChainLetter) -> tuple[Attempt, ...]:
    """Return the failed attempts of a letter; there is one at the least, since letters are shown by their last."""
    attempts = tuple(
        Attempt(each.number, each.at_ms, each.reason, each.operator, each.place, each.traceback)
        for each in letter.attempts
    )
    return attempts or (Attempt(1, letter.died_ms, "", letter.operator),)
