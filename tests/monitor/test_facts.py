from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any, NoReturn
from unittest.mock import Mock

import pyarrow as pa
import pytest

from ftlayer import FailException, PermanentFailure, sources
from ftlayer.common.rules.circuit import CircuitState, CircuitStatus
from ftlayer.connectors import amqp, mqtt, redis
from ftlayer.connectors.files.formats import POSITION
from ftlayer.connectors.kafka import source as kafka
from ftlayer.connectors.nats import source as nats
from ftlayer.connectors.postgres.catalog import schema_of_changes
from ftlayer.errors import ResultRowError
from ftlayer.functions.failures import failure_of
from ftlayer.monitor.rules import facts
from ftlayer.monitor.rules.facts import masked_failure, masked_reason, masked_traceback
from ftlayer.monitor.rules.names import JobNames
from ftlayer.runtime.driver.rules.events import conviction
from ftlayer.sources import PolledJsonSource, SseSource, TailSource, WebhookSource
from ftlayer.spark.stages.known import run_isolated
from ftlayer.vertex.calls import Attempt, RecordInfo
from ftlayer.vertex.calls.jobs import (
    AuditEntry,
    BatchDetails,
    CheckpointDetails,
    CheckpointTotals,
    EdgeDetails,
    HistogramDetails,
    Hour,
    Incident,
    JobOrder,
    JobPlan,
    OrderAction,
    OrderAnswer,
    OrderRecord,
    OrderState,
    PlanEdge,
    PlanNode,
    SlotDetails,
    SubtaskCheckpointDetails,
    SubtaskDetails,
)

SECRET = "4711-secret"
WORDS = f"ValueError: no number: '{SECRET}'"
TRACEBACK = f"""Traceback (most recent call last):
  File "job.py", line 3, in parse
    return float(text)  # {SECRET}
{WORDS}
  {SECRET}
"""


def a_full_job(made: Any) -> Any:
    part = SubtaskCheckpointDetails("parse", 0, 5, 6, 7.5, 8.5, 100, 200, 300, False)
    other = SubtaskCheckpointDetails("parse", 1, 50, 6, 1.0, 80.0, 10, 20, 30, True)
    order = JobOrder("id-1", "orders", "run-1", OrderAction.SAVEPOINT, "me", made.now_ms, "/sp")
    return made.job(
        plan=JobPlan(
            (PlanNode("lines", ("lines",), 1), PlanNode("parse", ("parse", "trim"), 2)),
            (PlanEdge("lines", "parse"),),
        ),
        line=f"running, {WORDS}",
        last_failure=WORDS,
        slots=(SlotDetails(0, "running", "w1", 7, 20, failure=f"lost: {WORDS}"),),
        subtasks=(
            SubtaskDetails("parse", 0, 10, 9, 1.5, 1.0, 0.5, 0.1, made.now_ms - 5_000),
            SubtaskDetails("parse", 1, 20, 19, 2.5, 2.0, 0.75, 0.2, made.now_ms - 9_000, 3),
        ),
        edges=(EdgeDetails("lines", "parse", 0, 100, 2), EdgeDetails("lines", "parse", 1, 50, 1)),
        histograms={"register_seconds|lines": HistogramDetails((0.1, 1.0), (1, 2, 3), 4.5)},
        incidents=(Incident(made.now_ms, "loss", f"slot 0 was lost: {WORDS}", 0),),
        checkpoint_totals=CheckpointTotals(3, 0, 2, 1, 0, 0, -1, 10_000, "s3://bucket/checkpoints"),
        checkpoints=(
            CheckpointDetails(
                3, "checkpoint", "completed", False, made.now_ms, made.now_ms, 90, 2, (part, other)
            ),
        ),
        circuits={"parse": CircuitStatus(CircuitState.OPEN, 1, 9, 8, 500)},
        batches=(BatchDetails(4, made.now_ms, 100, 98, 2, 0, 1_500.0, {"run": 1_000.0}),),
        orders=(OrderRecord(order, OrderAnswer("id-1", OrderState.FAILED, WORDS, made.now_ms)),),
    )


def a_record(made: Any) -> RecordInfo:
    return RecordInfo(
        key=b"\x00\x01",
        stream="orders/lines",
        state="dead",
        root=0xAB,
        origin=1 << 63,
        attempt=2,
        not_before_ms=0,
        history=(
            Attempt(1, made.now_ms - 1_000, WORDS, "parse", "slot 1 on a, pid 1", TRACEBACK),
            Attempt(2, made.now_ms, WORDS, "parse", "slot 2 on b, pid 2", TRACEBACK),
        ),
        payload=pa.record_batch(
            {"price": [SECRET], "tags": [[SECRET]], "none": pa.nulls(1, pa.string()), "n": [4711]}
        ),
    )


