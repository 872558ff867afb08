"""A chain whose dead letters are records of the topology sends them on, and keeps none."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from ftlayer import FailurePolicy
from ftlayer.checkpoint.barrier import Barrier
from ftlayer.clock import Now
from ftlayer.runtime.barrier_mode.task.mode import BarrierTaskMode
from ftlayer.runtime.protocol.elements import Batch
from ftlayer.runtime.task.actions import Action, Send
from ftlayer.runtime.task.build import build_task
from ftlayer.runtime.task.events import ElementCame, TaskStart, TimeCame
from ftlayer.runtime.task.suspects import NO_SUSPECTS
from ftlayer.state.contract import BackendSnapshot
from ftlayer.state.heap import HeapBackend
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.job_graph import Channel, JobGraph
from ftlayer.topology.job_graph_generator import job_graph

POLICY = FailurePolicy(max_attempts=2, backoff="1s", jitter=0)
N = pa.schema([("n", pa.int64())])


class Backend(HeapBackend):
    """Of a checkpoint that nothing is restored from."""

    is_full = False

    def opened(self) -> None:
        pass

    def freeze(self, barrier: Barrier, now_ms: int = 0) -> Any:
        return self

    def write(self, writer: Any, cancelled: Any) -> BackendSnapshot:
        return BackendSnapshot(None, ())

    def tend(self, now_ms: int, handled: int = 0) -> None:
        pass


def odd(n: int) -> int:
    if n % 2 == 0:
        raise ValueError(f"{n} is even")
    return n


def graph_of(*, letters: bool) -> JobGraph:
    builder = GraphBuilder("shop", status="off")
    parsed = builder.source([], "n long", uid="source").map(odd, uid="parse")
    parsed.sink(print, uid="out")
    if letters:
        parsed.dead_letters().sink(print, uid="dead")
    return job_graph(builder.build(), max_parallelism=8, failures=POLICY)


def sent(graph: JobGraph, actions: list[Action]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows that were sent, by the chain they go to."""
    found: dict[str, list[dict[str, Any]]] = {}
    for action in actions:
        if isinstance(action, Send) and isinstance(action.element, Batch):
            target = graph.edges[action.channel.edge].target
            found.setdefault(target, []).extend(action.element.payload.to_pylist())
    return found


def run(graph: JobGraph) -> tuple[dict[str, list[dict[str, Any]]], Any]:
    """Give it three rows, one of which fails twice; return what was sent, and its snapshot."""
    mode = BarrierTaskMode({}, lambda *_: Backend(), lambda *_: None, lambda _: NO_SUSPECTS)  # type: ignore
    task = build_task(graph, "parse", 0, mode)
    actions = [*task.handle(TaskStart(), Now(0, 0))]
    (edge,) = graph.edges_into("parse")
    rows = Batch(pa.record_batch([[1, 2, 3]], schema=N))
    actions += task.handle(ElementCame(Channel(edge.number, 0, 0), rows), Now(5, 5))
    assert "dead" not in sent(graph, actions)
    actions += task.handle(TimeCame(), Now(1_005, 1_005))
    _, pending = mode.checkpointed["parse", 0].snapshot(Barrier(1, 0), Now(1_006, 1_006))
    return sent(graph, actions), pending.write(None, lambda: False)  # type: ignore[arg-type]


def test_letters_go_to_their_stream_once_the_last_attempt_has_failed_and_into_no_snapshot() -> None:
    found, snapshot = run(graph_of(letters=True))
    assert found["out"] == [{"n": 1}, {"n": 3}]
    (letter,) = found["dead"]
    assert json.loads(letter["record"]) == {"n": 2}
    assert (letter["stream"], letter["operator"], letter["attempts"]) == ("shop/parse", "parse", 2)
    assert letter["reason"] == "ValueError: 2 is even"
    assert snapshot.letters == ()


def test_without_such_a_stream_they_are_in_the_snapshot() -> None:
    found, snapshot = run(graph_of(letters=False))
    assert found["out"] == [{"n": 1}, {"n": 3}]
    (letter,) = snapshot.letters
    assert letter.attempts[-1].number == 2
