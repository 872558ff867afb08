"""What is particular to AMQP: messages are given to any consumer, and known by the names that senders gave them.

The sink is here too: RabbitMQ starts once a file.
"""

from __future__ import annotations

import pickle
import signal
import threading
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.common.failures import PermanentFailure, RowsRejected
from ftlayer.errors import SinkError, SourceError
from ftlayer.sinks import AmqpSink
from ftlayer.sources import AmqpSource
from ftlayer.topology.operators import Fetched, QueueReader

pytest.importorskip("pika")


def fetch_all(kit: Any, reader: QueueReader, count: int, rows: int = 7) -> list[Fetched]:
    found: list[Fetched] = []
    for _ in range(1_000):
        if (fetched := reader.fetch(rows, 0.1)) is not None:
            found.append(fetched)
        if sum(each.rows.num_rows for each in found) >= count:
            return found
    raise AssertionError(f"{count} messages were not fetched")


def numbers_of(kit: Any, found: list[Fetched]) -> list[int]:
    return [number for each in found for number in kit.numbers(each)]


def put_plainly(kit: Any, names: list[str | None]) -> None:
    """Send numbers from 0 on, under these names."""
    import pika

    with kit.server.client() as client:
        channel = client.channel()
        channel.queue_declare(kit.name, durable=True)
        for number, name in enumerate(names):
            properties = pika.BasicProperties(message_id=name, headers={"a": number}, timestamp=1_700_000_000)
            channel.basic_publish("", kit.name, b"%d" % number, properties)


def test_fewer_members_know_what_all_had_stored(amqp: Any) -> None:
    """Each has ten messages stored, and ten more fetched, when all die."""
    source = AmqpSource(amqp.server.url, amqp.name, max_pending=20)
    amqp.put(0, 0)
    readers = [source.open(amqp.member(subtask, 3), {}, stored=True) for subtask in range(3)]
    for reader in readers:
        assert reader.fetch(1, 0.01) is None
    amqp.put(0, 60)
    positions: dict[int, bytes] = {}
    stored: list[int] = []
    for subtask, reader in enumerate(readers):
        pieces = fetch_all(amqp, reader, 20, rows=1)
        positions[subtask] = pieces[9].position
        stored += numbers_of(amqp, pieces[:10])
    for reader in readers:
        reader.close()
    alone = amqp.open(positions=positions)
    found = fetch_all(amqp, alone, 30)
    assert sorted(numbers_of(amqp, found) + stored) == list(range(60))
    alone.close()


@pytest.mark.parametrize(
    ("names", "unique"), [([None] * 6, True), (["same"] * 6, False)], ids=["no names", "names used again"]
)
def test_messages_that_have_no_names_of_their_own_come_again_and_none_is_lost(
    amqp: Any, names: list[str | None], unique: bool
) -> None:
    put_plainly(amqp, names)
    source = AmqpSource(amqp.server.url, amqp.name, unique_ids=unique)
    first = source.open(amqp.member(), {}, stored=True)
    found = fetch_all(amqp, first, 4, rows=2)
    assert len({each.position for each in found}) == len(found)
    first.close()
    second = source.open(amqp.member(), {0: found[-1].position}, stored=True)
    assert numbers_of(amqp, fetch_all(amqp, second, 6)) == list(range(6))
    second.close()


def test_what_was_fetched_is_not_lost_with_the_acknowledgement_of_what_was_known(amqp: Any) -> None:
    """The connection is lost right when what comes again, and is stored, is acknowledged."""
    import pika

    def lose(*_: Any, **__: Any) -> None:
        raise pika.exceptions.StreamLostError("meant to fail")

    amqp.put(0, 10)
    first = amqp.open()
    found = fetch_all(amqp, first, 5, rows=1)
    first.close()
    second: Any = amqp.open(positions={0: found[-1].position})
    assert second.waiting() == 5
    second._connection.channel.basic_ack = lose
    assert numbers_of(amqp, fetch_all(amqp, second, 5, rows=10)) == list(range(5, 10))
    second.close()


def test_columns_say_what_came_with_a_message(amqp: Any) -> None:
    put_plainly(amqp, ["name"])
    reader = amqp.open()
    (row,) = fetch_all(amqp, reader, 1)[0].rows.to_pylist()
    assert row.pop("timestamp").timestamp() == 1_700_000_000
    assert row == {
        "value": b"0",
        "routing_key": amqp.name,
        "message_id": "name",
        "headers": [("a", "0")],
        "redelivered": False,
    }
    reader.close()


def test_a_password_that_is_refused_is_not_tried_again(amqp: Any) -> None:
    url = amqp.server.url.replace("guest:guest", "guest:wrong")
    reader = AmqpSource(url, amqp.name).open(amqp.member(), {}, stored=True)
    with pytest.raises(SourceError, match="Authentication"):
        reader.fetch(1, 1.0)


def declare(kit: Any, **arguments: Any) -> None:
    with kit.server.client() as client:
        client.channel().queue_declare(kit.name, durable=True, arguments=arguments)


def take_all(kit: Any) -> list[tuple[Any, bytes]]:
    """Properties and bodies of all messages in the queue, which are there no more."""
    found = []
    with kit.server.client() as client:
        channel = client.channel()
        while (message := channel.basic_get(kit.name, auto_ack=True))[0] is not None:
            found.append((message[1], message[2]))
    return found


