"""Whole jobs with a loop in barrier mode: everything is exact, save what was on the feedback edge at a restore."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from draws import every_other, seeds

from ftlayer import FailurePolicy
from ftlayer.config import FTStatus
from ftlayer.functions.process import CoProcessFunction, ProcessFunction
from ftlayer.runtime.task.iteration import LoopGate
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.connectors import partitions

GOING = pa.schema([("key", pa.string()), ("part", pa.int64()), ("n", pa.int64()), ("rounds", pa.int64())])
COUNTED = pa.schema([*GOING, ("count", pa.int64())])
MODES = ("aligned", "at-least-once", "unaligned", "turning")
RINGS = pa.schema([("what", pa.string()), ("key", pa.string()), ("time", pa.int64())])
ACTS = ("kill", "kill-all", "function", "driver", "savepoint", "stop", "commit-middle")
CAMPAIGN = int(os.environ.get("FTLAYER_SEEDS", "3000")) // 10
"""Each of these runs takes as long as several of other topologies."""
Row = tuple[Any, ...]


def numbers(part: int, count: int, keys: int) -> list[Row]:
    """The records of a partition, with the rounds that each has before it."""
    return [(f"k{(n * 7 + part) % keys}", part, n, (n * 5 + part) % 6) for n in range(count)]


class Logging(ProcessFunction):
    """Passes records on, and says so."""

    def process(self, record: Any, ctx: Any) -> Iterator[Any]:
        ctx.output("log", record)
        yield record


class Rounds(ProcessFunction):
    """Counts the rounds of a key, and sends a record back that has more of them before it."""

    def process(self, record: Any, ctx: Any) -> Iterator[Any]:
        count = ctx.value("count", 0)
        count.set(count.get() + 1)
        *name, rounds = record
        if rounds:
            ctx.output("back", (*name, rounds - 1))
        yield (*record, count.get())


class Ringing(Rounds):
    """Sets timers beside, and checks that records, also those that came back, find none that is due."""

    def __init__(self, world: int) -> None:
        self.world = world

    def process(self, record: Any, ctx: Any) -> Iterator[Any]:
        waiting = ctx.map("waiting")
        self._check(not [time for time in waiting if time <= ctx.watermark], f"{record} came before timers")
        time = max(record[2] // 5 * 5, ctx.watermark) + 1 + record[3]
        if time not in waiting:
            waiting[time] = True
            ctx.timers.event(time)
            ctx.output("rings", ("set", ctx.key[0], time))
        yield from super().process(record, ctx)

    def on_timer(self, time_ms: int, ctx: Any) -> Iterator[Any]:
        waiting = ctx.map("waiting")
        self._check(time_ms == min(waiting, default=None), f"{time_ms} fired before {list(waiting)}")
        waiting.pop(time_ms, None)
        ctx.output("rings", ("fired", ctx.key[0], time_ms))
        return iter(())

    def _check(self, holds: bool, text: str) -> None:
        sys.modules["barrier_outside"].Outside.worlds[self.world].check(holds, text)


class Beside(CoProcessFunction):
    """Passes on what goes round; what comes from outside of the loop is taken."""

    def process_left(self, record: Any, ctx: Any) -> Iterator[Any]:
        yield record

    def process_right(self, record: Any, ctx: Any) -> Iterator[Any]:
        return iter(())


@dataclass
class Loop:
    """In place of `barrier_topologies.Case`. In ``"beside"`` another source leads into the body.

    ``entered`` is noted right behind the loop's head, and ``left`` right before its tail: what is in the second and not
    in the first was on the feedback edge.
    """

    name: str
    outside: Any
    count: int = 60
    keys: int = 5
    parts: int = 2
    exact: bool = True
    checked: bool = False
    came_back: bool = False

    def build(self, parallelism: int) -> GraphBuilder:
        topologies = sys.modules["barrier_topologies"]
        env = GraphBuilder("simulated", parallelism=parallelism, status=FTStatus.OFF)
        lists = [partial(numbers, part, self.count, self.keys) for part in range(self.parts)]
        reading = min(self.parts, parallelism)
        read = env.source(partitions(*lists), GOING, uid="a", parallelism=reading)
        passing = topologies.Passing(self.outside.number)
        if self.name == "ringing":
            read = read.assign_watermarks("n", 0, uid="times", parallelism=reading)
        loop = read.iterate("500ms", uid="loop")
        entered = loop.process(Logging(), GOING, side={"log": GOING}, uid="entering")
        self._sink(entered.side_output("log"), "entered")
        body = self._body(entered.map(passing, GOING, uid="passing"))
        if self.name == "beside":
            other = env.source(partitions(*lists), GOING, uid="b", parallelism=1)
            body = body.rebalance().connect(other.broadcast()).process(Beside(), GOING, uid="beside")
        rings = self.name == "ringing"
        function, side = (Ringing(self.outside.number), {"rings": RINGS}) if rings else (Rounds(), {})
        counted = body.key_by("key").process(function, COUNTED, side={"back": GOING, **side}, uid="counting")
        self._sink(counted, "out")
        if rings:
            self._sink(counted.side_output("rings"), "rings")
        leaving = (
            counted.side_output("back")
            .rebalance()
            .process(Logging(), GOING, side={"log": GOING}, uid="leaving")
        )
        self._sink(leaving.side_output("log"), "left")
        loop.close_with(leaving)
        return env

    def _body(self, entered: Any) -> Any:
        return entered

    def _sink(self, stream: Any, uid: str) -> None:
        stream.sink(sys.modules["barrier_topologies"].Writer(self.outside.number, uid), uid=uid)

    # ------------------------------------------------------------ checking

    @property
    def lost(self) -> set[Row]:
        """What has left, and never entered again."""
        return set(self.outside.visible("left")) - set(self.outside.visible("entered"))

    def completed(self, *_: Any) -> None:
        """A checkpoint is complete."""

    def check(self, extent: Any, *_: Any) -> None:
        """Check that nothing is lost but on the feedback edge, and nothing is there twice.

        A job that was ended early has not read everything.
        """
        self.checked = True
        read = {record for part in range(self.parts) for record in numbers(part, self.count, self.keys)}
        entered, left = self._seen("entered"), self._seen("left")
        if self.exact and extent.name != "CUT":
            rings = self.outside.visible("rings")
            assert sorted(ring[1:] for ring in rings if ring[0] == "set") == sorted(
                ring[1:] for ring in rings if ring[0] == "fired"
            ), "each timer fires once"
        if extent.name == "WHOLE":
            assert read <= set(entered), "something was read, and never entered"
        if not self.exact:
            # Of what came between two barriers one sink may show something, and another one not.
            return
        passed = Counter(row[:-1] for row in self.outside.visible("out"))
        assert set(entered) <= read | set(left), "something entered that never left"
        again = {(*row[:-1], row[-1] - 1) for row in passed if row[-1]}
        assert set(passed) <= set(entered), "something was counted that never entered"
        assert set(left) <= again, "something left that was not counted"
        if extent.name != "CUT":
            # What an unaligned checkpoint has in flight would come out behind a restore.
            assert set(passed) == set(entered), "something entered, and was not counted"
            assert set(left) == again, "something was counted, and never left"
        for seen in (entered, left, passed):
            assert set(seen.values()) <= {1}, [row for row, times in seen.items() if times > 1][:5]
        counts: dict[str, list[int]] = {}
        for row in self.outside.visible("out"):
            counts.setdefault(row[0], []).append(row[-1])
        for key, its in counts.items():
            assert sorted(its) == list(range(1, len(its) + 1)), key

    def _seen(self, sink: str) -> Counter[Row]:
        return Counter(self.outside.visible(sink))


@pytest.fixture
def loops(runs: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`barrier_runs`, whose topology is the loop."""
    monkeypatch.setattr(runs, "Case", Loop)
    return runs


