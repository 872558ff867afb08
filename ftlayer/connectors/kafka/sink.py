"""A sink of topics of Kafka: exactly once in transactions behind checkpoints, or at least once as rows come."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import WriterCommitMessage

from ftlayer.checkpoint.storage.files import Files, open_files
from ftlayer.checkpoint.storage.layout import join, normal, parent, part
from ftlayer.common.checks import Duration, check_bool, check_text, duration_ms, known_options
from ftlayer.common.failures import RowsRejected
from ftlayer.common.printable import hides_secrets
from ftlayer.connectors.files.sink import delete_paths
from ftlayer.connectors.fitting import is_any, whole_or_refused
from ftlayer.connectors.kafka import client
from ftlayer.connectors.table_commits import CleaningSink, by_query, streaming_query, tried
from ftlayer.errors import ConfigError, SinkError, SinkTargetError, UncommittableError

# Which messages of a sink are committed, as a few short texts that are written in the transaction of their rows.
#
# Rules without I/O. A message has a writer and a number, which count up from 1. The text of a mark has the numbers of
# its writers as ranges, ``"9f03:1-57 a1b2:~4,7-9"``; of those up to 4 it is not known any more. Brokers take texts of
# 4,096 bytes (``offset.metadata.max.bytes``), so there may be several, which are written together.


MOST_BYTES = 4_000
"""Of a text."""

FULL_BYTES = 3_000
"""No writer is added to a text of this length: those that are in it grow."""

MOST_NUMBERS = 300
"""Bytes of one writer."""

MOST_RANGES = 8
"""Of a writer. Those before are forgotten."""


class Fate(Enum):
    OPEN = "open"
    """It is not committed."""
    COMMITTED = "committed"
    FORGOTTEN = "forgotten"
    """It is not known any more."""


class CommittedMessages(NamedTuple):
    """Numbers of a writer's messages: ``ranges`` from first to last, ascending, with gaps between them.

    Of those up to ``forgotten``, and below all ranges, nothing is known.
    """

    ranges: tuple[tuple[int, int], ...] = ()
    forgotten: int = 0

    def fate(self, number: int) -> Fate:
        if any(first <= number <= last for first, last in self.ranges):
            return Fate.COMMITTED
        return Fate.FORGOTTEN if number <= self.forgotten else Fate.OPEN

    def with_number(self, number: int) -> CommittedMessages:
        """Return it with one number more; the lowest ranges are forgotten where there are too many."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted((*self.ranges, (number, number))):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            else:
                merged.append((first, last))
        forgotten = max([self.forgotten, *(last for _, last in merged[:-MOST_RANGES])])
        return CommittedMessages(tuple(merged[-MOST_RANGES:]), forgotten)


class CommitMarks:
    """What is committed of the messages of all writers of one execution of a sink."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        """``texts`` as `texts` returns them. Raises `ValueError` for what is no mark's."""
        self._parts = [_parsed(text) for text in texts]

    def fate(self, writer: str, number: int) -> Fate:
        return next((part[writer] for part in self._parts if writer in part), CommittedMessages()).fate(
            number
        )

    def add(self, writer: str, number: int) -> None:
        part = next((part for part in self._parts if writer in part), None)
        committed = (CommittedMessages() if part is None else part.pop(writer)).with_number(number)
        if part is None or _length(part) + MOST_NUMBERS > MOST_BYTES:
            part = self._with_room()
        part[writer] = committed

    def texts(self) -> list[str]:
        """Return what is to be written, all of it each time: brokers forget texts that are not renewed."""
        return [_text(each) for each in self._parts]

    def _with_room(self) -> dict[str, CommittedMessages]:
        for each in self._parts:
            if _length(each) < FULL_BYTES:
                return each
        self._parts.append({})
        return self._parts[-1]


def _length(part: Mapping[str, CommittedMessages]) -> int:
    return len(_text(part))


def _text(part: Mapping[str, CommittedMessages]) -> str:
    return " ".join(f"{writer}:{_numbers(committed)}" for writer, committed in part.items())


def _numbers(committed: CommittedMessages) -> str:
    ranges = [f"{first}-{last}" for first, last in committed.ranges]
    return ",".join([f"~{committed.forgotten}", *ranges] if committed.forgotten else ranges)


