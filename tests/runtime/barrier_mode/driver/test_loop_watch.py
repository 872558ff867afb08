"""What heads of loops are told of records that wait in other slots."""

from __future__ import annotations

from ftlayer import FailurePolicy
from ftlayer.config import FTStatus
from ftlayer.runtime.barrier_mode.driver.rules.job_rules import LoopWatch
from ftlayer.runtime.protocol.messages import LoopWaits
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.job_graph_generator import job_graph

WAITS, WAITS_NO_MORE = LoopWaits("head", True), LoopWaits("head", False)


def watch() -> LoopWatch:
    """source → head (2) → body → tail; before (1) is in front of the loop, out behind it."""
    env = GraphBuilder("loop", parallelism=2, status=FTStatus.OFF)
    before = env.source([], "n bigint", uid="source").map(lambda n: n, uid="before", parallelism=1)
    loop = before.rebalance().iterate("100ms", uid="head")
    body = loop.rebalance().map(lambda n: n - 1, uid="body")
    loop.close_with(body.rebalance().filter(lambda n: n > 0, uid="tail"))
    body.rebalance().sink(print, uid="out")
    return LoopWatch(job_graph(env.build(), max_parallelism=8, failures=FailurePolicy()))


def test_heads_hear_that_records_wait_in_their_loop_and_that_they_do_no_more() -> None:
    it = watch()
    assert it.waits_in(["before", "out"]) == []
    for chains in (["body"], ["tail", "out"], ["head"]):
        assert it.waits_in(chains) == [(0, WAITS), (1, WAITS)]
        assert it.waits_in([*chains, "before"]) == []
        assert it.waits_in(["before"]) == [(0, WAITS_NO_MORE), (1, WAITS_NO_MORE)]
    assert it.waits_in([]) == []


def test_tasks_that_begin_again_are_told_again() -> None:
    it = watch()
    it.waits_in(["body"])
    it.began([1])
    assert it.waits_in(["body"]) == [(1, WAITS)]
    it.began([0, 1])
    assert it.waits_in([]) == []
