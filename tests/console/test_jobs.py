"""The overview and the pages of jobs: what they show of what is announced, and what is asked of a job."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from ftlayer.monitor.console.serve import create_app
from ftlayer.vertex.calls import Announced, AnnounceJob, GetJob, OrderAction, OrderAnswer, OrderState

SCRIPT = '"><script>alert(1)</script><img src=x onerror=alert(1)>'


def test_the_overview_says_how_all_is(
    visitor: Any, vertex: Any, console: Any, topology: Any, query: Any, clock: Any
) -> None:
    """Names that people gave, health in words, where to go; what has ended stands apart."""
    vertex.announce(topology())
    vertex.announce(query())
    vertex.announce(
        topology("nightly", state="failed", final=True, ended_ms=clock().wall_ms, last_failure="no such file")
    )
    console.watch.refresh()
    text = visitor.log_in("reader").get("/").text
    assert "Something is broken" in text
    assert 'href="/jobs/shop:orders"' in text
    assert "clean-orders" in text
    assert "1 job that ended" in text
    assert "no such file" in text
    assert "/var/lib/shop" in text


def test_a_topology(visitor: Any, vertex: Any, topology: Any) -> None:
    """Its graph, what limits it, its operators and slots, what happened."""
    vertex.announce(topology())
    text = visitor.log_in("reader").get("/jobs/shop:orders").text
    assert "<svg" in text
    assert "parse is what limits orders" in text
    assert "node bottleneck" in text
    assert "worker-2" in text
    assert "app.parse_line" in text
    assert "exit code -9" in text
    assert "4.10 MiB" in text
    assert "From source to sink" in text
    assert "<td>out</td>" in text
    assert "150 ms" in text
    assert "/ask/" not in text, "a reader is offered nothing"
    assert ">Stack" not in text


def test_what_failed_in_a_chain_is_shown_with_its_operator(visitor: Any, vertex: Any, topology: Any) -> None:
    vertex.announce(topology(counters={"retried/parse": 4711, "waiting/parse": 12, "dead/parse": 37}))
    text = visitor.log_in("reader").get("/jobs/shop:orders").text
    assert "12 records wait for a retry in parse of orders" in text
    assert '<td class="num">4,711</td>' in text
    assert '<td class="num high">12</td>' in text
    assert '<td class="num high">37</td>' in text


def test_a_query(visitor: Any, vertex: Any, console: Any, query: Any) -> None:
    """Its batches by phase, and the way to Spark's own page."""
    vertex.announce(query())
    console.watch.refresh()
    text = visitor.log_in("operator").get(f"/jobs/shop:{'ab' * 16}").text
    assert "clean-orders" in text
    assert 'href="http://driver-1:4040/"' in text
    assert "4,383" in text
    assert "verdict" in text
    assert "/ask/drain" in text


def test_checkpoints(visitor: Any, vertex: Any, topology: Any) -> None:
    """History by operator and subtask, failures with their reasons, what to type to go on from the latest."""
    vertex.announce(topology())
    text = visitor.log_in("reader").get("/jobs/shop:orders/checkpoints").text
    assert "slot 1 was lost" in text
    assert "env.execute(restore_from=&#39;/cp/orders/chk-41&#39;)" in text
    assert "220 ms" in text


def test_a_job_without_a_history_is_restored_from_what_it_retained(
    visitor: Any, vertex: Any, console: Any, topology: Any
) -> None:
    """As one that is gone, at whose page nobody looked while it was there; what keeps no records has no way to them."""
    job = topology()
    totals = dataclasses.replace(job.checkpoint_totals, retained=("/cp/orders/chk-17", "/cp/orders/chk-18"))
    vertex.announce(dataclasses.replace(job, mode="barrier", checkpoints=(), checkpoint_totals=totals))
    console.watch.refresh()
    vertex.is_gone = True
    console.watch.refresh()
    text = visitor.log_in("reader").get("/jobs/shop:orders/checkpoints").text
    assert "env.execute(restore_from=&#39;/cp/orders/chk-18&#39;)" in text
    assert "It is not kept" in text
    assert "/records?" not in text
    vertex.is_gone = False


