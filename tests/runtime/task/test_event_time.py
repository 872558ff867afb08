from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import accumulate, chain, count
from random import Random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.common.clock import Now
from ftlayer.connectors.logs import LogReader, Offsets
from ftlayer.functions.steps import Map
from ftlayer.records.partitioning import Forward, Rebalance
from ftlayer.runtime.connectors.lane import BatchLimits, OpenSplits, SplitProgress
from ftlayer.runtime.connectors.offset_reader import PositionChain
from ftlayer.runtime.connectors.readers import SplitReader
from ftlayer.runtime.driver.rules.planner_rules import PlannedRange, SplitPlanner
from ftlayer.runtime.protocol.channel_frames import ElementCodec
from ftlayer.runtime.protocol.messages import (
    MAX_TIME_MS,
    MIN_TIME_MS,
    NAMED_SPLIT,
    Batch,
    Element,
    Idle,
    SplitDone,
    Splits,
    Watermark,
    seal,
)
from ftlayer.runtime.task.actions import ElementCame, Send, SourceOver, SourceRows, TaskStart
from ftlayer.runtime.task.build import build_task
from ftlayer.runtime.task.event_time import TimedInputs, WatermarkGenerator, times_of
from ftlayer.runtime.task.untracked import UntrackedTaskMode
from ftlayer.topology.job_graph import Channel, JobEdge, JobGraph, JobVertex
from ftlayer.topology.operators import (
    AssignWatermarks,
    FunctionSink,
    IterableSource,
    ReaderSource,
    Sink,
    Source,
)

NOW = Now(0, 0)
KEY = b"k" * 32
SCHEMA = pa.schema([("at", pa.int64())])


def generator(disorder: int = 0, idle: int | None = None) -> WatermarkGenerator:
    made = WatermarkGenerator(AssignWatermarks("w", "at", disorder, idle, SCHEMA))
    made.start(0)
    return made


