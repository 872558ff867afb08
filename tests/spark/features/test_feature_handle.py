"""The handle of a running query: restarts, errors, progress, stopping, draining."""

from __future__ import annotations

import json
import sys
import time
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ftlayer import TrackedQueryListener
from ftlayer.common.rules.restart import FixedDelay
from ftlayer.config import FTStatus
from ftlayer.errors import FunctionLoadError, InvalidTopologyError, QueryError
from ftlayer.spark.query import writer as query_writer
from ftlayer.spark.query.checkpoint import CheckpointDirectory
from ftlayer.spark.query.supervisor import QuerySupervisor
from ftlayer.vertex.calls import AskJob, GetJob, JobOrder, ListJobs, OrderAction, OrderState

pytestmark = pytest.mark.spark


def test_a_sink_that_fails_is_tried_again_as_the_strategy_says(
    layer: Any, numbers: Any, kept: Any, tools: Any
) -> None:
    def sink(rows: Any, batch: int) -> None:
        if kept.calls < 2:
            kept.calls += 1
            raise OSError("the database is down")
        kept(rows, batch)

    stream = layer.source(numbers, name="numbers")
    writer = stream.sink(sink, checkpoint=tools.checkpoint).trigger(availableNow=True)
    query = tools.finish(writer.restart(FixedDelay(5, "20ms")).start())
    assert query.restarts >= 2  # a busy machine adds failures of its own
    assert query.last_failure
    assert sorted(kept.column("n")) == list(range(100))
    assert query.exception() is None
    assert not query.isActive
    assert query.awaitTermination(1)


def test_the_error_that_ends_a_query_has_the_sinks_own_as_its_cause(
    layer: Any, numbers: Any, tools: Any
) -> None:
    class DatabaseError(RuntimeError):
        pass

    def sink(rows: Any, batch: int) -> None:
        raise DatabaseError("no table of this name")

    stream = layer.source(numbers, name="numbers")
    writer = stream.sink(sink, checkpoint=tools.checkpoint, name="to-db").restart(FixedDelay(1, "20ms"))
    query = writer.start()
    with pytest.raises(
        QueryError,
        match=r"^to-db: .* given up after 1 restart: sink 'sink' raised DatabaseError: no table of this name",
    ) as raised:
        query.awaitTermination(600)
    assert isinstance(raised.value.__cause__, DatabaseError)
    assert query.exception() is raised.value
    assert query.restarts == 1
    with pytest.raises(QueryError, match=r"no table"):
        query.processAllAvailable()
    with pytest.raises(QueryError, match=r"no table"):
        query.await_drained(1)
    query.stop()


def test_errors_that_a_restart_cannot_mend_end_the_query(layer: Any, numbers: Any, tools: Any) -> None:
    empty = []

    def forgets(frame: Any) -> Any:
        empty.append(1)
        return frame if len(empty) < 3 else frame.select("n")

    stream = layer.source(numbers, name="numbers").transform(forgets)
    query = stream.sink(lambda rows, batch: None, checkpoint=tools.checkpoint).start()
    with pytest.raises(InvalidTopologyError, match=r"'forgets' does not keep the column '_ft'"):
        query.awaitTermination(600)
    assert query.restarts == 0


def announced(layer: Any, name: str) -> Any:
    """Return what the vertex shows of a query; None before it is announced."""
    jobs = layer.client.call(ListJobs()).jobs
    return next((each for each in jobs if each.job.name == name), None)


