"""Stream readers whose rows are read again (``replay="source"``): planner, tasks and vertex, whatever is lost.

The log has splits with gaps between their offsets, and forgets what it is told to commit: rows that are read again
after that are an error.
"""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import DataSourceStreamReader

from ftlayer.common.failures import FailException
from ftlayer.errors import SourceChangedError, SourceError
from ftlayer.runtime.acker_mode.driver.job_vertex import FloorKeeper
from ftlayer.runtime.connectors.lane import SplitProgress
from ftlayer.runtime.connectors.offset_reader import (
    PositionChain,
    SplitPosition,
    pack_range,
    partition_key,
    progress_of,
    unpack_split,
)
from ftlayer.runtime.driver.rules.planner_rules import (
    CallReader,
    CloseSource,
    PlannedRange,
    PlannerEvent,
    PlannerRules,
    PollDue,
    ReaderCalls,
    SubtaskDown,
    SubtaskUp,
)
from ftlayer.runtime.protocol.messages import AssignSplits, Split, SplitDone
from ftlayer.runtime.task.actions import SourceOver
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.job_graph_generator import job_graph
from ftlayer.vertex import calls
from ftlayer.vertex.calls import StreamOptions

UID = "log"
SCHEMA = pa.schema([("n", pa.int64()), ("offset", pa.int64())])
RETRY = StreamOptions(timeout_ms=30_000, max_attempts=3, backoff_ms=(100,), jitter=0.0)
PARALLELISM = 2


class Declared(DataSourceStreamReader):
    """Stands for the log in the graph; the simulation reads it."""

    def read(self, partition: Any) -> Iterator[Any]:
        raise NotImplementedError