class OrderError(ValueError):
    pass


class Spoilt(PermanentFailure):
    pass


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("k"), "dead_on names KeyError, or retry_on does not"),
        (OrderError("no price\nof it"), "dead_on names OrderError, or retry_on does not"),
        (ResultRowError("column 'n'"), "the same function would fail alike"),
        (PermanentFailure("order: no price"), "it is a PermanentFailure"),
        (PermanentFailure(), "it is a PermanentFailure"),
        (Spoilt("order: no price"), "or it is a PermanentFailure"),
        (FailException("no price"), "or it is a PermanentFailure"),
    ],
)
def test_a_letter_says_why_its_attempts_were_not_used_up(made: Any, error: Exception, said: str) -> None:
    try:
        raise error
    except type(error) as raised:
        failure = failure_of(0, "parse", raised)
    attempt = Attempt(1, made.now_ms, failure.reason, "parse", "", failure.traceback)
    letter = replace(a_record(made), attempt=1, max_attempts=3, history=(attempt,))
    shown = facts.record_facts("local", letter, JobNames([]))
    assert (shown["attempt"], shown["max_attempts"]) == (1, 3)
    assert shown["final"].endswith(said)
    for other in (
        replace(letter, attempt=3),
        replace(letter, max_attempts=None),
        replace(letter, state="waiting"),
    ):
        assert facts.record_facts("local", other, JobNames([]))["final"] is None


def test_of_a_letter_that_no_exception_made_it_says_what_did(made: Any) -> None:
    def final(reason: str, traceback: str = "") -> str:
        attempt = Attempt(1, made.now_ms, reason, "parse", "", traceback)
        return facts.final_of(replace(a_record(made), attempt=1, max_attempts=3, history=(attempt,)))

    def killing(batch: pa.RecordBatch) -> NoReturn:
        os._exit(7)

    (killer,) = run_isolated(pa.record_batch({"n": [1]}), killing).failures
    slot = Mock(number=1, loss="slot 1: its process has ended", loss_in="parse", death=None)
    other = conviction(1, slot)
    assert final(killer.reason, killer.traceback).endswith(": it ended its process")
    assert final(other.reason, other.traceback).endswith(": it ended its process")
    assert final("column 'price': text").endswith(": its row does not fit")


def everything(made: Any, *, mask: bool) -> Any:
    view = made.view(
        jobs=(a_full_job(made), made.job("failed", state="failed", final=True, last_failure=WORDS)),
        streams=(made.stream(oldest_ms=made.now_ms - 41_200),),
        groups=(made.group(example=WORDS, kind=f"ValueError: no number: {SECRET}"),),
        stats={"used_share": 0.25, "dead_letters": 12.0, "pending": 3.0},
    )
    names = JobNames([view])
    found = {
        "overview": facts.overview_facts([view], names, mask=mask),
        "job": facts.job_facts(view, view.jobs[0], names, mask=mask),
        "record": facts.record_facts("local", a_record(made), names, mask=mask),
        "group": facts.group_facts("local", view.groups[0], names, mask=mask),
        "stream": facts.stream_facts("local", view.streams[0], names, made.now_ms),
        "audit": facts.audit_facts(AuditEntry(made.now_ms, "me", "requeue", "orders", 3, "done")),
        "hour": facts.hour_facts(Hour(10_000, made.now_ms, {"in": (1.0, float("nan"), 2.5)})),
    }
    return json.loads(json.dumps(found, allow_nan=False))


