from __future__ import annotations

from typing import Any

from ftlayer.monitor.rules.health import bottleneck
from ftlayer.vertex.calls.jobs import JobPlan, PlanEdge, PlanNode, SubtaskDetails


def plan(*edges: tuple[str, str] | tuple[str, str, bool]) -> JobPlan:
    uids = dict.fromkeys(uid for edge in edges for uid in edge[:2])
    return JobPlan(
        tuple(PlanNode(uid, (uid,), 1) for uid in uids),
        tuple(PlanEdge(edge[0], edge[1], feedback=len(edge) == 3) for edge in edges),
    )


def found(made: Any, shape: JobPlan, **shares: tuple[float, float]) -> str:
    subtasks = tuple(
        SubtaskDetails(uid, place, busy=busy, back_pressured=waiting)
        for place, (uid, (busy, waiting)) in enumerate(shares.items())
    )
    what = bottleneck(made.job(plan=shape, subtasks=subtasks).job)
    return "" if what is None else what.text


LINE = plan(("lines", "parse"), ("parse", "count"), ("count", "out"))


def test_the_chain_that_is_busy_behind_one_that_waits(made: Any) -> None:
    text = found(made, LINE, lines=(0.1, 0.88), parse=(0.97, 0.0), count=(0.2, 0.0), out=(0.1, 0.0))
    assert text == "parse is what limits orders: busy 97% in slot 1; lines before it waits 88% of its time"


def test_nothing_limits_a_job_in_which_nothing_waits(made: Any) -> None:
    assert found(made, LINE, lines=(0.9, 0.0), parse=(0.97, 0.4)) == ""
    assert found(made, LINE) == ""
    assert bottleneck(made.job().job) is None


def test_the_last_of_a_row_that_waits_is_to_blame(made: Any) -> None:
    text = found(made, LINE, lines=(0.1, 0.9), parse=(0.9, 0.8), count=(0.5, 0.7), out=(0.99, 0.0))
    assert text.startswith("out is what limits orders: busy 99% in slot 3; count before it")


def test_one_that_is_not_busy_waits_for_something_outside(made: Any) -> None:
    text = found(made, LINE, lines=(0.1, 0.9), parse=(0.1, 0.0))
    assert "busy 10% in slot 1, so it waits for something outside; lines" in text


def test_a_loop_is_walked_once(made: Any) -> None:
    shape = plan(("in", "step"), ("step", "in", True), ("step", "out"))
    assert found(made, shape, **{"in": (0.1, 0.9), "step": (0.9, 0.0)}).startswith("step is what limits")
