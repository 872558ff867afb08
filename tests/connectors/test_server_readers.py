"""The readers of servers behave alike when their server is away, comes back, or gives no more.

Between each and its server is a link that is cut, so that the server has what it had.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from servers import Link

from ftlayer.connectors.connections import FIRST_S, Reconnecting
from ftlayer.topology.operators import Fetched, QueueReader

Until = Callable[[Callable[[], Any], str], Any]


@pytest.fixture
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    (kit,) = {"server_kit", "limited_kit"} & set(request.fixturenames)
    made = Link(request.getfixturevalue(kit).server.port)
    yield made
    made.cut()


def opened(kit: Any, link: Link, **options: Any) -> QueueReader:
    """A reader that is connected."""
    reader: QueueReader = kit.at(link.port, **options).open(kit.member(), {}, stored=True)
    assert reader.fetch(1, 0.01) is None
    return reader


def fetch_all(kit: Any, reader: QueueReader, count: int) -> tuple[list[Fetched], list[int]]:
    found: list[Fetched] = []
    for _ in range(1_000):
        if (fetched := reader.fetch(100, 0.1)) is not None:
            found.append(fetched)
        numbers = [number for each in found for number in kit.numbers(each)]
        if len(numbers) >= count:
            return found, numbers
    raise AssertionError(f"{count} messages were not fetched")


def cut(link: Link, reader: QueueReader) -> None:
    """Cut it; the reader has noticed."""
    link.cut()
    for _ in range(1_000):
        assert reader.fetch(1, 0.01) is None
        if reader.is_away:
            return
    raise AssertionError("it is not noticed")


def test_nothing_is_fetched_or_counted_while_the_server_is_away(server_kit: Any, link: Link) -> None:
    kit = server_kit
    reader = opened(kit, link)
    kit.put(0, 5)
    _, numbers = fetch_all(kit, reader, 5)
    cut(link, reader)
    assert reader.waiting() is None
    assert reader.fetch(1, 0.3) is None
    assert reader.is_away
    kit.put(5, 10)
    link.mend()
    _, later = fetch_all(kit, reader, 5)
    assert (numbers, sorted(later)) == (list(range(5)), list(range(5, 10))), (
        "what was fetched is not given again"
    )
    assert not reader.is_away
    reader.close()


def test_pauses_between_attempts_to_connect_grow(
    server_kit: Any, link: Link, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[float] = []
    failed = Reconnecting.failed

    def note(tries: Reconnecting, error: Exception) -> None:
        failures.append(time.monotonic())
        failed(tries, error)

    monkeypatch.setattr(Reconnecting, "failed", note)
    reader = opened(server_kit, link)
    cut(link, reader)
    while len(failures) < 4:
        assert reader.fetch(1, 0.01) is None
        reader.waiting()
        reader.acknowledge([])
    pauses = [later - earlier for earlier, later in pairwise(failures)]
    assert all(pause >= FIRST_S * 2**place for place, pause in enumerate(pauses))
    link.mend()
    while reader.is_away:
        assert reader.fetch(1, 0.1) is None
    told = [
        record.getMessage() for record in caplog.records if record.name == "ftlayer.connectors.connections"
    ]
    assert ["is away" in text for text in told] == [True, False], "an outage is told once, and its end"
    reader.close()


def test_what_becomes_durable_while_the_server_is_away_is_acknowledged_behind_it(
    server_kit: Any, link: Link, wait_until: Until
) -> None:
    kit = server_kit
    reader = opened(kit, link)
    kit.put(0, 5)
    found, _ = fetch_all(kit, reader, 5)
    cut(link, reader)
    reader.acknowledge([each.receipt for each in found])
    assert reader.is_away
    link.mend()
    wait_until(lambda: reader.fetch(100, 1.0) is None and not reader.is_away, "the server")
    # MQTT's delivers again what it has to be told of; and to ask it takes the session from the reader.
    for _ in range(3):
        assert reader.fetch(100, 0.5) is None
    reader.close()
    wait_until(lambda: kit.pending() == 0, "acknowledgements")


def test_how_many_messages_wait_is_known_once_the_server_is_back(server_kit: Any, link: Link) -> None:
    kit = server_kit
    reader = opened(kit, link)
    assert reader.waiting() == (0 if kit.tells_what_waits else None)
    cut(link, reader)
    link.mend()
    kit.put(0, 5)
    if kit.tells_what_waits:
        while (waiting := reader.waiting()) is None:
            assert reader.is_away
        assert (waiting, reader.is_away) == (5, False)
    assert sorted(fetch_all(kit, reader, 5)[1]) == list(range(5))
    reader.close()


def test_a_standstill_is_told_once_until_messages_come_again(
    limited_kit: Any, link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    kit = limited_kit

    def told() -> int:
        return sum("which is max_pending" in record.getMessage() for record in caplog.records)

    reader = opened(kit, link, max_pending=5)
    for times in (1, 2):
        kit.put(7 * times, 7 * times + 7)
        found, _ = fetch_all(kit, reader, 5)
        # Mosquitto gives more than it was asked for, once some are acknowledged.
        while (more := reader.fetch(100, 0.2)) is not None:
            found.append(more)
        said = told()
        assert said >= times
        for _ in range(3):
            assert reader.fetch(100, 0.05) is None
        assert told() == said
        reader.acknowledge([each.receipt for each in found])
    reader.close()
