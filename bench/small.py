"""What a small batch costs by itself: CPU time and Python functions for 20 rows, in the rules of two slots.

The job is source, map, ``key_by``, map, sink, each in both slots. Loops, rules and tasks are those of a job; what they
send to each other lies in a queue, and time passes by 10 ms a batch.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast
from unittest.mock import patch

import pyarrow as pa

import ftlayer
from bench.harness import Target, note
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.common.clock import Now
from ftlayer.config import FTStatus, TopologyOptions
from ftlayer.runtime.acker_mode.slot.rules import AckerSlot, FailCall, PersistCall
from ftlayer.runtime.acker_mode.task.mode import AckerTaskMode
from ftlayer.runtime.barrier_mode.slot.rules.barriers import CheckpointParts
from ftlayer.runtime.barrier_mode.slot.rules.slot_half import BarrierSlot
from ftlayer.runtime.barrier_mode.task.mode import BarrierTaskMode
from ftlayer.runtime.connectors.lane import BatchLimits
from ftlayer.runtime.connectors.sinks import open_sink
from ftlayer.runtime.handler import FTHandler
from ftlayer.runtime.protocol.messages import Deploy
from ftlayer.runtime.slot import main
from ftlayer.runtime.slot.rules.core import SlotCore
from ftlayer.runtime.slot.rules.events import (
    CreditCame,
    Event,
    FrameCame,
    Mailbox,
    ModeInstruction,
    RootsAccepted,
)
from ftlayer.runtime.slot.rules.load import BusyTimes
from ftlayer.runtime.slot.rules.mode import OpenRules, UntrackedSlot
from ftlayer.runtime.slot.sources import Signal, Sources
from ftlayer.runtime.task.actions import SourceRows, TakenRows
from ftlayer.runtime.task.chain_plan import TaskMode
from ftlayer.runtime.task.contract import NO_SUSPECTS
from ftlayer.runtime.task.untracked import UntrackedTaskMode
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.connectors import partitions
from ftlayer.topology.job_graph import JobGraph
from ftlayer.topology.job_graph_generator import job_graph
from ftlayer.vertex.calls import SourcePosition, StreamOptions

MODES = ("untracked", "barriers", "acker")
ROWS = 20
BATCHES = 20
BATCH_MS = 10

TARGETS = {
    "untracked_calls": Target(at_most=1_196, unit="functions"),
    "barriers_calls": Target(at_most=1_294, unit="functions"),
    "acker_calls": Target(at_most=1_456, unit="functions"),
}

_OURS = str(Path(ftlayer.__file__).parent)


class _Reader:
    """Has a batch when it is given one."""

    lag: int | None = None
    is_away = ended = False
    due_ms = None

    def __init__(self) -> None:
        self.given: SourceRows | None = None

    def take(self, mono_ms: int) -> SourceRows | None:
        given, self.given = self.given, None
        return given

    def accepted(self, rows: TakenRows) -> None:
        """Nothing has to be read again."""

    def start(self) -> None:
        """It reads when it is told to."""


class _Mailbox(Mailbox[Event]):
    rests = False

    def put(self, item: Event) -> None:
        self.rests = False
        super().put(item)

    def wait(self, timeout_s: float | None) -> None:
        self.rests = True


@dataclass
class _Links:
    """Frames of one slot go to the mailbox of the other one."""

    slot: int
    mailboxes: list[_Mailbox]
    reached: Sequence[int] = ()

    def deploy(self, deploy: Deploy) -> None:
        self.reached = [1 - self.slot]

    def counts(self, slot: int, instance: str) -> bool:
        return True

    def transmit(self, slot: int, frame: bytes) -> None:
        self.mailboxes[slot].put(FrameCame(self.slot, "", pa.py_buffer(frame)))

    def grant(self, slot: int, grants: bytes) -> None:
        self.mailboxes[slot].put(CreditCame(self.slot, "", grants))


@dataclass
class _Pulse:
    busy: BusyTimes = field(default_factory=BusyTimes)
    quiet: bool = False

    def heartbeat(self) -> None:
        return None


@dataclass
class _Vertex:
    """Says at once that roots are stored."""

    mailbox: _Mailbox
    may_persist: bool = True
    is_quiet: bool = True

    def carry_out(self, instruction: ModeInstruction) -> None:
        match instruction:
            case PersistCall(key, ticket):
                self.mailbox.put(RootsAccepted(key, ticket))
            case FailCall(failures):
                raise AssertionError(f"nothing fails here: {failures}")


@dataclass
class Slots:
    """Two slots of a job, one of whose sources is given batches."""

    mailboxes: list[_Mailbox]
    loops: list[main.SlotLoop]
    reader: _Reader
    signal: Signal
    number: int = 0
    sunk: int = 0
    now_ms: int = 0

    @classmethod
    def of(cls, mode: str) -> Slots:
        slots = cls([_Mailbox(), _Mailbox()], [], _Reader(), Signal(lambda: None))
        graph = slots._graph(mode)
        for slot in range(2):
            slots.loops.append(slots._loop(graph, mode, slot))
        for slot, loop in enumerate(slots.loops):
            loop.begin(Deploy(1, f"{slot}", ()))
        slots.settle()
        return slots

    def _graph(self, mode: str) -> JobGraph:
        status = FTStatus.ON if mode == "acker" else FTStatus.OFF
        builder = GraphBuilder("small", parallelism=2, status=status)
        numbers = builder.source(partitions([0], [0]), "n bigint, text string", uid="numbers", parallelism=2)
        same: Callable[[Any], Any] = lambda record: record  # noqa: E731 - as users write it
        numbers.map(same).key_by("n").map(same).sink(self._sink)
        return job_graph(builder.build(), status, StreamOptions())

    def _sink(self, batch: pa.RecordBatch) -> None:
        self.sunk += batch.num_rows

    def _loop(self, graph: JobGraph, mode: str, slot: int) -> main.SlotLoop:
        options, mailbox, sinks = TopologyOptions(), self.mailboxes[slot], partial(open_sink, run=f"{slot}")
        tasks: TaskMode
        rules: OpenRules
        vertex = _Vertex(mailbox)
        if mode == "acker":
            handler = partial(FTHandler, job=graph.name, run="run", shard=0, shards=1)
            tasks, rules = AckerTaskMode(handler, options, sinks), partial(AckerSlot, vertex)
        elif mode == "barriers":
            tasks = BarrierTaskMode({}, _no_state, sinks, lambda _: NO_SUSPECTS)
            config = CheckpointConfig()
            rules = partial(BarrierSlot, CheckpointParts(config, tasks.checkpointed, lambda: 0.0))
        else:
            tasks, rules = UntrackedTaskMode(sinks), UntrackedSlot
        core = SlotCore(graph, slot, main.build_tasks(graph, slot, tasks), options, rules)
        sources = Sources(core, lambda _: None)
        reader, signal = (self.reader, self.signal) if slot == 0 else (_Reader(), Signal(lambda: None))
        sources.add(("numbers", slot), cast(Any, reader), signal, BatchLimits(ROWS, options.batch_age_ms))
        links: Any = _Links(slot, self.mailboxes)
        return main.SlotLoop(
            core, sources, mailbox, links, cast(Any, _Pulse()), lambda _: None, 1_000, vertex.carry_out
        )

    def batch(self) -> None:
        """Let a batch go through all of the job."""
        self.number += 1
        first = self.number * ROWS
        numbers = range(first, first + ROWS)
        columns = [pa.array(numbers, pa.int64()), pa.array([f"text {number}" for number in numbers])]
        rows = pa.RecordBatch.from_arrays(columns, ["n", "text"])
        position = SourcePosition("p0", str(first - ROWS).encode(), str(first).encode())
        self.now_ms += BATCH_MS
        self.reader.given, self.mailboxes[0].rests = SourceRows("p0", 0, first, rows, position), False
        self.signal.is_set = True

    def settle(self) -> None:
        """Run the loops until both rest."""
        clock = lambda: Now(self.now_ms, self.now_ms)  # noqa: E731
        with patch.object(main, "system_now", clock):
            while not all(mailbox.rests for mailbox in self.mailboxes):
                for loop, mailbox in zip(self.loops, self.mailboxes, strict=True):
                    while not mailbox.rests:
                        loop.turn()


def _no_state(*_: object) -> Any:
    raise AssertionError("no function here keeps state")


@contextmanager
def counting(counts: Counter[str]) -> Iterator[None]:
    """Count the Python functions that are called in this thread, by name."""

    def called(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            code = frame.f_code
            counts[f"{code.co_filename.removeprefix(_OURS)}:{code.co_firstlineno} {code.co_qualname}"] += 1

    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(None)


def calls_of(mode: str) -> Counter[str]:
    """Return how many Python functions `BATCHES` batches take, by name."""
    slots, counts = Slots.of(mode), Counter[str]()
    for _ in range(BATCHES):  # Caches are filled, and credit comes back.
        slots.batch()
        slots.settle()
    before = slots.sunk
    for _ in range(BATCHES):
        slots.batch()
        with counting(counts):
            slots.settle()
    assert slots.sunk - before == BATCHES * ROWS
    return counts


def cpu_us_of(mode: str, batches: int) -> float:
    """Return the CPU time (µs) of a batch: the median of ten parts of ``batches``."""
    slots, parts = Slots.of(mode), []
    for _ in range(10):
        gc.collect()
        spent = 0
        for _ in range(batches // 10):
            slots.batch()
            begun = time.thread_time_ns()
            slots.settle()
            spent += time.thread_time_ns() - begun
        parts.append(spent / 1_000 / (batches // 10))
    return sorted(parts)[len(parts) // 2]


def run(quick: bool) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for mode in MODES:
        counts = calls_of(mode)
        metrics[f"{mode}_calls"] = counts.total() / BATCHES
        metrics[f"{mode}_us"] = cpu_us_of(mode, 400 if quick else 4_000)
        most = (f"{name.rpartition(' ')[2]} {_each(counts, name)}" for name, _ in counts.most_common(12))
        note(f"{mode}: {', '.join(most)}")
    return metrics


def _each(counts: Mapping[str, int], name: str) -> str:
    return f"{counts[name] / BATCHES:g}"