def _parsed(text: str) -> dict[str, CommittedMessages]:
    found: dict[str, CommittedMessages] = {}
    for written in text.split():
        writer, _, numbers = written.partition(":")
        parts = numbers.split(",")
        forgotten = int(parts.pop(0)[1:]) if numbers.startswith("~") else 0
        pairs = [each.split("-") for each in parts]
        found[writer] = CommittedMessages(tuple((int(first), int(last)) for first, last in pairs), forgotten)
    return found


# The rules by which messages are committed, each once: what a transaction holds, and what its mark says.
#
# No I/O but by `MessageTransactions`. The order is always this: fence off all others, read the marks, then produce
# what they do not have, with new marks, in one transaction. What became of a transaction that was not answered is not
# asked of the broker: it is begun anew with the fence, and the marks say it.


@dataclass(frozen=True, slots=True)
class Mark:
    """An offset that is committed for a consumer group, with a text. Of two of a group the higher offset is newer."""

    offset: int
    text: str = ""


class MessageTransactions(Protocol):
    """A transactional producer. Its errors are `SinkError`: what it was asked for may have come about or not."""

    def fence(self) -> None:
        """Become the one that may produce. What others have begun is aborted, and theirs fail from now on."""

    def read(self, group: str) -> Mark | None:
        """Return a group's newest mark; None: it has none."""

    def run(self, written: Sequence[client.KafkaMessage], marks: Mapping[str, Mark]) -> None:
        """Produce rows and write marks, in one transaction.

        Raises `UncommittableError` if rows are gone; nothing has happened then.
        """


class KafkaCommits:
    """Commits messages of the sink ``name``.

    The marks of an execution's messages are those of the groups ``ftlayer-<name>-<execution>``, ``…-1``, ``…-2`` and so
    on; that of a query is the group ``ftlayer-<name>-<query>``, whose offset is the number of its next batch.
    """

    def __init__(self, name: str, transactions: MessageTransactions, remember_ms: int) -> None:
        """``remember_ms``: for how long brokers keep marks at least."""
        self._name = name
        self._transactions = transactions
        self._remember_ms = remember_ms

    def commit_messages(self, written: Iterable[client.KafkaMessage], now_ms: int) -> None:
        """Commit messages, but for those that are. Raises `UncommittableError`, and `SinkError`: it is unknown then."""
        self._transactions.fence()
        by_execution: dict[str, list[client.KafkaMessage]] = {}
        for message in written:
            by_execution.setdefault(message.execution, []).append(message)
        todo: list[client.KafkaMessage] = []
        marks: dict[str, Mark] = {}
        for execution, messages in by_execution.items():
            known, commits = self._known(execution)
            new = []
            for message in messages:
                if self._is_open(message, known, now_ms):
                    known.add(message.writer, message.number)
                    new.append(message)
            if new:
                todo += new
                texts = known.texts()
                groups = [self._group(execution, part) for part in range(len(texts))]
                marks |= {group: Mark(commits + 1, text) for group, text in zip(groups, texts, strict=True)}
        self._run(todo, marks)

    def commit_batch(self, query: str, batch: int, written: Sequence[client.KafkaMessage]) -> None:
        """Commit a batch of a query, if it was not. One that is run again has other messages, of the same rows."""
        self._transactions.fence()
        mark = self._transactions.read(self._group(query))
        if mark is None or mark.offset <= batch:
            self._run(written, {self._group(query): Mark(batch + 1)})

    def _run(self, written: Sequence[client.KafkaMessage], marks: Mapping[str, Mark]) -> None:
        if not written:
            return
        self._transactions.run(written, marks)
        for group, mark in marks.items():
            # A broker that has lost the transaction while it was restarted may answer that it is committed.
            if self._transactions.read(group) != mark:
                raise SinkError(
                    f"group {group!r}: the mark of a transaction is not there, though it was committed"
                )

    def _known(self, execution: str) -> tuple[CommitMarks, int]:
        """Return what is committed of an execution's messages, and the highest offset of its marks."""
        found: list[Mark] = []
        while (mark := self._transactions.read(self._group(execution, len(found)))) is not None:
            found.append(mark)
        try:
            known = CommitMarks(mark.text for mark in found)
        except ValueError as error:
            raise UncommittableError(
                f"group {self._group(execution)!r} has a mark that no KafkaSink has written: {error}"
            ) from error
        return known, max((mark.offset for mark in found), default=0)

    def _is_open(self, message: client.KafkaMessage, known: CommitMarks, now_ms: int) -> bool:
        if message.sink != self._name:
            raise UncommittableError(
                f"{message.rows:,} rows were written by a sink with the name {message.sink!r}, and this one has "
                f"{self._name!r}: what is committed is known by the name, so keep it"
            )
        fate = known.fate(message.writer, message.number)
        if fate is Fate.FORGOTTEN or (fate is Fate.OPEN and now_ms - message.written_ms > self._remember_ms):
            raise UncommittableError(
                f"{message.rows:,} rows were written {(now_ms - message.written_ms) / 3_600_000:,.0f} hours ago, and "
                "it is not known any more whether they were committed (remember)"
            )
        return fate is Fate.OPEN

    def _group(self, owner: str, part: int = 0) -> str:
        return f"ftlayer-{self._name}-{owner}" + (f"-{part}" if part else "")


