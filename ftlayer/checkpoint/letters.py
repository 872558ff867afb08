"""Dead letters of barrier mode: records that a chain gives up, as plain values that travel in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import pyarrow as pa

from ftlayer.common.printable import described
from ftlayer.errors import CheckpointDamagedError
from ftlayer.records.ipc import UNREADABLE, read_one_batch
from ftlayer.vertex.calls import Attempt

LETTER_BYTES = 16
"""Random bytes that name a letter."""


class LetterKind(StrEnum):
    """What failed: a record on its way into a chain, a timer, a row that a two-phase sink has refused."""

    RECORD = "record"
    TIMER = "timer"
    ROW = "row"


@dataclass(frozen=True, slots=True)
class ChainLetter:
    """A record, a timer or a sink's row that the chain with the uid ``chain`` has given up.

    Attributes:
        letter: its name, `LETTER_BYTES` random bytes: equal ones are one letter.
        checkpoint: the first one that holds it; 0 while none does.
        chain: uid of the operator at the chain's head.
        input: of the chain, from 0, that the record came by.
        operator: uid of the one that refused it.
        key: its key in the chain, as `ftlayer.state.snapshots.serializer` packs it; b"" without one.
        payload: an IPC stream of Arrow with one row; b"" for a timer.
        event_time_ms: of the record, or the timer's time; None without one.
        is_event_timer: it is a timer of event time, not of processing time.
        attempts: the failed ones, the oldest first.
        first_failed_ms, died_ms: wall clock.
    """

    letter: bytes
    checkpoint: int
    chain: str
    subtask: int
    input: int
    kind: LetterKind
    operator: str
    key: bytes
    payload: bytes
    event_time_ms: int | None
    attempts: tuple[Attempt, ...]
    first_failed_ms: int
    died_ms: int
    is_event_timer: bool = False


@dataclass(frozen=True, slots=True)
class LetterBatch:
    """The letters that one checkpoint was the first to hold, on their way to a file: ``name`` is the file's.

    ``lasting``: they are of a savepoint, which may be restored at any time.
    """

    name: str
    letters: tuple[ChainLetter, ...]
    lasting: bool = False


MAX_ATTEMPTS = 16
"""Failed attempts of a record that are kept: the first and the newest …"""

MAX_TRACEBACKS = 4
"""… of which so many have their traceback; the first and the newest again."""


def with_attempt(attempts: tuple[Attempt, ...], newest: Attempt, since_ms: int) -> tuple[Attempt, ...]:
    """Return failed attempts, within bounds, with one more; it is given as the first of those since ``since_ms``."""
    if attempts and attempts[-1].at_ms >= since_ms:
        newest = replace(newest, number=attempts[-1].number + 1)
    if len(attempts) >= MAX_ATTEMPTS:
        attempts = attempts[:1] + attempts[len(attempts) - MAX_ATTEMPTS + 2 :]
    if len(attempts) >= MAX_TRACEBACKS:
        at = len(attempts) - MAX_TRACEBACKS + 1
        attempts = (*attempts[:at], replace(attempts[at], traceback=""), *attempts[at + 1 :])
    return (*attempts, newest)


TIMER_SCHEMA = pa.schema([("timer", pa.timestamp("ms", "UTC")), ("key", pa.binary())])
"""What is shown of a timer. It is no record that could be edited."""


def not_into_source(chain: str) -> str:
    return (
        f"{chain!r} is a source: a row that it could not send does not come back into it. Mend the source, "
        "its schema or its partitioner, and let it give the row anew"
    )


def payload_of(letter: ChainLetter) -> pa.RecordBatch:
    """Return the one row of a letter; a timer has one with its time and its key, as that is packed.

    Raises `CheckpointDamagedError` for a payload that is no row.
    """
    if letter.kind is LetterKind.TIMER:
        values = [letter.event_time_ms], [letter.key]
        return pa.RecordBatch.from_arrays(
            [pa.array(each, field.type) for each, field in zip(values, TIMER_SCHEMA, strict=True)],
            schema=TIMER_SCHEMA,
        )
    try:
        return read_one_batch(letter.payload)
    except UNREADABLE as error:
        raise CheckpointDamagedError(
            f"a dead letter of {letter.chain!r} has a record that cannot be read: {described(error)}"
        ) from error


def attempts_of(letter: ChainLetter) -> tuple[Attempt, ...]:
    """Return the failed attempts of a letter; there is one at the least, since letters are shown by their last."""
    return letter.attempts or (Attempt(1, letter.died_ms, "", letter.operator),)
