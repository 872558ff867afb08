"""Whole topologies with failing records, in every order of events that a seed can think of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ftlayer.common.failures import FailException
from ftlayer.config import FTStatus
from ftlayer.runtime.protocol.messages import Batch
from ftlayer.runtime.task.build import JoinTask
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.connectors import partitions
from ftlayer.topology.job_graph import JobGraph
from ftlayer.topology.job_graph_generator import job_graph
from ftlayer.vertex import calls
from ftlayer.vertex.calls import StreamOptions

pytestmark = pytest.mark.usefixtures("markers_everywhere")

NUMBER = "n bigint"
RETRY = StreamOptions(timeout_ms=30_000, max_attempts=3, backoff_ms=(100,), jitter=0.0)
ROWS = 23
ROWS_A_BATCH = 5
REPLAY = "store"


class Collector:
    """A sink that keeps every record."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def __call__(self, batch: pa.RecordBatch) -> None:
        columns = [column.to_pylist() for column in batch.columns]
        self.records += columns[0] if len(columns) == 1 else zip(*columns, strict=True)

    @property
    def counts(self) -> Counter[Any]:
        return Counter(self.records)


class Stumbles:
    """A function that fails some records on their first ``times`` attempts, and then does ``then``."""

    def __init__(self, bad: set[int], times: int, then: Callable[[int], Any]) -> None:
        self._bad, self._times, self._then = bad, times, then
        self._tried: Counter[int] = Counter()

    def __call__(self, record: int) -> Any:
        if record in self._bad:
            self._tried[record] += 1
            if self._tried[record] <= self._times:
                raise FailException(f"{record} fails")
        return self._then(record)


def builder(parallelism: int = 2, status: FTStatus = FTStatus.ON) -> GraphBuilder:
    return GraphBuilder("job", parallelism=parallelism, status=status)


def graph_of(env: GraphBuilder, status: FTStatus = FTStatus.ON) -> JobGraph:
    return job_graph(env.build(), status, RETRY)


