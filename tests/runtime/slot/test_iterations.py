"""Loops in real tasks, on slots whose channels are lists: every record comes out that should, and the job ends."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer.common.clock import Now
from ftlayer.config import FTStatus, TopologyOptions
from ftlayer.functions.process import ProcessFunction
from ftlayer.runtime.connectors.sinks import open_sink
from ftlayer.runtime.protocol.messages import Batch, EndOfStream, Watermark
from ftlayer.runtime.slot.rules.inbox import FeedbackOutput, HeadInbox
from ftlayer.runtime.slot.rules.mode import UntrackedSlot
from ftlayer.runtime.task.actions import SourceRows
from ftlayer.runtime.task.build import build_task
from ftlayer.runtime.task.untracked import UntrackedTaskMode
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.connectors import partitions
from ftlayer.topology.job_graph import Channel, JobGraph
from ftlayer.topology.job_graph_generator import job_graph
from ftlayer.topology.streams.data_stream import DataStream
from ftlayer.topology.streams.windowed_stream import tumbling

SCHEMA = "name bigint, n bigint"
ARROW = pa.schema([("name", pa.int64()), ("n", pa.int64())])
Rows = list[tuple[int, int]]
MOST_STEPS = 200_000


def batch_of(rows: Rows) -> pa.RecordBatch:
    names, numbers = zip(*rows, strict=True)
    return pa.record_batch([pa.array(names), pa.array(numbers)], schema=ARROW)


# ---------------------------------------------------------------- bodies, with what comes out of them


def collatz(record: tuple[int, int]) -> tuple[int, int]:
    name, n = record
    return (name, n // 2 if n % 2 == 0 else 3 * n + 1)


def is_one(record: tuple[int, int]) -> bool:
    return record[1] <= 1


def is_more(record: tuple[int, int]) -> bool:
    return not is_one(record)


def halves(record: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """A record of n becomes n records of 1 in the end."""
    name, n = record
    if n <= 1:
        yield record
    else:
        yield name, n // 2
        yield name, n - n // 2


class Sorting(ProcessFunction):
    """What is done goes out, what is not goes back by a side output."""

    def process(self, record: Any, ctx: Any) -> Iterator[Any]:
        for half in halves(record):
            if is_one(half):
                yield half
            else:
                ctx.output("back", half)


class World:
    """The slots of a job without checkpoints; whatever can happen next is drawn."""

    def __init__(
        self,
        tools: Any,
        build: Callable[[DataStream], DataStream],
        rows: list[Rows],
        *,
        parallelism: int,
        draw: random.Random,
        max_wait: int = 2_000,
        **options: int,
    ) -> None:
        self.draw = draw
        self.came: Rows = []
        env = GraphBuilder("loops", parallelism=parallelism, status=FTStatus.OFF)
        source = env.source(partitions(*([] for _ in rows)), SCHEMA, uid="source", parallelism=len(rows))
        build(source).sink(self._take, uid="sink")
        self.graph: JobGraph = job_graph(env.build(), FTStatus.OFF)
        self.options = TopologyOptions(**{"batch_rows": 4, "channel_bytes": 1 << 10, **options})  # type: ignore[arg-type]
        self.left = {("source", place): list(each) for place, each in enumerate(rows)}
        self.reading = set(self.left)
        self.clock = 0
        self.links = [tools.links() for _ in range(self.graph.slots)]
        self.tasks = [self._tasks(slot) for slot in range(self.graph.slots)]
        self.cores = [
            tools.driven(
                self.graph,
                slot,
                self.tasks[slot],
                self.options,
                UntrackedSlot,
                self.links[slot],
                tools.not_wanted,
            )
            for slot in range(self.graph.slots)
        ]
        for slot, core in enumerate(self.cores):
            for other in range(self.graph.slots):
                if other != slot:
                    core.peer_up(other)
            core.start(self.now)

    def _tasks(self, slot: int) -> Any:
        return {
            key: build_task(self.graph, *key, UntrackedTaskMode(partial(open_sink, run="run")))
            for key in self.graph.subtasks_in(slot)
        }

    def _take(self, batch: pa.RecordBatch) -> None:
        self.came += [tuple(row.values()) for row in batch.to_pylist()]

    @property
    def now(self) -> Now:
        return Now(self.clock, 1_000_000 + self.clock)

    # ------------------------------------------------------------ running

    def run(self) -> None:
        for _ in range(MOST_STEPS):
            if all(core.has_ended for core in self.cores):
                return
            self.step()
        raise AssertionError(f"it does not end: {[core.counters() for core in self.cores]}")

    def step(self) -> None:
        self.clock += 1
        for core in self.cores:
            core.on_time(self.now)
        moves = [*self._moves()]
        self.draw.shuffle(moves)
        if any(move() for move in moves):
            return
        for core in self.cores:
            core.idle(self.clock)
        waiting = any(
            queue for link in self.links for kind in (link.frames, link.grants) for queue in kind.values()
        )
        if not waiting:
            # Nothing happens before somebody's time comes.
            dues = [core.due_ms for core in self.cores if core.due_ms is not None]
            self.clock = max(self.clock, min(dues, default=self.clock))

    def _moves(self) -> Iterator[Callable[[], bool]]:
        for key in sorted(self.reading):
            yield partial(self._read, key)
        for slot, (core, links) in enumerate(zip(self.cores, self.links, strict=True)):
            yield partial(core.run_next, self.now)
            for other, frames in links.frames.items():
                yield partial(self._deliver, frames, slot, other)
            for other, grants in links.grants.items():
                yield partial(self._grant, grants, other)

    def _read(self, key: tuple[str, int]) -> bool:
        core, left = self.cores[key[1]], self.left[key]
        if not left:
            self.reading.remove(key)
            core.source_ended(key, self.now)
            return True
        if not core.may_read(key):
            return False
        many = self.draw.randint(1, 5)
        rows, self.left[key] = left[:many], left[many:]
        core.rows(key, SourceRows(f"p{key[1]}", key[1], 0, batch_of(rows), None), self.now)
        return True

    def _deliver(self, frames: Any, sender: int, receiver: int) -> bool:
        if frames:
            self.cores[receiver].frame(sender, pa.py_buffer(frames.popleft()))
            return True
        return False

    def _grant(self, grants: Any, to: int) -> bool:
        if grants:
            self.cores[to].granted(grants.popleft())
            return True
        return False

    @property
    def late(self) -> int:
        return sum(core.counters()["late"] for core in self.cores)


def in_turn(stream: DataStream) -> DataStream:
    return stream.rebalance()


def by_key(stream: DataStream) -> DataStream:
    return stream.key_by("n")


def where_it_is(stream: DataStream) -> DataStream:
    return stream


def to_the_first(stream: DataStream) -> DataStream:
    return stream.global_()


WAYS = (in_turn, by_key, where_it_is, to_the_first)
Way = Callable[[DataStream], DataStream]


def one_out(source: DataStream, into: Way, back: Way, width: int | None) -> DataStream:
    loop = into(source).iterate("20s")
    body = into(loop).map(collatz, parallelism=width)
    loop.close_with(back(body.filter(is_more, parallelism=width)))
    return body.filter(is_one, parallelism=width)


def many_out(source: DataStream, into: Way, back: Way, width: int | None) -> DataStream:
    loop = source.iterate("20s")
    body = into(loop).flat_map(halves, parallelism=width)
    loop.close_with(back(body.filter(is_more)))
    return body.filter(is_one)


def by_the_side(source: DataStream, into: Way, back: Way, width: int | None) -> DataStream:
    loop = source.iterate("20s")
    body = into(loop).process(Sorting(), side={"back": SCHEMA}, parallelism=width)
    loop.close_with(back(body.side_output("back")).union(body.filter(lambda record: False)))
    return body


def nested(source: DataStream, into: Way, back: Way, width: int | None) -> DataStream:
    outer = source.iterate("40s")
    inner = into(outer).iterate("20s")
    body = inner.flat_map(halves, parallelism=width)
    some = body.filter(is_more)
    inner.close_with(back(some.filter(lambda record: record[1] % 2 == 0)))
    outer.close_with(some.filter(lambda record: record[1] % 2 == 1))
    return body.filter(is_one)


def expected(build: Any, rows: list[Rows]) -> Counter[tuple[int, int]]:
    if build is one_out:
        # 1 goes round once more: 1 → 4 → 2 → 1.
        return Counter((name, 1 if n else 0) for each in rows for name, n in each)
    return Counter({(name, min(n, 1)): max(n, 1) for each in rows for name, n in each})


loops = st.sampled_from([one_out, many_out, by_the_side, nested])


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1 << 30),
    build=loops,
    parallelism=st.sampled_from([1, 2, 4]),
    width=st.sampled_from([None, 1, 2, 3]),
    into=st.sampled_from(WAYS),
    back=st.sampled_from(WAYS),
    channel_bytes=st.sampled_from([1 << 10, 1 << 20]),
    batch_rows=st.sampled_from([1, 4, 64]),
)
def test_every_record_comes_out(
    tools: Any,
    seed: int,
    build: Any,
    parallelism: int,
    width: int | None,
    into: Way,
    back: Way,
    channel_bytes: int,
    batch_rows: int,
) -> None:
    draw = random.Random(seed)
    rows = [
        [(place * 1_000 + i, draw.randrange(30)) for i in range(draw.randrange(12))]
        for place in range(parallelism)
    ]
    world = World(
        tools,
        lambda source: build(source, into, back, width),
        rows,
        parallelism=parallelism,
        draw=draw,
        channel_bytes=channel_bytes,
        batch_rows=batch_rows,
    )
    world.run()
    assert Counter(world.came) == expected(build, rows)
    assert world.late == 0


# ---------------------------------------------------------------- room


def test_a_full_loop_works_itself_off(tools: Any) -> None:
    """All its channels are full, and more comes back than the way back would hold if it were any other channel."""
    rows = [[(place * 1_000 + i, 300) for i in range(12)] for place in range(2)]
    world = World(
        tools,
        lambda source: many_out(source, in_turn, by_key, None),
        rows,
        parallelism=2,
        draw=random.Random(5),
        batch_rows=16,
    )
    inboxes = [
        seat.inbox
        for core in world.cores
        for seat in core.seating.seats.values()
        if isinstance(seat.inbox, HeadInbox)
    ]
    (overfull, let_in, blocked) = (0, 0, 0)
    for _ in range(MOST_STEPS):
        full = [box for box in inboxes if not all(box.has_room(channel) for channel in box.feedback)]
        before = [
            sum(box.records_of(channel) for channel in box.channels if channel not in box.feedback)
            for box in full
        ]
        world.step()
        after = [
            sum(box.records_of(channel) for channel in box.channels if channel not in box.feedback)
            for box in full
        ]
        overfull += len(full)
        let_in += sum(then < now for now, then in zip(before, after, strict=True))
        blocked += sum(not seat.has_room for core in world.cores for seat in core.seating.seats.values())
        if all(core.has_ended for core in world.cores):
            break
    assert overfull
    assert blocked
    assert not let_in, "new records were let in though many waited that had come back"
    assert Counter(world.came) == Counter({(name, 1): 300 for each in rows for name, _ in each})


def test_what_goes_round_for_ever_keeps_nothing_new_out(tools: Any) -> None:
    def build(source: DataStream) -> DataStream:
        loop = source.iterate()
        body = loop.map(lambda record: record)
        loop.close_with(body.filter(lambda record: record[1] < 0))
        return body.filter(lambda record: record[1] >= 0)

    rows = [[(0, -1), *((i, i) for i in range(1, 100))]]
    world = World(tools, build, rows, parallelism=1, draw=random.Random(1))
    for _ in range(5_000):
        world.step()
    assert sorted(world.came) == rows[0][1:]
    assert not world.cores[0].has_ended


def test_turns_at_a_head() -> None:
    fresh, back = Channel(0, 0, 0), Channel(1, 0, 0)
    box = HeadInbox([fresh, back], frozenset({1}), batch_rows=1, limit_bytes=1 << 20)
    output = FeedbackOutput(back, box)
    for n in range(4):
        box.put(fresh, Batch(batch_of([(n, 0)])), 0)
        output.send(Batch(batch_of([(n, 1)])), 0)
    # A channel has room for two batches; more of what came back than that comes first.
    assert [box.take().channel for _ in range(8)] == [back, back, back, fresh, back, fresh, fresh, fresh]
    assert output.has_room
    assert not box.turns


def test_no_mark_goes_round() -> None:
    back = Channel(1, 0, 0)
    box = HeadInbox([Channel(0, 0, 0), back], frozenset({1}), batch_rows=1, limit_bytes=1)
    for mark in (Watermark(3), EndOfStream()):
        FeedbackOutput(back, box).send(mark, 0)
    assert box.is_empty


# ---------------------------------------------------------------- the end


def hold(world: World) -> None:
    """Nothing reaches slot 0 from slot 1 for ten seconds."""
    frames = world.links[1].frames
    held, frames[0] = frames.setdefault(0, deque()), deque()
    until = world.clock + 10_000
    while world.clock < until:
        world.step()
        world.clock += 50
        held.extend(frames[0])
        frames[0].clear()
    frames[0].extend(held)


def away_and_back_to(slot: int) -> Callable[[DataStream], DataStream]:
    def build(source: DataStream) -> DataStream:
        loop = source.iterate("100ms")
        body = loop.global_().map(collatz)
        back = body.filter(is_more).partition_custom(lambda n, channels: slot, "n")
        loop.close_with(back)
        return body.filter(is_one)

    return build


def test_what_is_on_its_way_to_another_slot_is_waited_for(tools: Any) -> None:
    world = World(tools, away_and_back_to(1), [[], [(1, 8)]], parallelism=2, draw=random.Random(3))
    hold(world)
    assert not world.came
    world.run()
    assert world.came == [(1, 1)]
    assert world.late == 0


def test_what_comes_back_behind_the_end_is_counted(tools: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The head in slot 0 cannot know that something is on its way in slot 1."""
    world = World(tools, away_and_back_to(0), [[], [(1, 8), (2, 2)]], parallelism=2, draw=random.Random(3))
    hold(world)
    world.run()
    assert world.came == [(2, 1)]
    assert world.late == 1
    assert "iteration 'iteration-1' has ended, and records still come back to it" in caplog.text


@pytest.mark.parametrize("parallelism", [1, 3])
def test_windows_behind_a_loop_wait_for_it(tools: Any, parallelism: int) -> None:
    """The last watermark comes when the loop has ended, not when the source has."""

    def build(source: DataStream) -> DataStream:
        loop = source.assign_watermarks("n", "1h").iterate("500ms")
        body = loop.map(lambda record: (record[0] - 1, record[1]))
        loop.close_with(body.filter(lambda record: record[0] > 0))
        done = body.filter(lambda record: record[0] <= 0)
        return done.key_by("name").window(tumbling("1s")).process(_counted, SCHEMA, parallelism=1)

    rows = [[(20, i) for i in range(10)]]
    world = World(tools, build, rows, parallelism=parallelism, draw=random.Random(7))
    world.run()
    assert world.came == [(0, 10)]


def _counted(key: Any, window: Any, records: list[Any]) -> Iterator[Any]:
    yield key, len(records)
