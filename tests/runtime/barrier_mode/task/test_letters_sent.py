"""A chain whose dead letters are records of the topology sends them on, and keeps none."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from ftlayer import FailurePolicy
from ftlayer.checkpoint.barrier import Barrier
from ftlayer.common.clock import Now
from ftlayer.runtime.barrier_mode.driver.letters import target_of
from ftlayer.runtime.barrier_mode.task.mode import BarrierTaskMode, shown
from ftlayer.runtime.protocol.messages import Batch
from ftlayer.runtime.task.actions import Action, ElementCame, Send, SourceRows, TaskStart, TimeCame
from ftlayer.runtime.task.build import build_task
from ftlayer.runtime.task.contract import NO_SUSPECTS
from ftlayer.state.contract import BackendSnapshot
from ftlayer.state.heap import HeapBackend
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.job_graph import Channel, JobGraph
from ftlayer.topology.job_graph_generator import job_graph
from ftlayer.vertex.calls import SourcePosition

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


def refusing(n: int, channels: int) -> int:
    if n == 4:
        raise KeyError(n)
    return n % channels


@pytest.mark.parametrize("letters", [False, True])
def test_what_a_source_cannot_send_is_a_letter_with_the_row_as_it_came(letters: bool) -> None:
    """A row that does not fit its schema, and one for which its partitioner raises; neither goes back into it."""
    builder = GraphBuilder("shop", status="off")
    source = builder.source([], "n long", uid="source")
    source.partition_custom(refusing, "n").map(odd, uid="parse", parallelism=2).sink(print, uid="out")
    if letters:
        source.dead_letters().sink(print, uid="dead")
    graph = job_graph(builder.build(), max_parallelism=8, failures=POLICY)
    mode = BarrierTaskMode({}, lambda *_: Backend(), lambda *_: None, lambda _: NO_SUSPECTS, "here")  # type: ignore
    task = build_task(graph, "source", 0, mode)
    task.handle(TaskStart(), Now(0, 0))
    raw = pa.record_batch({"row": ["'x'"]})
    where = "p0", 0
    beside = SourceRows(*where, 9, raw, None, misfit="it was beside")
    actions = task.handle(
        SourceRows(*where, 0, pa.record_batch([[3, 4, 5]], schema=N), SourcePosition("p0", None, b"1")),
        Now(5, 5),
    )
    for rows in (
        SourceRows(*where, 3, raw, SourcePosition("p0", b"1", b"2"), misfit="it is no number"),
        SourceRows(
            *where, 4, pa.record_batch([[]], schema=N), SourcePosition("p0", b"2", b"3"), aside=(beside,)
        ),
    ):
        actions += task.handle(rows, Now(6, 6))
    _, pending = mode.checkpointed["source", 0].snapshot(Barrier(1, 0), Now(7, 7))
    snapshot = pending.write(None, lambda: False)  # type: ignore[arg-type]
    found = sent(graph, actions)
    assert found["parse"] == [{"n": 3}, {"n": 5}] or found["parse"] == [{"n": 5}, {"n": 3}]
    assert snapshot.positions == {"p0": b"3"}
    assert task.failures.dead == 3  # type: ignore[attr-defined]
    said = ["KeyError: 4", "it is no number", "it was beside"]
    records = [{"n": 4}, {"row": "'x'"}, {"row": "'x'"}]
    if letters:
        assert [letter["reason"] for letter in found["dead"]] == said
        assert [json.loads(letter["record"]) for letter in found["dead"]] == records
        assert snapshot.letters == ()
        return
    shown_ones = [shown(letter, "shop") for letter in snapshot.letters]
    assert [letter.reason for letter in shown_ones] == said
    assert [letter.record for letter in shown_ones] == records
    assert {(letter.stream, letter.operator) for letter in shown_ones} == {("shop/source", "source")}
    assert {letter.checkpoint for letter in snapshot.letters} == {1}
    assert "is a source" in str(target_of(snapshot.letters[0], graph))
    mode.checkpointed["source", 0].completed(1)
    _, pending = mode.checkpointed["source", 0].snapshot(Barrier(2, 0), Now(8, 8))
    assert pending.write(None, lambda: False).letters == ()  # type: ignore[arg-type]


def test_without_such_a_stream_they_are_in_the_snapshot() -> None:
    found, snapshot = run(graph_of(letters=False))
    assert found["out"] == [{"n": 1}, {"n": 3}]
    (letter,) = snapshot.letters
    assert letter.attempts[-1].number == 2
