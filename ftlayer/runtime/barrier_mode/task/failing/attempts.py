"""What becomes of records that a chain has tried: they are through, wait for another attempt, or are dead letters."""

from __future__ import annotations

import heapq
import secrets
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ftlayer.checkpoint.letters import LETTER_BYTES, ChainLetter, LetterKind, with_attempt
from ftlayer.checkpoint.options import FailurePolicy
from ftlayer.common.clock import Now
from ftlayer.common.failures import PermanentFailure
from ftlayer.common.printable import described
from ftlayer.common.rules.circuit import CircuitBreaker, CircuitState, CircuitStatus, Limit, together
from ftlayer.common.rules.restart import Ended, next_attempt
from ftlayer.functions.chains.firing import FIRED_AT_ONCE, DueTimers, Timer, TimerKind
from ftlayer.functions.chains.fused import KeyColumns
from ftlayer.functions.conversion import VALUES, concat, records_in_form, schema_text
from ftlayer.functions.keyed import NAN, Key, MapTable
from ftlayer.functions.undo import LateFailure, UndoLog, in_pieces
from ftlayer.records.failures import RowFailure
from ftlayer.records.ids import I64Array
from ftlayer.records.ipc import as_message, as_stream, has_dictionaries, may_share, row_alone
from ftlayer.records.keyhash import spark_hash
from ftlayer.records.partitioning import key_groups
from ftlayer.runtime.task.actions import Action
from ftlayer.runtime.task.contract import Suspects
from ftlayer.runtime.task.pipeline import ChannelOutlet, Fired, OperatorChain, Routed
from ftlayer.state.snapshots.serializer import Serializer, unpack
from ftlayer.topology.job_graph import keys_of
from ftlayer.topology.operators import Operator
from ftlayer.vertex.calls import Attempt

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class OtherColumnsError(ValueError):
    """A row is not one of the input that it is to go into."""


class RowPacker:
    """Packs rows, one by one; rows of one schema behind each other take a third of the time."""

    def __init__(self) -> None:
        self._schema: pa.Schema | None = None
        self._head: bytes | None = None

    def pack(self, row: pa.RecordBatch) -> bytes:
        """Return a row that owns its memory (`ftlayer.records.ipc`) as an IPC stream."""
        schema = row.schema
        if self._schema is None or not schema.equals(self._schema, check_metadata=True):
            self._schema, self._head = schema, _head_of(schema)
        if self._head is None:
            return bytes(as_stream(row))
        # A stream is its messages one behind the other: so it takes half the time of a writer.
        return self._head + bytes(as_message(row, dictionaries=False)) + _END_OF_STREAM


