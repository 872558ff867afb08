"""The board of a program without a vertex: found by its access file, asked as a vertex is."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import tempfile
import textwrap
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import pytest

from ftlayer import __version__
from ftlayer.common.clock import Now
from ftlayer.errors import UnauthorizedError, UnknownJobError, UnreadableReplyError, UnsupportedError
from ftlayer.monitor.local_board import BoardServer, LocalBoard
from ftlayer.transport.sockets import SocketDirectory
from ftlayer.vertex.calls import (
    AnnounceJob,
    AskJob,
    AuditPage,
    CheckpointTotals,
    GetHour,
    GetJob,
    Hour,
    JobDetails,
    JobKind,
    JobList,
    JobOrder,
    ListAudit,
    ListJobs,
    OrderAction,
    OrderRecord,
    OrderState,
    Stats,
)
from ftlayer.vertex.client.client import VertexClient
from ftlayer.vertex.service.directory import FOUND_ACCESS_FILE, read_access
from ftlayer.vertex.service.metrics import Metrics, board_families


def announcement(run: str = "run-1", *, final: bool = False) -> AnnounceJob:
    return AnnounceJob(JobDetails("j", "j", JobKind.TOPOLOGY, run, "barrier", "running", final, 1, 2))


ORDER = JobOrder("o1", "j", "run-1", OrderAction.SAVEPOINT, "me", 1)


@pytest.fixture
def served() -> Iterator[tuple[LocalBoard, BoardServer, Path]]:
    board, sockets = LocalBoard(), SocketDirectory.make()
    assert sockets is not None
    server = BoardServer(board, sockets)
    yield board, server, Path(sockets.path)
    server.close()


def test_tools_find_it_and_ask_it(served: Any) -> None:
    board, server, directory = served
    board.call(announcement())
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / FOUND_ACCESS_FILE).stat().st_mode) == 0o600
    access = read_access(directory / FOUND_ACCESS_FILE)
    assert access.pid == os.getpid()
    with VertexClient(access.address, access.token, client_id="tool", deadline_ms=20_000) as client:
        assert client.health().exact is False
        jobs = client.call(ListJobs())
        assert isinstance(jobs, JobList)
        assert [each.job.owner for each in jobs.jobs] == ["j"]
        record = client.call(AskJob(ORDER))
        assert isinstance(record, OrderRecord)
        assert record.answer.state is OrderState.WAITING
        with pytest.raises(UnknownJobError, match="'other'"):
            client.call(GetJob("other"))
        for call in (Stats(), GetHour()):
            with pytest.raises(UnsupportedError, match="keeps no records"):
                client.call(call)
        hour = client.call(GetHour("j"))
        assert isinstance(hour, Hour)
        page = client.call(ListAudit())
        assert isinstance(page, AuditPage)
        assert [(entry.who, entry.which) for entry in page.entries] == [("me", "j, run run-1")]
    (order,) = board.call(announcement()).orders
    assert order == ORDER
    server.close()
    assert not directory.exists()


@pytest.mark.parametrize(
    ("health", "which"),
    [
        ({"ftlayer": "9.9.0"}, "ftlayer 9.9.0,"),
        ({"ftlayer": __version__}, "another build of ftlayer"),
        ({}, "ftlayer of another version,"),
    ],
)
def test_a_board_whose_replies_are_of_another_version_is_asked_for_that(
    served: Any, monkeypatch: pytest.MonkeyPatch, health: dict[str, str], which: str
) -> None:
    monkeypatch.setattr(
        "ftlayer.monitor.local_board.encode_reply",
        lambda reply: msgpack.packb({"reply": "JobList", "fields": {"jobs": [], "more": 1}}),
    )
    monkeypatch.setattr(
        "ftlayer.monitor.local_board.encode_health", lambda **values: msgpack.packb(values | health)
    )
    access = read_access(served[2] / FOUND_ACCESS_FILE)
    where = re.escape(access.address)
    said = f"the vertex at {where} runs {which}.*this is ftlayer {__version__}.*unknown field 'more'"
    with (
        VertexClient(access.address, access.token, deadline_ms=20_000) as client,
        pytest.raises(UnreadableReplyError, match=said),
    ):
        client.call(ListJobs())


def test_what_a_killed_program_ran_is_known_with_its_checkpoints(served: Any) -> None:
    board, _, directory = served
    job = announcement().job
    board.call(AnnounceJob(replace(job, checkpoint_totals=CheckpointTotals(directory="/data/ck"))))
    assert read_access(directory / FOUND_ACCESS_FILE).job == f"{job.name} with checkpoints in /data/ck"


def test_a_wrong_token_is_told_nothing(served: Any) -> None:
    _, _, directory = served
    address = read_access(directory / FOUND_ACCESS_FILE).address
    with VertexClient(address, "x" * 40, deadline_ms=20_000) as client, pytest.raises(UnauthorizedError):
        client.call(ListJobs())


def test_a_refusal_leaves_the_board_as_it_is() -> None:
    board = LocalBoard()
    with pytest.raises(UnknownJobError):
        board.call(AskJob(ORDER))
    board.call(announcement())
    board.call(AskJob(ORDER))
    assert board.call(announcement()).orders == (ORDER,)  # type: ignore[union-attr]


def test_orders_expire_while_nothing_but_questions_come() -> None:
    clock = [Now(0, 1_700_000_000_000)]
    board = LocalBoard(lambda: clock[0])
    board.call(announcement())
    board.call(AskJob(ORDER))
    clock[0] = Now(61_000, 1_700_000_061_000)
    record: Any = board.call(GetJob("j"))
    assert record.orders[0].answer.state is OrderState.EXPIRED
    assert record.is_silent


def test_prometheus_can_ask_a_board_without_a_vertex() -> None:
    board = LocalBoard()
    board.call(announcement())
    with (
        Metrics(partial(board_families, board.call, "1.2"), "127.0.0.1", 0) as endpoint,
        urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=600) as page,
    ):
        text = page.read().decode()
    assert 'ftlayer_build_info{version="1.2"} 1.0' in text
    assert 'ftlayer_job_state{kind="topology",state="running",topology="j"} 1.0' in text
    assert "ftlayer_records" not in text


OTLP_PROGRAM = """
    import sys
    from ftlayer.monitor.local_board import local_announcer, push_otlp
    from ftlayer.vertex.calls import JobDetails, JobKind
    class Telling:
        run = "run-1"
        def details(self, known_checkpoint, *, with_plan):
            return JobDetails("j", "j", JobKind.TOPOLOGY, "run-1", "barrier", "running", False, 1, 2)
        def carry_out(self, order):
            return ""
    announcer = local_announcer()
    push_otlp(sys.argv[1])
    push_otlp(sys.argv[1])
    announcer.add(Telling())
    sys.stdin.readline()
