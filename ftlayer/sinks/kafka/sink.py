"""A sink of topics of Kafka: exactly once in transactions behind checkpoints, or at least once as rows come."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from ftlayer.checkpoint.storage.deleting import StoragePool, raise_together
from ftlayer.checkpoint.storage.file_systems import open_files
from ftlayer.checkpoint.storage.files import Files
from ftlayer.checkpoint.storage.layout import join, normal, parent, part
from ftlayer.checks import Duration, check_bool, check_text, duration_ms
from ftlayer.clients.kafka import Brokers, check_producer_properties
from ftlayer.errors import ConfigError, SinkError, UncommittableError
from ftlayer.sinks.kafka.commits import KafkaCommits
from ftlayer.sinks.kafka.messages import KafkaMessage, Staged, encode
from ftlayer.sinks.kafka.producing import KafkaTransactions, PlainProducer
from ftlayer.sinks.kafka.records import SCHEMA, to_messages
from ftlayer.sinks.origin import by_query, streaming_query

logger = logging.getLogger(__name__)

DAY_S = 86_400.0
REMEMBER_MS = 6 * 86_400_000
MOST_MESSAGE_BYTES = 1_000_000
"""``message.max.bytes`` of librdkafka, where nothing else is given."""

TRIES = 3
"""How often a commit is tried; the marks say each time what it has to do still."""
TRY_AGAIN_S = 0.5


class KafkaSink(DataSourceStreamArrowWriter):
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

    def __init__(
        self,
        servers: str,
        topic: str | None = None,
        *,
        staging: str | os.PathLike[str] | None = None,
        exactly_once: bool = True,
        name: str = "",
        remember: Duration = REMEMBER_MS,
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
        check_text(servers, "servers", "brokers like 'host:9092'")
        if topic is not None:
            check_text(topic, "topic", "the name of a topic, or None where rows have a column of it")
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
        check_producer_properties(properties)
        self._servers, self._topic, self._name = servers, topic, name or (topic or "")
        self._brokers = Brokers(servers, "", tuple(sorted(properties.items())))
        self._most_bytes = int(properties.get("message.max.bytes", MOST_MESSAGE_BYTES))
        self._staging = normal(os.fspath(staging)) if exactly_once and staging is not None else ""
        if self._staging:
            open_files(self._staging)
        self._remember_ms = duration_ms(remember, "remember")
        self.needs_checkpoints = exactly_once
        # Copies of this object in slots and driver share it.
        self._execution = secrets.token_hex(8)
        self._forget_connections()

    def _forget_connections(self) -> None:
        self._writer, self._written = secrets.token_hex(6), 0
        self._transactions: dict[str, KafkaTransactions] = {}
        self._producer = PlainProducer(self._brokers)

    # ------------------------------------------------------------ writing

    def write(self, iterator: Iterator[pa.RecordBatch]) -> KafkaMessage:
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
        staged, rows = Staged(self._files(), file), 0
        try:

            def checked() -> Iterator[pa.RecordBatch]:
                nonlocal rows
                for batch in iterator:
                    if batch.num_rows:
                        yield to_messages(batch, self._topic, self._most_bytes, rows)
                        rows += batch.num_rows

            encode(checked(), SCHEMA, staged)
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
        self._produce([batch])

    def _produce(self, batches: Iterable[pa.RecordBatch]) -> int:
        rows = 0
        for batch in batches:
            if batch.num_rows:
                self._producer.send(to_messages(batch, self._topic, self._most_bytes, rows))
                rows += batch.num_rows
        self._producer.flush()
        return rows

    def _message(self, rows: int, query: str, staged: Staged | None = None) -> KafkaMessage:
        self._written += 1
        own = (self._name, self._execution, self._writer, self._written, rows, query, _now_ms())
        if staged is None or not rows:
            return KafkaMessage(*own)
        return KafkaMessage(*own, staged.content, staged.path, staged.size)

    # ------------------------------------------------------------ committing

    def commit(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """Produce the staged rows in one transaction, unless they are: all of them or none.

        Raises `UncommittableError` if rows are gone that were never committed, or may not have been, and
        `SinkError` if brokers cannot be reached (it is tried some times); then it is unknown whether it happened: call
        it again.
        """
        if not self._staging:
            return
        found = by_query(messages, KafkaMessage, "KafkaSink")
        for query, written in found.items():
            self._trying(partial(self._commit, query, written, batch_id))
        self._remove(one.path for written in found.values() for one in written)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """Remove the staged rows of messages; what is committed stays."""
        # Its numbers would have a gap.
        self._writer, self._written = secrets.token_hex(6), 0
        found = by_query(messages, KafkaMessage, "KafkaSink")
        self._remove(one.path for written in found.values() for one in written)

    def clean(
        self, keep: Iterable[WriterCommitMessage | None] = (), *, older_than_s: float = DAY_S
    ) -> list[str]:
        """Remove files that writers have staged that died before they could abort; returns their paths.

        That is: what other executions than this object's have staged under the sink's name, longer ago than
        ``older_than_s``, and what ``keep`` (messages of checkpoints that may still be restored) does not name.
        Checkpoints and savepoints that hold other rows cannot be restored any more, if their commit had not come.
        """
        if not self._staging:
            return []
        files = self._files()
        kept = {one.path for written in by_query(keep, KafkaMessage, "KafkaSink").values() for one in written}
        own = join(self._directory, self._execution)
        horizon_ms = (time.time() - older_than_s) * 1_000
        dead = [
            entry.path
            for entry in files.walk(self._directory)
            if entry.path not in kept and parent(entry.path) != own and _written_ms(entry.path) <= horizon_ms
        ]
        self._remove(dead)
        for directory in {parent(path) for path in dead}:
            files.delete_empty(directory)
        return [join(files.url, path) for path in dead]

    def _commit(self, query: str, written: list[KafkaMessage], batch: int) -> None:
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

    def _trying(self, work: Callable[[], None]) -> None:
        for left in reversed(range(TRIES)):
            try:
                work()
                return
            except UncommittableError:
                raise
            except SinkError as error:
                if not left:
                    raise
                logger.warning("%s; it is tried again", error)
                time.sleep(TRY_AGAIN_S)

    # ------------------------------------------------------------ staging

    @property
    def _directory(self) -> str:
        return part(self._name)

    def _files(self) -> Files:
        return open_files(self._staging)

    def _remove(self, paths: Iterable[str]) -> None:
        staged = [path for path in paths if path]
        if not staged:
            return
        crew = StoragePool()
        try:
            errors = crew.delete(self._files(), staged)
        finally:
            crew.close()
        raise_together(errors, self._staging)

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