HEADERS = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))

SCHEMA = pa.schema(
    [
        pa.field("value", pa.binary()),
        pa.field("key", pa.binary()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("timestamp", pa.timestamp("ms", "UTC")),
        pa.field("headers", HEADERS),
    ]
)
"""Of staged rows. A column that is not given is null."""

ANY_PARTITION = -1
"""librdkafka's: the partitioner chooses."""

_TOPIC = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,249}")

OVERHEAD_BYTES = 100
"""Of a message beside key, value and headers, at most."""


class Produced(NamedTuple):
    topic: str
    value: bytes | None
    key: bytes | None
    partition: int
    timestamp: int
    headers: list[tuple[str, bytes | None]] | None


def to_messages(batch: pa.RecordBatch, topic: str | None, most_bytes: int, first: int = 0) -> pa.RecordBatch:
    """Return rows with the columns of `SCHEMA`, ready to be staged. ``topic`` None: rows have a column of it.

    Raises `SinkError` for a column that a message has not, or of another type. Raises `RowsRejected`, which counts rows
    from ``first``, for a row without a topic, with a negative partition, or of more than ``most_bytes``.
    """
    strange = [name for name in batch.schema.names if name not in SCHEMA.names]
    if strange:
        raise SinkTargetError(
            f"column {strange[0]!r} is none of a message's, which are {', '.join(SCHEMA.names)}: make it a part of "
            "value, or leave it out of the rows"
        )
    if "value" not in batch.schema.names:
        raise SinkTargetError(f"the rows have no column 'value', just {', '.join(batch.schema.names)}")
    columns = [
        _cast(batch, field) if field.name in batch.schema.names else pa.nulls(batch.num_rows, field.type)
        for field in SCHEMA
    ]
    if topic is not None:
        columns[SCHEMA.get_field_index("topic")] = pa.repeat(pa.scalar(topic), batch.num_rows)
    found = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
    found.validate(full=True)  # What is no text would fail the commit.
    refused = _refused(found, most_bytes, first)
    if refused:
        raise RowsRejected(refused)
    return found


def produced(batch: pa.RecordBatch) -> Iterator[Produced]:
    partitions = batch.column("partition").fill_null(ANY_PARTITION).to_pylist()
    # 0: the time at which it is produced.
    stamps = batch.column("timestamp").cast(pa.int64()).fill_null(0).to_pylist()
    headers = batch.column("headers")
    return map(
        Produced,
        batch.column("topic").to_pylist(),
        batch.column("value").to_pylist(),
        batch.column("key").to_pylist(),
        partitions,
        stamps,
        [None] * batch.num_rows if headers.null_count == len(headers) else map(_pairs, headers.to_pylist()),
    )


def _pairs(headers: list[dict[str, Any]] | None) -> list[tuple[str, bytes | None]] | None:
    return None if headers is None else [(each["key"], each["value"]) for each in headers]