@pytest.fixture(scope="module", params=["store", "source"], autouse=True)
def replay(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run every test with both kinds of replay."""
    global REPLAY
    before, REPLAY = REPLAY, request.param
    yield
    REPLAY = before


def numbers(env: GraphBuilder, uid: str = "numbers", parallelism: int = 2) -> Any:
    """A source whose rows the simulation reads from its own list."""
    return env.source(
        partitions(*[[0]] * parallelism), NUMBER, uid=uid, parallelism=parallelism, replay=REPLAY
    )


def split(values: list[int], parts: int) -> list[list[int]]:
    return [values[part::parts] for part in range(parts)]


def same(record: int) -> int:
    return record


BAD: dict[str, set[int]] = {
    "first": {0},
    "last": {ROWS - 1},
    "every": set(range(ROWS)),
    "some": {3, 7, 8, 20},
    "none": set(),
}


@pytest.mark.parametrize("where", ["map", "flat_map", "filter", "keyed", "sink"])
@pytest.mark.parametrize("which", list(BAD))
@pytest.mark.parametrize("seed", range(3))
def test_failing_records_come_again_and_nothing_else_does(
    simulate: Any, where: str, which: str, seed: int
) -> None:
    bad, out = BAD[which], Collector()

    def stumble(place: str, then: Callable[[int], Any]) -> Callable[[int], Any]:
        return Stumbles(bad, 1, then) if place == where else then

    env = builder()
    stream = numbers(env).map(stumble("map", same)).rebalance()
    stream = stream.flat_map(stumble("flat_map", lambda n: [n, n])).key_by("n")
    stream = stream.filter(stumble("filter", lambda n: True)).key_by("n")
    stream = stream.map(stumble("keyed", same)).rebalance()
    sink_bad = Stumbles(bad, 1, same)

    def write(batch: pa.RecordBatch) -> None:
        if where == "sink":
            for value in batch.column(0).to_pylist():
                sink_bad(value)
        out(batch)

    stream.sink(write)
    run = simulate(graph_of(env), {"numbers": split(list(range(ROWS)), 2)}, seed)
    run.run()
    assert set(out.counts) == set(range(ROWS))
    for value, times in out.counts.items():
        # What had gone through before the other copy failed comes again: at least once, for its own record alone.
        assert times == 2 if value not in bad or where in ("map", "flat_map") else times >= 2, value
    assert run.dead() == []
    assert run.status().drained


@pytest.mark.parametrize("seed", range(3))
def test_attempts_are_counted_and_used_up(simulate: Any, seed: int) -> None:
    out = Collector()
    env = builder()
    numbers(env).map(Stumbles({1, 2}, 99, same), uid="broken").sink(out)
    run = simulate(graph_of(env), {"numbers": split(list(range(ROWS)), 2)}, seed)
    run.run()
    assert out.counts == Counter(set(range(ROWS)) - {1, 2})
    dead = run.dead()
    assert sorted(letter.payload.column(0)[0].as_py() for letter in dead) == [1, 2]
    for letter in dead:
        assert letter.attempt == RETRY.max_attempts
        assert letter.operator == "broken"
        assert "fails" in letter.reason
        assert len(letter.history) == RETRY.max_attempts


@pytest.mark.parametrize("parallelism", range(1, 5))
def test_broadcast_reaches_every_subtask(simulate: Any, parallelism: int) -> None:
    out = Collector()
    env = builder(parallelism)
    numbers(env, parallelism=1).broadcast().map(Stumbles({5}, 1, same)).sink(out)
    run = simulate(graph_of(env), {"numbers": [list(range(ROWS))]}, parallelism)
    run.run()
    for value in range(ROWS):
        # One subtask failed record 5, so the record came again to all of them.
        assert out.counts[value] == parallelism if value != 5 else 2 * parallelism - 1


@pytest.mark.parametrize("seed", range(4))
def test_two_sources_two_sinks_and_a_side_output(simulate: Any, seed: int) -> None:
    from ftlayer.functions.process import ProcessFunction

    class Sort(ProcessFunction):
        def process(self, record: int, ctx: Any) -> Any:
            if record % 2:
                ctx.output("odd", record)
            else:
                yield record

    even, odd, all_of_them = Collector(), Collector(), Collector()
    env = builder()
    left, right = numbers(env, "left"), numbers(env, "right", parallelism=1)
    both = left.union(right.map(lambda n: n + 100))
    sorted_out = both.process(Sort(), NUMBER, side={"odd": NUMBER})
    sorted_out.key_by("n").sink(even, uid="even")
    sorted_out.side_output("odd").map(Stumbles({7, 101}, 2, same), uid="odd").sink(odd)
    left.sink(all_of_them, uid="all")
    run = simulate(graph_of(env), {"left": split(list(range(ROWS)), 2), "right": [list(range(ROWS))]}, seed)
    run.run()
    values = [*range(ROWS), *range(100, 100 + ROWS)]
    assert set(even.counts) == {value for value in values if value % 2 == 0}
    assert odd.counts == Counter(value for value in values if value % 2)
    assert set(all_of_them.counts) == set(range(ROWS))
    # 7 is read once for each attempt by the other sink, which did not fail.
    assert all_of_them.counts[7] == 3
    assert run.dead() == []
    # By a side output too, and where the rows of a batch have all gone elsewhere; nothing behind replays.
    batches = sum(-(-len(part) // ROWS_A_BATCH) for part in split(list(range(ROWS)), 2))
    others = -(-ROWS // ROWS_A_BATCH)
    seen = {(source, uid): count for (source, uid), count in run.latencies.items()}
    assert seen == {
        **{("left", uid): batches for uid in ("even", "odd", "all")},
        **{("right", uid): others for uid in ("even", "odd")},
    }


def test_sources_without_rows_end(simulate: Any) -> None:
    out = Collector()
    env = builder()
    numbers(env).map(same).key_by("n").sink(out)
    run = simulate(graph_of(env), {"numbers": [[], []]}, 0)
    run.run()
    assert out.records == []


@pytest.mark.parametrize("many", [0, 1, 3_000])
def test_flat_map_of_none_and_of_thousands(simulate: Any, many: int) -> None:
    out = Collector()
    env = builder()
    numbers(env).flat_map(lambda n: [n] * many).key_by("n").sink(out)
    run = simulate(graph_of(env), {"numbers": split([1, 2, 3], 2)}, 1)
    run.run()
    assert out.counts == (Counter({1: many, 2: many, 3: many}) if many else Counter())


def test_one_record_on_two_edges_to_the_same_operator(simulate: Any) -> None:
    out = Collector()
    env = builder()
    source = numbers(env)
    source.union(source).map(Stumbles({4}, 1, same)).sink(out)
    run = simulate(graph_of(env), {"numbers": split(list(range(ROWS)), 2)}, 5)
    run.run()
    for value in range(ROWS):
        assert out.counts[value] in ((2,) if value != 4 else (2, 3))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), bad=st.sets(st.integers(0, ROWS - 1)), kills=st.integers(0, 3))
def test_a_slot_may_die_at_any_time(simulate: Any, seed: int, bad: set[int], kills: int) -> None:
    out = Collector()
    env = builder()
    keyed = numbers(env).map(Stumbles(bad, 1, same)).key_by("n").flat_map(lambda n: [n, n + 1_000])
    keyed.key_by("n").sink(out)
    random = Random(seed)
    run = simulate(graph_of(env), {"numbers": split(list(range(ROWS)), 2)}, random.randrange)
    for _ in range(kills):
        for _ in range(random.randrange(60)):
            run.step()
        run.kill(random.randrange(2))
    run.run()
    assert set(out.counts) == {value + more for value in range(ROWS) for more in (0, 1_000)}
    assert run.dead() == []


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), kills=st.integers(1, 3))
def test_the_vertex_may_die_at_any_time(simulate: Any, seed: int, kills: int) -> None:
    out = Collector()
    env = builder()
    numbers(env).map(Stumbles({2, 9}, 1, same)).key_by("n").sink(out)
    random = Random(seed)
    run = simulate(graph_of(env), {"numbers": split(list(range(ROWS)), 2)}, random.randrange)
    for _ in range(kills):
        for _ in range(random.randrange(60)):
            run.step()
        run.restart_vertex()
    run.run()
    assert set(out.counts) == set(range(ROWS))
    assert run.dead() == []


@pytest.mark.parametrize("seed", range(2))
def test_switched_off_it_runs_the_same_without_a_vertex(simulate: Any, seed: int) -> None:
    out = Collector()
    env = builder(status=FTStatus.OFF)
    numbers(env).map(same).key_by("n").flat_map(lambda n: [n, n]).sink(out)
    run = simulate(graph_of(env, FTStatus.OFF), {"numbers": split(list(range(ROWS)), 2)}, seed)
    run.run()
    assert out.counts == Counter(dict.fromkeys(range(ROWS), 2))


# ---------------------------------------------------------------- every id twice


@pytest.mark.parametrize("seed", range(4))
def test_each_id_is_xored_exactly_twice_and_roots_complete_at_the_last(simulate: Any, seed: int) -> None:
    out = Collector()
    env = builder()
    source = numbers(env)
    spread = (
        source.map(same).broadcast().flat_map(lambda n: [n] * (n % 3)).key_by("n").filter(lambda n: n % 5)
    )
    spread.key_by("n").sink(out)
    source.key_by("n").sink(out)
    run = simulate(graph_of(env), {"numbers": split(list(range(ROWS)), 2)}, seed, exact=True)
    assert run.ledger.completed == 0
    run.run()
    assert set(run.ledger.ids.values()) == {2}
    assert run.ledger.completed == ROWS


@pytest.mark.parametrize("seed", range(4))
def test_no_root_is_complete_while_a_record_of_it_is_under_way(simulate: Any, seed: int) -> None:
    """Only copies keep their parent's id, others do not; acknowledgements come in any order."""
    out = Collector()
    env = builder()
    source = numbers(env)
    once = source.map(same).filter(lambda n: n % 7).key_by("n").flat_map(lambda n: [n] * (n % 3))
    once.rebalance().map(same).sink(out)
    once.key_by("n").map(same).broadcast().flat_map(lambda n: [n] * (n % 2)).rebalance().map(same).sink(out)
    run = simulate(graph_of(env), {"numbers": split(list(range(ROWS)), 2)}, seed)
    apply, done = run.apply, set()

    def checked(call: Any) -> Any:
        reply = apply(call)
        if isinstance(call, calls.Xor):
            # Not `ListRecords`: records that their source keeps are not listed.
            pending = run.vertex._state.tracker.contains(call.roots)
            done.update(call.roots[~pending].tolist())
            batches = [each for queue in run.queues.values() for each in queue if isinstance(each, Batch)]
            under_way = {root for batch in batches for root in batch.lineage.roots.tolist()}
            assert not under_way & done
        return reply

    run.apply = checked
    run.run()
    assert len(done) == ROWS
    assert run.ledger.completed == ROWS


@pytest.mark.parametrize("seed", range(4))
def test_no_id_is_xored_more_than_twice_when_records_fail(simulate: Any, seed: int) -> None:
    out = Collector()
    env = builder()
    numbers(env).map(same).key_by("n").flat_map(lambda n: [n, n]).rebalance().map(
        Stumbles({1, 2, 3}, 1, same)
    ).sink(out)
    run = simulate(graph_of(env), {"numbers": split(list(range(ROWS)), 2)}, seed, exact=True)
    run.run()
    assert set(run.ledger.ids.values()) <= {1, 2}
    assert set(out.counts) == set(range(ROWS))


# ---------------------------------------------------------------- joins and timers

CLICKS = "at bigint, k bigint, n bigint"


def events(n: int, keys: int, seed: int) -> list[tuple[int, int, int]]:
    """(time, key, number), times nearly in order."""
    random = Random(seed)
    return [(1_000 * i + random.randrange(900), random.randrange(keys), i) for i in range(n)]


def timed(env: GraphBuilder, uid: str) -> Any:
    source = env.source(partitions([(0, 0, 0)]), CLICKS, uid=uid, parallelism=1, replay=REPLAY)
    return source.assign_watermarks("at", "1s").key_by("k")


def pairs_of(left: list[tuple[int, int, int]], right: list[tuple[int, int, int]]) -> set[tuple[int, int]]:
    return {(a[2], b[2]) for a in left for b in right if a[1] == b[1] and -2_000 <= b[0] - a[0] <= 3_000}


@pytest.mark.parametrize("where", ["nowhere", "left", "right", "behind"])
@pytest.mark.parametrize("seed", range(3))
def test_a_join_pairs_what_belongs_together_whatever_fails(simulate: Any, where: str, seed: int) -> None:
    bad = {2, 5, 11}

    def stumble(place: str, number: Callable[[Any], int]) -> Callable[[Any], Any]:
        inner = Stumbles(bad if place == where else set(), 1, same)
        return lambda record: (inner(number(record)), record)[1]

    out = Collector()
    env = builder()
    left = env.source(partitions([(0, 0, 0)]), CLICKS, uid="left", parallelism=1, replay=REPLAY)
    right = env.source(partitions([(0, 0, 0)]), CLICKS, uid="right", parallelism=1, replay=REPLAY)
    left = left.map(stumble("left", lambda r: r[2])).assign_watermarks("at", "1s").key_by("k")
    right = right.map(stumble("right", lambda r: r[2])).assign_watermarks("at", "1s").key_by("k")
    joined = left.join(
        right,
        lower="-2s",
        upper="3s",
        function=lambda a, b: (a[2], b[2]),
        schema="l bigint, r bigint",
        volatile_state=True,
    )
    joined.rebalance().map(stumble("behind", lambda r: r[0]), uid="behind").sink(out)
    rows = {"left": events(20, 3, seed), "right": events(20, 3, seed + 100)}
    run = simulate(graph_of(env), {uid: [values] for uid, values in rows.items()}, seed)
    run.run()
    assert run.latencies == {("left", "behind"): 4, ("right", "behind"): 4}
    wanted = pairs_of(rows["left"], rows["right"])
    if where in ("nowhere",):
        assert out.counts == Counter(wanted)
    else:
        assert set(out.counts) == wanted
    assert run.dead() == []
    assert run.status().drained


def test_a_join_of_a_source_with_itself(simulate: Any) -> None:
    out = Collector()
    env = builder()
    stream = timed(env, "clicks")
    joined = stream.join(
        stream,
        lower="-2s",
        upper="3s",
        function=lambda a, b: (a[2], b[2]),
        schema="l bigint, r bigint",
        volatile_state=True,
    )
    joined.sink(out)
    rows = events(20, 3, 1)
    run = simulate(graph_of(env), {"clicks": [rows]}, 3, exact=True)
    run.run()
    assert out.counts == Counter(pairs_of(rows, rows))
    assert set(run.ledger.ids.values()) == {2}
    assert run.ledger.completed == 20


def remembered(run: Any, slot: int) -> list[set[int]]:
    """Numbers of the rows of each side that are through, and that the joins of a slot remember for replays."""
    found: list[set[int]] = [set(), set()]
    for uid, subtask in run.graph.subtasks_in(slot):
        join = getattr(run.tasks[uid, subtask], "_first", None)
        for side, past in enumerate(join._past if isinstance(join, JoinTask) else ()):
            for each in past.buffer.runs:
                found[side] |= set(each.rows.payload.column("n").to_pylist())
    return found


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), kills=st.integers(0, 2))
@example(seed=17, kills=2)
def test_a_join_loses_with_its_slot_what_it_remembers_and_nothing_else(
    simulate: Any, seed: int, kills: int
) -> None:
    out = Collector()
    env = builder()
    joined = timed(env, "left").join(
        timed(env, "right"),
        lower="-2s",
        upper="3s",
        function=lambda a, b: (a[2], b[2]),
        schema="l bigint, r bigint",
        volatile_state=True,
    )
    joined.sink(out)
    random = Random(seed)
    rows = {"left": events(12, 2, seed), "right": events(12, 2, seed + 1)}
    run = simulate(graph_of(env), {uid: [values] for uid, values in rows.items()}, random.randrange)
    left: set[int] = set()
    right: set[int] = set()
    for _ in range(kills):
        for _ in range(random.randrange(60)):
            run.step()
        slot = random.randrange(2)
        for gone, more in zip((left, right), remembered(run, slot), strict=True):
            gone |= more
        run.kill(slot)
    run.run()
    wanted = pairs_of(rows["left"], rows["right"])
    assert set(out.counts) <= wanted
    assert all(one in left or other in right for one, other in wanted - set(out.counts))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), kills=st.integers(0, 2))
