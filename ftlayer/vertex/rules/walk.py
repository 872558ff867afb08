"""What a walk comes to: records of one snapshot of a shard, each read as far as it is asked."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

import numpy as np
import pyarrow as pa

from ftlayer.common.clock import Now
from ftlayer.errors import ProtocolError
from ftlayer.vertex import calls
from ftlayer.vertex.calls import Attempt, JobKind, RecordInfo
from ftlayer.vertex.rules.source_ranges import LiveSegment, by_segment
from ftlayer.vertex.rules.state import ShardState
from ftlayer.vertex.rules.streams import INGEST, MAX_HISTORY, Stream, owner_of, shortened, stored_attempt
from ftlayer.vertex.store import dead_index
from ftlayer.vertex.store import dead_index as failed
from ftlayer.vertex.store import key_value as kept
from ftlayer.vertex.store import rows as texts
from ftlayer.vertex.store.dead_index import FailedRecord, FailedTable, KeptName
from ftlayer.vertex.store.key_value import INTAKE_SHARE, KeyValueStore, ReadTransaction, WriteTransaction
from ftlayer.vertex.store.rows import I64, Edit, History, RowInfo
from ftlayer.vertex.store.streams import Head, Mask, get_bounds, get_query, log_entries


@dataclass(frozen=True, slots=True)
class StreamNames:
    """What a stream belongs to: ``owner`` ("") and ``kind`` (None for an unread ingest), ``title``, its ``source``."""

    owner: str
    kind: JobKind | None
    title: str
    source: str


def names_of(state: ShardState, txn: ReadTransaction, stream: Stream) -> StreamNames:
    owner, kind = _owner(state, stream)
    query = get_query(txn, owner) if kind is JobKind.QUERY else None
    title = owner if query is None else query.title or owner
    return StreamNames(owner, kind, title, stream.name.removeprefix(f"{owner}/"))


def belongs_to(stream: Stream, name: str) -> bool:
    """Whether ``name`` is that of a stream or of its owner."""
    return name in (stream.name, stream.query, owner_of(stream.name))


def _owner(state: ShardState, stream: Stream) -> tuple[str, JobKind | None]:
    if stream.query:
        return stream.query, JobKind.QUERY
    if stream.name.startswith(INGEST):
        return "", None
    owner = owner_of(stream.name)
    return owner, JobKind.TOPOLOGY if state.owners.run_of(owner) else None


class Record(ABC):
    __slots__ = ("key", "origin", "root", "stream")

    def __init__(self, key: bytes, stream: Stream, root: int, origin: int) -> None:
        self.key = key
        self.stream = stream
        self.root = root
        self.origin = origin

    @property
    @abstractmethod
    def history(self) -> History:
        """Its failed attempts."""

    @property
    @abstractmethod
    def time_ms(self) -> int:
        """When it died, is due, or was registered; 0 where that is not known."""

    @abstractmethod
    def may_say(self, sought: bytes) -> bool:
        """Whether ``sought`` can be in its payload; fast, and mistaken where it is in what is stored beside it."""

    @abstractmethod
    def payload(self) -> pa.RecordBatch:
        """Return its payload, one row."""

    @abstractmethod
    def info(self) -> RecordInfo:
        """Return it as a reply has it."""

    def _info(
        self,
        contents: RecordContents,
        state: str,
        attempt: int,
        due_ms: int,
        history: tuple[Attempt, ...],
        registered_ms: int,
        edit: Edit,
    ) -> RecordInfo:
        stream, (title, source), (edited_ms, edited_by) = self.stream, contents.names(self.stream), edit
        key, root, origin, payload = self.key, self.root, self.origin, self.payload()
        most, named = stream.options.max_attempts, (title, source, registered_ms, edited_ms, edited_by)
        return RecordInfo(
            key, stream.name, state, root, origin, attempt, due_ms, history, payload, *named, most
        )

    @property
    def last_failure(self) -> tuple[str, str]:
        """The reason and the operator of the last attempt that failed, "" both where none has."""
        last = self.history[-1] if self.history else None
        return ("", "") if last is None else (last.reason, last.operator)


class RecordContents:
    def __init__(self, state: ShardState, txn: ReadTransaction) -> None:
        self.state = state
        self.txn = txn
        self._names: dict[int, tuple[str, str]] = {}
        self._texts: dict[bytes, str] = {}

    def names(self, stream: Stream) -> tuple[str, str]:
        if stream.number not in self._names:
            names = names_of(self.state, self.txn, stream)
            self._names[stream.number] = names.title, names.source
        return self._names[stream.number]

    def payload_of(self, record: FailedRecord) -> pa.RecordBatch:
        return self.state.payloads.read(self.txn, record.digest, record.body)

    def attempts(self, history: History, known: Mapping[bytes, str] | None = None) -> tuple[Attempt, ...]:
        """Return failed attempts as a reply has them; ``known`` has their texts, None: the store has them."""
        return tuple(
            Attempt(
                attempt.number,
                attempt.wall_ms,
                attempt.reason,
                attempt.operator,
                attempt.place,
                self._text(attempt.frames, known)
                + (f"{attempt.reason}\n" if attempt.last_line is None else attempt.last_line),
                attempt.requeued_ms,
                attempt.requeued_by,
            )
            for attempt in history
        )

    def _text(self, digest: bytes, known: Mapping[bytes, str] | None) -> str:
        if not digest:
            return ""
        if known is not None:
            return known[digest]
        if digest not in self._texts:
            self._texts[digest] = texts.read(self.txn, digest)
        return self._texts[digest]


class FailedEntry(Record):
    """A record of one of the tables of failed ones; ``prefix`` is what a walk puts in front of its key there."""

    __slots__ = ("_contents", "_record", "_stored_key", "_table")

    def __init__(
        self,
        contents: RecordContents,
        table: FailedTable,
        key: bytes,
        record: FailedRecord,
        prefix: bytes = b"",
    ) -> None:
        stream = contents.state.numbers[failed.stream_of(key)]
        super().__init__(prefix + key, stream, record.root, record.origin)
        self._stored_key = key
        self._contents = contents
        self._table = table
        self._record = record

    @property
    def history(self) -> History:
        return self._record.history

    @property
    def time_ms(self) -> int:
        return failed.time_of(self._stored_key)

    def may_say(self, sought: bytes) -> bool:
        return sought in self._record.body

    def payload(self) -> pa.RecordBatch:
        return self._contents.payload_of(self._record)

    def info(self) -> RecordInfo:
        record = self._record
        due_ms = self.time_ms if self._table is FailedTable.WAITING else 0
        history = self._contents.attempts(record.history)
        return self._info(self._contents, str(self._table), record.attempt, due_ms, history, 0, record.edit)


@dataclass(slots=True, eq=False)
class SegmentRows:
    """Rows of a segment whose payload is read when the first of them is looked into."""

    contents: RecordContents
    sequence: int
    head: Head
    which: I64
    info: RowInfo
    stream: Stream
    state: str
    registered_ms: int
    _payload: pa.RecordBatch | None = None
    _said: dict[bytes, bool] = field(default_factory=dict)

    @property
    def payload(self) -> pa.RecordBatch:
        if self._payload is None:
            segments, txn = self.contents.state.segments, self.contents.txn
            self._payload = segments.payload(txn, self.sequence, self.head, self.which)
        return self._payload

    def may_say(self, sought: bytes) -> bool:
        if sought not in self._said:
            body = self.contents.state.segments.body(self.contents.txn, self.sequence)
            self._said[sought] = sought in body
        return self._said[sought]


class SegmentRow(Record):
    __slots__ = ("_index", "_rows")

    def __init__(self, rows: SegmentRows, index: int, key: bytes) -> None:
        info = rows.info
        super().__init__(key, rows.stream, int(info.roots[index]), int(info.origins[index]))
        self._rows = rows
        self._index = index

    @property
    def history(self) -> History:
        return self._rows.info.history(self._index)

    @property
    def time_ms(self) -> int:
        return self._rows.registered_ms

    def may_say(self, sought: bytes) -> bool:
        return self._rows.may_say(sought)

    def payload(self) -> pa.RecordBatch:
        return self._rows.payload.slice(self._index, 1)

    def info(self) -> RecordInfo:
        rows, info = self._rows, self._rows.info
        history = rows.contents.attempts(self.history, info.texts)
        attempt, edit = int(info.attempts[self._index]), info.edit(self._index)
        return self._info(rows.contents, rows.state, attempt, 0, history, rows.registered_ms, edit)


# Walks through the records of a state, in the order of their keys, from behind a key on.
#
# A walk is lazy: what it comes to is read when it is asked for. So its reader bounds what it costs. Every record is in
# one state; rows that are due after a restart wait.
#
# Keys: of failed records those of their table, of rows of segments the segment (u64) and the row (u32), of rows of a
# delivery log the stream (u32) and the offset (u64), big-endian. Keys of waiting records have a letter in front, since
# rows of segments and records of the table wait.


_IN_SEGMENT, _IN_TABLE = b"s", b"w"
_KEY_OF_ROW_BYTES = 12
_LAST_ROW = (1 << 32) - 1
_NO_ROWS: I64 = np.zeros(0, np.int64)

PASSED_AT_ONCE = 128
"""So many segments without a record that is wanted take about as long as so many records."""

NEVER_MS = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Span:
    """Which part of a walk is wanted: ``streams``, times, behind ``after``; ``most`` rows are read at once."""

    streams: Sequence[Stream]
    after: bytes
    most: int
    since_ms: int = 0
    until_ms: int = NEVER_MS
    numbers: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", frozenset(stream.number for stream in self.streams))


@dataclass(frozen=True, slots=True)
class PassedRows:
    """A walk has passed `PASSED_AT_ONCE` segments that have no such record, and come to ``key``."""

    key: bytes


class Walks:
    def __init__(self, state: ShardState, txn: ReadTransaction) -> None:
        self._state = state
        self._txn = txn
        self._contents = RecordContents(state, txn)

    def records(self, state: str, span: Span) -> Iterator[Record | PassedRows]:
        match state:
            case "pending":
                return self._tracked(span, is_due=False)
            case "waiting":
                return self._waiting(span)
            case "dead":
                return self._failed(FailedTable.DEAD, span)
        return self._delivery(span)

    def newest_dead(self, span: Span) -> Iterator[Record]:
        entries = [self._backwards(stream, span) for stream in span.streams if stream.dead]
        # Behind the stream a key has the time, and a number that no other has.
        for key, value in heapq.merge(*entries, key=lambda entry: entry[0][4:], reverse=True):
            yield FailedEntry(self._contents, FailedTable.DEAD, key, failed.decode(value))

    def dead_of_group(self, span: Span, stream: Stream, group: int, *, newest: bool) -> Iterator[Record]:
        """Return the dead letters of a group, as far as they are indexed."""
        keys = dead_index.letters_of_group(
            self._txn, stream.number, group, span.since_ms, span.until_ms, span.after, reverse=newest
        )
        for key in keys:
            yield from self._failed_at(FailedTable.DEAD, key)

    def dead_of_root(self, root: int, after: bytes) -> Iterator[Record]:
        """Return the dead letters of all streams with a root or origin; they have to be indexed."""
        for key in dead_index.letters_of_root(self._txn, root, after):
            yield from self._failed_at(FailedTable.DEAD, key)

    def _failed_at(self, table: FailedTable, key: bytes, prefix: bytes = b"") -> Iterator[Record]:
        record = failed.get(self._txn, table, key)
        if record is not None and key not in self._state.cancelled:
            yield FailedEntry(self._contents, table, key, record, prefix)

    def _failed(self, table: FailedTable, span: Span, prefix: bytes = b"") -> Iterator[Record]:
        for stream in span.streams:
            if not (stream.dead if table is FailedTable.DEAD else stream.waiting):
                continue
            if stream.number.to_bytes(4, "big") < span.after[:4]:
                continue
            start = failed.key_of(stream.number, span.since_ms, 0)
            stop = failed.key_of(stream.number, span.until_ms, 0)
            for found, value in self._txn.scan(
                table, max(start, span.after + b"\0" * bool(span.after)), stop
            ):
                key = bytes(found)
                if key not in self._state.cancelled:
                    yield FailedEntry(self._contents, table, key, failed.decode(value), prefix)

    def _backwards(self, stream: Stream, span: Span) -> Iterator[tuple[bytes, memoryview | bytes]]:
        start = failed.key_of(stream.number, span.since_ms, 0)
        stop = failed.key_of(stream.number, span.until_ms, 0)
        if span.after:
            stop = min(stop, start[:4] + span.after[4:])
        for key, value in self._txn.scan(FailedTable.DEAD, start, stop, reverse=True):
            yield bytes(key), value

    def pending_root(self, root: int) -> Iterator[Record]:
        located = self._state.tracker.locate(np.array([root], np.uint64))
        for sequence, rows, _ in by_segment(located.locations[located.pending]):
            yield from self._tracked_at(sequence, rows, is_due=False)

    def _waiting(self, span: Span) -> Iterator[Record | PassedRows]:
        after = span.after
        if not after.startswith(_IN_TABLE):
            if not span.since_ms:
                yield from self._tracked(replace(span, after=after[1:]), is_due=True)
            after = b""
        yield from self._failed(FailedTable.WAITING, replace(span, after=after[1:]), _IN_TABLE)

    def _tracked(self, span: Span, *, is_due: bool) -> Iterator[Record | PassedRows]:
        first = int.from_bytes(span.after[:8], "big")
        if is_due:
            sequences = sorted(sequence for sequence in self._due if sequence >= first)
        else:
            sequences = self._state.live.sequences(first)
        passed = 0
        for sequence in sequences:
            live = self._state.live.get(sequence)
            if live is not None and live.source is not None:
                live = None  # the slot that holds its partition has its rows, not the store
            which = _NO_ROWS if live is None else self._rows_in(live, sequence, span, is_due=is_due)
            if live is None or not len(which):
                passed += 1
                if not passed % PASSED_AT_ONCE:
                    yield PassedRows((_IN_SEGMENT if is_due else b"") + _row_key(sequence, _LAST_ROW))
                continue
            for at in range(0, len(which), span.most):
                yield from self._rows(sequence, live, which[at : at + span.most], is_due=is_due)

    def _rows_in(self, live: LiveSegment, sequence: int, span: Span, *, is_due: bool) -> I64:
        since_ms = 0 if is_due else _registered_ms(live)
        if live.stream.number not in span.numbers or not span.since_ms <= since_ms < span.until_ms:
            return _NO_ROWS
        which = np.flatnonzero(_in_state(live, self._due.get(sequence, ()), is_due=is_due))
        if span.after[:8] == sequence.to_bytes(8, "big"):
            which = which[which > int.from_bytes(span.after[8:], "big")]
        return which

    def _tracked_at(self, sequence: int, which: I64, *, is_due: bool) -> Iterator[Record]:
        live = self._state.live.get(sequence)
        if live is None or live.source is not None:
            return
        which = which[which < len(live.done)]
        which = which[_in_state(live, self._due.get(sequence, ()), is_due=is_due)[which]]
        if len(which):
            yield from self._rows(sequence, live, which, is_due=is_due)

    @cached_property
    def _due(self) -> dict[int, list[I64]]:
        due: dict[int, list[I64]] = {}
        for stream in self._state.streams.values():
            for sequence, rows in stream.due:
                due.setdefault(sequence, []).append(rows)
        return due

    def _rows(self, sequence: int, live: LiveSegment, which: I64, *, is_due: bool) -> Iterator[Record]:
        head = self._state.segments.head(self._txn, sequence)
        info = head.info.take(which)
        info = replace(info, roots=live.roots(which, info.roots))
        state, prefix = ("waiting", _IN_SEGMENT) if is_due else ("pending", b"")
        registered_ms = 0 if is_due else _registered_ms(live)
        rows = SegmentRows(self._contents, sequence, head, which, info, live.stream, state, registered_ms)
        for index, row in enumerate(which.tolist()):
            yield SegmentRow(rows, index, prefix + _row_key(sequence, row))

    def at_keys(self, state: str, keys: Iterable[bytes]) -> Iterator[Record]:
        """Return the records that have one of ``keys`` and are in this state, in the order of their keys."""
        for start, group in groupby(sorted(keys), lambda key: key[:-4]):
            same_start = list(group)
            match state:
                case "dead":
                    for key in same_start:
                        yield from self._failed_at(FailedTable.DEAD, key)
                case "waiting" if start.startswith(_IN_TABLE):
                    for key in same_start:
                        yield from self._failed_at(FailedTable.WAITING, key[1:], _IN_TABLE)
                case "waiting" if start.startswith(_IN_SEGMENT):
                    yield from self._at_rows([key[1:] for key in same_start], is_due=True)
                case "pending":
                    yield from self._at_rows(same_start, is_due=False)
                case "delivery":
                    for key in same_start:
                        yield from self._delivered_at(key)

    def _at_rows(self, keys: Sequence[bytes], *, is_due: bool) -> Iterator[Record]:
        if len(keys[0]) == _KEY_OF_ROW_BYTES:
            which = np.array([int.from_bytes(key[8:], "big") for key in keys], np.int64)
            yield from self._tracked_at(int.from_bytes(keys[0][:8], "big"), which, is_due=is_due)

    def _delivered_at(self, key: bytes) -> Iterator[Record]:
        stream = self._state.numbers.get(int.from_bytes(key[:4], "big"))
        if len(key) != _KEY_OF_ROW_BYTES or stream is None:
            return
        offset = int.from_bytes(key[4:], "big")
        after = key[:4] + (offset - 1).to_bytes(8, "big") if offset else b""
        for record in self._delivery(Span([stream], after, 1)):
            if record.key == key:
                yield record
            return

    def _delivery(self, span: Span) -> Iterator[Record]:
        if span.since_ms:
            return
        for stream in span.streams:
            bounds = get_bounds(self._txn, stream.number)
            prefix = stream.number.to_bytes(4, "big")
            start = bounds.committed
            if span.after[:4] == prefix:
                start = max(start, int.from_bytes(span.after[4:], "big") + 1)
            elif prefix < span.after[:4]:
                continue
            for entry in log_entries(self._txn, stream.number, start, bounds.next):
                head = self._state.segments.head(self._txn, entry.segment)
                first = max(start - entry.start, 0)
                for at in range(first, entry.rows, span.most):
                    which = np.arange(at, min(at + span.most, entry.rows))
                    rows = SegmentRows(
                        self._contents,
                        entry.segment,
                        head,
                        which,
                        head.info.take(which),
                        stream,
                        "delivery",
                        0,
                    )
                    for index in range(len(which)):
                        offset = entry.start + at + index
                        yield SegmentRow(rows, index, prefix + offset.to_bytes(8, "big"))


def _in_state(live: LiveSegment, due: Iterable[I64], *, is_due: bool) -> Mask:
    """Return which rows of a segment are due, or in flight, bool[n]; ``due`` are those that are not worked on."""
    mask = np.zeros(len(live.done), np.bool_)
    for rows in due:
        mask[rows] = True
    return ~live.done & (mask if is_due else ~mask)


def _row_key(sequence: int, row: int) -> bytes:
    return sequence.to_bytes(8, "big") + row.to_bytes(4, "big")


def _registered_ms(live: LiveSegment) -> int:
    return 0 if live.registered is None else live.registered.wall_ms


class BarrierLetters:
    """Letters of jobs in barrier mode. A requeued one is among the waiting records, and no replay."""

    def __init__(self, state: ShardState, store: KeyValueStore) -> None:
        self._state = state
        self._store = store

    @calls.handles(calls.KeepLetters)
    def keep(self, txn: WriteTransaction, call: calls.KeepLetters, now: Now) -> calls.LettersKept:
        state = self._state
        state.owners.check([call.stream], call.owner)
        stream = state.stream(call.stream)
        job = owner_of(call.stream)
        if kept.is_kept(txn, job, call.file, call.part):
            return calls.LettersKept(0)
        if self._store.used_share >= INTAKE_SHARE:
            raise ProtocolError(
                f"the store has used {self._store.used_share:.0%} of its {self._store.max_bytes} bytes, and takes no "
                "letters in: purge some, or wait until records complete"
            )
        kept.put_kept(txn, job, call.file, call.part)
        roots = state.fresh_roots(len(call.letters))
        for root, letter in zip(roots.tolist(), call.letters, strict=True):
            row = state.payloads.rows(txn, letter.payload)
            record = FailedRecord(
                root=root,
                origin=root,
                attempt=letter.attempts[-1].number,
                key_hashes=None,
                flat_hashes=False,
                history=self._history(letter.attempts),
                digest=row.digest,
                body=row.body(0),
                kept=KeptName(letter.letter, letter.facts),
            )
            self._put_dead(txn, stream, record, now)
            stream.counters.dead += 1
        return calls.LettersKept(len(call.letters))

    @calls.handles(calls.ForgetLetters)
    def forget(self, txn: WriteTransaction, call: calls.ForgetLetters, now: Now) -> calls.LettersKept:
        self._state.owners.check([call.job], call.owner)
        return calls.LettersKept(kept.forget_kept(txn, call.job, call.file))

    @calls.handles(calls.GetRequeued)
    def requeued(self, txn: ReadTransaction, call: calls.GetRequeued, now: Now) -> calls.RequeuedLetters:
        """Return a page of letters that were requeued, and are in no checkpoint of their job yet."""
        self._state.owners.check([call.job], call.owner)
        contents = RecordContents(self._state, txn)
        found: list[calls.RequeuedLetter] = []
        size = 0
        for key, record in self._waiting(txn, call.job, call.after):
            if len(found) == call.limit or size >= calls.MAX_PAGE_BYTES:
                return calls.RequeuedLetters(tuple(found), found[-1].key)
            assert record.kept is not None
            stream = self._state.numbers[failed.stream_of(key)].name
            payload = contents.payload_of(record)
            attempts = contents.attempts(record.history)
            found.append(
                calls.RequeuedLetter(key, stream, *record.kept, payload, attempts, edited=record.is_edited)
            )
            size += payload.nbytes + sum(len(each.traceback) for each in attempts)
        return calls.RequeuedLetters(tuple(found), b"")

    @calls.handles(calls.Readmitted)
    def readmitted(self, txn: WriteTransaction, call: calls.Readmitted, now: Now) -> calls.Changed:
        self._state.owners.check([call.job], call.owner)
        return calls.Changed(sum(self._take(txn, call.job, key) is not None for key in call.keys))

    @calls.handles(calls.ReturnLetters)
    def give_back(self, txn: WriteTransaction, call: calls.ReturnLetters, now: Now) -> calls.Changed:
        self._state.owners.check([call.job], call.owner)
        count = 0
        for key in call.keys:
            taken = self._take(txn, call.job, key, with_texts=False)
            if taken is not None:
                stream, record = taken
                self._put_dead(txn, stream, self._with_reason(record, call.reason, now), now)
                count += 1
        return calls.Changed(count)

    def _put_dead(self, txn: WriteTransaction, stream: Stream, record: FailedRecord, now: Now) -> None:
        stream.died_ms = max(stream.died_ms, now.wall_ms)
        key = failed.key_of(stream.number, stream.died_ms, self._state.new_serial())
        failed.put(txn, FailedTable.DEAD, key, record)
        self._state.dead_index.add(txn, key, record)
        stream.dead += 1

    def _history(self, attempts: Sequence[calls.Attempt]) -> History:
        if len(attempts) > MAX_HISTORY:
            attempts = (*attempts[:1], *attempts[1 - MAX_HISTORY :])
        hold = self._state.group.texts.hold
        return tuple(
            stored_attempt(
                each.number,
                each.at_ms,
                calls.Failure(0, each.reason, each.operator, each.traceback, place=each.place),
                hold,
            )._replace(requeued_ms=each.requeued_ms, requeued_by=each.requeued_by)
            for each in attempts
        )

    def _with_reason(self, record: FailedRecord, reason: str, now: Now) -> FailedRecord:
        texts = self._state.group.texts
        earlier = shortened(record.history)
        # What is left out of the middle is held no more.
        texts.release_all(tuple(each for each in record.history if each not in earlier))
        last = record.history[-1]
        again = stored_attempt(last.number, now.wall_ms, calls.Failure(0, reason, last.operator), texts.hold)
        return replace(record, history=(*earlier, again), attempt=last.number)

    def _take(
        self, txn: WriteTransaction, job: str, key: bytes, *, with_texts: bool = True
    ) -> tuple[Stream, FailedRecord] | None:
        record = failed.get(txn, FailedTable.WAITING, key)
        stream = self._state.numbers.get(failed.stream_of(key))
        if record is None or record.kept is None or stream is None or owner_of(stream.name) != job:
            return None
        txn.delete(FailedTable.WAITING, key)
        stream.waiting -= 1
        if with_texts:
            self._state.group.texts.release_all(record.history)
        return stream, record

    def _waiting(self, txn: ReadTransaction, job: str, after: bytes) -> Iterator[tuple[bytes, FailedRecord]]:
        streams = sorted(
            stream.number
            for stream in self._state.numbers.values()
            if stream.waiting and owner_of(stream.name) == job
        )
        for number in streams:
            for found, value in failed.scan(txn, FailedTable.WAITING, number):
                key = bytes(found)
                if key > after and (record := failed.decode(value)).kept is not None:
                    yield key, record
