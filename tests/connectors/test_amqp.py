"""What is particular to AMQP: messages are given to any consumer, and known by the names that senders gave them."""

from __future__ import annotations

from typing import Any

import pytest

from ftlayer.errors import SourceError
from ftlayer.sources import AmqpSource
from ftlayer.topology.queues import Fetched, QueueReader

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