def test_facts_are_plain_and_in_seconds(made: Any) -> None:
    shown = everything(made, mask=False)
    overview, job, record = shown["overview"], shown["job"], shown["record"]
    assert overview["health"] == "broken"
    assert overview["reasons"][0]["text"] == f"failed has failed: {WORDS}"
    (vertex,) = overview["vertices"]
    assert (vertex["pending"], vertex["dead"], vertex["oldest_seconds"]) == (3, 12, 41.2)
    assert vertex["as_of"] == "2027-01-15T08:00:00.000Z"
    assert [each["job"] for each in overview["jobs"]] == ["local:orders", "local:failed"]
    lines, parse = job["operators"]
    assert (lines["uid"], lines["parallelism"]) == ("lines", 0)
    assert (parse["records_in"], parse["in_per_second"], parse["busy_ratio"]) == (30, 4.0, 0.75)
    assert (parse["watermark_lag_seconds"], parse["late"]) == (9.0, 3)
    assert job["edges"] == [{"source": "lines", "target": "parse", "queued_bytes": 150, "queued_rows": 3}]
    checkpoint = job["checkpoints"]["items"][0]
    assert (checkpoint["start_delay_seconds"], checkpoint["written_bytes"]) == (0.05, 110)
    assert (checkpoint["unaligned"], checkpoint["operators"][0]["async_seconds"]) == (True, 0.08)
    assert job["checkpoints"]["tolerable_failures"] is None
    assert job["batches"][0]["phases_seconds"] == {"run": 1.0}
    assert record["origin"] == "8000000000000000"
    assert record["record"] == {"price": SECRET, "tags": [SECRET], "none": None, "n": 4711}
    assert record["types"]["tags"] == "list<item: string>"
    assert [each["traceback"] for each in record["attempts"]] == [TRACEBACK, TRACEBACK]
    assert shown["hour"]["series"] == {"in": [1, None, 2.5]}


T = pa.scalar(1_790_000_000_000_000, pa.timestamp("us", "UTC"))


def test_every_ready_made_source_says_where_a_record_came_from(made: Any) -> None:
    """By columns of its rows, whatever else of them is there; what is masked is not told."""
    rows: dict[str, tuple[pa.Schema, dict[str, Any], str]] = {
        "AmqpSource": (
            amqp.SCHEMA,
            {"routing_key": "new", "message_id": "m1", "timestamp": T.as_py()},
            "routing key new, message m1",
        ),
        "FilesSource": (pa.schema(POSITION), {"path": "/a.csv", "offset": 17}, "/a.csv, offset 17"),
        "KafkaSource": (
            kafka.SCHEMA,
            {"topic": "orders", "partition": 3, "offset": 17},
            "topic orders, partition 3, offset 17",
        ),
        "MqttSource": (
            mqtt.SCHEMA,
            {"topic": "room/1", "qos": 1, "received": T.as_py()},
            "topic room/1, received 2026-09-21T14:13:20Z",
        ),
        "NatsSource": (
            nats.SCHEMA,
            {"subject": "orders.new", "sequence": 17},
            "subject orders.new, message 17",
        ),
        "PolledJsonSource": (PolledJsonSource("http://a/b", id="n").schema, {"id": "17"}, "message 17"),
        "PostgresChangesSource": (
            schema_of_changes([pa.field("price", pa.int64())]),
            {"_lsn": (1 << 32) + 0x16B3748, "_sequence": 3, "_transaction": 571},
            "LSN 1/16B3748, change 3 of transaction 571",
        ),
        "RedisSource": (redis.schema_of(()), {"id": "1526919030474-0"}, "message 1526919030474-0"),
        "SseSource": (SseSource("http://a/b").schema, {"id": "17"}, "message 17"),
        "TailSource": (
            TailSource("/var/log/a.log").schema,
            {"path": "/var/log/a.log", "offset": 9},
            "/var/log/a.log, offset 9",
        ),
        "WebhookSource": (
            WebhookSource("127.0.0.1:0").schema,
            {"id": "r1", "path": "/in"},
            "request r1 to /in",
        ),
    }
    named = {name for name in sources.__all__ if name.endswith("Source") and not name.endswith("DataSource")}
    # A row of a table says it by the table's own key.
    assert set(rows) == named - {"PostgresTableSource"}
    record = a_record(made)
    for schema, values, said in rows.values():
        payload = pa.RecordBatch.from_pylist([values], schema=schema)
        found = replace(record, payload=payload)
        assert facts.came_from(found) == said
        assert facts.came_from(found, mask=True) == ""
        assert facts.record_facts("local", found, JobNames([]))["came_from"] == said
        nothing = pa.RecordBatch.from_pylist(
            [{}], schema=pa.schema([field.with_nullable(True) for field in schema])
        )
        assert facts.came_from(replace(record, payload=nothing)) == ""
    read = Attempt(1, 1, "", "", "Spark stage 3 on a, pid 1; read as row 7 of partition 2 of batch 40")
    assert (
        facts.came_from(replace(record, history=(read, *record.history)))
        == "row 7 of partition 2 of batch 40"
    )


