"""Topics of Kafka hold each record exactly once, whatever is lost, repeated or fenced off. Without Spark."""

from __future__ import annotations

import datetime
import os
import pickle
import signal
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer import RowsRejected
from ftlayer.connectors import table_commits
from ftlayer.connectors.kafka import client as messages_module
from ftlayer.connectors.kafka import sink as sink_module
from ftlayer.connectors.kafka.client import Brokers
from ftlayer.errors import ConfigError, SinkError, UncommittableError
from ftlayer.sinks import FileMessage, KafkaSink

COUNT = count()


@pytest.fixture
def topic(kafka_server: Any) -> str:
    name = f"sink-{os.getpid()}-{next(COUNT)}"
    kafka_server.make_topic(name, 2)
    return name


@pytest.fixture
def sink(kafka_server: Any, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KafkaSink:
    monkeypatch.setattr(table_commits, "TRY_AGAIN_S", 0)
    return KafkaSink(kafka_server.url, topic, staging=tmp_path)


@pytest.fixture(params=["inline", "in files"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where rows wait for their commit."""
    if request.param == "in files":
        monkeypatch.setattr(messages_module, "INLINE_BYTES", 0)
    return str(request.param)


def rows(*numbers: int) -> Any:
    return iter([pa.record_batch({"value": pa.array(map(str, numbers))})])


def copy_of(sink: KafkaSink) -> KafkaSink:
    copied: KafkaSink = pickle.loads(pickle.dumps(sink))
    return copied


def staged_in(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def test_rows_are_seen_when_they_are_committed(
    kafka_server: Any, sink: KafkaSink, topic: str, tmp_path: Path, size: str
) -> None:
    messages = [copy_of(sink).write(rows(1, 2)), copy_of(sink).write(rows(3)), sink.write(iter([]))]
    assert kafka_server.numbers(topic) == []
    assert len(staged_in(tmp_path)) == (0 if size == "inline" else 2)
    copy_of(sink).commit(pickle.loads(pickle.dumps(messages)), 7)
    assert sorted(kafka_server.numbers(topic)) == [1, 2, 3]
    assert staged_in(tmp_path) == []


def test_a_commit_that_comes_again_changes_nothing(
    kafka_server: Any, sink: KafkaSink, topic: str, size: str
) -> None:
    slots = [copy_of(sink), copy_of(sink)]
    first, second, third = slots[0].write(rows(1)), slots[1].write(rows(2)), slots[0].write(rows(3))
    sink.commit([first], 1)
    sink.commit([first, None], 1)
    copy_of(sink).commit([first, second], 2)
    copy_of(sink).commit([third, second, first], 3)
    assert sorted(kafka_server.numbers(topic)) == [1, 2, 3]


def test_what_is_aborted_is_gone_and_what_is_committed_stays(
    kafka_server: Any, sink: KafkaSink, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages_module, "INLINE_BYTES", 0)
    first, second = sink.write(rows(1)), sink.write(rows(2))
    sink.commit([first], 1)
    sink.abort([first, second, None], 2)
    assert kafka_server.numbers(topic) == [1]
    assert staged_in(tmp_path) == []
    with pytest.raises(UncommittableError, match="is gone, with 1 rows that were not committed"):
        sink.commit([second], 2)


def test_the_broker_is_restarted(kafka_server: Any, sink: KafkaSink, topic: str) -> None:
    message = sink.write(rows(1, 2))
    kafka_server.restart(signal.SIGTERM)
    sink.commit([message], 1)
    kafka_server.restart(signal.SIGTERM)
    sink.commit([message], 1)
    sink.commit([message, sink.write(rows(3))], 2)
    assert sorted(kafka_server.numbers(topic)) == [1, 2, 3]


@pytest.mark.parametrize("moment", ["before", "behind"])
def test_a_transaction_that_was_not_answered_is_done_once(
    kafka_server: Any, sink: KafkaSink, topic: str, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Its rows are with the broker: the connection is lost before it is committed, or behind."""
    from confluent_kafka import KafkaError, KafkaException

    from ftlayer.connectors.kafka.sink import KafkaTransactions

    class Losing:
        """A producer that loses the connection once."""

        def __init__(self, producer: Any) -> None:
            self._producer = producer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._producer, name)

        def commit_transaction(self, timeout: float) -> None:
            self._producer.flush(60)
            if lost or moment == "behind":
                self._producer.commit_transaction(timeout)
            if not lost:
                lost.append(True)
                raise KafkaException(KafkaError(KafkaError._TRANSPORT))

    lost: list[bool] = []
    fence = KafkaTransactions.fence

    def losing(transactions: Any) -> None:
        fence(transactions)
        transactions._producer = Losing(transactions._producer)

    monkeypatch.setattr(KafkaTransactions, "fence", losing)
    sink.commit([sink.write(rows(1, 2))], 1)
    assert lost
    assert sorted(kafka_server.numbers(topic)) == [1, 2]


def test_one_who_was_replaced_in_a_transaction_commits_nothing(
    kafka_server: Any, sink: KafkaSink, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that hangs in its commit while another one takes over, and goes on then."""
    from ftlayer.connectors.kafka import client as producing

    message, metadata = sink.write(rows(1, 2)), producing.group_metadata
    zombie, driver = copy_of(sink), copy_of(sink)
    replaced = []

    def replace(group: str) -> Any:
        if not replaced:
            replaced.append(True)
            driver.commit([message], 1)
        return metadata(group)

    monkeypatch.setattr(producing, "group_metadata", replace)
    monkeypatch.setattr(table_commits, "TRIES", 1)
    with pytest.raises(SinkError, match="another sink with the name of this one"):
        zombie.commit([message], 1)
    assert replaced
    assert sorted(kafka_server.numbers(topic)) == [1, 2]
    zombie.commit([message], 1)
    driver.commit([message], 1)
    assert sorted(kafka_server.numbers(topic)) == [1, 2]


def test_a_batch_of_a_query_that_is_run_again_adds_nothing(
    kafka_server: Any, sink: KafkaSink, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    monkeypatch.setattr(sink_module, "streaming_query", lambda: "query")
    sink.commit([copy_of(sink).write(rows(1)), copy_of(sink).write(rows(2))], 0)
    copy_of(sink).commit([sink.write(rows(1, 2))], 0)
    copy_of(sink).commit([sink.write(rows(3))], 1)
    assert sorted(kafka_server.numbers(topic)) == [1, 2, 3]
    assert staged_in(tmp_path) == []


def test_messages_have_what_rows_say(kafka_server: Any, tmp_path: Path) -> None:
    topics = [f"rows-{os.getpid()}-{next(COUNT)}" for _ in range(2)]
    for topic in topics:
        kafka_server.make_topic(topic, 3)
    at = datetime.datetime.now(datetime.UTC).replace(microsecond=7_000)
    headers = [{"key": "a", "value": b"1"}, {"key": "b", "value": None}]
    batch = pa.record_batch(
        {
            "topic": pa.array([topics[0], topics[1], topics[1]]).dictionary_encode(),
            "key": pa.array(["k", None, "k"], pa.large_string()),
            "value": pa.array([b"1", b"2", None]),
            "partition": pa.array([2, None, 0], pa.int64()),
            "timestamp": pa.array([at, None, None], pa.timestamp("us", "UTC")),
            "headers": pa.array([headers, None, []], sink_module.SCHEMA.field("headers").type),
        }
    )
    sink = KafkaSink(kafka_server.url, staging=tmp_path, name=topics[0])
    sink.commit([sink.write(iter([batch]))], 1)
    (one,) = kafka_server.messages(topics[0])
    assert (one.key(), one.value(), one.partition()) == (b"k", b"1", 2)
    assert one.timestamp()[1] == int(at.timestamp() * 1_000)
    assert one.headers() == [("a", b"1"), ("b", None)]
    others = {message.value(): message for message in kafka_server.messages(topics[1])}
    assert set(others) == {b"2", None}
    assert (others[None].key(), others[None].partition()) == (b"k", 0)


def test_rows_that_can_never_be_produced_are_refused_by_their_numbers(
    kafka_server: Any, tmp_path: Path
) -> None:
    sink = KafkaSink(kafka_server.url, staging=tmp_path, name="n", config={"message.max.bytes": 2_000})
    batch = pa.record_batch(
        {
            "value": pa.array(["ok", "no topic", "x" * 2_000, "partition"]),
            "topic": pa.array(["t", None, "t", "t"]),
            "partition": pa.array([0, None, None, -1], pa.int32()),
        }
    )
    with pytest.raises(RowsRejected) as refused:
        sink.write(iter([batch.slice(0, 1), batch]))
    assert {row: str(error)[:20] for row, error in refused.value.errors.items()} == {
        2: "it has no topic: giv",
        3: "it has 2,100 bytes, ",
        4: "its partition is -1",
    }
    assert staged_in(tmp_path) == []
    no_text = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]
    )
    batch = pa.record_batch(
        {
            "value": ["ok", "no text", "no name", "no number", "dots"],
            "topic": pa.concat_arrays([pa.array(["t"]), no_text, pa.array(["a b", "t", ".."])]),
            "partition": pa.array([0, 0, 0, 2**40, 0]),
        }
    )
    found, left = [], batch
    while True:
        try:
            sink.write(iter([left]))
        except RowsRejected as refused_again:
            found += [left["value"][row].as_py() for row in refused_again.errors]
            kept = [row for row in range(left.num_rows) if row not in refused_again.errors]
            left = left.take(pa.array(kept))
        else:
            break
    assert sorted(found) == ["dots", "no name", "no number", "no text"]
    with pytest.raises(ConfigError, match="topic: expected up to 249 letters"):
        KafkaSink(kafka_server.url, "a b", staging=tmp_path)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"n": [1]}, "column 'n' is none of a message's, which are value, key"),
        ({"key": ["k"]}, "the rows have no column 'value', just key"),
        ({"value": [1]}, "column 'value' is int64, and cannot be binary"),
        ({"value": ["x"], "partition": ["one"]}, "column 'partition' is string, and cannot be int32"),
        ({"value": ["x"], "headers": ["one"]}, "column 'headers' is string, and cannot be list"),
    ],
)
def test_a_column_that_no_message_has_is_named(tmp_path: Path, columns: dict[str, Any], said: str) -> None:
    pytest.importorskip("confluent_kafka")
    sink = KafkaSink("localhost:1", "t", staging=tmp_path)
    with pytest.raises(SinkError, match=said):
        sink.write(iter([pa.record_batch(columns)]))


def test_rows_are_produced_at_once_where_they_may_come_twice(kafka_server: Any, topic: str) -> None:
    sink = KafkaSink(kafka_server.url, topic, exactly_once=False)
    sink.commit([copy_of(sink).write(rows(1, 2))], 1)
    assert sorted(kafka_server.numbers(topic)) == [1, 2]
    copy_of(sink).send(next(rows(3)))
    sink.abort([sink.write(rows(4))], 2)
    assert sorted(kafka_server.numbers(topic)) == [1, 2, 3, 4]


def test_brokers_that_stay_away_fail_what_is_produced_at_once() -> None:
    pytest.importorskip("confluent_kafka")
    sink = KafkaSink(
        "127.0.0.1:1", "t", exactly_once=False, config={"delivery.timeout.ms": 100, "linger.ms": 1}
    )
    for _ in range(2):
        with pytest.raises(SinkError, match="rows cannot be produced: _MSG_TIMED_OUT"):
            sink.write(rows(1))


@pytest.mark.parametrize("partition", [0, 7], ids=["too large for the topic", "no such partition"])
def test_what_brokers_refuse_is_never_committed_and_told_at_once(
    kafka_server: Any, topic: str, tmp_path: Path, partition: int
) -> None:
    small = f"{topic}-small"
    kafka_server.make_topic(small, 1, **{"max.message.bytes": "500"})
    sink = KafkaSink(kafka_server.url, staging=tmp_path, name=topic)
    batch = pa.record_batch(
        {
            "value": ["x", "x" * 1_000, "y"],
            "topic": [topic, topic if partition else small, topic],
            "partition": pa.array([0, partition, 1], pa.int32()),
        }
    )
    message = sink.write(iter([batch]))
    for _ in range(2):
        with pytest.raises(UncommittableError) as refused:
            sink.commit([message], 1)
        said = str(refused.value)
        assert f"topic {(topic if partition else small)!r}, partition {partition}: " in said
        assert ("_UNKNOWN_PARTITION" if partition else "raise the topic's max.message.bytes") in said
    assert kafka_server.messages(topic) == []


def test_a_commit_that_fails_before_the_report_of_its_row_is_told_with_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = pytest.importorskip("confluent_kafka")
    error = library.KafkaError(library.KafkaError.MSG_SIZE_TOO_LARGE)

    class Late:
        def __init__(self) -> None:
            self.reports: list[Any] = []

        def produce(self, topic: str, value: bytes, key: bytes, *, on_delivery: Any, **_: Any) -> None:
            self.reports.append(
                partial(on_delivery, error, sink_module.Produced(topic, value, key, 3, 0, None))
            )

        def poll(self, _: float) -> None:
            self.reports.pop()()

        def commit_transaction(self, _: float) -> None:
            raise library.KafkaException(error)

        def init_transactions(self, _: float) -> None: ...
        def begin_transaction(self) -> None: ...
        def send_offsets_to_transaction(self, *_: Any) -> None: ...

    sink = KafkaSink("127.0.0.1:1", "t", staging=tmp_path, name="n")
    monkeypatch.setattr(Brokers, "producer", lambda *_: Late())
    transactions = sink_module.KafkaTransactions(sink._brokers, "id", sink._files())
    transactions.fence()
    written = sink.write(rows(1))
    with pytest.raises(UncommittableError, match=r"topic 't', partition 3: .*raise the topic's max.message"):
        transactions.run([written], {})


@pytest.mark.parametrize("as_writer", [False, True])
def test_rows_that_brokers_refuse_are_named_and_the_others_are_produced(
    kafka_server: Any, topic: str, as_writer: bool
) -> None:
    small = f"{topic}-small"
    kafka_server.make_topic(small, 1, **{"max.message.bytes": "500"})
    sink = KafkaSink(kafka_server.url, exactly_once=False, name="n", config={"linger.ms": 50})
    # Small ones are in one batch with the large one, and refused together with it.
    values = [str(number) if number % 10 else str(number) + " " * 1_000 for number in range(50)]
    batch = pa.record_batch({"value": values, "topic": [small] * 49 + [topic], "partition": [0] * 49 + [9]})
    halves = iter([batch.slice(0, 25), batch.slice(25)])
    with pytest.raises(RowsRejected) as refused:
        sink.write(halves) if as_writer else sink.send(batch)
    assert sorted(refused.value.errors) == [0, 10, 20, 30, 40, 49]
    assert "MSG_SIZE_TOO_LARGE" in str(refused.value.errors[10])
    assert "_UNKNOWN_PARTITION" in str(refused.value.errors[49])
    good = [number for number in range(49) if number % 10]
    assert sorted(kafka_server.numbers(small)) == good
    # Nothing of it is left for the next write.
    assert sink.write(rows_of(small, 99)).rows == 1
    assert sorted(kafka_server.numbers(small)) == [*good, 99]


def rows_of(topic: str, number: int) -> Any:
    return iter([pa.record_batch({"value": [str(number)], "topic": [topic]})])


def test_a_function_that_refuses_rows_has_produced_the_others(kafka_server: Any, topic: str) -> None:
    sink = KafkaSink(kafka_server.url, exactly_once=False, name="n")
    batch = pa.record_batch({"value": ["1", "2", "3"], "topic": [topic, None, topic]})
    with pytest.raises(RowsRejected) as refused:
        sink.send(batch)
    assert list(refused.value.errors) == [1]
    assert sorted(kafka_server.numbers(topic)) == [1, 3]


def test_what_dead_writers_left_is_removed(
    kafka_server: Any, sink: KafkaSink, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages_module, "INLINE_BYTES", 0)
    dead, kept = [
        KafkaSink(kafka_server.url, topic, staging=tmp_path).write(rows(number)) for number in (1, 2)
    ]
    mine = copy_of(sink).write(rows(3))
    other = KafkaSink(kafka_server.url, topic, name="other", staging=tmp_path).write(rows(4))
    assert sink.clean([kept]) == []
    assert sink.clean([kept], older_than=-60) == [str(tmp_path / dead.path)]
    sink.commit([kept, mine], 1)
    assert sorted(kafka_server.numbers(topic)) == [2, 3]
    assert staged_in(tmp_path) == [tmp_path / other.path]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"servers": ""}, "servers: expected brokers"),
        ({"topic": ""}, "topic: expected the name of a topic"),
        ({"topic": None}, "name: expected one where rows have their topics"),
        ({"name": 7}, "name: "),
        ({"staging": None}, "staging: expected a path or URL"),
        ({"staging": 7}, "staging: expected a path or URL"),
        ({"exactly_once": False}, "staging: expected None with exactly_once=False"),
        ({"exactly_once": "no"}, "exactly_once: expected True or False"),
        ({"remember": "long"}, "remember: "),
        ({"config": {"transactional.id": "x"}}, "config: 'transactional.id' is set by the sink"),
        ({"config": {"no.such": "1"}}, "config: .*no.such"),
        ({"config": {"acks": "0"}}, "config: .*acks"),
    ],
)
def test_a_wrong_option_is_named(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    pytest.importorskip("confluent_kafka")
    with pytest.raises(ConfigError, match=said):
        KafkaSink(**{"servers": "localhost:9092", "topic": "t", "staging": tmp_path, **options})


def test_messages_of_another_sink_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("confluent_kafka")
    sink = KafkaSink("localhost:1", "t", staging=tmp_path)
    with pytest.raises(UncommittableError, match="expected messages of KafkaSink, got a FileMessage"):
        sink.commit([FileMessage(None, 0, "")], 1)


STEPS = st.lists(
    st.tuples(st.sampled_from(["write", "commit", "again", "abort", "driver", "slot"]), st.integers(0, 4)),
    max_size=15,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=6)
@given(STEPS)
def test_what_is_committed_is_there_once(
    kafka_server: Any, tmp_path: Path, steps: list[tuple[str, int]]
) -> None:
    topic = f"walk-{os.getpid()}-{next(COUNT)}"
    kafka_server.make_topic(topic, 1)
    sink = KafkaSink(kafka_server.url, topic, staging=tmp_path)
    slot, driver = copy_of(sink), copy_of(sink)
    staged: list[Any] = []
    committed: list[Any] = []
    expected: list[int] = []
    written = 0
    for step, size in steps:
        if step == "write":
            message = slot.write(rows(*range(written, written + size)))
            staged.append((message, list(range(written, written + size))))
            written += size
        elif step == "abort":
            slot.abort([message for message, _ in staged], 0)
            staged = []
        elif step == "commit":
            driver.commit([message for message, _ in staged[:size]], len(expected))
            expected += [number for _, numbers in staged[:size] for number in numbers]
            committed, staged = committed + staged[:size], staged[size:]
        elif step == "again":
            driver.commit([message for message, _ in committed[-size:]], len(expected))
        elif step == "driver":
            driver = copy_of(sink)
        else:
            slot = copy_of(sink)
    assert kafka_server.numbers(topic) == expected
