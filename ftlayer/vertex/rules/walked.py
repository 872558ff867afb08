"""What a walk comes to: records of one snapshot of a shard, each read as far as it is asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import pyarrow as pa

from ftlayer.store import failed, texts
from ftlayer.store.failed import FailedRecord, FailedTable
from ftlayer.store.kv import ReadTransaction
from ftlayer.store.rows import I64, History, RowInfo
from ftlayer.store.segments import Head
from ftlayer.vertex.calls import Attempt, RecordInfo
from ftlayer.vertex.rules.names import names_of
from ftlayer.vertex.rules.state import ShardState
from ftlayer.vertex.rules.streams import Stream


class Record(ABC):
    """A record that a walk came to."""

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

    @property
    def last_failure(self) -> tuple[str, str]:
        """The reason and the operator of the last attempt that failed, "" both where none has."""
        last = self.history[-1] if self.history else None
        return ("", "") if last is None else (last.reason, last.operator)


class RecordContents:
    """What the records of one snapshot of a shard hold, read from its store."""

    def __init__(self, state: ShardState, txn: ReadTransaction) -> None:
        self._state = state
        self._txn = txn
        self._names: dict[int, tuple[str, str]] = {}
        self._texts: dict[bytes, str] = {}

    def names(self, stream: Stream) -> tuple[str, str]:
        """Return the title and the source of a stream."""
        if stream.number not in self._names:
            names = names_of(self._state, self._txn, stream)
            self._names[stream.number] = names.title, names.source
        return self._names[stream.number]

    def stream_of(self, key: bytes) -> Stream:
        """Return the stream of a failed record."""
        return self._state.numbers[failed.stream_of(key)]

    def payload_of(self, record: FailedRecord) -> pa.RecordBatch:
        """Return the payload of a failed record."""
        return self._state.payloads.read(self._txn, record.digest, record.body)

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
            )
            for attempt in history
        )

    def _text(self, digest: bytes, known: Mapping[bytes, str] | None) -> str:
        if not digest:
            return ""
        if known is not None:
            return known[digest]
        if digest not in self._texts:
            self._texts[digest] = texts.read(self._txn, digest)
        return self._texts[digest]

    def segment_may_say(self, sequence: int, sought: bytes) -> bool:
        """Whether ``sought`` can be in the payload of a segment."""
        return sought in self._state.segments.body(self._txn, sequence)

    def rows_payload(self, sequence: int, head: Head, which: I64) -> pa.RecordBatch:
        """Return the payload of some rows of a segment."""
        return self._state.segments.payload(self._txn, sequence, head, which)


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
        super().__init__(prefix + key, contents.stream_of(key), record.root, record.origin)
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
        record, contents = self._record, self._contents
        title, source = contents.names(self.stream)
        return RecordInfo(
            key=self.key,
            stream=self.stream.name,
            state=str(self._table),
            root=record.root,
            origin=record.origin,
            attempt=record.attempt,
            not_before_ms=self.time_ms if self._table is FailedTable.WAITING else 0,
            history=contents.attempts(record.history),
            payload=self.payload(),
            title=title,
            source=source,
            edited_ms=record.edit[0],
            edited_by=record.edit[1],
        )


class SegmentRows:
    """Rows of a segment whose payload is read when the first of them is looked into."""

    def __init__(
        self,
        contents: RecordContents,
        sequence: int,
        head: Head,
        which: I64,
        info: RowInfo,
        stream: Stream,
        state: str,
        registered_ms: int,
    ) -> None:
        self.contents = contents
        self.info = info
        self.stream = stream
        self.state = state
        self.registered_ms = registered_ms
        self._sequence = sequence
        self._head = head
        self._which = which
        self._payload: pa.RecordBatch | None = None
        self._said: dict[bytes, bool] = {}

    @property
    def payload(self) -> pa.RecordBatch:
        """Return the payload of all of them."""
        if self._payload is None:
            self._payload = self.contents.rows_payload(self._sequence, self._head, self._which)
        return self._payload

    def may_say(self, sought: bytes) -> bool:
        """Whether ``sought`` can be in one of the rows."""
        if sought not in self._said:
            self._said[sought] = self.contents.segment_may_say(self._sequence, sought)
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
        rows = self._rows
        edited_ms, edited_by = rows.info.edit(self._index)
        title, source = rows.contents.names(self.stream)
        return RecordInfo(
            key=self.key,
            stream=self.stream.name,
            state=rows.state,
            root=self.root,
            origin=self.origin,
            attempt=int(rows.info.attempts[self._index]),
            not_before_ms=0,
            history=rows.contents.attempts(self.history, rows.info.texts),
            payload=self.payload(),
            title=title,
            source=source,
            registered_ms=rows.registered_ms,
            edited_ms=edited_ms,
            edited_by=edited_by,
        )
