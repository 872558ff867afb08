from __future__ import annotations

import math
from typing import Any

import pytest

from ftlayer.common.rules.circuit import CircuitState, CircuitStatus
from ftlayer.monitor.rules.health import (
    Health,
    Page,
    PageLink,
    driver_health,
    job_health,
    overall_health,
    together,
    vertex_health,
)
from ftlayer.monitor.rules.names import pace_of, spoken
from ftlayer.vertex.calls.jobs import CheckpointTotals, Hour, Incident, SlotDetails

OPEN = CircuitStatus(CircuitState.OPEN, 1, 100, 40, 5_000)


def totals(**fields: int) -> CheckpointTotals:
    given = dict.fromkeys(
        ("triggered", "in_progress", "completed", "failed", "restored", "failures_in_a_row"), 0
    )
    return CheckpointTotals(**given | {"tolerable_failures": -1, "interval_ms": 0} | fields)  # type: ignore[arg-type]


def test_a_job_that_runs_and_one_that_has_ended_are_ok(made: Any) -> None:
    for job in (made.job(), made.job(state="ended", final=True), made.job(state="cancelled", final=True)):
        assert job_health(made.view(), job).health is Health.OK


def test_a_job_is_judged_with_a_sentence_and_a_place(made: Any) -> None:
    now = made.now_ms
    restarts = tuple(Incident(now - ago, "restart", "slot 1 was lost") for ago in (1_000, 60_000, 299_000))
    cases: list[tuple[Any, Health, str, Page]] = [
        (
            made.job(is_silent=True, heard_ago_ms=42_000, host="w1", pid=7),
            Health.BROKEN,
            "the driver of orders (process 7 on w1) has not been heard for 42 s: if it is gone, start it again",
            Page.JOB,
        ),
        (
            made.job(state="failed", final=True, last_failure="slot 1 was lost"),
            Health.BROKEN,
            "orders has failed: slot 1 was lost",
            Page.JOB,
        ),
        (made.job(incidents=restarts), Health.BROKEN, "orders was started again 3 times in 5 min", Page.JOB),
        (
            made.job(checkpoint_totals=totals(failures_in_a_row=2, tolerable_failures=2)),
            Health.BROKEN,
            "the last 2 checkpoints of orders failed, and 2 may: with the next one the job starts again",
            Page.CHECKPOINTS,
        ),
        (
            made.job(checkpoint_totals=totals(interval_ms=10_000, last_completed_ms=now - 30_001)),
            Health.LOOK,
            "orders has completed no checkpoint for 30 s; one is due every 10 s",
            Page.CHECKPOINTS,
        ),
        (
            made.job(circuits={"parse": OPEN}),
            Health.LOOK,
            "the circuit of parse in orders is open: 40 of 100 records failed, so work pauses; "
            "the next trial is in 5 s",
            Page.JOB,
        ),
        (
            made.job(counters={"waiting/parse": 12, "waiting/score": 0, "retried/parse": 40}),
            Health.LOOK,
            "12 records wait for a retry in parse of orders",
            Page.JOB,
        ),
        (
            made.job(counters={"dead/parse": 1_000, "dead/score": 234}, died_ago_ms=299_999),
            Health.LOOK,
            "orders has made dead letters in the last 5 min, 1,234 in this run",
            Page.JOB,
        ),
        (
            made.job(counters={"waiting/parse": 1}),
            Health.LOOK,
            "1 record waits for a retry in parse of orders",
            Page.JOB,
        ),
        (
            made.job(counters={"away/orders": 42_000, "away/clicks": 29_999}),
            Health.LOOK,
            "source orders of orders has not been able to read for 42 s",
            Page.JOB,
        ),
        (
            made.job(
                counters={"away/orders": 42_000},
                last_failure="source 'orders' cannot be read on: no such queue",
            ),
            Health.LOOK,
            "source orders of orders has not been able to read for 42 s: source 'orders' cannot be read on: no such "
            "queue",
            Page.JOB,
        ),
        (
            made.job(counters={"paused/parse": 2, "paused/score": 0}),
            Health.LOOK,
            "parse of orders takes no new records in 2 subtasks: more fail than max_failing allows, or more wait than "
            "max_waiting does",
            Page.JOB,
        ),
        (
            made.job(
                slots=(SlotDetails(2, "running", busy="parse", busy_ms=61_000, function="parse (job.py:3)"),)
            ),
            Health.LOOK,
            "parse (job.py:3) has not returned for 61 s in slot 2 of orders",
            Page.JOB,
        ),
    ]
    for job, health, text, page in cases:
        judged = job_health(made.view(), job)
        assert (judged.health, [finding.text for finding in judged.findings]) == (health, [text])
        place = judged.findings[0].place
        assert (place.page, place.vertex, place.owner) == (page, "local", "orders")