"""


def test_a_program_without_a_vertex_pushes_what_its_jobs_do_and_once_more_at_its_end(collector: Any) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OTLP_PROGRAM), collector.url],
        stdin=subprocess.PIPE,
        env=os.environ | {"OTEL_METRIC_EXPORT_INTERVAL": "100"},
    )
    collector.until(lambda: "ftlayer.job_state" in collector.metrics())
    assert collector.resource()["service.name"] == "ftlayer-driver"
    program.communicate(b"")
    assert program.returncode == 0
    assert collector.metrics()["ftlayer.otlp_exports"].sum.data_points[0].as_int >= 1


PROGRAM = """
    import os, sys
    from pathlib import Path
    from ftlayer.monitor.local_board import local_announcer
    from ftlayer.vertex.calls import JobDetails, JobKind
    class Telling:
        run = "run-1"
        def details(self, known_checkpoint, *, with_plan):
            return JobDetails("j", "j", JobKind.TOPOLOGY, "run-1", "barrier", "running", False, 1, 2)
        def carry_out(self, order):
            return "/savepoint"
    local_announcer().add(Telling())
    assert local_announcer() is local_announcer()
    print(os.getpid(), flush=True)
    child = os.fork()
    if child == 0:
        sys.exit(0)  # the servers are its parent's: it waits for none of them
    assert os.waitpid(child, 0)[1] == 0
    sys.stdin.readline()
"""


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A path that sockets fit in."""
    with tempfile.TemporaryDirectory(prefix="ft-") as path:
        yield Path(path)


def test_a_program_s_board_ends_with_it_and_not_with_a_forked_child(short_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    environment = os.environ | {"TMPDIR": str(short_path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdout.readline()
        (found,) = short_path.glob(f"ftlayer-sockets-*/{FOUND_ACCESS_FILE}")
        access = read_access(found)
        with VertexClient(access.address, access.token, deadline_ms=20_000) as client:
            jobs: Any = client.call(ListJobs())
            while not jobs.jobs:  # its first announcement is on its way
                jobs = client.call(ListJobs())
            assert jobs.jobs[0].job.run == "run-1"
        program.stdin.write("\n")
        program.stdin.flush()
        assert program.wait(600) == 0
    assert not list(short_path.glob("ftlayer-sockets-*"))
