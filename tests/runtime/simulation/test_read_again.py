"""Sources whose rows are read again (``replay="source"``): whatever is lost, in any order, while time passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.common.failures import FailException
from ftlayer.errors import SourceChangedError
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.connectors import partitions
from ftlayer.topology.job_graph_generator import job_graph
from ftlayer.vertex import calls
from ftlayer.vertex.calls import StreamOptions
from ftlayer.vertex.rules.source_ranges import all_ranges

ROWS = 40
RETRY = StreamOptions(timeout_ms=30_000, max_attempts=3, backoff_ms=(100,), jitter=0.0)


def graph_of(
    work: Callable[[int], Any], write: Callable[[pa.RecordBatch], None], replay: str = "source"
) -> Any:
    env = GraphBuilder("job", parallelism=2)
    numbers = env.source(partitions([0], [0]), "n bigint", uid="numbers", parallelism=2, replay=replay)
    numbers.map(work, uid="work").key_by("n").sink(write)
    return job_graph(env.build(), retry=RETRY)


class World:
    """A topology that counts by 2 in two partitions; ``bad`` records fail ``times`` times each."""

    def __init__(self, simulate: Any, random: Random, bad: set[int] = frozenset(), times: int = 1) -> None:  # type: ignore[assignment]
        self.random = random
        self.out: Counter[int] = Counter()
        self.tried: Counter[int] = Counter()
        self.bad, self.times = bad, times
        rows = {"numbers": [list(range(part, ROWS, 2)) for part in range(2)]}
        self.run = simulate(graph_of(self.work, self.write), rows, random.randrange)

    def work(self, number: int) -> int:
        if number in self.bad:
            self.tried[number] += 1
            if self.tried[number] <= self.times:
                raise FailException(f"{number} fails")
        return number

    def write(self, batch: pa.RecordBatch) -> None:
        self.out.update(batch.column(0).to_pylist())

    def go_on(self, lose: bool) -> None:
        """Let something happen, or be lost."""
        match self.random.randrange(12):
            case 0 | 1 | 2:
                self.run.advance(self.random.choice((10, 50, 150, 400)))
            case 3 if lose:
                self.run.kill(self.random.randrange(2))
            case 4 if lose:
                self.run.restart_vertex()
            case _:
                for _ in range(self.random.randrange(12)):
                    self.run.step()

    def check_nothing_is_left(self) -> None:
        """Check what the store has when all is over: floors at the end, and nothing beyond them."""
        self.run.advance(500)
        self.run.advance(500)
        stream = self.run.streams[0]
        opened = self.run.apply(calls.OpenStream(stream, dict(self.run.graph.options)[stream]))
        assert opened.positions == {"p0": b"20", "p1": b"20"}
        with self.run.store.read() as txn:
            assert all(not stored.ranges for _, _, stored in all_ranges(txn))
            assert not list(txn.scan("segments")), "what was stored is done"


def check(simulate: Any, seed: int, bad: set[int], moves: int) -> None:
    world = World(simulate, Random(seed), bad)
    for _ in range(moves):
        world.go_on(lose=True)
    world.run.run()
    assert set(world.out) == set(range(ROWS))
    assert world.run.dead() == []
    assert world.run.status().drained
    world.check_nothing_is_left()


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), bad=st.sets(st.integers(0, ROWS - 1)), moves=st.integers(0, 60))
def test_slots_and_vertex_may_be_lost_while_time_passes(
    simulate: Any, seed: int, bad: set[int], moves: int
) -> None:
    check(simulate, seed, bad, moves)


@pytest.mark.campaign
@settings(max_examples=8_000, deadline=None)
@given(seed=st.integers(0, 2**32), bad=st.sets(st.integers(0, ROWS - 1)), moves=st.integers(0, 120))
def test_slots_and_vertex_may_be_lost_thousands_of_times(
    simulate: Any, seed: int, bad: set[int], moves: int
) -> None:
    check(simulate, seed, bad, moves)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_attempts_survive_what_is_lost_once_they_are_stored(simulate: Any, seed: int) -> None:
    random = Random(seed)
    world = World(simulate, random, {3, 4}, times=99)
    for _ in range(random.randrange(40)):
        world.go_on(lose=True)
    world.run.run()
    assert set(world.out) == set(range(ROWS)) - {3, 4}
    dead = world.run.dead()
    assert sorted(letter.payload.column(0)[0].as_py() for letter in dead) == [3, 4]
    assert all(letter.attempt == RETRY.max_attempts for letter in dead)
    assert [len(letter.history) for letter in dead] == [RETRY.max_attempts] * 2


def test_what_is_done_is_not_processed_again_by_the_next_instance(simulate: Any) -> None:
    world = World(simulate, Random(1))
    for _ in range(200):
        world.run.step()
    world.run.advance(200)
    done = Counter(world.out)
    in_flight = world.run.status().pending
    world.run.kill(0)
    world.run.kill(1)
    world.run.run()
    assert sum(world.out.values()) <= ROWS + in_flight
    assert set(world.out) == set(range(ROWS))
    assert done


@pytest.mark.parametrize("change", ["other", "fewer"])
def test_a_source_that_gives_other_rows_is_an_error(simulate: Any, change: str) -> None:
    world = World(simulate, Random(3))
    while not world.run.status().pending:
        world.run.step()
    for feed in world.run.feeds.values():
        feed.rows = [number + 1_000 for number in feed.rows] if change == "other" else feed.rows[:0]

    def lose_and_go_on() -> None:
        world.run.kill(0)
        world.run.kill(1)
        world.run.run()

    with pytest.raises(
        SourceChangedError, match=r"source 'numbers': \d+ rows of partition 'p[01]' from \d+ on"
    ):
        lose_and_go_on()


def test_a_run_that_stores_reads_what_was_not_done_and_forgets_the_ranges(simulate: Any) -> None:
    world = World(simulate, Random(5))
    for _ in range(60):
        world.run.step()
    world.run.advance(200)
    stream, options = world.run.graph.options[0]
    world.run.apply(calls.OpenStream(stream, StreamOptions(timeout_ms=options.timeout_ms)))
    with world.run.store.read() as txn:
        assert not list(all_ranges(txn))
    assert world.run.status().pending == 0
    for call in [call for call in world.run.calls if isinstance(call.call, calls.Xor | calls.Fail)]:
        world.run.apply(call.call)  # of the run before: they have no effect
    assert world.run.status().pending == 0