def test_what_is_near_a_bound_is_ok(made: Any) -> None:
    now = made.now_ms
    restarts = tuple(Incident(now - ago, "restart", "") for ago in (1_000, 60_000, 300_000))
    for job in (
        made.job(incidents=restarts),
        made.job(incidents=tuple(Incident(now, "loss", "") for _ in range(9))),
        made.job(checkpoint_totals=totals(failures_in_a_row=9)),
        made.job(checkpoint_totals=totals(tolerable_failures=0)),
        made.job(checkpoint_totals=totals(interval_ms=10_000, last_completed_ms=now - 30_000)),
        made.job(circuits={"parse": CircuitStatus()}),
        made.job(counters={"dead/parse": 9}, died_ago_ms=300_000),
        made.job(counters={"dead/parse": 9}),
        made.job(slots=(SlotDetails(2, "running", busy_ms=59_999),)),
    ):
        assert job_health(made.view(), job).findings == ()


def test_a_watermark_that_falls_behind_for_five_minutes(made: Any) -> None:
    def judged(*lags: float) -> list[str]:
        hour = Hour(60_000, made.now_ms, {"watermark_lag_seconds": lags})
        return [finding.text for finding in job_health(made.view(), made.job(), hour).findings]

    said = ["the watermark of orders falls behind: 5 min now, 60 s 5 min ago"]
    assert judged(0, 60, 61, 100, 200, 300) == said
    assert judged(60, 61, 100, 99, 300) == []
    assert judged(300, 300, 300, 300, 300) == []
    assert judged(61, 100, 300) == []
    assert judged(math.nan, 60, 61, 100, 300) == []
    assert judged(1, 2, 3, 4, 5) == []
    teeth = [base + tooth for base in (60, 61, 100, 200, 300) for tooth in (5, 0, 9)]
    hour = Hour(20_000, made.now_ms, {"watermark_lag_seconds": tuple(teeth)})
    assert [finding.text for finding in job_health(made.view(), made.job(), hour).findings] == said