def test_totals_of_an_operator_outlive_its_subtasks(made: Any) -> None:
    """A slot that is started again counts from 0, and an ended job has none."""
    counters = {"records_in": 50, "records_in/parse": 50, "records_out/parse": 48, "late/parse": 1}
    job = made.job(plan=JobPlan((PlanNode("parse", ("parse",), 1),), ()), counters=counters)
    (parse,) = facts.operator_facts(job.job)
    assert (parse["records_in"], parse["records_out"], parse["late"]) == (50, 48, 1)
    view = made.view(jobs=(job,))
    shown = facts.job_facts(view, job, JobNames((view,)), mask=False)
    assert shown["counters"] == {"records_in": 50}
    assert (parse["retried"], parse["waiting"], parse["dead"]) == (0, 0, 0)


def test_what_failed_in_a_chain_is_shown_with_it(made: Any) -> None:
    counters = {"retried/parse": 9, "waiting/parse": 2, "dead/parse": 3}
    job = made.job(plan=JobPlan((PlanNode("parse", ("parse",), 1),), ()), counters=counters)
    (parse,) = facts.operator_facts(job.job)
    assert (parse["retried"], parse["waiting"], parse["dead"]) == (9, 2, 3)


def test_nothing_that_a_record_says_is_in_masked_facts(made: Any) -> None:
    shown = everything(made, mask=True)
    assert SECRET in json.dumps(everything(made, mask=False))
    assert SECRET not in json.dumps(shown)
    assert "4711" not in json.dumps(shown["record"])
    assert shown["record"]["record"] == {
        "price": "string, 11 characters",
        "tags": "list<item: string>, 1 items",
        "none": None,
        "n": "int64",
    }
    assert shown["record"]["reason"] == "ValueError: …"
    assert "job.py" in shown["record"]["attempts"][-1]["traceback"]


def test_what_is_left_of_words_that_may_quote_a_record() -> None:
    assert masked_reason("my.pack.BadRowError: 17") == "my.pack.BadRowError: …"
    assert masked_reason("row 17 is bad") == "…"
    assert masked_reason("John Smith raised ValueError: x") == "…"
    assert masked_reason("") == ""
    assert masked_failure("slot 2: heartbeats stopped") == "slot 2: heartbeats stopped"
    assert masked_failure("slot 2: KeyError('x')") == "slot 2: KeyError: …"
    assert masked_traceback(TRACEBACK).splitlines() == TRACEBACK.splitlines()[:2]


def test_words_of_an_exception_are_masked_though_they_look_like_a_place() -> None:
    cause = 'Traceback (most recent call last):\n  File "job.py", line 7, in parse\n    ~~~^^^\nKeyError: 1\n'
    between = "\nDuring handling of the above exception, another exception occurred:\n\n"
    words = f'ValueError: in\n  File "{SECRET}", line 1, in {SECRET}\n{SECRET}\n'
    own = f'Traceback (most recent call last):\n  File "job.py", line 3, in parse\n    float(x)\n{words}'
    assert masked_traceback(cause + between + own).splitlines() == [
        "Traceback (most recent call last):",
        '  File "job.py", line 7, in parse',
        "Traceback (most recent call last):",
        '  File "job.py", line 3, in parse',
    ]


def test_a_vertex_that_never_answered_and_a_board_without_records_have_no_figures(made: Any) -> None:
    for view in (made.view(is_up=False, as_of_ms=0, failure="refused"), made.view(has_records=False)):
        shown = facts.vertex_facts(view)
        assert shown["pending"] is shown["dead"] is shown["store_used_ratio"] is None


def test_any_watermark_is_shown(made: Any) -> None:
    for mark, shown in ((0, "1970-01-01T00:00:00.000Z"), (-(1 << 63), f"{-(1 << 63)} ms")):
        job = made.job(subtasks=(SubtaskDetails("parse", 0, watermark_ms=mark),)).job
        assert facts.operator_facts(job)[0]["watermark"] == shown


def test_what_a_job_said_last_is_called_so_when_it_is_not_heard(made: Any) -> None:
    job = made.job(line="running · 5 in", rates={"records_in": 7.0})

    def told(**view: Any) -> tuple[str, str, float | None]:
        (shown,) = facts.overview_facts([made.view(jobs=(job,), **view)], JobNames(()))["jobs"]
        return shown["state"], shown["line"], shown["in_per_second"]

    assert told() == ("running", "running · 5 in", 7.0)
    assert told(is_up=False, is_killed=True) == ("killed", "said last: running · 5 in", None)
    assert told(is_up=False, is_gone=True) == ("gone", "said last: running · 5 in", None)
