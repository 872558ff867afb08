"""Every connector of a queue: what is delivered, what again, and what not. Against its server, without Spark."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from ftlayer.errors import ConfigError, SourceError
from ftlayer.topology.operators import Fetched, QueueReader

Until = Callable[[Callable[[], Any], str], Any]

FETCHES = 1_000
"""More are not made for messages that are there."""


def fetch(reader: QueueReader, rows: int = 100) -> Fetched:
    for _ in range(FETCHES):
        if (fetched := reader.fetch(rows, 0.1)) is not None:
            return fetched
    raise AssertionError("nothing was fetched")


def fetch_numbers(kit: Any, reader: QueueReader, count: int, rows: int = 7) -> list[Fetched]:
    """Fetch so many messages, in pieces."""
    found: list[Fetched] = []
    while sum(each.rows.num_rows for each in found) < count:
        found.append(fetch(reader, rows))
    return found


def numbers_of(kit: Any, found: list[Fetched]) -> list[int]:
    return [number for each in found for number in kit.numbers(each)]


def test_messages_come_in_order_as_many_as_are_asked_for(kit: Any) -> None:
    kit.put(0, 20)
    reader = kit.open()
    found = fetch_numbers(kit, reader, 20)
    assert numbers_of(kit, found) == list(range(20))
    assert all(1 <= each.rows.num_rows <= 7 for each in found)
    assert len({each.position for each in found}) == len(found)
    assert all(each.rows.schema.equals(kit.queue.schema) for each in found)
    assert reader.fetch(7, 0.01) is None
    reader.close()


def test_messages_are_pending_until_they_are_acknowledged(kit: Any, wait_until: Until) -> None:
    kit.put(0, 10)
    reader = kit.open()
    found = fetch_numbers(kit, reader, 10, rows=5)
    wait_until(lambda: kit.pending() == 10, "acknowledgements")
    reader.acknowledge([found[0].receipt])
    wait_until(lambda: kit.pending() == 5, "acknowledgements")
    reader.acknowledge([found[1].receipt])
    wait_until(lambda: kit.pending() == 0, "acknowledgements")
    reader.close()


def test_what_was_not_stored_comes_again_and_nothing_else(kit: Any, wait_until: Until) -> None:
    """A reader dies: some of its messages are acknowledged, some stored, some only fetched."""
    kit.put(0, 20)
    first = kit.open()
    found = fetch_numbers(kit, first, 12, rows=4)
    first.acknowledge([found[0].receipt])
    first.close()
    second = kit.open(positions={0: found[1].position})
    assert numbers_of(kit, fetch_numbers(kit, second, 12)) == list(range(8, 20))
    wait_until(lambda: kit.pending() == 12, "what was stored is acknowledged without being fetched")
    second.close()


def test_a_reader_that_has_never_stored_anything_begins_with_all_that_it_was_given(kit: Any) -> None:
    kit.put(0, 10)
    first = kit.open()
    fetch_numbers(kit, first, 5, rows=5)
    first.close()
    second = kit.open()
    assert numbers_of(kit, fetch_numbers(kit, second, 10)) == list(range(10))
    second.close()


def test_a_reader_that_takes_over_acknowledges_nothing_by_itself(kit: Any, wait_until: Until) -> None:
    kit.put(0, 10)
    first = kit.open()
    (found,) = fetch_numbers(kit, first, 4, rows=4)
    first.close()
    second = kit.open(positions={0: found.position}, stored=False)
    again = fetch(second)
    assert kit.numbers(again) == list(range(4, 10))
    wait_until(lambda: kit.pending() == 10, "acknowledgements")
    second.acknowledge([again.receipt])
    wait_until(lambda: kit.pending() == 0, "what was fetched before it is durable, too")
    second.close()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_server_is_restarted(kit: Any, wait_until: Until, how: signal.Signals) -> None:
    kit.put(0, 10)
    reader = kit.open()
    found = fetch_numbers(kit, reader, 5, rows=5)
    kit.server.restart(how)
    kit.put(10, 20)
    reader.acknowledge([each.receipt for each in found])
    found = fetch_numbers(kit, reader, 15)
    # What is delivered again comes among what is new, as the server likes.
    assert sorted(numbers_of(kit, found)) == list(range(5, 20))
    reader.acknowledge([each.receipt for each in found])
    reader.fetch(1, 0.01)
    wait_until(lambda: kit.pending() == 0, "those that were acknowledged while it was away")
    reader.close()


def test_messages_come_while_it_waits_and_the_server_goes_away_meanwhile(kit: Any) -> None:
    reader = kit.open()
    assert reader.fetch(5, 0.01) is None
    kit.server.end()
    try:
        assert reader.fetch(5, 0.01) is None
        assert reader.fetch(5, 0.01) is None
    finally:
        kit.server.start()
    kit.put(0, 5)
    assert numbers_of(kit, fetch_numbers(kit, reader, 5)) == list(range(5))
    reader.close()


def test_members_share_the_messages(kit: Any) -> None:
    readers = [kit.open(subtask, 2) for subtask in range(2)]
    found: list[int] = []
    for first in range(0, 40, 10):
        kit.put(first, first + 10)
        while len(found) < first + 10:
            for reader in readers:
                if (fetched := reader.fetch(100, 0.01)) is not None:
                    found += kit.numbers(fetched)
    assert sorted(found) == list(range(40))
    for reader in readers:
        reader.close()


def test_fewer_members_read_on_for_those_that_are_gone(kit_of_one: Any, wait_until: Until) -> None:
    kit = kit_of_one
    positions: dict[int, bytes] = {}
    stored: list[int] = []
    kit.put(0, 60)
    for subtask in range(3):
        reader = kit.open(subtask, 3)
        first, _ = fetch_numbers(kit, reader, 20, rows=10)
        positions[subtask] = first.position
        stored += kit.numbers(first)
        reader.close()
    alone = kit.open(positions=positions)
    found = fetch_numbers(kit, alone, 30, rows=4)
    assert sorted(numbers_of(kit, found) + stored) == list(range(60))
    assert {each.of for each in found} == {0, 1, 2}
    wait_until(lambda: kit.pending() == 30, "acknowledgements")
    alone.acknowledge([each.receipt for each in found])
    wait_until(lambda: kit.pending() == 0, "acknowledgements")
    alone.close()


def test_members_that_are_gone_and_stored_nothing_lose_nothing(kit: Any) -> None:
    kit.put(0, 20)
    gone = kit.open(1, 2)
    fetch_numbers(kit, gone, 10, rows=10)
    gone.close()
    alone = kit.open()
    assert sorted(numbers_of(kit, fetch_numbers(kit, alone, 20))) == list(range(20))
    alone.close()


def test_positions_of_another_source_are_refused(kit: Any) -> None:
    with pytest.raises(ConfigError, match="give the new one a uid of its own"):
        kit.open(positions={0: b"\x07"}).fetch(1, 0.01)


def test_a_server_that_stays_away_is_given_up(kit: Any) -> None:
    reader = kit.refused().open(kit.member(), {}, stored=True)
    with pytest.raises(SourceError, match="reconnect_timeout"):
        fetch(reader)


def test_it_says_how_many_messages_wait(telling_kit: Any) -> None:
    kit = telling_kit
    kit.put(0, 10)
    first = kit.open()
    assert first.waiting() == 10
    (found,) = fetch_numbers(kit, first, 4, rows=4)
    assert first.waiting() == 6
    first.acknowledge([found.receipt])
    assert first.waiting() == 6
    fetch(first, 3)
    first.close()
    second = kit.open(positions={0: found.position})
    assert second.waiting() == 6, "three of them were fetched, and not stored"
    second.close()