def test_a_vertex_is_judged_with_a_sentence_and_a_place(made: Any) -> None:
    now = made.now_ms
    cases: list[tuple[Any, Health, str, PageLink]] = [
        (
            made.view(is_up=False, as_of_ms=0, failure="connection refused"),
            Health.BROKEN,
            "vertex local gives no answer: connection refused",
            PageLink(Page.VERTEX, "local"),
        ),
        (
            made.view(is_up=False, as_of_ms=now - 30_000, failure="gone"),
            Health.BROKEN,
            "vertex local was heard 30 s ago: gone",
            PageLink(Page.VERTEX, "local"),
        ),
        (
            made.view(is_up=False, as_of_ms=now - 29_000, failure="gone"),
            Health.LOOK,
            "vertex local was heard 29 s ago: gone",
            PageLink(Page.VERTEX, "local"),
        ),
        (
            made.view(is_up=False, is_gone=True, stats={"dead_letters": 5505.0}),
            Health.LOOK,
            "the program of vertex local has ended and left 5,505 dead letters in its store: to change them start it "
            "again, or ftlayer serve the directory",
            PageLink(Page.VERTEX, "local"),
        ),
        (
            made.view(stats={"used_share": 0.9}),
            Health.BROKEN,
            "the store of local is 90% full, and takes nothing new: purge dead letters, or start it with a "
            "larger store",
            PageLink(Page.VERTEX, "local"),
        ),
        (
            made.view(stats={"used_share": 0.7}),
            Health.LOOK,
            "the store of local is 70% full; from 90% on it takes nothing new",
            PageLink(Page.VERTEX, "local"),
        ),
        (
            made.view(groups=(made.group(),), died_lately=12, streams=(made.stream(),)),
            Health.LOOK,
            "12 records of orders became dead letters in the last 5 min, all in parse",
            PageLink(Page.DEAD, "local", stream="orders/lines", operator="parse"),
        ),
        (
            made.view(groups=(made.group(), made.group("clean/in", "trim"))),
            Health.LOOK,
            "24 records became dead letters in the last 5 min, in parse and trim",
            PageLink(Page.DEAD, "local"),
        ),
        (
            made.view(streams=(made.stream(pending=90, max_pending=100),)),
            Health.LOOK,
            "orders/lines has 90 records pending of 100 that may be: its source has to wait",
            PageLink(Page.RECORDS, "local", "orders", "orders/lines"),
        ),
        (
            made.view(circuits={"clean": {"": OPEN}}),
            Health.LOOK,
            "the circuit of clean is open: 40 of 100 records failed, so work pauses; the next trial is in 5 s",
            PageLink(Page.JOB, "local", "clean"),
        ),
        (
            made.view(indexed=0.34),
            Health.LOOK,
            "the dead letters of local are being counted anew: 34% are",
            PageLink(Page.DEAD, "local"),
        ),
    ]
    for view, health, text, place in cases:
        (finding,) = vertex_health(view).findings
        assert (finding.health, finding.text, finding.place) == (health, text, place)
    assert vertex_health(made.view(is_up=False, is_gone=True)).health is Health.OK
    old = made.group(last_seen_ms=now - 300_000)
    assert vertex_health(made.view(groups=(old,))).health is Health.OK


def test_a_job_is_judged_by_its_records_where_its_vertex_is_known(made: Any) -> None:
    streams = (made.stream(), made.stream("clean/in"))
    view = made.view(groups=(made.group(),), streams=streams, died_lately=12)
    assert job_health(made.view(), made.job()).health is Health.OK
    (finding,) = job_health(view, made.job()).findings
    assert finding.text == "12 records of orders became dead letters in the last 5 min, all in parse"
    assert job_health(view, made.job("clean")).health is Health.OK


def test_how_many_letters_came_lately_is_said_as_far_as_it_is_known(made: Any) -> None:
    old = made.now_ms - 3_600_000
    cases = [
        ({"groups": (made.group(count=1),)}, "1 record"),
        ({"groups": (made.group(), made.group(operator="trim", count=3))}, "15 records"),
        # How many of a group's letters came lately is not known where it began before.
        ({"groups": (made.group(first_seen_ms=old), made.group(operator="trim"))}, "at least 13 records"),
        ({"groups": (made.group(first_seen_ms=old),), "died_lately": 7}, "7 records"),
    ]
    for fields, said in cases:
        (finding,) = vertex_health(made.view(**fields)).findings
        assert finding.text.startswith(f"{said} became dead letters in the last 5 min"), finding.text


def test_what_a_vertex_counted_is_a_jobs_if_no_other_job_had_any(made: Any) -> None:
    old = made.now_ms - 3_600_000
    streams = (made.stream(), made.stream("clean/in"))
    own, others = made.group(first_seen_ms=old), made.group("clean/in")
    view = made.view(groups=(own, others), streams=streams, died_lately=12)
    (finding,) = job_health(view, made.job()).findings
    assert finding.text.startswith("at least 1 record of orders")


