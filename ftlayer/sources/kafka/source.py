from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from ftlayer.checks import Duration, check_int, check_text, check_texts, duration_ms
from ftlayer.clients.kafka import (
    CALL_S,
    Brokers,
    ask_offsets,
    check_properties,
    is_away,
    kafka_library,
    reason,
)
from ftlayer.clients.reconnecting import MOST_S, Reconnecting
from ftlayer.errors import ConfigError, SourceError
from ftlayer.sources.kafka.rows import SCHEMA
from ftlayer.sources.kafka.splits import CONSUMERS
from ftlayer.sources.logs import LogReader, Offsets

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

MAX_ROWS = 200_000
DISCOVERY_S = 10.0
"""Topics are asked for new partitions so often."""

EARLIEST, LATEST = -2, -1
"""Offsets of Spark's JSON that are none."""


class KafkaSource(LogReader):
    """Reads topics of Kafka: all partitions, also those that are added later, by their offsets.

    Offsets are kept by who reads: in the checkpoint of a query or topology, or in the vertex. So each message is in
    one batch of a query, and barrier mode reflects it exactly once. Messages of transactions are read once they are
    committed. With ``group`` offsets are committed to the broker too, behind completion or checkpoints, for tools that
    show how far a group lags behind; nothing here reads them.

    A message is read as long as the broker has it: one that was removed before (``retention.ms``) fails the source.
    """

    schema: pa.Schema = SCHEMA

    def __init__(
        self,
        servers: str,
        topic: str | Sequence[str],
        *,
        group: str = "",
        start: str | Mapping[str, Mapping[str, int]] = "earliest",
        max_rows: int = MAX_ROWS,
        reconnect_timeout: Duration = "5m",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Nothing is connected to before it is read.

        Args:
            servers: ``"host:port,host:port"``, brokers to begin with; driver and slots connect.
            topic: name of a topic, or several.
            group: consumer group that offsets are committed for; "": none.
            start: where a source begins that was never read: ``"earliest"``, ``"latest"``, or offsets
                ``{topic: {partition: offset}}`` as Spark writes them (-2 for the earliest, -1 for the latest one).
            max_rows: of a batch, or a range of a topology: all partitions together.
            reconnect_timeout: the source fails when brokers were away for this long.
            config: more properties of librdkafka, ``{"security.protocol": "SASL_SSL", …}``.

        Raises `ConfigError` if confluent-kafka is missing, and for an option that will not do.
        """
        check_text(servers, "servers", "brokers like 'host:9092'")
        topics = [topic] if isinstance(topic, str) else list(topic)
        check_texts(topics, "topic", "the name of a topic, or several")
        if not topics:
            raise ConfigError("topic: expected the name of a topic, or several, got none")
        if group != "":
            check_text(group, "group", "the name of a consumer group")
        check_int(max_rows, "max_rows", least=1)
        super().__init__(max_rows)
        self.patience_ms = duration_ms(reconnect_timeout, "reconnect_timeout")
        properties = dict(config or {})
        check_properties(properties)
        self._brokers = Brokers(servers, group, tuple(sorted(properties.items())))
        self.servers, self.topics, self.group = servers, topics, group
        self._start = _checked_start(start, topics)
        self._admin: Any = None
        self._committer: Any = None
        self._known: list[str] = []
        self._asked = 0.0

    # ------------------------------------------------------------ in the driver

    def starts(self) -> Offsets:
        splits = self._splits()
        wanted = {split: self._start.get(split, self._start.get("", EARLIEST)) for split in splits}
        unknown = [split for split in self._start if split and split not in wanted]
        if unknown:
            raise ConfigError(f"start: there is no partition {unknown[0]} at {self.servers}")
        return self._offsets(wanted)

    def ends(self) -> Offsets:
        return self._offsets(dict.fromkeys(self._splits(), LATEST))

    def first_of(self, splits: Sequence[str]) -> Offsets:
        return self._offsets(dict.fromkeys(splits, EARLIEST))

    def committed(self, offsets: Mapping[str, int]) -> None:
        """Commit to the broker. That it cannot is logged: nothing depends on it."""
        if not self.group:
            return
        kafka = kafka_library()
        if self._committer is None:
            self._committer = self._brokers.consumer()
        try:
            self._committer.commit(
                offsets=[kafka.TopicPartition(*_place(split), offset) for split, offset in offsets.items()],
                asynchronous=False,
            )
        except kafka.KafkaException as error:
            logger.warning("group %r: offsets cannot be committed: %s", self.group, reason(error))

    def stop(self) -> None:
        if self._committer is not None:
            self._committer.close()
        self._admin = self._committer = None

    def _splits(self) -> list[str]:
        """Return all partitions of the topics; asks for new ones now and then."""
        now = time.monotonic()
        if not self._known or now - self._asked >= DISCOVERY_S:
            self._known = [split for topic in self.topics for split in self._splits_of(topic)]
            self._asked = now
        return self._known

    def _splits_of(self, topic: str) -> list[str]:
        found = self._asking(
            # Asked for by its name, one that is not there would be made by the brokers.
            f"topic {topic!r}",
            lambda admin: admin.list_topics(timeout=CALL_S).topics.get(topic),
        )
        if found is None:
            raise SourceError(f"topic {topic!r} at {self.servers}: there is no such topic; make it before")
        if found.error is not None or not found.partitions:
            said = "it has no partitions" if found.error is None else reason(found.error)
            raise SourceError(f"topic {topic!r} at {self.servers}: {said}")
        return [f"{topic}-{partition}" for partition in sorted(found.partitions)]

    def _offsets(self, wanted: Mapping[str, int]) -> Offsets:
        """Return offsets as they are, and what the earliest and latest ones are."""
        kafka = kafka_library()
        places: dict[int, list[Any]] = {EARLIEST: [], LATEST: []}
        for split, offset in wanted.items():
            if offset in places:
                places[offset].append(kafka.TopicPartition(*_place(split)))
        found = dict(wanted)
        if not any(places.values()):
            return found
        committed = self._brokers.reads_committed

        def ask(admin: Any) -> Offsets:
            futures = ask_offsets(admin, places[EARLIEST], places[LATEST], committed=committed)
            return {
                f"{place.topic}-{place.partition}": future.result(CALL_S).offset
                for place, future in futures.items()
            }

        return found | self._asking(f"topics {', '.join(self.topics)}", ask)

    def _asking(self, what: str, ask: Callable[[Any], Result]) -> Result:
        """Ask brokers, again while they are away. Raises `SourceError`."""
        tries = Reconnecting(f"{what} at {self.servers}", self.patience_ms)
        while True:
            if self._admin is None:
                self._admin = self._brokers.admin()
            try:
                return ask(self._admin)
            except (kafka_library().KafkaException, TimeoutError) as error:
                if not is_away(error):
                    raise SourceError(f"{what} at {self.servers}: {reason(error)}") from error
                tries.failed(error)
                tries.wait(MOST_S)

    # ------------------------------------------------------------ in the tasks

    def read_split(self, split: str, start: int, end: int) -> Iterator[pa.RecordBatch]:
        return CONSUMERS.read(self._brokers, *_place(split), start, end, patience_s=self.patience_ms / 1_000)

    def __getstate__(self) -> dict[str, Any]:
        # A copy connects by itself.
        return {**self.__dict__, "_admin": None, "_committer": None}


def _place(split: str) -> tuple[str, int]:
    topic, _, partition = split.rpartition("-")
    return topic, int(partition)


def _checked_start(start: object, topics: Sequence[str]) -> dict[str, int]:
    """Return offsets by split; "" is for those that are not named."""
    if isinstance(start, str) and start.lstrip().startswith("{"):
        try:
            start = json.loads(start)
        except ValueError as error:
            raise ConfigError(f"start: not JSON: {error}") from error
    if start in ("earliest", "latest"):
        return {"": EARLIEST if start == "earliest" else LATEST}
    if not isinstance(start, Mapping):
        raise ConfigError(
            f"start: expected 'earliest', 'latest' or {{topic: {{partition: offset}}}}, got {start!r}"
        )
    found: dict[str, int] = {}
    for topic, offsets in start.items():
        if topic not in topics or not isinstance(offsets, Mapping):
            raise ConfigError(
                f"start: expected offsets by partition of one of {list(topics)}, got {topic!r}: {offsets!r}"
            )
        for partition, offset in offsets.items():
            if not str(partition).isdecimal() or type(offset) is not int or offset < EARLIEST:
                raise ConfigError(
                    f"start: topic {topic!r}: {partition!r}: {offset!r} is no partition with an offset"
                )
            found[f"{topic}-{partition}"] = offset
    return found