class Log:
    """Splits of records at ascending offsets, some of which are missing. A record is its split's number and offset."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.splits = {
            name: [offset for offset in range(random.randrange(24)) if random.random() < 0.6]
            for name in ("a", "b", "c")
        }
        self.forgotten = dict.fromkeys(self.splits, 0)

    @property
    def ends(self) -> dict[str, int]:
        return {name: max(offsets, default=-1) + 1 for name, offsets in self.splits.items()}

    @property
    def records(self) -> set[int]:
        return {self.record(name, offset) for name, offsets in self.splits.items() for offset in offsets}

    def record(self, name: str, offset: int) -> int:
        return 1_000 * sorted(self.splits).index(name) + offset

    def latest(self, start: dict[str, int]) -> dict[str, int]:
        return {name: min(end, start[name] + self.random.randint(1, 12)) for name, end in self.ends.items()}

    def payloads(self, start: dict[str, int], end: dict[str, int]) -> tuple[bytes, ...]:
        assert all(start[name] >= self.forgotten[name] for name in start), "planned again, and forgotten"
        found = tuple(
            json.dumps([name, start[name], end[name]]).encode() if start[name] < end[name] else b""
            for name in sorted(start)
        )
        return found if any(found) else ()

    def read(self, name: str, start: int, end: int) -> list[tuple[int, int]]:
        assert start >= self.forgotten[name], "read again, and forgotten"
        return [(self.record(name, offset), offset) for offset in self.splits[name] if start <= offset < end]


@dataclass
class Reader:
    """One instance of a subtask: reads its splits as `SplitReader` does, a few records at a time."""

    log: Log
    chain: PositionChain
    todo: deque[tuple[AssignSplits, Split]] = field(default_factory=deque)
    split: SplitProgress | None = None
    rows: list[tuple[int, int]] = field(default_factory=list)
    ending: bool = False
    ended: bool = False

    def assign(self, message: AssignSplits) -> None:
        self.ending = self.ending or not message.range.splits
        self.todo.extend((message, split) for split in message.mine)

    def read(self) -> Any:
        message, split = self.todo[0]
        if self.split is None:
            self._begin(message, split)
        assert self.split is not None
        count = self.log.random.randint(1, 4)
        rows, self.rows = self.rows[:count], self.rows[count:]
        done = not self.rows and (not rows or self.log.random.random() < 0.5)
        columns = [list(column) for column in zip(*rows, strict=True)] or [[], []]
        payload = pa.record_batch(columns, schema=SCHEMA)
        found = self.split.advance(payload, done=done)
        if done:
            self.todo.popleft()
            self.split = None
        return found

    def _begin(self, message: AssignSplits, split: Split) -> None:
        key = partition_key(split.number)
        name, start, end = json.loads(split.payload)
        last = self.chain.last(key)
        position = None if last is None else unpack_split(UID, last)
        here = position is not None and position.range.number == message.range.number
        rows = position.rows if position is not None and here else split.rows
        done = position is not None and here and position.done

        def position_of(rows: int, done: bool) -> bytes:
            return SplitPosition(message.range, rows, done).pack()

        number = message.range.number << 20 | split.number
        self.rows = [] if done else self.log.read(name, start + rows, end)
        offsets = None if done else ("offset", start)
        self.split = SplitProgress(
            key, number, rows, self.chain, position_of, tells_done=True, offsets=offsets
        )


class Cluster(ReaderCalls):
    """A simulated topology over the log, with the rules of the planner in the driver."""

    def __init__(self, simulate: Any, random: Random, bad: set[int], times: int = 1) -> None:
        self.random = random
        self.log = Log(random)
        self.out: Counter[int] = Counter()
        self.tried: Counter[int] = Counter()
        self.bad, self.times = bad, times
        env = GraphBuilder("job", parallelism=PARALLELISM)
        numbers = env.source(Declared(), SCHEMA, uid=UID, replay="source")
        numbers.map(self.work, "n bigint", uid="work").key_by("n").sink(self.write)
        self.readers: dict[int, Reader] = {}
        self.reports: list[SplitDone] = []
        self.call: CallReader | None = None
        graph = job_graph(env.build(), retry=RETRY)
        self.run = simulate(graph, {UID: [[], []]}, random.randrange)
        # They are none of the simulation's own.
        self.run.feeds = {}
        self.run.more_events = self.events
        self.run.has_more = lambda: not all(reader.ended for reader in self.readers.values())
        self.stream = self.run.streams[0]
        self.start_driver()
        for subtask in range(PARALLELISM):
            self.up(subtask)

    def work(self, record: tuple[int, int]) -> int:
        number = record[0]
        if number in self.bad:
            self.tried[number] += 1
            if self.tried[number] <= self.times:
                raise FailException(f"{number} fails")
        return number

    def write(self, batch: pa.RecordBatch) -> None:
        self.out.update(batch.column(0).to_pylist())

    # ------------------------------------------------------------ the driver

    def start_driver(self) -> None:
        self.rules = PlannerRules(UID, PARALLELISM, FloorKeeper(), stop_at_latest=True)
        self.call = None
        self.reports.clear()
        self.handle(PollDue())

    def handle(self, event: PlannerEvent) -> None:
        for instruction in self.rules.handle(event, self.run.now):
            if isinstance(instruction, CallReader):
                self.call = instruction
            elif isinstance(instruction, AssignSplits):
                self.readers[instruction.subtask].assign(instruction)
        self.rules.validate()

    def opened(self) -> Any:
        options = dict(self.run.graph.options)[self.stream]
        return self.run.apply(calls.OpenStream(self.stream, options))

    def progress(self) -> Any:
        opened = self.opened()
        return progress_of(UID, opened.positions, opened.planned)

    def answer(self) -> None:
        assert self.call is not None
        call, self.call = self.call, None
        self.handle(call.carried_out(self))

    def initial(self) -> str:
        return json.dumps(dict.fromkeys(self.log.splits, 0))

    def find_end(self, start: str) -> None:
        """The reader has an end of its own."""

    def latest(self, start: str) -> str:
        return json.dumps(self.log.latest(json.loads(start)))

    def splits(self, number: int, start: str, end: str, digest: bytes) -> Any:
        found = self.log.payloads(json.loads(start), json.loads(end))
        planned = PlannedRange(number, start, end, b"".join(found), found)
        assert digest in (b"", planned.digest), "planned otherwise"
        return planned, planned

    def keep(self, planned: PlannedRange, first: int) -> None:
        note = pack_range(planned.range)
        self.run.apply(calls.NoteRange(self.stream, planned.number, note, first))

    def lag(self, at: str) -> None:
        """It cannot tell."""

    def commit(self, end: str) -> str:
        self.log.forgotten = json.loads(end)
        return end

    # ------------------------------------------------------------ what happens

    def events(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        if self.call is not None:
            found.append(self.answer)
        elif self.rules.due_ms is not None and self.rules.due_ms <= self.run.mono:
            found.append(lambda: self.handle(PollDue()))
        if self.reports:
            found.append(lambda: self.handle(self.reports.pop(0)))
        for subtask, reader in self.readers.items():
            if reader.todo or (reader.ending and not reader.ended):
                found.append(partial(self.read, subtask))
        return found

    def read(self, subtask: int) -> None:
        reader, key = self.readers[subtask], (UID, subtask)
        task = self.run.tasks[key]
        if not reader.todo:
            reader.ended = True
            self.run._do(key, task.handle(SourceOver(), self.run.now))
            return
        rows = reader.read()
        self.run._do(key, task.handle(rows, self.run.now))
        position = unpack_split(UID, rows.position.end)
        if position.done:
            self.reports.append(SplitDone(UID, position.range.number, rows.number & 0xFFFFF))

    def up(self, subtask: int) -> None:
        self.readers[subtask] = Reader(self.log, PositionChain(self.opened().positions))
        self.handle(SubtaskUp(subtask))

    def lose(self, slot: int) -> None:
        del self.readers[slot]
        self.handle(SubtaskDown(slot))
        self.run.kill(slot)
        self.up(slot)

    def lose_driver(self) -> None:
        self.start_driver()
        for slot in range(PARALLELISM):
            self.lose(slot)

    def go_on(self) -> None:
        match self.random.randrange(13):
            case 0 | 1 | 2:
                self.run.advance(self.random.choice((10, 50, 150, 400)))
            case 3:
                self.lose(self.random.randrange(PARALLELISM))
            case 4:
                self.run.restart_vertex()
            case 5 if self.random.random() < 0.4:
                self.lose_driver()
            case _:
                self.safely(lambda: [self.run.step() for _ in range(self.random.randrange(14))])

    def safely(self, work: Callable[[], Any]) -> None:
        """Replace a slot whose source says that another instance has to read its rows."""
        while True:
            try:
                work()
                return
            except SourceError as error:
                if error.recoverable is False:
                    raise
                found = re.search(r"partition 'p(\d)'", str(error))
                assert found is not None
                self.lose(int(found[1]) % PARALLELISM)

    def finish(self) -> None:
        self.safely(self.run.run)
        self.run.advance(500)
        self.run.advance(500)
        self.handle(CloseSource())
        while self.call is not None:
            self.answer()


def check(simulate: Any, seed: int, bad: int, moves: int) -> None:
    random = Random(seed)
    cluster = Cluster(simulate, random, set())
    records = sorted(cluster.log.records)
    cluster.bad.update(random.sample(records, min(bad, len(records))))
    for _ in range(moves):
        cluster.go_on()
    cluster.finish()
    assert set(cluster.out) == set(records)
    assert cluster.run.dead() == []
    assert cluster.run.status().drained
    assert all(each.complete for each in cluster.progress())
    assert cluster.log.forgotten == (cluster.log.ends if records else dict.fromkeys(cluster.log.splits, 0))
    with cluster.run.store.read() as txn:
        assert not list(txn.scan("segments")), "what was stored is done"
    assert len(cluster.opened().planned) <= 256


@settings(max_examples=20, deadline=None)
@example(seed=375, bad=14, moves=65)  # a range was committed that a subtask had been told to read again
@example(seed=2**32, bad=19, moves=100)  # a subtask was lost before it said that its part of a range is done
@given(seed=st.integers(0, 2**32), bad=st.integers(0, 6), moves=st.integers(0, 40))
def test_slots_vertex_and_driver_may_be_lost(simulate: Any, seed: int, bad: int, moves: int) -> None:
    check(simulate, seed, bad, moves)


@pytest.mark.campaign
@settings(max_examples=6_000, deadline=None)
@given(seed=st.integers(0, 2**32), bad=st.integers(0, 20), moves=st.integers(0, 120))
def test_slots_vertex_and_driver_may_be_lost_thousands_of_times(
    simulate: Any, seed: int, bad: int, moves: int
) -> None:
    check(simulate, seed, bad, moves)


def compacted(log: Log) -> Iterator[None]:
    """Take a record away that is not forgotten."""
    for name, offsets in log.splits.items():
        left = [offset for offset in offsets if offset >= log.forgotten[name]]
        if left:
            offsets.remove(left[0])
            yield


def test_a_record_that_is_gone_before_it_is_done_is_an_error(simulate: Any) -> None:
    cluster = Cluster(simulate, Random(3), set())
    while not cluster.run.status().pending:
        cluster.run.step()
    assert list(compacted(cluster.log))

    def lose_and_go_on() -> None:
        cluster.lose(0)
        cluster.lose(1)
        cluster.finish()

    with pytest.raises(SourceChangedError, match=r"source 'log': \d+ rows of partition 'p\d' from \d+ on"):
        lose_and_go_on()