class Batches(TrackedQueryListener):
    """Keeps what it is told, and fails then: that is no business of the query's."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_batch(self, report: Any) -> None:
        self.told.append(report)
        raise ValueError("a listener that does not work")


def test_progress_stop_and_going_on(layer: Any, rows: Any, kept: Any, tools: Any) -> None:
    stream = layer.source(rows.add([{"n": n} for n in range(10)]).stream("n bigint"), name="numbers")
    batches = Batches()
    writer = stream.sink(kept, checkpoint=tools.checkpoint, name="progressing").trigger(
        processingTime="0 seconds"
    )
    writer = writer.listener(batches)
    query = writer.start()
    query.processAllAvailable()
    assert sorted(kept.column("n")) == list(range(10))
    assert query.isActive
    assert not query.awaitTermination(0.01)
    assert query.lastProgress is not None
    first = query.recentProgress[0]
    assert first.observedMetrics["ftlayer"].asDict() == {"rows": 10, "delivered": 0}
    assert [json.loads(source.latestOffset) for source in first.sources][1] == {"next": 0}
    assert [(report.query, report.batch, report.rows_in) for report in batches.told] == [
        ("progressing", 0, 10)
    ]
    assert query.recent_batches == batches.told
    assert query.status["isTriggerActive"] in (True, False)
    first_id, first_run = query.id, query.runId
    assert query.ft_status().drained
    query.explain()
    job = tools.until(lambda: announced(layer, "progressing"), "its announcement").job
    tools.until(lambda: announced(layer, "progressing").job.counters.get("batches"), "its batch")
    told = layer.client.call(GetJob(job.owner)).job
    assert (told.kind, told.state, told.checkpoint_location) == ("query", "running", tools.checkpoint)
    assert [(batch.batch, batch.rows_in) for batch in told.batches] == [(0, 10)]
    assert list(told.batches[0].phases_ms) == ["run", "verdict", "seal", "sink", "commit"]
    # Asked from outside, as a tool does it.
    order = JobOrder("stop-it", job.owner, job.run, OrderAction.STOP, "a test", 1)
    layer.client.call(AskJob(order))
    assert query.awaitTermination(600)
    done = tools.until(
        lambda: (it := layer.client.call(AskJob(order)).answer).state is OrderState.DONE and it, "the answer"
    )
    assert "stays for its next start" in done.text
    assert tools.until(lambda: (it := announced(layer, "progressing")).job.final and it).job.state == "ended"
    query.stop()
    assert not query.isActive
    rows.add([{"n": n} for n in range(10, 20)])
    again = writer.start()
    try:
        again.processAllAvailable()
        assert sorted(kept.column("n")) == list(range(20))
        assert (again.id, again.runId == first_run) == (first_id, False)
    finally:
        again.stop()


def test_stopping_while_it_waits_to_restart(layer: Any, numbers: Any, tools: Any) -> None:
    def sink(rows: Any, batch: int) -> None:
        raise OSError("down")

    stream = layer.source(numbers, name="numbers")
    writer = stream.sink(sink, checkpoint=tools.checkpoint, name="waits-to-restart")
    query = writer.restart(FixedDelay(5, "10h")).start()
    tools.until(lambda: query.restarts == 1, "the failure")
    assert query.isActive
    tools.until(
        lambda: (it := announced(layer, "waits-to-restart")) and it.job.state == "restarting",
        "the announcement",
    )
    _, restart = announced(layer, "waits-to-restart").incidents
    assert (restart.kind, "OSError: down" in restart.text) == ("restart", True)
    query.stop()  # Not behind the pause of ten hours, which is longer than a test may take.
    assert not query.isActive
    assert query.exception() is None
    assert query.awaitTermination(1)


def test_drain_finishes_what_waits_and_reads_no_more_of_the_source(
    layer: Any, rows: Any, kept: Any, tools: Any, once: Any
) -> None:
    """Each record fails once, and waits; rows that come later are the next start's."""

    def flaky(record: dict[str, Any]) -> dict[str, Any]:
        if once.first(record["n"]):
            raise RuntimeError("try again")
        return record

    source = rows.add([{"n": n} for n in range(20)]).stream("n bigint")
    stream = layer.source(source, name="drained").map(flaky, "n bigint")
    writer = stream.sink(kept, checkpoint=tools.checkpoint).trigger(processingTime="1 hour")
    query = writer.start()
    tools.until(lambda: query.recent_batches, "the first batch")
    assert kept.rows == []
    assert query.ft_status().waiting == 20
    assert query.drain(600)
    assert sorted(kept.column("n")) == list(range(20))
    assert not query.isActive
    assert query.ft_status().drained
    rows.add([{"n": n} for n in range(20, 25)])
    tools.finish(writer.trigger(availableNow=True).start())
    assert sorted(kept.column("n")) == list(range(25))


