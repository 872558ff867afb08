"""Topologies that really run: to their end, killed, cancelled and started again, two at a time."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftlayer import FTLayer
from ftlayer.common.rules.restart import NoRestart
from ftlayer.config import FTStatus
from ftlayer.errors import ConfigError, JobStartError, SourceGivenUpError, StaleOwnerError
from ftlayer.runtime.driver.job import Job
from ftlayer.runtime.driver.rules.events import JobState
from ftlayer.runtime.environment import StreamEnvironment
from ftlayer.topology.connectors import partitions
from ftlayer.vertex.calls import ClaimJob

pytestmark = pytest.mark.spark

WAIT_S = 600


class Written:
    """Where a sink writes its numbers, a file a process."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory

    def sink(self) -> Callable[[Any], None]:
        directory = str(self.directory)

        def write(batch: Any) -> None:
            import os

            lines = "".join(f"{row}\n" for row in zip(*batch.to_pydict().values(), strict=True))
            with open(f"{directory}/{os.getpid()}", "a") as file:
                file.write(lines)

        return write

    def rows(self) -> Counter[Any]:
        return Counter(
            # A line that a killed process did not finish is none.
            eval(line)
            for file in self.directory.iterdir()
            for line in file.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        )


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "out")


@pytest.fixture
def layer(tmp_path: Path) -> Iterator[FTLayer]:
    with FTLayer.embedded(tmp_path / "ft", backoff="50ms") as it:
        yield it


@pytest.fixture
def ended() -> Iterator[list[Job]]:
    """Jobs that are ended whatever a test finds."""
    jobs: list[Job] = []
    yield jobs
    for job in jobs:
        job.cancel()


def numbers(first: int, last: int, pause_s: float = 0.0) -> Callable[[], Iterator[int]]:
    """A source's partition; pauses after each hundred."""

    def read() -> Iterator[int]:
        import time

        for number in range(first, last):
            if pause_s and number % 100 == 0:
                time.sleep(pause_s)
            yield number

    return read


