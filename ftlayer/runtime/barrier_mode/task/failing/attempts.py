"""What becomes of records that a chain has tried: they are through, wait for another attempt, or are dead letters."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import pyarrow as pa

from ftlayer.backoff import Ended, next_attempt
from ftlayer.checkpoint.failure_policy import FailurePolicy
from ftlayer.checkpoint.letters import LETTER_BYTES, ChainLetter, FailedAttempt, LetterKind, with_attempt
from ftlayer.clock import Now
from ftlayer.functions.failures import RowFailure
from ftlayer.functions.keyed import Key
from ftlayer.records.alone import may_share, row_alone
from ftlayer.records.ids import I64Array
from ftlayer.runtime.barrier_mode.task.failing.breakers import Breakers
from ftlayer.runtime.barrier_mode.task.failing.keys import NO_KEY, HeadKeys
from ftlayer.runtime.barrier_mode.task.failing.letters import MadeLetters
from ftlayer.runtime.barrier_mode.task.failing.payloads import OtherColumnsError, RowPacker, rows_of
from ftlayer.runtime.barrier_mode.task.failing.waiting import WaitingRecord, WaitingRecords
from ftlayer.state.snapshots.serializer import Serializer, unpack

NO_SCHEMAS: Mapping[str, pa.Schema] = {}


@dataclass(frozen=True, slots=True)
class Given:
    """Rows that a chain is given at once.

    Attributes:
        input: of the chain.
        payload: n rows.
        times: int64[n], event times (ms since 1970); None without.
        watermark_ms: the chain's.
        waiting: n records that they are, if they were tried before.
        enters: uid of the operator that they go to first; "" for the chain's head.
    """

    input: int
    payload: pa.RecordBatch
    times: I64Array | None
    watermark_ms: int
    waiting: Sequence[WaitingRecord] = ()
    enters: str = ""

    def part(self, start: int, most: int) -> Given:
        """Return up to ``most`` of the rows, from ``start`` on."""
        if start == 0 and most >= self.payload.num_rows:
            return self
        end = start + most
        times = None if self.times is None else self.times[start:end]
        return replace(
            self, payload=self.payload.slice(start, most), times=times, waiting=self.waiting[start:end]
        )


class _Pauses(NamedTuple):
    """`ftlayer.backoff.Retrying` of a policy, whose durations are read once."""

    max_attempts: int | None
    backoff_ms: tuple[int, ...]
    jitter: float


class RecordAttempts:
    """See the module. One subtask's; not for several threads.

    Attributes:
        waiting: the records that wait.
        letters: the dead ones.
        retried: how many failures there were that another attempt follows.
        is_last: no further attempt is to come: the chain has said that it is done.
    """

    def __init__(
        self,
        chain: tuple[str, int],
        policy: FailurePolicy,
        keys: HeadKeys,
        waiting: WaitingRecords,
        breakers: Breakers,
        place: str,
        inside: Mapping[str, pa.Schema] = NO_SCHEMAS,
    ) -> None:
        """``chain`` is the uid of its head, and which subtask; ``place`` says in words which process this is.

        ``inside`` has by uid what the operators behind the head take.
        """
        self.waiting = waiting
        self.letters = MadeLetters()
        self.retried = 0
        self.is_last = False
        self._uid, self._subtask = chain
        self._policy = _Pauses(policy.max_attempts, policy.backoff_ms, policy.jitter)
        self._keys = keys
        self._breakers = breakers
        self._place = place
        self._inside = inside
        self._serializer = Serializer()
        self._shares = [may_share(schema) for schema in keys.inputs]
        self._packers = [RowPacker() for _ in keys.inputs]
        self._most_pause_ms: int | None = None

    def hurry(self, most_ms: int | None, now: Now) -> None:
        """From now on no pause is longer than this; None: they are what policy and functions say."""
        if most_ms is not None and (self._most_pause_ms is None or most_ms < self._most_pause_ms):
            self.waiting.no_later_than(now.wall_ms + most_ms)
        self._most_pause_ms = most_ms

    def may_end(self, given: Given) -> bool:
        """Whether a failure of one of the rows may be its last: its traceback is kept then."""
        most = self._policy.max_attempts
        attempt = max((waiting.attempt for waiting in given.waiting), default=1)
        return self.is_last or (most is not None and attempt >= most)

    def ended(self, given: Given, failures: Sequence[RowFailure], now: Now) -> None:
        """All rows were tried; ``failures`` are those of rows that failed, of which the first counts."""
        failed = first_of_each(failures)
        if self._breakers:
            self._breakers.outcome(given.payload.num_rows, [*failed.values()], now.mono_ms)
        for row, waiting in enumerate(given.waiting):
            if row not in failed:
                self.waiting.remove(waiting)
        for waiting, failure in zip(self._waiting_of(given, [*failed], now), failed.values(), strict=True):
            self._decide(waiting, failure, now, waited=bool(given.waiting))

    def timer_through(self, timer: WaitingRecord) -> None:
        self.waiting.remove(timer)

    def timer_failed(self, timer: WaitingRecord, failure: RowFailure, now: Now, *, waited: bool) -> None:
        """A timer failed; ``waited``: it is not its first time."""
        self._decide(timer, failure, now, waited=waited)

    def new_timer(self, operator: str, key: Key, time_ms: int, now: Now, *, is_event: bool) -> WaitingRecord:
        """Return a timer that fails for the first time."""
        return WaitingRecord(
            secrets.token_bytes(LETTER_BYTES),
            key,
            LetterKind.TIMER,
            0,
            b"",
            time_ms,
            time_ms,
            1,
            now.wall_ms,
            now.wall_ms,
            (),
            operator,
            is_event,
        )

    def condemned(self, given: Given, row: int, attempt: FailedAttempt, now: Now) -> None:
        """A record is not to be given to functions again: it is a dead letter."""
        (waiting,) = self._waiting_of(given, [row], now)
        self._bury(waiting, with_attempt(waiting.attempts, attempt), attempt.operator, now)
        if given.waiting:
            self.waiting.remove(waiting)

    def readmit(self, letter: ChainLetter, now: Now) -> None:
        """A dead letter is to be tried again, from its first attempt on; one that does not fit is dead again.

        One of an operator that was a chain's head, and has others before it now, enters there.
        """
        if not self.letters.readmit(letter.letter):
            return
        enters = "" if letter.chain == self._uid else letter.chain
        key, problem = self._readmitted(letter, enters)
        is_timer = letter.kind is LetterKind.TIMER
        waiting = WaitingRecord(
            secrets.token_bytes(LETTER_BYTES),
            key,
            # A row that a sink refused comes into its chain as a record.
            LetterKind.TIMER if is_timer else LetterKind.RECORD,
            letter.input,
            letter.payload,
            letter.event_time_ms,
            0,
            1,
            now.wall_ms,
            now.wall_ms,
            letter.attempts,
            letter.operator if is_timer else "",
            letter.is_event_timer,
            enters,
        )
        if problem:
            attempt = FailedAttempt(1, now.wall_ms, problem, letter.operator, self._place)
            self._bury(waiting, with_attempt(letter.attempts, attempt), letter.operator, now)
        else:
            self.waiting.put(waiting)

    def _readmitted(self, letter: ChainLetter, enters: str) -> tuple[Key, str]:
        """Return a letter's key in the chain, and why it cannot be tried again: "" if it can.

        Of a record the key is read anew: somebody may have edited it.
        """
        if letter.kind is LetterKind.TIMER:
            return unpack(letter.key), ""
        inputs = (self._inside[enters],) if enters else self._keys.inputs
        if letter.input >= len(inputs):
            return NO_KEY, f"the chain has no input {letter.input} any more"
        try:
            row = rows_of([letter.payload], inputs[letter.input])
        except OtherColumnsError as error:
            return NO_KEY, str(error)
        except (pa.ArrowException, OSError, StopIteration) as error:
            return NO_KEY, f"its record cannot be read: {error}"
        # Operators with a key begin their chains.
        (key,) = [self._keys.drawn()] if enters else self._keys.of(row, letter.input)
        return key, "its key cannot be read" if key is NO_KEY else ""

    # ------------------------------------------------------------ one record

    def _waiting_of(self, given: Given, rows: list[int], now: Now) -> list[WaitingRecord]:
        """Return those of ``given`` in these rows, or, if they have not waited before, new ones."""
        if given.waiting:
            return [given.waiting[row] for row in rows]
        if not rows:
            return []
        shares, packer = self._shares[given.input], self._packers[given.input]
        keys = self._keys.of(given.payload.take(pa.array(rows, pa.int64())), given.input)
        return [
            WaitingRecord(
                secrets.token_bytes(LETTER_BYTES),
                key,
                LetterKind.RECORD,
                given.input,
                packer.pack(row_alone(given.payload, row, shares=shares)),
                None if given.times is None else int(given.times[row]),
                given.watermark_ms,
                1,
                now.wall_ms,
                now.wall_ms,
                (),
            )
            for row, key in zip(rows, keys, strict=True)
        ]

    def _decide(self, waiting: WaitingRecord, failure: RowFailure, now: Now, *, waited: bool) -> None:
        attempts = with_attempt(
            waiting.attempts,
            FailedAttempt(1, now.wall_ms, failure.reason, failure.operator, self._place, failure.traceback),
        )
        ended: Ended = self._breakers.held(failure)
        seed = int.from_bytes(waiting.name[:8])
        retry = next_attempt(self._policy, seed, waiting.attempt, ended, wall_ms=now.wall_ms)
        if retry is not None and not self.is_last and waiting.key is not NO_KEY:
            self.retried += 1
            due_ms = retry.not_before_ms
            if self._most_pause_ms is not None:
                due_ms = min(due_ms, now.wall_ms + self._most_pause_ms)
            self.waiting.put(waiting.failed(attempts, retry.attempt, due_ms))
            return
        self._bury(waiting, attempts, failure.operator, now)
        if waited:
            self.waiting.remove(waiting)

    def _bury(
        self, waiting: WaitingRecord, attempts: tuple[FailedAttempt, ...], operator: str, now: Now
    ) -> None:
        is_timer = waiting.kind is LetterKind.TIMER
        has_columns = self._keys.are_columns and not waiting.enters
        has_key = is_timer or (has_columns and waiting.key is not NO_KEY)
        self.letters.add(
            ChainLetter(
                waiting.name,
                0,
                # Requeued, it comes back to where it enters.
                waiting.enters or self._uid,
                self._subtask,
                waiting.input,
                waiting.kind,
                waiting.operator or operator,
                self._serializer.pack(waiting.key) if has_key else b"",
                waiting.payload,
                waiting.event_time_ms,
                attempts,
                waiting.first_failed_ms,
                now.wall_ms,
                waiting.is_event_timer,
            )
        )


def first_of_each(failures: Sequence[RowFailure]) -> dict[int, RowFailure]:
    """Return the first failure of each row."""
    first: dict[int, RowFailure] = {}
    for failure in failures:
        first.setdefault(failure.row, failure)
    return first
