"""What is kept of each failed attempt: time, place, reason and traceback, wherever the record is by then."""

from __future__ import annotations

from typing import Any

import pytest

from ftlayer.vertex import calls
from ftlayer.vertex.rules import streams
from ftlayer.vertex.store import dead_index as failed
from ftlayer.vertex.store.dead_index import FailedTable

FRAMES = (
    "Traceback (most recent call last):\n"
    + '  File "job.py", line {line}, in parse\n    return int(text)\n' * 8
)


def fail(vertex: Any, root: int, attempt: int, *, fatal: bool = False, line: int = 3) -> int:
    """Fail a record; return when."""
    reason = f"ValueError: no {attempt}"
    traceback = f"{FRAMES.format(line=line)}{reason}\n"
    failure = calls.Failure(root, reason, "parse", traceback, fatal, place=f"slot {attempt} on w1, pid 4711")
    vertex.call(calls.Fail((failure,), vertex.layer.incarnation))
    return int(vertex.wall)


def expected(number: int, at_ms: int, *, line: int = 3) -> calls.Attempt:
    reason = f"ValueError: no {number}"
    place = f"slot {number} on w1, pid 4711"
    return calls.Attempt(number, at_ms, reason, "parse", place, f"{FRAMES.format(line=line)}{reason}\n")


def again(vertex: Any) -> int:
    """Let the record that waits be tried again; return its root."""
    vertex.advance(200)
    ((root, *_),) = vertex.take()
    return int(root)


@pytest.mark.parametrize("restarts", [False, True])
def test_every_attempt_is_told_wherever_the_record_is(vertex: Any, restarts: bool) -> None:
    def told(state: str) -> tuple[calls.Attempt, ...]:
        if restarts:
            vertex.restart()
        (info,) = vertex.list(state)
        assert (info.reason, info.operator) == (info.history[-1].reason, "parse")
        return info.history

    vertex.open(max_attempts=None)
    vertex.persist([1])
    first = fail(vertex, 1, 1)
    assert told("waiting") == (expected(1, first),)
    root = again(vertex)
    # A restart makes due what was in flight.
    assert told("waiting" if restarts else "pending") == (expected(1, first),)
    if restarts:
        root = again(vertex)
    second = fail(vertex, root, 2, line=4)
    assert told("waiting") == (expected(1, first), expected(2, second, line=4))
    third = fail(vertex, again(vertex), 3, fatal=True)
    assert told("dead") == (expected(1, first), expected(2, second, line=4), expected(3, third))
    vertex.call(calls.Requeue((vertex.list("dead")[0].key,)))
    assert len(told("waiting")) == 3


def test_of_many_attempts_the_first_and_the_last_are_kept(vertex: Any) -> None:
    vertex.open(max_attempts=None)
    vertex.persist([1])
    root = 1
    for number in range(1, 31):
        fail(vertex, root, number, line=number)
        (info,) = vertex.list("waiting")
        whole = [each.number for each in info.history if each.traceback != streams.NOT_KEPT]
        assert whole == [1, *range(max(2, number - 2), number + 1)][: max(number, 1)]
        root = again(vertex)
    assert [each.number for each in info.history] == [1, *range(16, 31)]
    assert info.history[-1].traceback.endswith("ValueError: no 30\n")


def test_a_letter_of_the_longest_attempts_is_bounded(vertex: Any, kit: Any) -> None:
    vertex.open(max_attempts=None)
    vertex.persist([1])
    root = 1
    words = streams.MAX_REASON + streams.MAX_OPERATOR + streams.MAX_PLACE + 100
    bound = streams.MAX_HISTORY * words + streams.MAX_TRACEBACKS * streams.MAX_TRACEBACK + 1_000
    for number in range(40):
        long = f"{number:05}" * 4_000
        failure = calls.Failure(root, long, long, f"{long}\n{long}", place=long)
        vertex.call(calls.Fail((failure,), vertex.layer.incarnation))
        with vertex.store.read() as txn:
            ((_, value),) = txn.scan(FailedTable.WAITING)
            letter = bytes(value)
        texts = sum(len(text) for key, text in vertex.stored("meta").items() if key.startswith(b"text/"))
        assert failed.decode(letter).history[-1].place
        assert len(letter) + texts < bound
        root = again(vertex)


def test_a_sealed_failure_keeps_its_place(vertex: Any, kit: Any) -> None:
    vertex.call(calls.OpenQuery("q", "run", ("q/files",)))
    failures = tuple(
        calls.Failure(root, "no", "op", "trace", fatal=True, place=place)
        for root, place in ((1, ""), (2, "Spark stage 3, partition 0, attempt 1 on w1, pid 5"))
    )
    sealed = calls.SealedRows("q/files", kit.payload(["a", "b"]), kit.u64([1, 2]), failures)
    vertex.call(calls.BeginBatch("q", 1, 0))
    vertex.call(calls.Seal("q", 1, 0, {}, (sealed,)))
    assert vertex.call(calls.BeginBatch("q", 1, 0)).failed[0].failures == failures
    vertex.call(calls.Commit("q", 1, 0))
    assert [record.history[0].place for record in vertex.list("dead")] == [each.place for each in failures]
