"""A function of `partition_custom` that raises fails the record it was asked for, and no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.config import FTStatus
from ftlayer.errors import JobError
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.connectors import partitions
from ftlayer.topology.job_graph_generator import job_graph
from ftlayer.vertex.calls import StreamOptions

RETRY = StreamOptions(timeout_ms=30_000, max_attempts=3, backoff_ms=(100,), jitter=0.0)
ROWS = 23
CLICKS = "at bigint, k bigint, n bigint"


class Road:
    """Says where numbers go, and raises for some of them, so many times each."""

    def __init__(self, bad: set[int], times: int, wrong: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self._left = dict.fromkeys(bad, times)
        self._wrong = wrong

    def __call__(self, number: int, channels: int) -> int:
        if self._left.get(number, 0):
            self._left[number] -= 1
            raise LookupError(f"no road for {number}")
        return channels if number in self._wrong else number % channels


class Seen:
    """A sink that counts."""

    def __init__(self) -> None:
        self.counts: Counter[Any] = Counter()

    def __call__(self, batch: pa.RecordBatch) -> None:
        columns = [column.to_pylist() for column in batch.columns]
        self.counts.update(columns[0] if len(columns) == 1 else zip(*columns, strict=True))


def numbers(env: GraphBuilder) -> Any:
    return env.source(partitions([0], [0]), "n bigint", uid="numbers", parallelism=2)


ROWS_OF = {"numbers": [list(range(0, ROWS, 2)), list(range(1, ROWS, 2))]}

# A source's function is asked twice where it raises for a batch: to find the rows.
ONE_TRY = 2


@pytest.mark.parametrize("behind", ["source", "map"])
@pytest.mark.parametrize("seed", range(3))
def test_a_record_is_tried_again_and_its_neighbours_are_not(simulate: Any, behind: str, seed: int) -> None:
    one, two = Seen(), Seen()
    env = GraphBuilder("job", parallelism=2)
    stream = numbers(env)
    stream = stream if behind == "source" else stream.map(lambda n: n, uid="map")
    # Nothing of a record goes by its other edges either.
    stream.key_by("n").sink(one)
    stream.partition_custom(Road({3, 4, 20}, ONE_TRY), "n").sink(two)
    run = simulate(job_graph(env.build(), retry=RETRY), ROWS_OF, seed, exact=True)
    run.run()
    assert one.counts == two.counts == Counter(range(ROWS))
    assert run.dead() == []
    assert run.status().drained
    assert set(run.ledger.ids.values()) <= {1, 2}


@pytest.mark.parametrize("behind", ["source", "map"])
def test_one_that_never_passes_is_a_dead_letter_with_the_traceback(simulate: Any, behind: str) -> None:
    out = Seen()
    env = GraphBuilder("job", parallelism=2)
    stream = numbers(env)
    stream = stream if behind == "source" else stream.map(lambda n: n, uid="map")
    stream.partition_custom(Road({3, 20}, 1_000, wrong={7}), "n").sink(out)
    run = simulate(job_graph(env.build(), retry=RETRY), ROWS_OF, 1)
    run.run()
    assert out.counts == Counter(set(range(ROWS)) - {3, 7, 20})
    dead = {letter.payload.column(0)[0].as_py(): letter for letter in run.dead()}
    assert set(dead) == {3, 7, 20}
    # A channel that does not exist is a fault of the function (`ConfigError`), which no attempt mends.
    assert {number: letter.attempt for number, letter in dead.items()} == {3: 3, 7: 1, 20: 3}
    assert {letter.operator for letter in dead.values()} == {"numbers" if behind == "source" else "map"}
    assert dead[3].reason == "LookupError: no road for 3"
    assert "in __call__" in dead[3].traceback
    assert "must return an int in 0..1" in dead[7].reason


def test_a_record_with_many_rows_fails_as_a_whole(simulate: Any) -> None:
    out = Seen()
    env = GraphBuilder("job", parallelism=2)
    stream = numbers(env).flat_map(lambda n: [n, n + 100, n + 200])
    stream.partition_custom(Road({103}, 1_000), "n").sink(out)
    run = simulate(job_graph(env.build(), retry=RETRY), ROWS_OF, 2)
    run.run()
    assert out.counts == Counter(n + more for n in set(range(ROWS)) - {3} for more in (0, 100, 200))
    assert [letter.payload.column(0)[0].as_py() for letter in run.dead()] == [3]


@pytest.mark.parametrize("seed", range(3))
def test_a_pair_of_a_join_fails_both_its_records(simulate: Any, seed: int) -> None:
    out = Seen()
    env = GraphBuilder("job", parallelism=2)

    def side(uid: str) -> Any:
        source = env.source(partitions([(0, 0, 0)]), CLICKS, uid=uid, parallelism=1)
        return source.assign_watermarks("at", "1s").key_by("k")

    joined = side("left").join(
        side("right"),
        lower="0s",
        upper="0s",
        function=lambda a, b: (a[2], b[2]),
        schema="l bigint, r bigint",
        volatile_state=True,
    )
    road = Road({4}, ONE_TRY)
    joined.partition_custom(lambda key, channels: road(key, channels), "l").sink(out)
    rows = [(1_000 * i, i % 3, i) for i in range(12)]
    run = simulate(job_graph(env.build(), retry=RETRY), {"left": [rows], "right": [rows]}, seed)
    run.run()
    assert set(out.counts) == {(i, i) for i in range(12)}
    assert all(count == 1 for pair, count in out.counts.items() if pair != (4, 4))
    assert run.dead() == []


def test_what_timers_put_out_fails_as_a_record_of_its_own(simulate: Any) -> None:
    from ftlayer.functions.process import ProcessFunction

    class Later(ProcessFunction):
        def process(self, record: tuple[int, int, int], ctx: Any) -> Any:
            ctx.timers.event(record[0] + 10)
            return ()

        def on_timer(self, time_ms: int, ctx: Any) -> Any:
            yield ctx.key

    out = Seen()
    env = GraphBuilder("job", parallelism=2)
    source = env.source(partitions([(0, 0, 0)]), CLICKS, uid="clicks", parallelism=1)
    timed = source.assign_watermarks("at", "1s").key_by("k")
    fired = timed.process(Later(), "k bigint", uid="later", volatile_state=True)
    fired.partition_custom(Road({2}, ONE_TRY), "k").sink(out)
    rows = [(1_000 * i, i, i) for i in range(8)]
    run = simulate(job_graph(env.build(), retry=RETRY), {"clicks": [rows]}, 1)
    run.run()
    assert out.counts == Counter(range(8))
    assert run.dead() == []


def test_without_fault_tolerance_the_job_ends_with_what_was_raised(simulate: Any) -> None:
    def run(stream_of: Callable[[Any], Any]) -> None:
        env = GraphBuilder("job", parallelism=2, status=FTStatus.OFF)
        stream_of(numbers(env)).partition_custom(Road({3}, 1_000), "n").sink(Seen())
        simulate(job_graph(env.build(), FTStatus.OFF), ROWS_OF, 1).run()

    for stream_of in (lambda source: source, lambda source: source.rebalance().map(lambda n: n)):
        with pytest.raises(JobError, match="no road for 3"):
            run(stream_of)
