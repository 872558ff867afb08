"""A chain of barrier mode without a slot: its graph, a backend that copies everything, and its events."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.letters import ChainLetter
from ftlayer.checkpoint.options import FailurePolicy
from ftlayer.checkpoint.snapshots import (
    KeyedSnapshot,
    OperatorState,
    Piece,
    Redistribution,
    Scope,
    StatePiece,
    SubtaskRestore,
)
from ftlayer.common.clock import Now
from ftlayer.functions.keyed import StateCache
from ftlayer.functions.process import ProcessFunction
from ftlayer.functions.steps import Process
from ftlayer.records.partitioning import HashByKeyGroup, Rebalance
from ftlayer.records.traced import KeySelector
from ftlayer.runtime.barrier_mode.task.mode import BarrierTaskMode
from ftlayer.runtime.protocol.messages import MAX_TIME_MS, Batch, Readmit, Watermark
from ftlayer.runtime.task.actions import Action, ElementCame, Send, TaskStart, TimeCame
from ftlayer.runtime.task.build import build_task
from ftlayer.runtime.task.contract import NO_SUSPECTS, Suspects
from ftlayer.state.contract import BackendSnapshot
from ftlayer.state.heap import HeapBackend, HeapState
from ftlayer.topology.job_graph import Channel, JobEdge, JobGraph, JobVertex
from ftlayer.topology.operators import FunctionSink, IterableSource, Sink, Source

ROW = pa.schema([("key", pa.string()), ("n", pa.int64())])
IN = Channel(0, 0, 0)


RETRYING = FailurePolicy(max_attempts=3, backoff=("1s", "5s"), jitter=0)


def no_cancel() -> bool:
    return False


class Writer:
    def write(self, chunks: Iterable[bytes], scope: Scope = Scope.EXCLUSIVE, in_flight_of: str = "") -> Piece:
        data = b"".join(chunks)
        return Piece(b"", len(data), data)


class ModelFrozen:
    def __init__(self, backend: ModelBackend, checkpoint: int) -> None:
        self.backend, self.checkpoint = backend, checkpoint
        self.state = backend.copied()
        self.released = False

    def write(self, writer: Any, cancelled: Callable[[], bool]) -> BackendSnapshot:
        old = StatePiece("entries", Piece(b"", 40), 1, self.checkpoint - 1)
        new = StatePiece("entries", writer.write([b"12345"]), 1, self.checkpoint)
        self.backend.written[self.checkpoint] = self.state
        states = (OperatorState("sum", "list", Redistribution.SPLIT, (b"abc",)),)
        return BackendSnapshot(KeyedSnapshot(0, 8, (), (old, new)), states)

    def release(self) -> None:
        assert not self.released
        self.released = True


class ModelState(HeapState):
    """Knows what has some of it in a form of its own."""

    def __init__(self, caches: list[StateCache]) -> None:
        super().__init__()
        self.caches = caches

    def cache(self, cache: StateCache) -> None:
        self.caches.append(cache)

    def __deepcopy__(self, memo: Any) -> ModelState:
        copied = ModelState([])
        copied._tables = copy.deepcopy(self._tables, memo)
        return copied


class ModelBackend(HeapBackend):
    """Copies everything at once; notes what it is told."""

    def __init__(self, state: Any = None) -> None:
        super().__init__()
        self.caches: list[StateCache] = []
        if state is not None:
            self._states, self._timers = copy.deepcopy(state)
            for restored in self._states.values():
                restored.caches = self.caches
        self.written: dict[int, Any] = {}
        self.said: list[Any] = []
        self.tended: list[int] = []
        self.handled = 0
        self.is_full = False
        self.is_open = False

    def state(self, uid: str) -> HeapState:
        return self._states.setdefault(uid, ModelState(self.caches))

    def copied(self) -> Any:
        for cache in self.caches:
            cache.write_back()
        return copy.deepcopy((self._states, self._timers))

    def opened(self) -> None:
        self.is_open = True

    def freeze(self, barrier: Barrier, now_ms: int = 0) -> ModelFrozen:
        return ModelFrozen(self, barrier.checkpoint)

    def completed(self, checkpoint: int) -> None:
        self.said.append(("completed", checkpoint))

    def aborted(self, checkpoint: int) -> None:
        self.said.append(("aborted", checkpoint))

    def tend(self, now_ms: int, handled: int = 0) -> None:
        assert "closed" not in self.said
        self.tended.append(now_ms)
        self.handled += handled

    def close(self) -> None:
        self.said.append("closed")


def graph(*operators: Any, schema: pa.Schema = ROW, parallelism: int = 1, inputs: int = 1) -> JobGraph:
    sources = [
        JobVertex(f"src{i}", (Source(f"src{i}", IterableSource(()), schema),), 1) for i in range(inputs)
    ]
    chain = JobVertex(operators[0].uid, operators, parallelism)
    vertices = [*sources, chain]
    key = HashByKeyGroup(KeySelector(("key",)), 8)
    edges = [JobEdge(i, f"src{i}", chain.uid, i, key, schema) for i in range(inputs)]
    if not isinstance(operators[-1], Sink):
        vertices.append(JobVertex("end", (Sink("end", FunctionSink(print), ROW),), 1))
        edges.append(JobEdge(inputs, chain.uid, "end", 0, Rebalance(), ROW))
    return JobGraph("job", tuple(vertices), tuple(edges), tracked=False, max_parallelism=8)


def batch(*rows: tuple[str, int]) -> Batch:
    columns = [list(column) for column in zip(*rows, strict=True)]
    return Batch(pa.record_batch(columns, schema=ROW))


def sent(actions: list[Action]) -> list[tuple[str, int]]:
    return [
        tuple(row.values())
        for action in actions
        if isinstance(action, Send) and isinstance(action.element, Batch)
        for row in action.element.payload.to_pylist()
    ]


def now(mono_ms: int, wall_ms: int | None = None) -> Now:
    return Now(mono_ms, mono_ms if wall_ms is None else wall_ms)


class FailingChain:
    """A chain with a failure policy, of one process function or as it is given, and its clock."""

    def __init__(
        self,
        function: ProcessFunction | tuple[Any, ...],
        policy: FailurePolicy = RETRYING,
        backend: Any = None,
        at_ms: int = 0,
        schema: pa.Schema = ROW,
        suspects: Suspects = NO_SUSPECTS,
        restored: SubtaskRestore | None = None,
        opens: Callable[[Mapping[str, pa.Schema]], Any] | None = None,
    ) -> None:
        """``backend`` is the chain's, or what ``opens`` returns for the keys of its operators."""
        self.backend = ModelBackend() if backend is None else backend
        operators = function if isinstance(function, tuple) else (Process("p", function, schema, ("key",)),)
        made = graph(*operators, schema=schema)
        uid = operators[0].uid
        vertices = [
            vertex if vertex.uid != uid else replace(vertex, failures=policy) for vertex in made.vertices
        ]
        job = JobGraph("job", tuple(vertices), made.edges, tracked=False, max_parallelism=8)

        def open_backend(chain: str, subtask: int, asked: Mapping[str, pa.Schema]) -> Any:
            if opens is not None:
                self.backend = opens(asked)
            return self.backend

        restores = {} if restored is None else {(uid, 0): restored}
        mode = BarrierTaskMode(restores, open_backend, lambda *_: None, lambda _: suspects, "here")
        self.task: Any = build_task(job, uid, 0, mode)
        self.checkpoints = mode.checkpointed[uid, 0]
        self.time, self.schema = at_ms, schema
        self.task.handle(TaskStart(), self.now)

    @property
    def now(self) -> Any:
        return now(self.time)

    def give(self, *rows: tuple[Any, ...]) -> list[Any]:
        columns = [list(column) for column in zip(*rows, strict=True)]
        return self.take(pa.record_batch(columns, schema=self.schema))

    def take(self, payload: pa.RecordBatch) -> list[Any]:
        return self.task.handle(ElementCame(IN, Batch(payload)), self.now)

    def readmit(self, *letters: ChainLetter) -> list[Any]:
        return self.task.handle(Readmit("p", 0, letters), self.now)

    def watermark(self, time_ms: int = MAX_TIME_MS) -> list[Any]:
        return self.task.handle(ElementCame(IN, Watermark(time_ms)), self.now)

    def after(self, ms: int) -> list[Any]:
        self.time += ms
        return self.task.handle(TimeCame(), self.now)

    def snapshot(self, checkpoint: int) -> Any:
        _, pending = self.checkpoints.snapshot(Barrier(checkpoint, 0), self.now)
        part = pending.write(Writer(), no_cancel)
        pending.release()
        return part