def _cast(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    column = batch.column(batch.schema.get_field_index(field.name))
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    is_text = is_any(column.type, "string", "large_string")
    try:
        if pa.types.is_binary(field.type) and not (is_text or is_any(column.type, "binary", "large_binary")):
            raise pa.ArrowTypeError(f"a message's {field.name} is a text or bytes")
        # A time is cut to milliseconds, as Kafka has it.
        return column.cast(field.type, safe=not pa.types.is_timestamp(field.type))
    except pa.ArrowException as error:
        if isinstance(error, pa.ArrowInvalid) and not is_text:  # Of a value: the others fit.
            raise
        raise SinkTargetError(
            f"column {field.name!r} is {column.type}, and cannot be {field.type}: {error}"
        ) from error


def _refused(batch: pa.RecordBatch, most_bytes: int, first: int) -> dict[int, Exception | str]:
    found: dict[int, Exception | str] = {}
    for row in np.flatnonzero(batch.column("topic").is_null().to_numpy(zero_copy_only=False)):
        found[first + int(row)] = "it has no topic: give the sink one, or the row"
    for topic in pc.unique(batch.column("topic")).drop_null().to_pylist():
        if not _TOPIC.fullmatch(topic):
            same = pc.equal(batch.column("topic"), topic).fill_null(False)
            for row in np.flatnonzero(same.to_numpy(zero_copy_only=False)):
                found[first + int(row)] = (
                    "its topic has no name that Kafka takes (up to 249 letters, digits, '.', '_', '-')"
                )
    negative = pc.less(batch.column("partition"), 0).fill_null(False)
    for row in np.flatnonzero(negative.to_numpy(zero_copy_only=False)):
        found[first + int(row)] = f"its partition is {batch.column('partition')[int(row)]}"
    sizes = _sizes(batch)
    for row in np.flatnonzero(sizes > most_bytes):
        found[first + int(row)] = (
            f"it has {sizes[row]:,} bytes, and message.max.bytes allows {most_bytes:,}: give config "
            "{'message.max.bytes': …}, if the topic takes them"
        )
    return found


def _sizes(batch: pa.RecordBatch) -> np.ndarray[Any, np.dtype[np.int64]]:
    sizes = np.full(batch.num_rows, OVERHEAD_BYTES, np.int64)
    for name in ("value", "key"):
        sizes += pc.binary_length(batch.column(name)).fill_null(0).to_numpy(zero_copy_only=False)
    headers = batch.column("headers")
    if headers.null_count < len(headers):
        for row, pairs in enumerate(headers.to_pylist()):
            sizes[row] += sum(
                len(each["key"].encode()) + len(each["value"] or b"") + 10 for each in pairs or ()
            )
    return sizes


POLL_S = 0.1
"""How long room in librdkafka's queue is waited for at a time."""

KEPT_REPORTS = 1 << 16

ERRORS_ONLY = {"delivery.report.only.error": True}

ROWS_S = 300.0
"""How long the rows of a transaction, or of a batch, may take to be produced."""

Result = TypeVar("Result")


class KafkaTransactions:
    """`MessageTransactions` of Kafka. After any error it begins anew with the fence, and that aborts what it had."""

    def __init__(self, brokers: client.Brokers, transactional_id: str, files: Files) -> None:
        """``files`` has the rows of messages that are not in the messages themselves."""
        self._brokers, self._id, self._files = brokers, transactional_id, files
        self._producer: Any = None
        self._admin: Any = None
        self._refused: tuple[str, Any] | None = None

    def fence(self) -> None:
        if self._producer is None:
            producer = self._brokers.producer({**ERRORS_ONLY, "transactional.id": self._id})
            self._doing("a transaction cannot be begun", lambda: producer.init_transactions(client.CALL_S))
            self._producer = producer

    def read(self, group: str) -> Mark | None:
        if self._admin is None:
            self._admin = self._brokers.admin()
        found = self._doing(f"group {group!r} cannot be read", lambda: client.read_group(self._admin, group))
        return max((Mark(*each) for each in found), key=lambda mark: mark.offset, default=None)

    def run(self, written: Sequence[client.KafkaMessage], marks: Mapping[str, Mark]) -> None:
        # Before it begins: an open transaction holds back those who read the topic.
        contents = [client.content_of(message, self._files) for message in written]
        self._doing("rows cannot be committed", lambda: self._run(contents, marks))

    def close(self) -> None:
        """Disconnect; a transaction that is open ends by the next fence, or by its timeout."""
        self._producer = self._admin = None

    def _run(self, contents: Iterable[bytes], marks: Mapping[str, Mark]) -> None:
        producer, topic = self._producer, ""
        producer.begin_transaction()
        deadline = time.monotonic() + ROWS_S
        for content in contents:
            for batch in client.batches_of(content):
                topic = topic or batch.column("topic")[0].as_py()
                produce(producer, produced(batch), repeat(self._failed), deadline)
                if self._refused is not None:
                    raise client.kafka_library().KafkaException(self._refused[1])
        for group, mark in marks.items():
            # Any partition will do that is there: the group has no members, and reads nothing.
            offset = client.kafka_library().TopicPartition(topic, 0, mark.offset, metadata=mark.text)
            producer.send_offsets_to_transaction([offset], client.group_metadata(group), client.CALL_S)
        producer.commit_transaction(ROWS_S)

    def _failed(self, error: Any, message: Any) -> None:
        # The others are purged with their transaction.
        if self._refused is None and client.refused_by_brokers(error):
            row = _row_of(message)
            self._refused = f"topic {row.topic!r}, partition {row.partition}: ", error

    def _doing(self, what: str, work: Callable[[], Result]) -> Result:
        self._refused = None
        try:
            return work()
        except (client.kafka_library().KafkaException, BufferError, TimeoutError) as error:
            # A call may fail before the report of the row that failed it was served.
            deadline = time.monotonic() + client.CALL_S
            while (
                self._producer and not self._refused and client.refused_by_brokers(error) in ("row", "topic")
            ):
                self._producer.poll(POLL_S)
                if time.monotonic() > deadline:
                    break
            self.close()
            place, said = self._refused or ("", error)
            if client.refused_by_brokers(said):
                raise UncommittableError(
                    f"{self._brokers.servers}: {what}: {place}{client.reason(said)}. Tried again they would be refused "
                    f"again: {client.way_out(said)}, and start the job again, which commits them first"
                ) from error
            more = (
                f": another sink with the name of this one (transactional.id {self._id!r}) produces now: give each job "
                "that writes to a topic its own name"
                if client.is_fenced(error)
                else ""
            )
            raise SinkError(f"{self._brokers.servers}: {what}: {client.reason(error)}{more}") from error
        except BaseException:
            self.close()
            raise


class PlainProducer:
    """An idempotent producer without transactions: what is tried again by librdkafka is not there twice."""

    def __init__(self, brokers: client.Brokers, *, alone: bool = False) -> None:
        """``alone``: each message is a batch of its own."""
        self._brokers, self._alone = brokers, alone
        self._producer: Any = None
        self._process = os.getpid()
        self._reports: list[Callable[[Any, Any], None]] = []
        self.begin()

    def begin(self) -> None:
        self._refused: dict[int, tuple[Any, Produced]] = {}
        self._error: Any = None

    def send(self, rows: Iterable[Produced], numbers: Sequence[int]) -> None:
        """Queue rows, with their numbers. Raises `SinkError`."""
        if self._producer is None or self._process != os.getpid():
            # Threads and sockets do not survive a fork.
            own = {"batch.num.messages": 1} if self._alone else {}
            self._producer, self._process = self._brokers.producer({**ERRORS_ONLY, **own}), os.getpid()
        deadline, known = time.monotonic() + ROWS_S, self._reports
        # One for each row anew would be most of what producing costs.
        known += [partial(self._failed, n) for n in range(len(known), min(max(numbers) + 1, KEPT_REPORTS))]
        reports = (
            known[number] if number < KEPT_REPORTS else partial(self._failed, number) for number in numbers
        )
        self._doing(lambda: produce(self._producer, rows, reports, deadline))

    def flush(self) -> dict[int, Any]:
        """Wait until brokers have all rows but those that they refuse; returns why, by number.

        Raises `SinkError`: some may be there, and some not.
        """
        if self._producer is not None:
            self._doing(self._flush)
        if not self._refused or self._alone:
            return {number: error for number, (error, _) in self._refused.items()}
        # A broker refuses a batch as a whole: each of its rows is sent again by itself.
        again = PlainProducer(self._brokers, alone=True)
        again.send((row for _, row in self._refused.values()), list(self._refused))
        return again.flush()

    def _flush(self) -> None:
        # librdkafka gives each message up by itself (delivery.timeout.ms): it says so by its report.
        while self._producer.flush(POLL_S) and self._error is None:
            pass
        if self._error is not None:
            raise client.kafka_library().KafkaException(self._error)

    def _failed(self, number: int, error: Any, message: Any) -> None:
        if client.refused_by_brokers(error) in ("row", "topic"):
            self._refused[number] = error, _row_of(message)
        else:
            self._error = error

    def _doing(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            if self._producer is not None:
                self._producer.purge()
            self._producer = None
            if isinstance(error, (client.kafka_library().KafkaException, BufferError, TimeoutError)):
                kind = SinkTargetError if client.refused_by_brokers(error) else SinkError
                raise kind(
                    f"{self._brokers.servers}: rows cannot be produced: {client.reason(error)}"
                ) from error
            raise


def produce(
    producer: Any, rows: Iterable[Produced], reports: Iterable[Callable[[Any, Any], None]], deadline: float
) -> None:
    """Queue messages; waits while the queue is full. Raises `TimeoutError` at the deadline (monotone time).

    ``reports``: for each row what is called, with the error and the message or row, if it is not taken: here, or while
    ``producer`` is polled or flushed.
    """
    send, library = producer.produce, client.kafka_library()
    for row, report in zip(rows, reports, strict=False):
        topic, value, key, partition, timestamp, headers = row
        while True:
            try:
                send(
                    topic,
                    value,
                    key,
                    partition=partition,
                    on_delivery=report,
                    timestamp=timestamp,
                    headers=headers,
                )
                break
            except BufferError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"brokers have not taken the rows in {ROWS_S:g} s") from None
                producer.poll(POLL_S)
            except library.KafkaException as error:
                if not client.refused_by_brokers(error):
                    raise
                report(error.args[0], row)
                break


def _row_of(message: Any) -> Produced:
    if isinstance(message, Produced):
        return message
    stamp, headers = max(message.timestamp()[1], 0), message.headers()
    return Produced(message.topic(), message.value(), message.key(), message.partition(), stamp, headers)


REMEMBER = "6d"
MOST_MESSAGE_BYTES = 1_000_000
"""``message.max.bytes`` of librdkafka, where nothing else is given."""


@known_options
@hides_secrets(lambda sink: sink._brokers.secrets)
class KafkaSink(CleaningSink[client.KafkaMessage]):
    """Produces rows as messages of Kafka.

    Columns of a row: ``value`` (bytes or text; null is a tombstone), and where they are wanted ``key``, ``topic``,
    ``partition``, ``timestamp``, and ``headers``, a list of ``key`` and ``value``. What is null is as if it was not
    given. A row without a topic, or larger than ``message.max.bytes``, is refused by `RowsRejected`.

    Exactly once: ``write`` stages rows (small ones in its message, others in a file below ``staging``), and the commit
    produces those of all messages in one transaction of Kafka, together with a mark of what they were: an offset of a
    consumer group ``ftlayer-<name>-…``. A commit that was called before finds the mark, and changes nothing. Consumers
    have to read ``isolation.level=read_committed``. The producer's ``transactional.id`` is ``ftlayer-<name>``: of two
    processes that commit for the sink, the older one is fenced off.

    With ``exactly_once=False`` ``write`` produces at once, and returns when brokers have all rows; a commit does
    nothing. `send` does the same for a topology that does not want to wait for a checkpoint.
    """

    _kind = client.KafkaMessage

    def __init__(
        self,
        servers: str,
        topic: str | None = None,
        *,
        staging: str | os.PathLike[str] | None = None,
        exactly_once: bool = True,
        name: str = "",
        remember: Duration = REMEMBER,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the sink; nothing is connected to before the first rows come.

        Args:
            servers: ``"host:port,host:port"``, brokers to begin with; the driver connects, without exactly once the
                slots do.
            topic: name of the topic, whatever rows say. None: rows have a column ``topic``.
            staging: directory, a path or any URL of fsspec's, that driver and slots reach. Rows lie there that are
                written and not committed.
            exactly_once: False: at least once.
            name: of the sink; "": the topic's. Jobs that write to one topic have different ones, and a job keeps its
                own: what was committed is known by it.
            remember: for how long brokers keep offsets of groups without members (``offsets.retention.minutes``, 7
                days) or a little less. A checkpoint that is restored later, and has rows for this sink, fails with an
                `UncommittableError`.
            config: more properties of librdkafka, ``{"security.protocol": "SASL_SSL", …}``.

        Raises `ConfigError` if confluent-kafka is missing, and for an option that will not do.
        """
        super().__init__()
        check_text(servers, "servers", "brokers like 'host:9092'")
        if topic is not None:
            check_text(topic, "topic", "the name of a topic, or None where rows have a column of it")
            if not _TOPIC.fullmatch(topic):
                raise ConfigError(
                    f"topic: expected up to 249 letters, digits, '.', '_' and '-', as Kafka has it, got {topic!r}"
                )
        check_bool(exactly_once, "exactly_once")
        if name != "":
            check_text(name, "name")
        if exactly_once and not (name or topic):
            raise ConfigError(
                "name: expected one where rows have their topics, by which commits are known, got ''"
            )
        if exactly_once and not (isinstance(staging, (str, os.PathLike)) and os.fspath(staging)):
            raise ConfigError(
                "staging: expected a path or URL of a directory, where rows wait for their checkpoint (or say "
                f"exactly_once=False), got {staging!r}"
            )
        if not exactly_once and staging is not None:
            raise ConfigError(f"staging: expected None with exactly_once=False, got {staging!r}")
        properties = dict(config or {})
        client.check_properties(properties, "sink")
        self._servers, self._topic, self._name = servers, topic, name or (topic or "")
        self._brokers = client.Brokers(servers, "", tuple(sorted(properties.items())))
        self._most_bytes = int(properties.get("message.max.bytes", MOST_MESSAGE_BYTES))
        self._staging = normal(os.fspath(staging)) if exactly_once and staging is not None else ""
        if self._staging:
            open_files(self._staging)
        self._remember_ms = duration_ms(remember, "remember")
        self.needs_checkpoints = exactly_once
        self._forget_connections()

    def _forget_connections(self) -> None:
        self._writer, self._written = secrets.token_hex(6), 0
        self._transactions: dict[str, KafkaTransactions] = {}
        self._producer = PlainProducer(self._brokers)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> client.KafkaMessage:
        """Stage rows, or produce them. Raises `SinkError`, `RowsRejected`, `CheckpointStorageError`: nothing is staged
        then, and some rows may be produced.
        """
        query = streaming_query()
        if not self._staging:
            return self._message(self._produce(iterator), query)
        file = join(
            self._directory,
            self._execution,
            f"{time.time_ns() // 1_000_000:012x}-{secrets.token_hex(8)}.arrows",
        )
        staged, rows = client.StagedMessages(self._files(), file), 0
        try:

            def checked() -> Iterator[pa.RecordBatch]:
                nonlocal rows
                for batch in iterator:
                    if batch.num_rows:
                        yield self._messages(batch, rows)
                        rows += batch.num_rows

            client.encode(checked(), SCHEMA, staged)
            if rows:
                staged.finish()
        except BaseException:
            staged.abandon()
            raise
        if not rows:
            staged.abandon()
        return self._message(rows, query, staged)

    def send(self, batch: pa.RecordBatch) -> None:
        """Produce rows, and return when brokers have them: ``stream.sink(KafkaSink(…, exactly_once=False).send)``.

        At least once. Raises `SinkError` and `RowsRejected`; some rows may be produced then.
        """
        if self._staging:
            raise ConfigError(
                "send: the sink is exactly_once: rows are produced behind a checkpoint, by commit"
            )
        self._produce([batch], takes_the_rest=True)

    def _produce(self, batches: Iterable[pa.RecordBatch], *, takes_the_rest: bool = False) -> int:
        rows, refused = 0, dict[int, Exception | str]()
        self._producer.begin()
        for batch in batches:
            left, numbers = batch, np.arange(rows, rows + batch.num_rows)
            rows += batch.num_rows
            while left.num_rows:
                try:
                    messages = self._messages(left, 0)
                except RowsRejected as rejected:
                    refused |= {int(numbers[row]): why for row, why in rejected.errors.items()}
                    kept = np.delete(np.arange(left.num_rows), list(rejected.errors))
                    left, numbers = left.take(pa.array(kept)), numbers[kept]
                else:
                    if takes_the_rest or not refused:
                        self._producer.send(produced(messages), numbers.tolist())
                    break
        for number, error in self._producer.flush().items():
            of_topic = client.refused_by_brokers(error) == "topic"
            if of_topic and self._topic is not None and not client.is_of_partition(error):
                raise SinkTargetError(
                    f"{self._brokers.servers}: rows cannot be produced: topic {self._topic!r}: {client.reason(error)}: "
                    f"{client.way_out(error)}"
                )
            refused[number] = f"brokers refuse it: {client.reason(error)}"
        if refused:
            raise RowsRejected(dict(sorted(refused.items())))
        return rows

    def _messages(self, batch: pa.RecordBatch, first: int) -> pa.RecordBatch:
        def messages(start: int, end: int) -> pa.RecordBatch:
            return to_messages(batch.slice(start, end - start), self._topic, self._most_bytes, first + start)

        return whole_or_refused(batch.num_rows, first, messages)

    def _message(
        self, rows: int, query: str, staged: client.StagedMessages | None = None
    ) -> client.KafkaMessage:
        self._written += 1
        own = (self._name, self._execution, self._writer, self._written, rows, query, _now_ms())
        if staged is None or not rows:
            return client.KafkaMessage(*own)
        return client.KafkaMessage(*own, staged.content, staged.path, staged.size)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """Produce the staged rows in one transaction, unless they are: all of them or none.

        Raises `UncommittableError` if rows are gone that were never committed, or may not have been, and
        `SinkError` if brokers cannot be reached (it is tried some times); then it is unknown whether it happened: call
        it again.
        """
        if not self._staging:
            return
        found = by_query(messages, client.KafkaMessage)
        for query, written in found.items():
            # The marks say each time what it has to do still.
            work = partial(self._commit, query, written, batch_id)
            tried(work, self._brokers.secrets, may_help=lambda _: True)
        self._remove(one.path for written in found.values() for one in written)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """Remove the staged rows of messages; what is committed stays."""
        # Its numbers would have a gap.
        self._writer, self._written = secrets.token_hex(6), 0
        super().abort(messages, batch_id)

    def _abort(self, written: list[client.KafkaMessage], batch_id: int) -> None:
        self._remove(one.path for one in written)

    def _clean(self, keep: list[client.KafkaMessage], older_than_ms: int) -> list[str]:
        if not self._staging:
            return []
        files = self._files()
        kept = {one.path for one in keep}
        own = join(self._directory, self._execution)
        horizon_ms = time.time() * 1_000 - older_than_ms
        dead = [
            entry.path
            for entry in files.walk(self._directory)
            if entry.path not in kept and parent(entry.path) != own and _written_ms(entry.path) <= horizon_ms
        ]
        self._remove(dead)
        for directory in {parent(path) for path in dead}:
            files.delete_empty(directory)
        return [join(files.url, path) for path in dead]

    def _commit(self, query: str, written: list[client.KafkaMessage], batch: int) -> None:
        commits = KafkaCommits(self._name, self._transactional(query), self._remember_ms)
        if query:
            commits.commit_batch(query, batch, written)
        else:
            commits.commit_messages(written, _now_ms())

    def _transactional(self, query: str) -> KafkaTransactions:
        """Return the producer; queries that have the same name, or none, do not fence each other off."""
        if query not in self._transactions:
            own = f"ftlayer-{self._name}" + (f"-{query}" if query else "")
            self._transactions[query] = KafkaTransactions(self._brokers, own, self._files())
        return self._transactions[query]

    @property
    def _directory(self) -> str:
        return part(self._name)

    def _files(self) -> Files:
        return open_files(self._staging)

    def _remove(self, paths: Iterable[str]) -> None:
        delete_paths(self._files(), [path for path in paths if path])

    def __getstate__(self) -> dict[str, Any]:
        # A copy connects by itself, and is another writer.
        own = ("_writer", "_written", "_transactions", "_producer")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_connections()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _written_ms(path: str) -> float:
    """Return when a file was staged, as its name says; what has another name is no file of ours."""
    try:
        return int(path.rpartition("/")[2].partition("-")[0], 16)
    except ValueError:
        return float("inf")