def test_a_gone_job_is_shown_with_its_last_word(
    visitor: Any, vertex: Any, console: Any, topology: Any
) -> None:
    """And not with what it said when somebody looked at its page."""
    job = topology()
    vertex.announce(job)
    assert 'value="stack"' in visitor.log_in("operator").get("/jobs/shop:orders").text
    vertex.announce(dataclasses.replace(job, at_ms=job.at_ms + 400_000, line="42,120 in"))
    console.watch.refresh()
    vertex.is_gone = True
    console.watch.refresh()
    text = visitor.get("/jobs/shop:orders").text
    assert "42,120 in" in text
    assert job.line not in text
    assert "worker-2" in text
    assert 'value="stack"' not in text
    vertex.is_gone = False


def test_what_is_gone_is_shown_as_it_was(
    visitor: Any, vertex: Any, console: Any, topology: Any, query: Any
) -> None:
    """All of a job that somebody has looked at, of another what lists have; nothing is offered to be asked."""
    vertex.announce(topology())
    vertex.announce(query())
    console.watch.refresh()
    visitor.log_in("operator").get("/jobs/shop:orders")
    vertex.is_gone = True
    console.watch.refresh()
    text = visitor.get("/jobs/shop:orders").text
    assert "this is what was known last" in text
    assert "worker-2" in text
    assert "/ask/" not in text
    assert visitor.get("/jobs/shop:orders/checkpoints").status_code == 200
    text = visitor.get(f"/jobs/shop:{'ab' * 16}").text
    assert "clean-orders" in text
    assert "It is not kept" in text
    assert "No batch has come through yet" not in text
    assert "shop" in visitor.get("/").text
    assert "gives no answer" in visitor.get("/dead").text
    assert visitor.get("/audit").text.count("gives no answer") == 1
    assert visitor.get("/jobs/shop:nothing").status_code == 503
    found = visitor.get("/records")
    assert found.status_code == 200
    assert "shop was not searched" in found.text
    assert visitor.get("/records?vertex=shop").status_code == 503
    vertex.is_gone = False


def test_what_is_not_there(visitor: Any) -> None:
    """A job or a vertex that is not known is a page that says so."""
    visitor.log_in("reader")
    assert visitor.get("/jobs/shop:nothing").status_code == 404
    assert visitor.get("/jobs/elsewhere:orders").status_code == 400
    assert visitor.get("/jobs/orders").status_code == 400


def test_an_operator_asks_for_a_savepoint(visitor: Any, vertex: Any, topology: Any) -> None:
    """The form brings its order's id: sent twice, it is one order. What becomes of it is shown."""
    vertex.announce(topology())
    visitor.log_in("operator")
    form = visitor.get("/jobs/shop:orders/ask/savepoint").text
    order_id = form.split('name="id" value="', 1)[1].split('"', 1)[0]
    fields = {"action": "savepoint", "run": "run-1", "id": order_id}
    for _ in range(2):
        answer = visitor.post("/jobs/shop:orders/orders", fields)
        assert (answer.status_code, answer.headers["location"]) == (303, "/jobs/shop:orders")
    assert "Asked for: savepoint" in visitor.get("/jobs/shop:orders").text
    taken = vertex.call(AnnounceJob(topology()))
    assert isinstance(taken, Announced)
    (order,) = taken.orders
    assert (order.id, order.action, order.by) == (order_id, OrderAction.SAVEPOINT, "ada@console")
    at_ms = topology().at_ms
    vertex.call(AnnounceJob(topology(), (OrderAnswer(order_id, OrderState.TAKEN, "", at_ms),)))
    done = OrderAnswer(order_id, OrderState.DONE, "/savepoints/sp-1", at_ms)
    vertex.call(AnnounceJob(topology(), (done,)))
    vertex.clock.move(1_000)
    assert "/savepoints/sp-1" in visitor.get("/jobs/shop:orders").text


@pytest.mark.parametrize("action", ["savepoint", "stop"])
def test_a_job_without_a_savepoint_directory_says_so_before(
    visitor: Any, vertex: Any, topology: Any, action: str
) -> None:
    """And not the driver, after the order; what takes none is asked for as ever."""
    job = topology()
    totals = dataclasses.replace(job.checkpoint_totals, savepoint_directory="")
    vertex.announce(dataclasses.replace(job, checkpoint_totals=totals))
    answer = visitor.log_in("operator").get(f"/jobs/shop:orders/ask/{action}")
    assert (answer.status_code, "--directory URL" in answer.text) == (400, True)
    assert visitor.get("/jobs/shop:orders/ask/cancel").status_code == 200