def rows_of(payloads: Sequence[bytes], schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows of ``payloads``.

    Raises `OtherColumnsError` for one that does not have the columns of ``schema``, `pa.ArrowException`, `OSError` or
    `StopIteration` for one that cannot be read.
    """
    rows = _read_together(payloads, schema) or [_row_of(payload, schema) for payload in payloads]
    return concat(rows, schema)


def _read_together(payloads: Sequence[bytes], schema: pa.Schema) -> list[pa.RecordBatch] | None:
    """Return the rows of many payloads that differ in their rows alone: their messages make one stream."""
    head = None if len(payloads) < 2 else _head_of(schema)
    if head is None or not all(each.startswith(head) and each.endswith(_END_OF_STREAM) for each in payloads):
        return None
    messages = [payload[len(head) : -len(_END_OF_STREAM)] for payload in payloads]
    rows = list(pa.ipc.open_stream(b"".join([head, *messages, _END_OF_STREAM])))
    # A letter that a user has edited may be a stream of several; one without any was refused.
    return rows if len(rows) == len(payloads) else None


def _row_of(payload: bytes, schema: pa.Schema) -> pa.RecordBatch:
    row = pa.ipc.open_stream(payload).read_next_batch()
    if row.schema.names != schema.names or row.schema.types != schema.types:
        raise OtherColumnsError(
            f"it has other columns ({schema_text(row.schema)}) than its input has now ({schema_text(schema)})"
        )
    return pa.RecordBatch.from_arrays(row.columns, schema=schema)


def _head_of(schema: pa.Schema) -> bytes | None:
    """Return the message that begins a stream of rows alone; None if dictionaries come before them."""
    return None if has_dictionaries(schema) else bytes(schema.serialize())


class MadeLetters:
    """The letters of one subtask, and the names of those that came back to it. Not for several threads.

    Attributes:
        made: how many there ever were in this run.
    """

    def __init__(self) -> None:
        self.made = 0
        self._letters: list[ChainLetter] = []
        self._readmitted: dict[bytes, int] = {}

    def add(self, letter: ChainLetter) -> None:
        self.made += 1
        self._letters.append(letter)

    def readmit(self, name: bytes) -> bool:
        """A letter comes back; whether it is not here already."""
        if name in self._readmitted:
            return False
        self._readmitted[name] = 0
        return True

    def take(self) -> list[ChainLetter]:
        """Return, and forget, what was made: it goes on as records."""
        taken, self._letters = self._letters, []
        return taken

    def snapshot(self, checkpoint: int) -> tuple[tuple[ChainLetter, ...], tuple[bytes, ...]]:
        """Return what this checkpoint holds: all letters, and all names, that were not told to be complete."""
        self._letters = [
            letter if letter.checkpoint else replace(letter, checkpoint=checkpoint)
            for letter in self._letters
        ]
        self._readmitted = {name: first or checkpoint for name, first in self._readmitted.items()}
        return tuple(self._letters), tuple(self._readmitted)

    def completed(self, checkpoint: int) -> None:
        self._letters = [letter for letter in self._letters if not 0 < letter.checkpoint <= checkpoint]
        self._readmitted = {
            name: first for name, first in self._readmitted.items() if not 0 < first <= checkpoint
        }


class Breakers:
    """A breaker for each operator with a ``max_failing`` of its own, and the policy's for all others."""

    def __init__(self, chain: str, policy: Limit | None, own: Mapping[str, Limit]) -> None:
        self._chain = chain
        self._own = {operator: CircuitBreaker(limit) for operator, limit in own.items()}
        self._rest = None if policy is None else CircuitBreaker(policy)

    def __bool__(self) -> bool:
        return bool(self._own) or self._rest is not None

    def outcome(self, records: int, failures: Sequence[RowFailure], now_ms: int) -> None:
        """So many records were tried. Failures that no attempt follows count for nothing, as in acker mode."""
        failed: dict[str, int] = {}
        for failure in failures:
            if not failure.fatal:
                operator = failure.operator if failure.operator in self._own else ""
                failed[operator] = failed.get(operator, 0) + 1
        for operator, breaker in self._own.items():
            breaker.outcome(records, failed.get(operator, 0), now_ms)
        if self._rest is not None:
            self._rest.outcome(records, failed.get("", 0), now_ms)

    def held(self, failure: RowFailure) -> RowFailure:
        breaker = self._own.get(failure.operator, self._rest)
        if failure.fatal or breaker is None or breaker.state is not CircuitState.OPEN:
            return failure
        return replace(failure, uses_attempt=False, after_ms=failure.after_ms or 0)

    @property
    def is_open(self) -> bool:
        """Whether one of them is not closed. Any thread may look."""
        every = [*self._own.values(), *([] if self._rest is None else [self._rest])]
        return any(breaker.state is not CircuitState.CLOSED for breaker in every)

    def circuits(self, now_ms: int) -> dict[str, CircuitStatus]:
        """Return where they are, by operator; the policy's is the chain's. Any thread may look."""
        found = {operator: breaker.status(now_ms) for operator, breaker in self._own.items()}
        if self._rest is not None:
            of_chain = self._rest.status(now_ms)
            head = found.get(self._chain)
            found[self._chain] = of_chain if head is None else together([of_chain, head])
        return found

    def pause_ms(self, now_ms: int) -> int:
        """Return for how long the chain takes nothing; 0: it goes on, if only for a trial."""
        every = [*self._own.values(), *([] if self._rest is None else [self._rest])]
        return max(
            (breaker.status(now_ms).next_trial_in_ms for breaker in every if not breaker.may_try(now_ms)),
            default=0,
        )


class _NoKey:
    """Hashable, as keys are."""


NO_KEY: Key = _NoKey()
"""In the place of a key that a record should have, and cannot be read."""

DRAWN_KEY = pa.schema([("number", pa.int64())])
"""The type of the keys of records in a chain whose head has no key."""


DRAWN_AT_ONCE = 64


class DrawnKeys:
    """Numbers in the place of keys, whose key groups are the subtask's own: state of other groups is not restored."""

    def __init__(self, groups: range, max_parallelism: int) -> None:
        self._groups = groups
        self._max_parallelism = max_parallelism
        self._drawn: list[int] = []

    def draw(self) -> int:
        while not self._drawn:
            numbers = np.frombuffer(secrets.token_bytes(8 * DRAWN_AT_ONCE), np.int64)
            found = key_groups(spark_hash([pa.array(numbers)]), self._max_parallelism)
            mine = (found >= self._groups.start) & (found < self._groups.stop)
            self._drawn = numbers[mine].tolist()
        return self._drawn.pop()


class HeadKeys:
    """See the module.

    Attributes:
        inputs: the schemas of what the chain takes.
        are_columns: records have keys of their own; False: a number is drawn for each.
    """

    def __init__(self, head: Operator | None, inputs: Sequence[pa.Schema], drawn: DrawnKeys) -> None:
        self._drawn = drawn
        self.inputs = tuple(inputs)
        columns = [()] * len(inputs) if head is None else keys_of(head)
        self._keys = [
            _reader(KeyColumns.of("", names, schema)) if names else None
            for names, schema in zip(columns, inputs, strict=True)
        ]
        self.are_columns = any(key is not None for key in self._keys)

    def of(self, rows: pa.RecordBatch, input: int) -> list[Key]:
        """Return the keys of rows that came by an input; `NO_KEY` for one that cannot be read, or hashed."""
        read = self._keys[input]
        if read is None:
            return [self.drawn() for _ in range(rows.num_rows)]
        return [_key_of(record, read) for record in records_in_form(rows, VALUES)]

    def drawn(self) -> int:
        return self._drawn.draw()


def _key_of(record: Any, read: Callable[[Any], Any]) -> Key:
    if isinstance(record, Exception):
        return NO_KEY
    key: Key = read(record)
    return key if _is_hashable(key) else NO_KEY


def _is_hashable(key: Any) -> bool:
    if not isinstance(key, Hashable):
        return False
    try:
        hash(key)
    except TypeError:
        return False
    return True


def _reader(columns: KeyColumns) -> Callable[[Any], Any]:
    read: Callable[[Any], Any] = eval(f"lambda record: {columns.source('record')}", {"NAN": NAN})
    return read


# Records that wait for another attempt: a table of the chain's state, and in memory what is due when.
#
# The table is filed under the operator at the chain's head, by the records' keys there, so that a record is restored
# where its key goes. Records of a chain without a key lie under numbers that are drawn. An operator that was a head
# when a record failed, and has others before it now, has a table of its own: its records enter the chain there.


WAITING_TABLE = "waiting for another attempt"
"""Name of the table. A user's state of that name would be another kind of table, and is refused."""

_ENTRY_BYTES = 256
"""What an entry takes besides its texts and its payload, about."""


@dataclass(frozen=True, slots=True)
class WaitingRecord:
    """A record, or a timer, that failed and is to be tried again.

    Attributes:
        name: random bytes; of the letter, if it becomes one.
        key: in the chain's state.
        kind: a record or a timer.
        input: of the chain.
        payload: an IPC stream with the one row; b"" for a timer.
        event_time_ms: of the record, or the timer's time; None without one.
        watermark_ms: the chain's when the record failed first.
        attempt: the number of the next one.
        due_ms: wall clock.
        first_failed_ms: wall clock.
        attempts: those that failed.
        operator: whose timer it is; "" for a record.
        is_event_timer: a timer of event time, not of processing time.
        enters: uid of the operator that it goes to first; "" for the chain's head.
    """

    name: bytes
    key: Key
    kind: LetterKind
    input: int
    payload: bytes
    event_time_ms: int | None
    watermark_ms: int
    attempt: int
    due_ms: int
    first_failed_ms: int
    attempts: tuple[Attempt, ...]
    operator: str = ""
    is_event_timer: bool = False
    enters: str = ""

    @property
    def size(self) -> int:
        size = _ENTRY_BYTES + len(self.payload)
        for attempt in self.attempts:
            size += len(attempt.reason) + len(attempt.traceback)
        return size

    def failed(self, attempts: tuple[Attempt, ...], next_attempt: int, due_ms: int) -> WaitingRecord:
        """Return it behind another failed attempt. (`dataclasses.replace` takes several times as long.)"""
        return WaitingRecord(
            self.name,
            self.key,
            self.kind,
            self.input,
            self.payload,
            self.event_time_ms,
            self.watermark_ms,
            next_attempt,
            due_ms,
            self.first_failed_ms,
            attempts,
            self.operator,
            self.is_event_timer,
            self.enters,
        )

    def packed(self) -> tuple[object, ...]:
        attempts = tuple(
            (each.number, each.at_ms, each.reason, each.operator, each.place, each.traceback)
            for each in self.attempts
        )
        return (
            self.kind.value,
            self.input,
            self.payload,
            self.event_time_ms,
            self.watermark_ms,
            self.attempt,
            self.due_ms,
            self.first_failed_ms,
            attempts,
            self.operator,
            self.is_event_timer,
        )

    @classmethod
    def unpacked(cls, name: bytes, key: Key, packed: tuple[object, ...], enters: str = "") -> WaitingRecord:
        kind, input, payload, time_ms, watermark_ms, attempt, due_ms, first_ms, attempts, operator, event = (
            packed
        )
        return cls(
            name,
            key,
            LetterKind(str(kind)),
            input,  # type: ignore[arg-type]
            payload,  # type: ignore[arg-type]
            time_ms,  # type: ignore[arg-type]
            watermark_ms,  # type: ignore[arg-type]
            attempt,  # type: ignore[arg-type]
            due_ms,  # type: ignore[arg-type]
            first_ms,  # type: ignore[arg-type]
            tuple(Attempt(*each) for each in attempts),  # type: ignore[attr-defined]
            operator,  # type: ignore[arg-type]
            event,  # type: ignore[arg-type]
            enters,
        )


class WaitingRecords:
    """See the module. Not for several threads.

    Attributes:
        bytes: what all of them take, about.
    """

    def __init__(self, table_of: Callable[[str], MapTable], inside: Iterable[str] = ()) -> None:
        """``table_of(enters)`` gives the table of records that enter there, see `WaitingRecord.enters`.

        ``inside`` are the operators behind the chain's head that have restored ones: `restored` takes those in, too.
        """
        self.bytes = 0
        self._table_of = table_of
        # Restored tables are asked for before functions are open: the state is told as declared by then.
        self._tables = {enters: table_of(enters) for enters in ("", *inside)}
        self._all: dict[bytes, WaitingRecord] = {}
        self._due: list[tuple[int, int, bytes]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[WaitingRecord]:
        return iter(self._all.values())

    def restored(self, latest_ms: int) -> None:
        """Take in what the tables hold, all of it due at ``latest_ms`` or before."""
        for enters, table in self._tables.items():
            for key in list(table.keys()):
                for name, packed in table.items(key).items():
                    found = WaitingRecord.unpacked(name, key, packed, enters)
                    self._take_in(replace(found, due_ms=min(found.due_ms, latest_ms)))

    def put(self, waiting: WaitingRecord) -> None:
        old = self._all.get(waiting.name)
        if old is not None:
            self.bytes -= old.size
        if waiting.enters not in self._tables:
            self._tables[waiting.enters] = self._table_of(waiting.enters)
        self._tables[waiting.enters].put(waiting.key, waiting.name, waiting.packed())
        self._take_in(waiting)

    def remove(self, waiting: WaitingRecord) -> None:
        self.bytes -= self._all.pop(waiting.name).size
        self._tables[waiting.enters].remove(waiting.key, waiting.name)

    def no_later_than(self, latest_ms: int) -> None:
        """All that wait now are due at ``latest_ms`` of the wall clock or before."""
        self._due = [(min(due_ms, latest_ms), number, name) for due_ms, number, name in self._due]
        heapq.heapify(self._due)

    @property
    def due_ms(self) -> int | None:
        while self._due and not self._is_current(self._due[0]):
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def take_due(self, now_ms: int, most: int) -> list[WaitingRecord]:
        """Return up to ``most`` that are due, the earliest first. Each has to be `put` again, or to be removed."""
        found: list[WaitingRecord] = []
        while len(found) < most and (due_ms := self.due_ms) is not None and due_ms <= now_ms:
            found.append(self._all[heapq.heappop(self._due)[2]])
        return found

    def _take_in(self, waiting: WaitingRecord) -> None:
        self._all[waiting.name] = waiting
        self.bytes += waiting.size
        self._added += 1
        heapq.heappush(self._due, (waiting.due_ms, self._added, waiting.name))

    def _is_current(self, due: tuple[int, int, bytes]) -> bool:
        return due[2] in self._all


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
        if start == 0 and most >= self.payload.num_rows:
            return self
        end = start + most
        times = None if self.times is None else self.times[start:end]
        return replace(
            self, payload=self.payload.slice(start, most), times=times, waiting=self.waiting[start:end]
        )


class _Pauses(NamedTuple):
    """`ftlayer.common.rules.restart.Retrying` of a policy, whose durations are read once."""

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
        self._decide(timer, failure, now, waited=waited)

    def new_timer(self, operator: str, key: Key, time_ms: int, now: Now, *, is_event: bool) -> WaitingRecord:
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

    def condemned(self, given: Given, row: int, attempt: Attempt, now: Now) -> None:
        (waiting,) = self._waiting_of(given, [row], now)
        attempts = with_attempt(waiting.attempts, attempt, waiting.first_failed_ms)
        self._bury(waiting, attempts, attempt.operator, now)
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
            attempt = Attempt(1, now.wall_ms, problem, letter.operator, self._place)
            self._bury(waiting, with_attempt(letter.attempts, attempt, now.wall_ms), letter.operator, now)
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
            return NO_KEY, f"its record cannot be read: {described(error)}"
        # Operators with a key begin their chains.
        (key,) = [self._keys.drawn()] if enters else self._keys.of(row, letter.input)
        return key, "its key cannot be read" if key is NO_KEY else ""

    # ------------------------------------------------------------ one record

    def _waiting_of(self, given: Given, rows: list[int], now: Now) -> list[WaitingRecord]:
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
            Attempt(1, now.wall_ms, failure.reason, failure.operator, self._place, failure.traceback),
            waiting.first_failed_ms,
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

    def _bury(self, waiting: WaitingRecord, attempts: tuple[Attempt, ...], operator: str, now: Now) -> None:
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
    first: dict[int, RowFailure] = {}
    for failure in failures:
        first.setdefault(failure.row, failure)
    return first


Waited = Mapping[Timer, WaitingRecord]
"""Timers of one operator that failed before."""

_NONE: Waited = {}


@dataclass(frozen=True, slots=True)
class _Piece:
    fired: Fired
    routed: Routed

    @property
    def size(self) -> int:
        return self.fired.size

    @property
    def has_failures(self) -> bool:
        return bool(self.routed.failures)


@dataclass(eq=False)
class TimersAlone:
    """See the module. One subtask's; not for several threads."""

    pipeline: OperatorChain
    log: UndoLog
    outlet: ChannelOutlet
    attempts: RecordAttempts
    suspects: Suspects

    def fire(self, stage: int, kind: TimerKind, now: Now) -> list[Action]:
        return self._fire(stage, self.pipeline.due_timers(stage, kind, now), _NONE, now)

    def again(self, due: Sequence[WaitingRecord], now: Now) -> list[Action]:
        actions: list[Action] = []
        for (operator, kind), group in groupby(sorted(due, key=_alike), key=_alike):
            stage = self.pipeline.stage_of_timers(operator)
            for waited in _each_once(group):
                if stage is None:
                    self._no_longer(operator, waited, now)
                    continue
                timers = self.pipeline.timers_again(stage, operator, kind, list(waited), now)
                actions += self._fire(stage, timers, waited, now)
        return actions

    def _no_longer(self, operator: str, waited: Waited, now: Now) -> None:
        reason = f"{operator!r} has no on_timer any more: nothing can fire for this timer"
        for timer in waited.values():
            failure = RowFailure(0, operator, reason, "", fatal=True)
            self.attempts.timer_failed(timer, failure, now, waited=True)

    def _fire(self, stage: int, due: DueTimers, waited: Waited, now: Now) -> list[Action]:
        actions: list[Action] = []
        self.log.traced = True
        for _, piece in in_pieces(self.log, FIRED_AT_ONCE, partial(self._piece, stage, due, now)):
            self._settle(piece, waited, now)
            actions += self.outlet.send(None, piece.size, piece.routed)
            self.suspects.over()
        return actions

    def _piece(self, stage: int, due: DueTimers, now: Now, start: int, most: int) -> _Piece | None:
        suspects = self.suspects
        if suspects.one_at_a_time:
            most = 1
        guard = self._check if suspects.looks_at_timers else None
        try:
            fired = self.pipeline.fire(stage, due, most, now, guard)
            return None if fired is None else _Piece(fired, self.outlet.route(fired.passed, self.log))
        except LateFailure as late:
            raise LateFailure(start + late.row) from None

    def _check(self, operator: str, kind: TimerKind, timer: Timer) -> None:
        conviction = self.suspects.fires(operator, kind, *timer)
        if conviction is not None:
            error = PermanentFailure(conviction.reason)
            error.add_note(f"{conviction.place}: {conviction.traceback}")
            raise error

    def _settle(self, piece: _Piece, waited: Waited, now: Now) -> None:
        failures = first_of_each(piece.routed.failures)
        for place, timer in enumerate(piece.fired.timers) if waited else ():
            if place not in failures and timer in waited:
                self.attempts.timer_through(waited[timer])
        for place, failure in failures.items():
            key, time_ms = timer = piece.fired.timers[place]
            entry = waited.get(timer)
            if entry is None:
                is_event = piece.fired.kind == "event"
                entry = self.attempts.new_timer(piece.fired.operator, key, time_ms, now, is_event=is_event)
            self.attempts.timer_failed(entry, failure, now, waited=timer in waited)


def _each_once(timers: Iterable[WaitingRecord]) -> Iterator[Waited]:
    """Cut timers into groups that have each once: one that waits may have been set again, and have failed again."""
    left = [*timers]
    while left:
        group: dict[Timer, WaitingRecord] = {}
        again: list[WaitingRecord] = []
        for timer in left:
            if group.setdefault((timer.key, timer.event_time_ms or 0), timer) is not timer:
                again.append(timer)
        yield group
        left = again


def _alike(timer: WaitingRecord) -> tuple[str, TimerKind]:
    return timer.operator, "event" if timer.is_event_timer else "processing"