def test_a_job_whose_end_was_asked_for_and_not_heard_is_not_to_be_started_again(made: Any) -> None:
    gone = made.view(is_up=False, is_gone=True, as_of_ms=made.now_ms - 60_000)
    for state in ("draining", "ending", "stopping"):
        judgement = job_health(gone, made.job(pid=7, host="w1", state=state))
        assert judgement.health is Health.OK
        (finding,) = judgement.findings
        assert finding.text.endswith(
            f"was {state} when it was heard last, 60 s ago, and its program (process 7 on w1) has ended"
        )


def test_no_checkpoint_is_due_before_a_job_runs(made: Any) -> None:
    now, due = made.now_ms, totals(interval_ms=1_000)
    starting = made.job(state="starting", since_ms=now - 60_000, checkpoint_totals=due)
    assert job_health(made.view(), starting).health is Health.OK
    began = (Incident(now - 2_000, "state", "starting → running"),)
    just_runs = made.job(since_ms=now - 60_000, checkpoint_totals=due, incidents=began)
    assert job_health(made.view(), just_runs).health is Health.OK
    long_runs = made.job(
        since_ms=now - 60_000, checkpoint_totals=due, incidents=(Incident(now - 4_000, "state", "x"),)
    )
    assert (
        job_health(made.view(), long_runs)
        .findings[0]
        .text.startswith("orders has completed no checkpoint for 4 s")
    )


def test_a_job_that_said_no_last_word_is_not_ok(made: Any) -> None:
    now = made.now_ms
    job, ended = made.job(pid=7, host="w1"), made.job(state="ended", final=True)
    gone = made.view(is_up=False, is_gone=True, as_of_ms=now - 60_000, jobs=(job, ended))
    away = made.view(is_up=False, as_of_ms=now - 10_000, failure="refused", jobs=(job, ended))
    lost = made.view(is_up=False, as_of_ms=now - 30_000, failure="refused", jobs=(job, ended))
    said = [
        (
            gone,
            Health.LOOK,
            "orders was running when it was heard last, 60 s ago, and its program (process 7 on w1) has ended: start "
            "it again if it is to go on",
        ),
        (away, Health.LOOK, "orders was heard 10 s ago: its vertex gives no answer"),
        (lost, Health.BROKEN, "orders was heard 30 s ago: its vertex gives no answer"),
    ]
    for view, health, text in said:
        (finding,) = job_health(view, job).findings
        assert (finding.health, finding.text) == (health, text)
        assert driver_health(view, ended).health is Health.OK
    rated = made.job(rates={"records_in": 7.0})
    assert [pace_of(view, rated) for view in (made.view(), gone, away)] == [7.0, None, None]
    assert pace_of(made.view(), made.job(rates={"records_in": 7.0}, final=True)) is None
    # A vertex that gives no answer is told once, whatever jobs it has.
    assert [len(overall_health([view]).findings) for view in (gone, away)] == [1, 1]


def test_all_of_it_is_as_its_worst_part_which_is_said_first(made: Any) -> None:
    look = vertex_health(made.view(indexed=0.5))
    broken = job_health(made.view(), made.job(state="failed", final=True))
    judged = together([look, broken, job_health(made.view(), made.job())])
    assert judged.health is Health.BROKEN
    assert [finding.health for finding in judged.findings] == [Health.BROKEN, Health.LOOK]
    assert together([]).health is Health.OK


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        *((0, "0 s"), (1, "1 ms"), (999, "999 ms"), (1_000, "1 s"), (119_999, "119 s"), (120_000, "2 min")),
        *((7_200_000, "2 h"), (12_000_000, "3 h 20 min"), (172_800_000, "2 days"), (-5, "0 s")),
    ],
)
def test_durations_as_people_say_them(milliseconds: int, text: str) -> None:
    assert spoken(milliseconds) == text