def test_a_reader_asks_for_nothing(visitor: Any, vertex: Any, topology: Any) -> None:
    """Neither by form nor by the page before it; stacks are for operators too."""
    vertex.announce(topology())
    visitor.log_in("reader")
    assert visitor.get("/jobs/shop:orders/ask/cancel").status_code == 403
    for action in ("cancel", "stack"):
        answer = visitor.post("/jobs/shop:orders/orders", {"action": action, "slot": "1"})
        assert answer.status_code == 403
    assert vertex.call(GetJob("orders")).orders == ()


@pytest.mark.parametrize(
    "fields",
    [
        {"action": "explode"},
        {"action": "stack", "slot": "-1"},
        {"action": "stack", "slot": "one"},
        {"action": "savepoint", "id": "../x"},
        {"action": "drain", "timeout": "soon"},
    ],
)
def test_an_order_that_makes_no_sense(
    visitor: Any, vertex: Any, topology: Any, fields: dict[str, str]
) -> None:
    """It is refused with words, and nothing is asked."""
    vertex.announce(topology())
    assert visitor.log_in("operator").post("/jobs/shop:orders/orders", fields).status_code == 400
    assert vertex.call(GetJob("orders")).orders == ()


def test_an_action_that_a_job_does_not_have(visitor: Any, vertex: Any, query: Any) -> None:
    """A query has no savepoint."""
    vertex.announce(query())
    assert visitor.log_in("operator").get(f"/jobs/shop:{'ab' * 16}/ask/savepoint").status_code == 400


def test_a_stack_is_for_operators(visitor: Any, vertex: Any, topology: Any) -> None:
    """It has lines of the program: a reader sees that one was taken, and not what is in it."""
    vertex.announce(topology())
    visitor.log_in("operator").post("/jobs/shop:orders/orders", {"action": "stack", "slot": "1"})
    (order,) = vertex.call(AnnounceJob(topology())).orders
    at_ms = topology().at_ms
    vertex.call(AnnounceJob(topology(), (OrderAnswer(order.id, OrderState.TAKEN, "", at_ms),)))
    answer = OrderAnswer(order.id, OrderState.DONE, "in parse_line", at_ms)
    vertex.call(AnnounceJob(topology(), (answer,)))
    vertex.clock.move(1_000)
    assert "in parse_line" in visitor.get("/jobs/shop:orders").text
    assert "in parse_line" not in visitor.log_in("reader").get("/jobs/shop:orders").text


def test_nothing_that_is_announced_is_markup(
    visitor: Any, vertex: Any, console: Any, topology: Any, query: Any
) -> None:
    """Names, failures, incidents, lines, links, places: text, wherever they are shown."""
    plain = topology()
    vertex.announce(
        topology(
            name="orders",
            line=SCRIPT,
            last_failure=SCRIPT,
            host=SCRIPT,
            incidents=tuple(_with(plain.incidents[0], text=SCRIPT, kind=SCRIPT) for _ in range(1)),
            slots=tuple(_with(slot, host=SCRIPT, failure=SCRIPT, function=SCRIPT) for slot in plain.slots),
            links={SCRIPT: "javascript:alert(1)"},
        )
    )
    vertex.announce(query(name=SCRIPT))
    console.watch.refresh()
    visitor.log_in("operator")
    pages = ("/", "/jobs/shop:orders", "/jobs/shop:orders/checkpoints", f"/jobs/shop:{'ab' * 16}")
    for path in pages:
        text = visitor.get(path).text
        assert "<script>alert" not in text, path
        assert "<img src=x" not in text, path
        assert 'href="javascript' not in text, path
        assert "&lt;script&gt;alert" in text, path


def _with(value: Any, **changes: Any) -> Any:
    from dataclasses import replace

    return replace(value, **changes)


def test_checkpoints_that_cannot_be_read_are_said(make_console: Any, tmp_path: Path) -> None:
    """A directory that is missing, and one without any, are no faults of the page."""
    (tmp_path / "empty").mkdir()
    console = make_console(checkpoints=(str(tmp_path / "missing"), str(tmp_path / "empty")))
    bearer = {"authorization": f"Bearer {console.users.first.token}"}
    with TestClient(create_app(console), "http://localhost") as client:
        text = client.get("/checkpoints", headers=bearer).text
        assert str(tmp_path / "missing") in text
        missing, empty = client.get("/api/v1/checkpoints", headers=bearer).json()["items"]
    assert missing["failure"]
    assert (missing["items"], empty["items"], empty["failure"]) == ([], [], "")
    assert "There is none" in text