def rows_of(keys: list[str | None], first: int = 0) -> pa.RecordBatch:
    numbers = range(first, first + len(keys))
    bodies = [b"%d" % number for number in numbers]
    return pa.record_batch({"key": keys, "id": [str(number) for number in numbers], "body": bodies})


def sink_to(kit: Any, **options: Any) -> AmqpSink:
    chosen = {"routing_key_column": "key", "body": "body", "message_id": "id", **options}
    return AmqpSink(kit.server.url, **chosen)


def test_rows_are_persistent_messages(amqp: Any) -> None:
    declare(amqp)
    sink = pickle.loads(pickle.dumps(sink_to(amqp)))
    sink(rows_of([amqp.name] * 1_200))
    sink(rows_of([amqp.name] * 2, 1_200))
    AmqpSink(amqp.server.url, routing_key=amqp.name)(pa.record_batch({"a": [1], "b": ["x"]}))
    *found, last = take_all(amqp)
    assert [body for _, body in found] == [b"%d" % number for number in range(1_202)]
    assert {properties.delivery_mode for properties, _ in [*found, last]} == {2}
    assert [properties.message_id for properties, _ in found] == [str(number) for number in range(1_202)]
    assert (last[0].content_type, last[1]) == ("application/json", b'{"a": 1, "b": "x"}')


def test_rows_that_no_queue_takes_fail_and_no_other_does(amqp: Any) -> None:
    declare(amqp)
    keys = [amqp.name, "nowhere", None, amqp.name, "x" * 300, "nowhere", amqp.name]
    with pytest.raises(RowsRejected) as raised:
        sink_to(amqp)(rows_of(keys))
    errors = raised.value.errors
    assert {row: type(error) for row, error in errors.items()} == {
        1: SinkError,
        2: PermanentFailure,
        4: PermanentFailure,
        5: SinkError,
    }
    assert "NO_ROUTE" in str(errors[1])
    assert [body for _, body in take_all(amqp)] == [b"0", b"3", b"6"]


def test_rows_that_the_server_refuses_fail(amqp: Any) -> None:
    declare(amqp, **{"x-max-length": 5, "x-overflow": "reject-publish"})
    with pytest.raises(RowsRejected) as raised:
        sink_to(amqp)(rows_of([amqp.name] * 8))
    taken = [body for _, body in take_all(amqp)]
    assert sorted([*taken, *(b"%d" % row for row in raised.value.errors)]) == [
        b"%d" % row for row in range(8)
    ]
    assert "basic.nack" in str(next(iter(raised.value.errors.values())))


def test_a_message_for_which_the_channel_is_closed_fails_alone(amqp: Any) -> None:
    declare(amqp)
    bodies = [b"%d" % number for number in range(20)]
    bodies[7] = b"x" * 1_000_001
    with pytest.raises(RowsRejected) as raised:
        sink_to(amqp)(rows_of([amqp.name] * 20).set_column(2, "body", pa.array(bodies)))
    assert list(raised.value.errors) == [7]
    assert "larger than" in str(raised.value.errors[7])
    assert isinstance(raised.value.errors[7], PermanentFailure)
    assert {body for _, body in take_all(amqp)} == {body for body in bodies if len(body) < 1_000}


def test_an_exchange_that_is_not_there_is_named(amqp: Any) -> None:
    with pytest.raises(RowsRejected) as raised:
        sink_to(amqp, exchange="nowhere")(rows_of(["a"] * 1_000))
    assert len(raised.value.errors) == 1_000
    assert "no exchange 'nowhere'" in str(raised.value.errors[999])


@pytest.mark.campaign
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_server_is_restarted_while_rows_are_published(
    amqp: Any, wait_until: Any, how: signal.Signals
) -> None:
    declare(amqp)
    sink, published = sink_to(amqp), list[int]()

    def publish() -> None:
        for first in range(0, 20_000, 500):
            sink(rows_of([amqp.name] * 500, first))
            published.append(first)

    publishing = threading.Thread(target=publish)
    publishing.start()
    for times in (5, 15):
        wait_until(lambda times=times: len(published) >= times, "messages on their way")
        amqp.server.restart(how)
    publishing.join(600)
    assert len(published) == 40
    found = [int(body) for _, body in take_all(amqp)]
    assert set(found) == set(range(20_000))
    assert len(found) <= 20_000 + 2 * 1_000, "what was on its way"


def test_a_server_that_stays_away_fails_the_rows(amqp: Any) -> None:
    sink = AmqpSink("amqp://127.0.0.1:1", routing_key="a", reconnect_timeout="50ms")
    with pytest.raises(RowsRejected) as raised:
        sink(rows_of(["a"] * 3))
    assert list(raised.value.errors) == [0, 1, 2]
    assert "reconnect_timeout" in str(raised.value.errors[2])


def test_messages_that_are_known_do_not_end_a_fetch(amqp: Any) -> None:
    amqp.put(0, 30)
    first = amqp.open()
    found = fetch_all(amqp, first, 20, rows=1)
    first.close()
    second = amqp.open(positions={0: found[-1].position})
    assert second.waiting() == 10
    assert second.fetch(1, 10.0) is not None
    assert numbers_of(amqp, fetch_all(amqp, second, 9, rows=1)) == list(range(21, 30))
    assert second.waiting() == 0
    second.close()


def test_a_long_queue_is_not_received_to_be_counted(amqp: Any) -> None:
    put_plainly(amqp, [None] * 6_000)
    reader: Any = amqp.open()
    waiting = reader.waiting()
    assert waiting is None or waiting >= 6_000
    assert len(reader._delivered) < 4_000
    reader.close()