def until(job: Job, holds: Callable[[Any], bool]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        status = job.status()
        if holds(status):
            return status
        assert not status.state.is_final, (status, job.exception())
        job.over(0.05)
    raise AssertionError(job.status())


@pytest.mark.parametrize("status", list(FTStatus))
def test_a_bounded_topology_ends(
    spark: Any,
    tmp_path: Path,
    written: Written,
    status: FTStatus,
    collector: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if status is FTStatus.ON:
        # The session's workers were started before: slots learn of them from the driver.
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.1")
    with FTLayer.embedded(tmp_path / "ft", status=status) as layer:
        env = StreamEnvironment(spark, layer, name="count", parallelism=2)
        env.source(partitions(numbers(0, 500), numbers(500, 1_000)), "id bigint").map(
            lambda it: (it % 5, 1), "key bigint, n bigint"
        ).key_by("key").reduce(lambda a, b: (a[0], a[1] + b[1]), volatile_state=True).sink(written.sink())
        job = env.execute_async()
        assert job.wait(WAIT_S), job.status()
        assert job.state is JobState.ENDED
        assert written.rows() == Counter((key, n) for key in range(5) for n in range(1, 201))
        assert job.status().counters["records_in"] == 1_000
    if status is FTStatus.ON:
        # The layer is closed, and with it its vertex.
        spans = collector.spans()
        assert len({span.trace_id for span in spans if not span.parent_span_id}) > 50
        assert "attempt 1" in {span.name for span in spans}
        assert collector.metrics()["ftlayer.end_to_end_latency"].histogram.data_points


def flow(spark: Any, layer: FTLayer, written: Written, name: str, parallelism: int = 2) -> StreamEnvironment:
    """Numbers to a sink over a shuffle, for some seconds."""
    env = StreamEnvironment(spark, layer, name=name, parallelism=parallelism)
    source = env.source(
        partitions(numbers(0, 2_000, 0.1), numbers(2_000, 4_000, 0.1)), "id bigint", uid="numbers"
    )
    source.key_by("id").map(lambda it: it, "id bigint").sink(written.sink())
    return env


def test_killed_slots_lose_nothing(spark: Any, layer: FTLayer, written: Written, ended: list[Job]) -> None:
    job = flow(spark, layer, written, "killed").execute_async()
    ended.append(job)
    until(job, lambda it: it.counters.get("records_out", 0) > 200)
    for slot in (0, 1):
        before = until(job, lambda it: it.state is JobState.RUNNING).slots[slot]
        with contextlib.suppress(ProcessLookupError):
            os.kill(before.pid, signal.SIGKILL)
        until(
            job,
            lambda it, slot=slot, gone=before.instance: (
                it.slots[slot].instance not in ("", gone) and it.state is JobState.RUNNING
            ),
        )
    assert job.wait(WAIT_S), job.status()
    assert written.rows().keys() == {(number,) for number in range(4_000)}
    assert job.status().restarts == 2


def test_a_cancelled_job_goes_on_at_its_next_start(
    spark: Any, layer: FTLayer, written: Written, ended: list[Job]
) -> None:
    job = flow(spark, layer, written, "again").execute_async()
    ended.append(job)
    until(job, lambda it: it.counters.get("records_out", 0) > 200)
    with pytest.raises(ConfigError, match="topology 'again' runs already"):
        flow(spark, layer, written, "again").execute_async()
    assert job.cancel()
    assert job.state is JobState.CANCELLED
    first = job.status().counters["records_in"]
    assert len(written.rows()) < 4_000
    job = flow(spark, layer, written, "again").execute_async()
    ended.append(job)
    assert job.wait(WAIT_S), job.status()
    assert written.rows().keys() == {(number,) for number in range(4_000)}
    # It went on where the vertex had accepted them, and did not read everything again.
    assert job.status().counters["records_in"] <= 4_000 - first + 400


def test_a_mistake_in_a_sink_ends_the_job_and_loses_nothing(
    spark: Any, layer: FTLayer, written: Written, ended: list[Job]
) -> None:
    def run(sink: Callable[[Any], Any]) -> Job:
        env = StreamEnvironment(spark, layer, name="wrong", parallelism=1)
        env.source(range(500), "id bigint", uid="numbers").map(lambda it: it, uid="same").sink(
            sink, uid="out"
        )
        ended.append(env.execute_async())
        return ended[-1]

    for _ in range(2):  # What is replayed first at a start is no other rows.
        job = run(lambda rows: rows.wirte("out"))
        with pytest.raises(JobStartError, match=r"sink 'out' could write no row of its first .* 'wirte'"):
            job.wait(WAIT_S)
        assert job.status().restarts == 0
    assert run(written.sink()).wait(WAIT_S)
    assert written.rows() == Counter((number,) for number in range(500))
    assert not list(layer.list_dead())


def test_two_topologies_beside_each_other(
    spark: Any, layer: FTLayer, written: Written, ended: list[Job]
) -> None:
    jobs = [flow(spark, layer, written, name, parallelism=1).execute_async() for name in ("left", "right")]
    ended += jobs
    for job in jobs:
        until(job, lambda it: it.state is JobState.RUNNING)
    assert all(job.drain(WAIT_S) for job in jobs)
    assert set(written.rows().values()) <= {1, 2}


def test_a_job_that_another_driver_takes_over_ends_and_is_not_started_again(
    spark: Any, layer: FTLayer, ended: list[Job]
) -> None:
    env = StreamEnvironment(spark, layer, name="twice")
    env.source(lambda: iter(int, 1), "id bigint").sink(lambda batch: None)
    job = env.execute_async()
    ended.append(job)
    assert job.wait_until_running(WAIT_S)
    layer.client.call(ClaimJob("twice", "another-run"))
    with pytest.raises(
        StaleOwnerError, match="'twice' was started again by another driver, as run another-run"
    ):
        job.wait(WAIT_S)
    assert job.state is JobState.FAILED
    assert job.status().restarts == 0


def test_what_a_source_fails_with_is_what_the_job_fails_with(spark: Any, layer: FTLayer) -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise ConnectionError("the broker is gone")

    env = StreamEnvironment(spark, layer, name="broken", restart=NoRestart())
    env.source(broken, "id bigint").sink(lambda batch: None)
    with pytest.raises(SourceGivenUpError, match=r"(?s)ConnectionError: the broker is gone"):
        env.execute()
