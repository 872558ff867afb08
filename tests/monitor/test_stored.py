"""Jobs whose drivers are gone, by what these have said last beside their checkpoints."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftlayer.checkpoint.storage.report import find_reports, put_report
from ftlayer.common.clock import Now
from ftlayer.errors import CheckpointDamagedError, UnknownJobError, UnsupportedError
from ftlayer.monitor.gather import SILENT_MS, Gatherer, StoredReports
from ftlayer.monitor.rules.health import Health, job_health, vertex_health
from ftlayer.monitor.rules.names import state_of
from ftlayer.monitor.sources import VertexSource
from ftlayer.vertex.calls import AnnounceJob, AskJob, JobDetails, JobList, JobOrder, OrderAction, Reply
from ftlayer.vertex.rules.board import Board
from ftlayer.vertex.store import LmdbStore

GONE_PID = (1 << 22) + 17
"""No process has it: the system's largest is 2^22."""


class FakeBoard:
    """A running driver's own board, with one job."""

    def __init__(self, made: Any) -> None:
        self._announced = made.job("orders")

    @property
    def run(self) -> str:
        return str(self._announced.job.run)

    def call(self, call: Any, *, deadline_ms: int | None = None) -> Reply:
        if type(call).__name__ == "ListJobs":
            return JobList((self._announced,))
        raise UnsupportedError("no records here")

    def close(self) -> None:
        pass


def details(made: Any, **fields: Any) -> JobDetails:
    given = {"at_ms": made.now_ms, "host": socket.gethostname(), "pid": os.getpid()}
    job = replace(made.job("orders").job, **given | fields)
    assert isinstance(job, JobDetails)
    return job


def gatherer(made: Any, path: Path, *sources: VertexSource, later_ms: int = 0, board: Any = None) -> Gatherer:
    now = Now(0, made.now_ms + later_ms)
    return Gatherer(
        lambda: (*sources, StoredReports(str(path))), clock=lambda: now, connect=lambda source, label: board
    )


def test_what_a_killed_driver_said_last_is_shown(made: Any, tmp_path: Path) -> None:
    put_report(str(tmp_path), details(made, pid=GONE_PID))
    gathering = gatherer(made, tmp_path, later_ms=1_000)
    (view,) = gathering.gather()
    assert (view.vertex, view.state, view.has_records) == (tmp_path.name.replace("[", "-"), "stored", False)
    (announced,) = view.jobs
    assert (state_of(view, announced), announced.is_silent) == ("gone", True)
    judged = job_health(view, announced)
    assert judged.health is Health.BROKEN
    assert f"(process {GONE_PID} on" in judged.findings[0].text
    assert "has ended without a last word" in judged.findings[0].text
    assert gathering.job(view.vertex, announced.job.owner).job == announced.job
    assert gathering.hour(view.vertex, announced.job.owner).series == {}
    with pytest.raises(UnknownJobError):
        gathering.job(view.vertex, "other")
    order = JobOrder("1", announced.job.owner, announced.job.run, OrderAction.STOP, "me", 1)
    with pytest.raises(UnsupportedError, match="start its program"):
        gathering.client(view.vertex).call(AskJob(order))


@pytest.mark.parametrize(
    ("fields", "later_ms", "is_silent"),
    [
        ({}, SILENT_MS - 1, False),
        ({}, SILENT_MS, True),
        ({"host": "elsewhere", "pid": GONE_PID}, SILENT_MS - 1, False),
        ({"state": "ended", "final": True, "pid": GONE_PID}, SILENT_MS, False),
    ],
)
def test_a_driver_that_may_be_there_is_silent_when_it_is_late(
    made: Any, tmp_path: Path, fields: dict[str, Any], later_ms: int, is_silent: bool
) -> None:
    put_report(str(tmp_path), details(made, **fields))
    (view,) = gatherer(made, tmp_path, later_ms=later_ms).gather()
    assert view.jobs[0].is_silent is is_silent


def test_a_job_that_runs_is_listed_once(made: Any, tmp_path: Path) -> None:
    board = FakeBoard(made)
    put_report(str(tmp_path), details(made))
    put_report(str(tmp_path), details(made, owner="other", run="another"))
    driver = VertexSource("driver-1", "grpc://127.0.0.1:1", "a-token-of-some-length")
    views = {view.vertex: view for view in gatherer(made, tmp_path, driver, board=board).gather()}
    running = views.pop("driver-1")
    (stored,) = views.values()
    assert [each.job.run for each in running.jobs] == [board.run]
    assert [each.job.run for each in stored.jobs] == ["another"]


def test_a_directory_that_cannot_be_read_is_said_so(made: Any, tmp_path: Path) -> None:
    (missing,) = gatherer(made, tmp_path / "missing").gather()
    assert missing.state == "no answer"
    assert "missing" in missing.failure
    put_report(str(tmp_path), details(made))
    (file,) = tmp_path.rglob("_last")
    for content in (b"", b"\x81", file.read_bytes()[:-5], b"\x82\xa6format\x09\xa3job\x80"):
        file.write_bytes(content)
        with pytest.raises(CheckpointDamagedError, match="_last is not what a job's driver has said last"):
            find_reports(str(tmp_path))
        (damaged,) = gatherer(made, tmp_path).gather()
        assert "_last" in damaged.failure


def test_a_killed_vertex_is_shown_with_the_jobs_of_its_store(made: Any, tmp_path: Path) -> None:
    now = Now(1_000, made.now_ms)
    store = LmdbStore.open(_made(tmp_path / "shard-000"), max_store_bytes=8 << 20)
    with store.read() as txn:
        board = Board(store, txn, now)
    for owner, state, final in (("orders", "running", False), ("old", "ended", True)):
        with store.write(intake=False) as txn:
            job = details(made, owner=owner, name=owner, run=owner, state=state, final=final)
            board.announce(txn, AnnounceJob(job), "", now)
    store.close()
    access = str(tmp_path / "vertex.access")
    killed = VertexSource(
        "ft", "grpc://127.0.0.1:1", "a-token-of-some-length", path=str(tmp_path), file=access, pid=GONE_PID
    )
    Path(access).write_text(
        json.dumps(
            {
                "address": killed.address,
                "token": killed.token,
                "root_certs": None,
                "client_pem": None,
                "pid": GONE_PID,
            }
        )
    )
    Path(access).chmod(0o600)
    gathering = Gatherer(lambda: (killed,), clock=lambda: now, connect=lambda source, label: FakeBoard(made))
    for _ in range(2):
        (view,) = gathering.gather()
        assert view.state == "killed"
        assert {each.job.owner: state_of(view, each) for each in view.jobs} == {
            "orders": "killed",
            "old": "ended",
        }
        assert "which ran orders" in vertex_health(view).findings[0].text
    assert gathering.job("ft", "orders").job.state == "running"
    (tmp_path / "shard-000" / "data.mdb").write_bytes(b"no store")
    gathering = Gatherer(lambda: (killed,), clock=lambda: now, connect=lambda source, label: FakeBoard(made))
    (view,) = gathering.gather()
    assert view.state == "killed"
    assert "What it ran is not known" in view.failure


def _made(path: Path) -> Path:
    path.mkdir(parents=True)
    return path