def times(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin"])
@pytest.mark.parametrize(("unit", "per_ms"), [("s", 0.001), ("ms", 1), ("us", 1_000), ("ns", 1_000_000)])
def test_timestamps_of_every_unit_are_rounded_down(unit, per_ms, zone):
    column = pa.array([0, None, 1, -1, 1_500_000_000], pa.int64()).cast(pa.timestamp(unit, zone))
    found, nulls = times_of(column)
    expected = [0, 1, -1, 1_500_000_000]
    assert [time for time, null in zip(found.tolist(), nulls, strict=True) if not null] == [
        value * 1_000 if unit == "s" else value // int(per_ms) for value in expected
    ]
    assert nulls.tolist() == [False, True, False, False, False]


def test_milliseconds_and_slices():
    found, nulls = times_of(pa.array([5, None, 7, 8], pa.int64())[2:])
    assert found.tolist() == [7, 8]
    assert nulls is None


@given(st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1)))
def test_what_python_says(moment):
    moment = moment.replace(tzinfo=UTC)
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    found, _ = times_of(pa.array([moment], pa.timestamp("us", "UTC")))
    assert found.tolist() == [since // timedelta(milliseconds=1)]


def test_the_watermark_follows_the_highest_time_and_is_said_once():
    made = generator(disorder=5)
    assert made.mark(0) is None
    made.observe(times(10, 30, 20), fresh=True, mono_ms=0)
    assert made.mark(0) == Watermark(25)
    assert made.mark(0) is None
    made.observe(times(29), fresh=True, mono_ms=0)
    assert made.mark(0) is None
    made.observe(times(31), fresh=True, mono_ms=0)
    assert made.mark(0) == Watermark(26)
    made.observe(times(MIN_TIME_MS), fresh=True, mono_ms=0)
    assert made.mark(0) is None


def test_a_subtask_without_records_becomes_idle_and_says_when_it_goes_on():
    made = generator(idle=100)
    assert made.due_ms == 100
    assert made.mark(99) is None
    assert made.mark(100) == Idle()
    assert made.mark(500) is None
    assert made.due_ms is None
    made.observe(times(7), fresh=True, mono_ms=500)
    assert made.mark(500) == Watermark(7)
    assert made.due_ms == 600
    made.mark(600)
    made.observe(times(3), fresh=True, mono_ms=700)
    assert made.mark(700) == Watermark(7)


def test_old_replays_do_not_end_idleness_and_new_ones_do():
    made = generator(idle=100)
    made.observe(times(50), fresh=True, mono_ms=0)
    made.mark(0)
    assert made.mark(100) == Idle()
    made.observe(times(40), fresh=False, mono_ms=110)
    assert made.mark(110) is None
    made.observe(times(60), fresh=False, mono_ms=120)
    assert made.mark(120) == Watermark(60)


def test_the_end_is_said_even_when_idle():
    made = generator(idle=10)
    assert made.mark(10) == Idle()
    made.end()
    assert made.mark(11) == Watermark(MAX_TIME_MS)
    assert made.due_ms is None
    made.observe(times(5), fresh=False, mono_ms=20)
    assert made.mark(100) is None


# ---------------------------------------------------------------- several splits

SOURCE = Source("source", IterableSource(()), SCHEMA)


def graph_of(senders: int, receivers: int, *, mapped: bool) -> JobGraph:
    before = (Map("map", lambda at: at, SCHEMA),) if mapped else ()
    chain = (*before, AssignWatermarks("times", "at", 3, None, SCHEMA))
    sink = JobVertex("sink", (Sink("sink", FunctionSink(print), SCHEMA),), 1)
    heads = JobVertex("source", (SOURCE,), senders), JobVertex(chain[0].uid, chain, receivers)
    edges = (
        JobEdge(0, "source", chain[0].uid, 0, Forward() if senders == receivers else Rebalance(), SCHEMA),
        JobEdge(1, chain[0].uid, "sink", 0, Rebalance(), SCHEMA),
    )
    return JobGraph("job", (*heads, sink), edges, tracked=False)


class SplitsInTurns:
    """Source subtasks that read ranges of splits, and chains behind them, in an order that is drawn.

    Of each split records are at most 3 ms out of order, and each range has some.
    """

    def __init__(self, random: Random, senders: int = 0, receivers: int = 0) -> None:
        self.random = random
        receivers = receivers or random.randint(1, 2)
        self.graph = graph_of(senders or random.randint(1, 2), receivers, mapped=random.random() < 0.5)
        self.chain = self.graph.vertices[1].uid
        mode = UntrackedTaskMode(None)
        self.senders = [
            build_task(self.graph, "source", each, mode) for each in range(self.graph.vertices[0].parallelism)
        ]
        self.receivers = [build_task(self.graph, self.chain, each, mode) for each in range(receivers)]
        self.channels = {channel: deque() for channel in self.graph.channels(self.graph.edges[0])}
        self.reached = [MIN_TIME_MS] * receivers
        self.came: list[int] = []
        self.late: list[int] = []
        for receiver, task in enumerate(self.receivers):
            self.take(receiver, task.handle(TaskStart(), NOW))

    def range(self, begins: dict[int, int], number: int) -> Iterator[SourceRows]:
        """Read a range of splits, each of which goes on from the time where it is."""
        beside = OpenSplits(number << 20 | split for split in begins)
        left = {}
        for split in begins:
            steps = [self.random.randint(0, 40) for _ in range(self.random.randint(1, 8))]
            moments = list(accumulate(steps, initial=begins[split]))[1:]
            left[split] = [moment - self.random.randint(0, 3) for moment in moments]
            begins[split] = max(moments, default=begins[split])
        progress = {
            split: SplitProgress(
                f"p{split}",
                number << 20 | split,
                0,
                PositionChain({}),
                lambda rows, done: b"",
                tells_done=True,
                beside=beside,
            )
            for split in begins
        }
        while progress:
            split = self.random.choice(sorted(progress))
            most = self.random.randint(1, 4)
            now, left[split] = left[split][:most], left[split][most:]
            done = not left[split] and (not now or self.random.random() < 0.5)
            self.came += now
            yield progress[split].advance(pa.record_batch([pa.array(now, pa.int64())], SCHEMA), done=done)
            if done:
                del progress[split]

    def send(self, actions: list[object]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.channels[action.channel].append(action.element)

    def deliver(self, some: bool = True) -> None:
        while waiting := [channel for channel, elements in self.channels.items() if elements]:
            if some and self.random.random() < 0.5:
                return
            channel = self.random.choice(waiting)
            element = through_the_wire(self.graph, channel, self.channels[channel].popleft())
            self.take(
                channel.receiver, self.receivers[channel.receiver].handle(ElementCame(channel, element), NOW)
            )

    def take(self, receiver: int, actions: list[object]) -> None:
        for action in actions:
            if isinstance(action, Send) and isinstance(action.element, Watermark):
                self.reached[receiver] = action.element.time_ms
            elif isinstance(action, Send) and isinstance(action.element, Batch):
                times = action.element.times.tolist()
                self.late += [time for time in times if time < self.reached[receiver]]


def through_the_wire(graph: JobGraph, channel: Channel, element: Element) -> Element:
    codec = ElementCodec(graph.edges)
    return codec.decode(pa.py_buffer(codec.encode(channel, element)))[1]


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False))
def test_no_record_of_a_split_in_order_is_late_whatever_others_are_read_before_it(random):
    world = SplitsInTurns(random)
    begins = [
        dict.fromkeys(range(sender, random.randint(1, 4), len(world.senders)), 0)
        for sender in range(len(world.senders))
    ]
    for own in begins:
        for split in own:
            own[split] = random.randint(0, 1_000)
    readers = {
        sender: chain(*(world.range(own, number) for number in range(1, 3)))
        for sender, own in enumerate(begins)
    }
    while readers:
        sender = random.choice(sorted(readers))
        rows = next(readers[sender], None)
        if rows is None:
            world.send(world.senders[sender].handle(SourceOver(), NOW))
            del readers[sender]
        else:
            world.send(world.senders[sender].handle(rows, NOW))
        world.deliver()
    world.deliver(some=False)
    assert world.late == []
    assert world.reached == [MAX_TIME_MS] * len(world.receivers)