def test_what_timers_put_out_is_a_root_of_its_own(simulate: Any, seed: int, kills: int) -> None:
    from ftlayer.functions.process import ProcessFunction

    class Windows(ProcessFunction):
        """Sums a key's numbers for every ten seconds."""

        def process(self, record: tuple[int, int, int], ctx: Any) -> Any:
            end = record[0] // 10_000 * 10_000 + 10_000
            sums = ctx.map("sums")
            sums[end] = sums.get(end, 0) + 1
            ctx.timers.event(end - 1)
            return ()

        def on_timer(self, time_ms: int, ctx: Any) -> Any:
            sums = ctx.map("sums")
            yield (ctx.key, time_ms + 1, sums.get(time_ms + 1, 0))

    out = Collector()
    fails = Stumbles({10_000, 20_000}, 1, same)
    env = builder()
    windows = timed(env, "clicks").process(Windows(), "k bigint, end bigint, n bigint", volatile_state=True)
    windows.rebalance().map(lambda record: (fails(record[1]), record)[1]).sink(out)
    random = Random(seed)
    rows = events(30, 2, seed)
    run = simulate(graph_of(env), {"clicks": [rows]}, random.randrange)
    for _ in range(kills):
        for _ in range(random.randrange(60)):
            run.step()
        run.kill(random.randrange(2))
    run.run()
    wanted = Counter((key, at // 10_000 * 10_000 + 10_000) for at, key, _ in rows)
    assert {(key, end) for key, end, _ in out.counts} <= set(wanted)
    if not kills:
        # With a slot goes what it had counted and the timers it had set: that is what volatile_state says.
        assert {(key, end): n for key, end, n in out.counts} == wanted
    assert run.dead() == []
