"""A chain whose records fail alone: each passes through it whole or not at all, and is tried again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Protocol

import numpy as np
import pyarrow as pa

from ftlayer.checkpoint.letters import ChainLetter, LetterKind
from ftlayer.checkpoint.options import FailurePolicy
from ftlayer.common.clock import Now
from ftlayer.common.rules.circuit import CircuitStatus
from ftlayer.errors import IncompatibleCheckpointError
from ftlayer.functions.chains.firing import TimerKind
from ftlayer.functions.current import UNTRACKED, Known, Tries
from ftlayer.functions.undo import LateFailure, UndoLog, in_pieces
from ftlayer.records.ids import pack_tries
from ftlayer.runtime.barrier_mode.task.failing import attempts as record_attempts
from ftlayer.runtime.protocol.messages import MAX_TIME_MS, Batch, Idle, Watermark
from ftlayer.runtime.task.actions import Action
from ftlayer.runtime.task.chain_task import ChainRows, FailureCounts
from ftlayer.runtime.task.contract import Suspects
from ftlayer.runtime.task.pipeline import ChannelOutlet, OperatorChain, Passed, Routed
from ftlayer.vertex.calls import Attempt

LAST_PAUSE_MS = 1_000
"""The longest pause before an attempt once no more records come: the job's end waits for it."""

LOOK_MS = 100
"""The longest pause in a chain that holds too much, and how often it looks whether there is room again."""


MOST_AT_ONCE = 1_000
"""Records that are tried again together."""


class WayOut(Protocol):
    @property
    def refused(self) -> int:
        """How many rows have died behind the chain, in its sink."""

    def route(self, given: record_attempts.Given, passed: Passed, log: UndoLog) -> Routed:
        """Ask where rows go. May raise `LateFailure`."""

    def send(self, given: record_attempts.Given, routed: Routed, now: Now) -> list[Action]:
        """Send them; says what became of the records, now or later, to the chain's `RecordAttempts`."""


class ToChannels:
    """`WayOut` to channels: a record is through when what came of it is sent."""

    refused = 0

    def __init__(self, outlet: ChannelOutlet, attempts: record_attempts.RecordAttempts) -> None:
        self._outlet = outlet
        self._attempts = attempts

    def route(self, given: record_attempts.Given, passed: Passed, log: UndoLog) -> Routed:
        return self._outlet.route(passed, log)

    def send(self, given: record_attempts.Given, routed: Routed, now: Now) -> list[Action]:
        self._attempts.ended(given, routed.failures, now)
        return self._outlet.send(None, given.payload.num_rows, routed)


@dataclass(frozen=True, slots=True)
class _Piece:
    given: record_attempts.Given
    routed: Routed

    @property
    def size(self) -> int:
        rows: int = self.given.payload.num_rows
        return rows

    @property
    def has_failures(self) -> bool:
        return bool(self.routed.failures)


