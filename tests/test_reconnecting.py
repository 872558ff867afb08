"""Pauses of a connection that is lost."""

from __future__ import annotations

import logging

import pytest

from ftlayer.connectors.connections import FIRST_S, MOST_S, Reconnecting
from ftlayer.errors import SourceError

GONE = ConnectionError("refused")


class World:
    def __init__(self, patience_ms: int = 60_000) -> None:
        self.now = 100.0
        self.tries = Reconnecting("the place", patience_ms, clock=lambda: self.now, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_pauses_double_up_to_the_longest() -> None:
    world = World()
    pauses = []
    for _ in range(9):
        world.tries.failed(GONE)
        assert world.tries.is_early
        pauses.append(round(world.tries.wait(1_000), 6))
        assert not world.tries.is_early
    assert pauses[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
    assert pauses[-1] == MOST_S


def test_a_wait_is_no_longer_than_it_may_be() -> None:
    world = World()
    assert world.tries.wait(1) == 0
    world.tries.failed(GONE)
    assert world.tries.wait(0.03) == pytest.approx(0.03)
    assert world.tries.is_early


def test_it_is_given_up_after_its_time_and_not_before() -> None:
    world = World(1_000)
    world.tries.failed(GONE)
    world.now += 0.999
    world.tries.failed(GONE)
    world.now += 0.001
    with pytest.raises(
        SourceError, match="the place has been away for 1 s, longer than reconnect_timeout: refused"
    ):
        world.tries.failed(GONE)


def test_an_outage_is_logged_once_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    world = World(1_000)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            world.tries.failed(GONE)
        world.tries.works()
        world.tries.works()
    own = [record for record in caplog.records if record.name == "ftlayer.connectors.connections"]
    assert [record.getMessage() for record in own] == [
        "the place is away, and is tried again: refused",
        "the place is back after 0.0 s",
    ]
    world.now += 2
    world.tries.failed(GONE)  # A new outage has all its time.