def test_the_watermark_is_the_lowest_of_the_splits_and_one_that_is_not_read_holds_it():
    channel = Channel(0, 0, 0)
    made = WatermarkGenerator(AssignWatermarks("w", "at", 0, 100, SCHEMA), TimedInputs({channel: "source"}))
    made.start(0)
    made.splits(channel, Splits((1, 2), endless=False), 0)
    made.observe(times(50, 900), True, 0, (channel, 1))
    assert made.mark(0) is None
    made.observe(times(20), True, 0, (channel, 2))
    assert made.mark(0) == Watermark(20)
    # There is more of the second one: it does not become idle before that is read.
    assert made.due_ms is None
    made.splits(channel, Splits((2,), (1,), endless=False), 0)
    assert made.mark(100) is None
    made.splits(channel, Splits((), (2, 1), endless=False), 150)
    made.observe(times(30), True, 150, (channel, 2))
    assert made.mark(150) == Watermark(30)
    # Nothing comes of either: that may be for other reasons than theirs.
    assert [made.mark(250), made.mark(250)] == [Idle(), None]
    made.splits(channel, Splits((3, 4), endless=False), 300)
    assert made.mark(300) == Watermark(30)
    made.observe(times(950), True, 300, (channel, 3))
    assert made.mark(300) is None


def test_a_split_is_idle_while_others_go_on_and_not_since_the_chain_took_nothing():
    channel = Channel(0, 0, 0)
    made = WatermarkGenerator(AssignWatermarks("w", "at", 0, 100, SCHEMA), TimedInputs({channel: "source"}))
    made.start(0)
    made.splits(channel, Splits((1, 2)), 0)
    made.observe(times(10), True, 0, (channel, 1))
    made.observe(times(900), True, 20, (channel, 2))
    assert made.mark(20) == Watermark(10)
    # Both wait behind something.
    assert [made.mark(100), made.due_ms, made.mark(120)] == [None, 120, Idle()]
    made.observe(times(20), True, 130, (channel, 1))
    assert made.mark(130) == Watermark(20)
    made.observe(times(950), True, 180, (channel, 2))
    assert [made.mark(229), made.due_ms, made.mark(230)] == [None, 230, Watermark(950)]