class RecordsAlone(ChainRows):
    """`ftlayer.runtime.task.chain_task.ChainRows` of a chain with a failure policy.

    Attributes:
        send_letters: sends dead letters on as records; None: they stay for the next checkpoint.
    """

    def __init__(
        self,
        uid: str,
        policy: FailurePolicy,
        pipeline: OperatorChain,
        log: UndoLog,
        attempts: record_attempts.RecordAttempts,
        breakers: record_attempts.Breakers,
        out: WayOut,
        timers: record_attempts.TimersAlone | None,
        suspects: Suspects,
        inputs: Sequence[pa.Schema],
        inside: Mapping[str, pa.Schema] = record_attempts.NO_SCHEMAS,
    ) -> None:
        """``inputs`` are the schemas of what the chain takes. ``timers`` None: it is a sink.

        ``inside`` are those of the operators behind its head, at which restored and requeued records may enter.
        """
        self.send_letters: Callable[[Sequence[ChainLetter]], list[Action]] | None = None
        self._uid = uid
        self._policy = policy
        self._pipeline = pipeline
        self._log = log
        self._attempts = attempts
        self._breakers = breakers
        self._out = out
        self._timers = timers
        self._suspects = suspects
        self._inputs = inputs
        self._inside = inside
        self._ends = False

    def opened(self, now: Now) -> None:
        """See `ChainRows.opened`: restored records wait no longer than from their beginning."""
        longest = max(self._policy.backoff_ms, default=0)
        self._attempts.waiting.restored(now.wall_ms + longest)
        self._log.forget()

    def take(self, input: int, batch: Batch, now: Now) -> list[Action]:
        watermark_ms = self._pipeline.stages[0].watermark_ms
        actions = self._run(record_attempts.Given(input, batch.payload, batch.times, watermark_ms), now)
        self._hurry(now)
        return actions

    def fire(self, stage: int, kind: TimerKind, now: Now) -> list[Action]:
        assert self._timers is not None, f"{self._uid!r} is a sink"
        actions = self._timers.fire(stage, kind, now)
        self._hurry(now)
        return [*actions, *self._letters_sent()]

    def again(self, now: Now) -> list[Action]:
        if self._breakers.pause_ms(now.mono_ms):
            return []
        due = self._attempts.waiting.take_due(now.wall_ms, MOST_AT_ONCE)
        records = [waiting for waiting in due if waiting.kind is LetterKind.RECORD]
        actions: list[Action] = []
        for _, group in groupby(sorted(records, key=_alike), key=_alike):
            actions += self._run(self._given(list(group)), now)
        timers = [waiting for waiting in due if waiting.kind is LetterKind.TIMER]
        if timers:
            assert self._timers is not None, f"{self._uid!r} is a sink"
            actions += self._timers.again(timers, now)
        self._hurry(now)
        return [*actions, *self._letters_sent()]

    def readmit(self, letters: tuple[ChainLetter, ...], now: Now) -> None:
        if self._attempts.is_last:
            return  # They are still where they came from, and come with the job's next start.
        for letter in letters:
            self._attempts.readmit(letter, now)
        self._hurry(now)

    def holds(self, mark: Watermark | Idle) -> bool:
        is_last = mark == Watermark(MAX_TIME_MS)
        return bool(len(self._attempts.waiting)) and (is_last or self._policy.hold_watermark)

    def ends(self, now: Now) -> None:
        self._ends = True
        self._hurry(now)

    def last(self) -> None:
        self._attempts.is_last = True

    def due_ms(self, now: Now) -> int | None:
        due_ms = self._attempts.waiting.due_ms
        if due_ms is None:
            return None
        return now.mono_ms + max(due_ms - now.wall_ms, self._breakers.pause_ms(now.mono_ms), 0)

    def hold_ms(self, now: Now) -> int:
        return max(LOOK_MS if self._is_full else 0, self._breakers.pause_ms(now.mono_ms))

    def circuits(self, now_ms: int) -> dict[str, CircuitStatus]:
        return self._breakers.circuits(now_ms)

    @property
    def counts(self) -> FailureCounts:
        attempts = self._attempts
        return FailureCounts(
            attempts.retried,
            attempts.letters.made + self._out.refused,
            len(attempts.waiting),
            attempts.waiting.bytes,
            self._is_full or self._breakers.is_open,
        )

    @property
    def _is_full(self) -> bool:
        return self._attempts.waiting.bytes > self._policy.max_waiting

    def _hurry(self, now: Now) -> None:
        self._attempts.hurry(LOOK_MS if self._is_full else LAST_PAUSE_MS if self._ends else None, now)

    # ------------------------------------------------------------ rows

    def _run(self, given: record_attempts.Given, now: Now) -> list[Action]:
        given = self._without_condemned(given, now)
        actions = (
            self._run_one_by_one(given, now)
            if self._suspects.one_at_a_time
            else self._run_together(given, now)
        )
        return [*actions, *self._letters_sent()]

    def _letters_sent(self) -> list[Action]:
        if self.send_letters is None or not (letters := self._attempts.letters.take()):
            return []
        return self.send_letters(letters)

    def _run_one_by_one(self, given: record_attempts.Given, now: Now) -> list[Action]:
        actions: list[Action] = []
        for row in range(given.payload.num_rows):
            self._suspects.about_to(given.payload, row, given.input)
            actions += self._run_together(given.part(row, 1), now)
            self._suspects.over()
        return actions

    def _run_together(self, given: record_attempts.Given, now: Now) -> list[Action]:
        if not given.payload.num_rows:
            return []
        actions: list[Action] = []
        self._log.traced = self._attempts.may_end(given)
        for _, piece in in_pieces(self._log, given.payload.num_rows, partial(self._piece, given, now)):
            actions += self._out.send(piece.given, piece.routed, now)
        return actions

    def _piece(self, given: record_attempts.Given, now: Now, start: int, most: int) -> _Piece | None:
        if start >= given.payload.num_rows:
            return None
        part = given.part(start, most)
        try:
            passed = self._pipeline.run(
                part.payload,
                part.times,
                not part.waiting,
                part.input,
                now,
                _known(part.waiting),
                watermark_ms=part.watermark_ms,
                enters=part.enters,
            )
            return _Piece(part, self._out.route(part, passed, self._log))
        except LateFailure as late:
            raise LateFailure(start + late.row) from None

    def _without_condemned(self, given: record_attempts.Given, now: Now) -> record_attempts.Given:
        convicted = self._suspects.convicted(given.payload, given.input)
        if not convicted:
            return given
        keep = np.ones(given.payload.num_rows, np.bool_)
        for row, conviction in convicted:
            keep[row] = False
            attempt = Attempt(
                1, now.wall_ms, conviction.reason, self._uid, conviction.place, conviction.traceback
            )
            self._attempts.condemned(given, row, attempt, now)
        rows = np.flatnonzero(keep)
        return record_attempts.Given(
            given.input,
            given.payload.filter(pa.array(keep)),
            None if given.times is None else given.times[rows],
            given.watermark_ms,
            [given.waiting[row] for row in rows.tolist()] if given.waiting else (),
            given.enters,
        )

    def _given(self, records: list[record_attempts.WaitingRecord]) -> record_attempts.Given:
        """Make rows of records that waited, all of one input, or of one operator inside the chain."""
        first = records[0]
        schema = self._inside[first.enters] if first.enters else self._inputs[first.input]
        try:
            payload = record_attempts.rows_of([record.payload for record in records], schema)
        except record_attempts.OtherColumnsError as error:
            raise IncompatibleCheckpointError(
                f"{first.enters or self._uid!r}: a record waits for another attempt, and {error}. Restore with the "
                "program that took the checkpoint until none waits"
            ) from error
        times = [record.event_time_ms for record in records]
        known = None if times[0] is None else np.array(times, np.int64)
        # At another parallelism the chain's watermark may have gone back; what was late, or not, stays so.
        watermark_ms = max(
            self._pipeline.stages[0].watermark_ms, *(record.watermark_ms for record in records)
        )
        return record_attempts.Given(first.input, payload, known, watermark_ms, records, first.enters)


def _alike(waiting: record_attempts.WaitingRecord) -> tuple[str, int, bool]:
    return waiting.enters, waiting.input, waiting.event_time_ms is None


def _known(waiting: Sequence[record_attempts.WaitingRecord]) -> Known:
    if not waiting:
        return UNTRACKED
    attempts = np.array([record.attempt for record in waiting], np.int32)
    first = np.array([record.first_failed_ms for record in waiting], np.uint64)
    return Tries(None, pack_tries(attempts, first))
