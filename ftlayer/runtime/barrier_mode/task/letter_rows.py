"""Dead letters as records of the topology: the rows that a chain puts out to `DataStream.dead_letters`."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

import pyarrow as pa

from ftlayer.checkpoint.letters import ChainLetter, LetterKind
from ftlayer.dead_letters.letter import DeadLetter, row_of, shown_record
from ftlayer.dead_letters.schema import LETTER_SCHEMA
from ftlayer.functions.steps import Record
from ftlayer.records.ipc import read_one_batch
from ftlayer.state.snapshots.serializer import unpack
from ftlayer.topology.job_graph import stream_name

_ORIGIN_BYTES = 8


def letter_rows(letters: Sequence[ChainLetter], job: str) -> pa.RecordBatch:
    """Return letters as rows of `LETTER_SCHEMA`."""
    return pa.RecordBatch.from_pylist(
        [row_of(shown(letter, job)) for letter in letters], schema=LETTER_SCHEMA
    )


def shown(letter: ChainLetter, job: str) -> DeadLetter:
    """Return a letter of the topology ``job`` as a program sees it.

    Its stream is named after its chain, as an operator's with timers in acker mode. What is shown of a timer are its
    key and its time.
    """
    last = letter.attempts[-1]
    return DeadLetter(
        key=letter.letter.hex(),
        stream=stream_name(job, letter.chain),
        record=_record(letter),
        reason=last.reason,
        operator=letter.operator,
        traceback=last.traceback,
        attempts=last.number,
        first_failed_at=_time(letter.first_failed_ms),
        died_at=_time(letter.died_ms),
        origin=int.from_bytes(letter.letter[:_ORIGIN_BYTES]),
    )


def _record(letter: ChainLetter) -> Record:
    if letter.kind is LetterKind.TIMER:
        return {"key": unpack(letter.key), "timer_ms": letter.event_time_ms}
    return shown_record(read_one_batch(letter.payload))


def _time(wall_ms: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(wall_ms / 1_000, dt.UTC)