def test_a_split_that_has_a_name_holds_the_watermark_while_it_has_no_records():
    channel, one, other, never = Channel(0, 0, 0), NAMED_SPLIT + 1, NAMED_SPLIT + 2, NAMED_SPLIT + 3
    made = WatermarkGenerator(AssignWatermarks("w", "at", 0, None, SCHEMA), TimedInputs({channel: "source"}))
    made.splits(channel, Splits((one, other), (), (never,), endless=False), 0)
    made.observe(times(50), True, 0, (channel, one))
    made.observe(times(20), True, 0, (channel, other))
    assert made.mark(0) == Watermark(20)
    made.splits(channel, Splits((one,), (), (other, never), endless=False), 0)
    made.observe(times(900), True, 0, (channel, one))
    assert made.mark(0) is None
    made.splits(channel, Splits((one, other), (), (never,), endless=False), 0)
    made.observe(times(30), True, 0, (channel, other))
    assert made.mark(0) == Watermark(30)


class TimedLog(LogReader):
    """The times of its records by split, of which the first ones are there."""

    schema = pa.schema([("at", pa.int64()), ("offset", pa.int64())])

    def __init__(self, records: dict[str, list[int]], there: dict[str, int], max_rows: int) -> None:
        super().__init__(max_rows)
        self.records, self.there = records, there

    def starts(self) -> Offsets:
        return dict.fromkeys(self.records, 0)

    def ends(self) -> Offsets:
        return dict(self.there)

    def first_of(self, splits: Sequence[str]) -> Offsets:
        raise AssertionError("there are no new ones")

    def read_split(self, split: str, start: int, end: int) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch([self.records[split][start:end], range(start, end)], self.schema)


@settings(max_examples=16, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([3, 65, 100]))
def test_no_record_of_a_log_is_late_however_many_splits_it_has_and_while_some_have_none(random, splits):
    senders = random.randint(1, 3)
    world = SplitsInTurns(random, senders, senders)
    records = {
        str(split): list(accumulate(random.choices(range(60), k=random.choice([0, 1, 5, 20]))))
        for split in range(splits)
    }
    for times in records.values():
        begin = random.randint(0, 1_000)
        times[:] = [begin + time for time in times]
    there = {split: min(len(times), random.randint(1, 9)) for split, times in records.items()}
    log = TimedLog(records, there, random.choice([1, 100, 1_000]))
    planner, start = SplitPlanner("source", senders), log.starts()
    source = Source("source", ReaderSource(log), log.schema)
    readers = [
        SplitReader(source, each, senders, {}, KEY, BatchLimits(4, 1), print) for each in range(senders)
    ]
    for subtask in range(senders):
        planner.slot_up(subtask, ())
    for number in count(1):
        end = log.latestOffset(start, log.getDefaultReadLimit())
        ranges = log.log_ranges(start, end)
        if not ranges and there == {split: len(times) for split, times in records.items()}:
            break
        payloads = tuple(b"" if each is None else seal(each, KEY) for each in ranges)
        planned = PlannedRange(number, json.dumps(start), json.dumps(end), b"", payloads)
        turns = deque(
            (message.subtask, progress, next(items))
            for message in (planner.open(planned, None) if payloads else ())
            for items, progress in readers[message.subtask]._progress(message)
        )
        while turns:
            subtask, progress, rows = turns.popleft()
            most = random.randint(1, 9)
            taken = progress.advance(rows.slice(0, most), done=rows.num_rows <= most)
            if rows.num_rows > most:
                turns.append((subtask, progress, rows.slice(most)))
            world.came += taken.payload.column(0).to_pylist()
            world.send(
                world.senders[subtask].handle(replace(taken, payload=taken.payload.select(["at"])), NOW)
            )
            world.deliver()
        for split in range(len(payloads)):
            planner.split_done(SplitDone("source", number, split))
        start = end
        for split, times in records.items():
            there[split] = min(len(times), there[split] + random.choice([0, 0, 9]))
    for sender in world.senders:
        world.send(sender.handle(SourceOver(), NOW))
    world.deliver(some=False)
    assert sorted(world.came) == sorted(chain(*records.values()))
    assert world.late == []
    assert world.reached == [MAX_TIME_MS] * len(world.receivers)