def test_rows_that_the_source_has_and_the_query_has_not_finished_are_not_drained(
    layer: Any, numbers: Any, kept: Any, tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vertex knows nothing of them: there is no verdict yet."""
    gate = tmp_path / "gate"
    supervisors: list[QuerySupervisor] = []

    def kept_supervisor(*given: Any, **options: Any) -> QuerySupervisor:
        supervisors.append(QuerySupervisor(*given, **options))
        return supervisors[-1]

    monkeypatch.setattr(query_writer, "QuerySupervisor", kept_supervisor)

    def slow(record: dict[str, Any]) -> dict[str, Any]:
        while not gate.exists():
            time.sleep(0.02)
        return record

    stream = layer.source(numbers, name="slow").map(slow, "n bigint")
    writer = stream.sink(kept, checkpoint=tools.checkpoint)
    query = writer.start()
    assert query.ft_status().drained
    assert not query.await_drained(0.5)
    assert not query.drain(1.0)
    # Spark takes the batch that was given up for stopped, and logs no error.
    assert supervisors[0].query.exception() is None
    assert query.ft_status().drained
    gate.touch()
    query = writer.start()
    assert query.await_drained(600)
    assert sorted(kept.column("n")) == list(range(100))
    assert query.drain(600)


@pytest.mark.parametrize("status", [FTStatus.ON, FTStatus.OFF])
def test_a_stop_within_the_first_offsets_leaves_a_checkpoint_that_can_be_started(
    spark: Any, connect: Any, numbers: Any, kept: Any, tools: Any, status: FTStatus
) -> None:
    """Spark refuses a checkpoint for its own temporary file, as long as no batch is planned."""
    if status is FTStatus.ON:
        CheckpointDirectory(spark, tools.checkpoint).claim("torn")
    offsets = Path(tools.checkpoint) / "offsets"
    offsets.mkdir(parents=True)
    (offsets / f".0.{uuid.uuid4()}.tmp").write_text("v1\n{")
    layer = connect(status=status)
    query = layer.source(numbers, name="torn").sink(kept, checkpoint=tools.checkpoint)
    tools.finish(query.trigger(availableNow=True).start())
    assert sorted(kept.column("n")) == list(range(100))
    assert (offsets / "0").exists()


def test_a_drain_that_takes_too_long_leaves_the_rest_in_the_store(
    connect: Any, numbers: Any, kept: Any, tools: Any, once: Any
) -> None:
    def flaky(record: dict[str, Any]) -> dict[str, Any]:
        if record["n"] < 7 and once.first(record["n"]):
            raise RuntimeError("try again")
        return record

    layer = connect(backoff="1h")
    stream = layer.source(numbers, name="undrained").map(flaky, "n bigint")
    query = stream.sink(kept, checkpoint=tools.checkpoint).start()
    query.processAllAvailable()
    assert not query.drain(1.5)
    assert not query.isActive
    assert query.ft_status().waiting == 7
    assert len(kept.rows) == 93


def test_a_module_that_workers_lack_ends_the_query_at_once(
    layer: Any, numbers: Any, kept: Any, tools: Any
) -> None:
    module = ModuleType("only_in_the_driver")
    exec("def same(record):\n    return record\n", vars(module))
    sys.modules[module.__name__] = module
    try:
        stream = layer.source(numbers, name="unloadable").map(module.same, "n bigint")
        query = stream.sink(kept, checkpoint=tools.checkpoint).start()
        with pytest.raises(
            FunctionLoadError, match=r"^'[^']+': .*No module named 'only_in_the_driver'.*addArtifact"
        ):
            tools.finish(query)
    finally:
        del sys.modules[module.__name__]
    assert query.restarts == 0
    assert not kept.calls