@pytest.mark.usefixtures("markers")
@every_other("name, parallelism, mode", ["loop", "beside"], [1, 3], MODES)
def test_nothing_fails(loops: Any, mode: str, parallelism: int, name: str) -> None:
    config = {**loops.MODES[mode], "interval": "10ms"}
    run = loops.Run(loops.Plan(name, parallelism, parallelism=parallelism, config=config, count=30)).run()
    assert run.case.checked
    assert not run.case.lost
    assert run.world.driver.checkpoints.checkpoint_counts.completed > 3


@every_other("act, mode", ACTS, MODES)
def test_one_thing_happens(loops: Any, mode: str, act: str) -> None:
    # Each of them early and late.
    move = (60, 450)[(ACTS.index(act) + MODES.index(mode)) // 2 % 2]
    config = {**loops.MODES[mode], "interval": "10ms"}
    plan = loops.Plan("loop", move, events=((move, act),), config=config, count=30)
    assert loops.Run(plan).run().case.checked


def test_what_was_on_the_feedback_edge_is_lost(loops: Any) -> None:
    """Else the tests above show nothing."""

    def plan(seed: int) -> Any:
        return loops.Plan(
            "loop", seed, events=((300 + 10 * seed, "kill"),), config={"interval": "5ms"}, count=60
        )

    assert any(loops.Run(plan(seed)).run().case.lost for seed in range(19, 29)), (
        "nothing was on the feedback edge"
    )


def drawn(loops: Any, seed: int) -> Any:
    plan = loops.drawn(seed, names=["loop", "beside"])
    # There are more subtasks than in other topologies: a checkpoint takes more moves.
    return replace(plan, config={**plan.config, "timeout": "2s"})


@seeds(range(3), range(3, 8))
def test_anything_happens(loops: Any, seeds: range) -> None:
    for seed in seeds:
        loops.Run(drawn(loops, seed)).run()


@pytest.mark.campaign
@pytest.mark.parametrize("first", range(1_000, 1_000 + CAMPAIGN, 50))
def test_campaign(loops: Any, first: int) -> None:
    for seed in range(first, first + 50):
        loops.Run(drawn(loops, seed)).run()


class Stumbling(ProcessFunction):
    """Passes records on; one of them fails when it goes round for the last time but one, and all others are through."""

    def process(self, record: Any, ctx: Any) -> Iterator[Any]:
        if record[1:] == (0, 3, 1) and ctx.attempt < 3:
            raise ValueError(record)
        yield record


@dataclass
class StumblingLoop(Loop):
    """A loop whose body takes long over some records."""

    def _body(self, entered: Any) -> Any:
        return entered.rebalance().process(Stumbling(), GOING, uid="stumbling")


def test_no_head_lets_its_loop_end_while_records_wait_in_it_for_another_attempt_in_any_slot(
    loops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their pause is longer than the loop waits for what comes back."""
    monkeypatch.setattr(loops, "Case", StumblingLoop)
    config = {"failures": FailurePolicy(max_attempts=3, backoff="800ms", jitter=0), "interval": "50ms"}
    run = loops.Run(loops.Plan("loop", 1, 3, (), config, count=6))
    let_go, waited = LoopGate.let_go, []

    def looked(gate: LoopGate) -> None:
        cores = [process.instance.core for process in run.world.processes]
        waited.append(sum(seat.failures.waiting for core in cores if core is not None for seat in core.seats))
        let_go(gate)

    monkeypatch.setattr(LoopGate, "let_go", looked)
    run.run()
    assert waited == [0, 0, 0]
    assert not run.case.lost
    assert not run.world.letters


@seeds(range(2), range(2, 60))
def test_records_that_come_back_find_no_timer_that_is_due(loops: Any, seeds: range) -> None:
    """Those that a barrier has interrupted fire before anything is taken, wherever it comes from."""
    exact = {"mode": "exactly-once", "max_concurrent": 1, "timeout": "2s"}
    for seed in seeds:
        plan = loops.drawn(seed, names=["ringing"])
        loops.Run(replace(plan, config={**plan.config, **exact, **loops.MODES["unaligned"]})).run()
