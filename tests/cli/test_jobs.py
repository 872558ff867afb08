from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from programs import open_terminal
from typer.testing import CliRunner

from ftlayer import __version__
from ftlayer.cli.main import app, await_end
from ftlayer.cli.top import Key, Position, key_of, moved
from ftlayer.config import VertexOptions
from ftlayer.errors import VertexUnavailableError
from ftlayer.monitor.local_board import BoardServer, LocalBoard
from ftlayer.monitor.rules.names import JobKey, VertexView, marked, state_of
from ftlayer.transport.sockets import SocketDirectory
from ftlayer.vertex import calls
from ftlayer.vertex.service.directory import ACCESS_FILE, AccessFile, link_access, write_access
from ftlayer.vertex.service.embedded import EmbeddedVertex
from ftlayer.vertex.wire.frames import encode_health, encode_reply

HOUR_MS = 3_600_000
NOW_MS = 1_800_000_000_000
GONE_PID = (1 << 22) + 17
"""No process has it: the system's largest is 2^22."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FTLAYER_TOKEN", "FTLAYER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GRPC_VERBOSITY", "ERROR")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs") / "ft"


@pytest.fixture(scope="module")
def started(store: Path) -> Iterator[EmbeddedVertex]:
    with EmbeddedVertex(VertexOptions(store, max_store_bytes=1 << 26)) as started:
        yield started


@pytest.fixture
def vertex(started: EmbeddedVertex) -> EmbeddedVertex:
    """Announce two jobs, which are silent after 30 s."""
    with started.client() as client:
        for job in (topology(), query()):
            client.call(calls.AnnounceJob(job))
    return started


def topology(name: str = "orders") -> calls.JobDetails:
    return calls.JobDetails(
        owner=name,
        name=name,
        kind=calls.JobKind.TOPOLOGY,
        run="run-1",
        mode="barrier",
        state="running",
        final=False,
        since_ms=NOW_MS - HOUR_MS,
        at_ms=NOW_MS,
        host="w1",
        pid=4711,
        version="9.9.0",
        line="orders: running",
        restarts=1,
        last_failure="slot 1 was lost",
        plan=calls.JobPlan(
            (calls.PlanNode("lines", ("lines",), 1), calls.PlanNode("parse", ("parse",), 1)),
            (calls.PlanEdge("lines", "parse"),),
        ),
        slots=(calls.SlotDetails(0, "running", "w1", 4712, 200, "parse", 1_500, "parse (job.py:3)"),),
        subtasks=(
            calls.SubtaskDetails("lines", 0, 10, 10, 1_234.5, 1_234.5, 0.1, 0.88),
            calls.SubtaskDetails("parse", 0, 10, 9, 1_234.5, 1_000.0, 0.97, 0.0, NOW_MS - 5_000),
        ),
        rates={"records_in": 1_234.5},
        histograms={"end_to_end|lines|out": calls.HistogramDetails((0.1, 0.2), (0, 10, 0), 1.5)},
        incidents=(calls.Incident(NOW_MS - HOUR_MS // 2, "restart", "slot 1 was lost", 1),),
        checkpoint_totals=calls.CheckpointTotals(3, 0, 3, 0, 0, 0, -1, 0),
    )


def query() -> calls.JobDetails:
    job = replace(topology(), owner="3f2a" + "0" * 28, name="clean-orders", kind=calls.JobKind.QUERY, mode="")
    batch = calls.BatchDetails(7, NOW_MS, 100, 98, 2, 0, 1_500.0, {"run": 1_000.0, "commit": 20.0})
    return replace(
        job,
        plan=None,
        slots=(),
        subtasks=(),
        checkpoint_totals=None,
        batches=(batch,),
        links={"Spark UI": "http://w1:4040"},
    )


def ftlayer(*arguments: object, columns: int = 80) -> tuple[int, str, str]:
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_jobs_are_listed_by_the_names_that_people_gave(vertex: EmbeddedVertex, store: Path) -> None:
    code, output, _ = ftlayer("jobs", "--vertex", store)
    assert code == 0
    rows = {line.split()[0]: line.split() for line in output.splitlines()}
    assert rows["orders"][:4] == ["orders", "topology", "running", "ok"]
    assert "1,234" in rows["orders"]
    assert rows["clean-orders"][1] == "query"
    assert rows["ft"][:2] == ["ft", "up"]
    assert "3f2a" not in output
    assert max(map(len, output.splitlines())) <= 80


def test_a_job_is_shown_in_full(vertex: EmbeddedVertex, store: Path) -> None:
    code, output, _ = ftlayer("jobs", "orders", "--vertex", store)
    assert code == 0
    for said in (
        "topology orders: running",
        "parse is what limits orders: busy 97% in slot 0; lines before it waits 88% of its time",
        "process 4711 on w1",
        "  mode       barrier",
        "  ftlayer    9.9.0",
        "1, the last one: slot 1 was lost",
        "parse (job.py:3) for 1 s",
        "checkpoints: 3 completed, 0 failed, 0 under way",
        "restart  slot 1 was lost",
        "99 % within",
        "150 ms",
    ):
        assert said in output, said
    code, output, _ = ftlayer("jobs", "clean-orders", "--vertex", store)
    assert code == 0
    assert "run 1 s, commit 20 ms" in output
    assert "Spark UI   http://w1:4040" in output
    assert "  mode " not in output


def test_what_failed_in_a_chain_is_shown_where_there_is_a_policy(tmp_path: Path) -> None:
    store = tmp_path / "ft"
    counters = {"retried/parse": 4_711, "waiting/parse": 12, "dead/parse": 37, "paused/parse": 1}
    with EmbeddedVertex(VertexOptions(store, max_store_bytes=1 << 26)) as vertex, vertex.client() as client:
        client.call(calls.AnnounceJob(topology()))
        _, output, _ = ftlayer("jobs", "orders", "--vertex", store)
        assert "to retry" not in output
        client.call(calls.AnnounceJob(replace(topology(), counters=counters)))
        _, output, _ = ftlayer("jobs", "orders", "--vertex", store, columns=120)
    assert "look here: orders has made dead letters in the last 5 min, 37 in this run" in output
    assert f"  vertex     ft ({store})" in output
    assert "look here: 12 records wait for a retry in parse of orders" in output
    assert "look here: parse of orders takes no new records in 1 subtask" in output
    (row,) = [line.split() for line in output.splitlines() if line.startswith("parse ") and "4,711" in line]
    assert row[5:8] == ["4,711", "12", "37"]


def test_what_a_source_has_not_read_is_shown_where_it_tells(vertex: EmbeddedVertex, store: Path) -> None:
    _, output, _ = ftlayer("jobs", "orders", "--vertex", store)
    assert "unread" not in output
    with vertex.client() as client:
        client.call(calls.AnnounceJob(replace(topology(), counters={"lag/lines": 4_711})))
    _, output, _ = ftlayer("jobs", "orders", "--vertex", store, columns=120)
    assert "unread" in output
    (row,) = [line.split() for line in output.splitlines() if line.startswith("lines ") and "4,711" in line]
    assert row[5] == "4,711"


def test_json_has_the_same(vertex: EmbeddedVertex, store: Path) -> None:
    overview = json.loads(ftlayer("jobs", "--json", "--vertex", store)[1])
    assert {job["name"] for job in overview["jobs"]} >= {"orders", "clean-orders"}
    assert overview["vertices"][0]["state"] == "up"
    job = json.loads(ftlayer("jobs", "orders", "--json", "--vertex", store)[1])
    assert (job["mode"], job["version"], job["bottleneck"]["operator"]) == ("barrier", "9.9.0", "parse")
    assert json.loads(ftlayer("jobs", "clean-orders", "--json", "--vertex", store)[1])["mode"] is None
    assert [operator["uid"] for operator in job["operators"]] == ["lines", "parse"]
    (latency,) = job["latencies"]
    assert (latency["source"], latency["sink"], latency["count"]) == ("lines", "out", 10)
    assert latency["p50_seconds"] == pytest.approx(0.15)


def test_a_job_that_is_not_there_is_said_with_those_that_are(vertex: EmbeddedVertex, store: Path) -> None:
    code, _, errors = ftlayer("jobs", "order", "--vertex", store)
    assert code == 2
    assert "no job is called 'order'; there are: clean-orders, orders" in errors


def test_without_a_place_all_of_this_user_are_found(
    vertex: EmbeddedVertex, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Programs of other tests are left out.
    directory = Path(vertex.address.removeprefix("grpc+unix://")).parent
    monkeypatch.setattr("ftlayer.monitor.sources.socket_directories", lambda: (directory,))
    code, output, _ = ftlayer("jobs")
    assert code == 0
    assert "clean-orders" in output


def test_the_only_vertex_that_runs_is_named_where_it_is_another_directory_s(
    vertex: EmbeddedVertex, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "sockets"
    directory.mkdir()
    link_access(directory, store / ACCESS_FILE)
    monkeypatch.setattr("ftlayer.monitor.sources.socket_directories", lambda: (directory,))
    assert ftlayer("pending")[2] == ""
    monkeypatch.chdir(store)  # Its program was started where these tests were.
    assert ftlayer("pending")[2] == f"ftlayer: ft ({store}) is asked, which is the only one that runs\n"


def test_without_any_vertex_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftlayer.monitor.sources.socket_directories", tuple)
    code, _, errors = ftlayer("jobs")
    assert code == 2
    assert (
        "no program of yours serves a vertex on this machine now: name the store of one that has ended"
        in errors
    )


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a killed driver has left: the access file of a store, and a link to it where tools look."""
    sockets = tmp_path / "sockets"
    path = tmp_path / "left"
    for directory in (sockets, path):
        directory.mkdir()
    write_access(path / ACCESS_FILE, AccessFile("grpc+unix:///tmp/x/vertex", "t" * 43, None, None, GONE_PID))
    link_access(sockets, path / ACCESS_FILE)
    monkeypatch.setattr("ftlayer.monitor.sources.socket_directories", lambda: (sockets,))
    return path


def test_what_a_killed_driver_has_left_is_broken_and_told_by_jobs_alone(killed: Path) -> None:
    code, output, errors = ftlayer("jobs")
    assert (code, errors) == (0, "")
    assert output.splitlines()[0] == (
        f"broken: vertex left: process {GONE_PID}, which served it, was killed: start the program again; until then "
        f"ftlayer inspect {killed} shows what its store has, and --store {killed} asks it"
    )
    assert json.loads(ftlayer("jobs", "--json")[1])["vertices"][0]["state"] == "killed"
    code, _, errors = ftlayer("pending")
    assert code == 2
    assert "no program of yours serves a vertex on this machine now" in errors
    assert f"of left, process {GONE_PID}, which served it, was killed" in errors


def test_programs_that_were_killed_are_forgotten(killed: Path) -> None:
    code, output, _ = ftlayer("jobs", "forget", "other")
    assert (code, output) == (2, "")
    assert ftlayer("jobs", "forget") == (
        0,
        f"forgot left, whose process {GONE_PID} was killed; its store {killed} stays\n",
        "",
    )
    assert killed.is_dir()
    code, _, errors = ftlayer("jobs")
    assert (code, "no program of yours serves a vertex" in errors) == (2, True)
    assert ftlayer("jobs", "forget")[0::2] == (0, "")


def test_programs_of_other_projects_that_were_killed_are_shown_to_nobody_who_has_not_asked(
    killed: Path, tmp_path: Path
) -> None:
    access = AccessFile("grpc+unix:///tmp/x/vertex", "t" * 43, None, None, GONE_PID, str(tmp_path / "other"))
    write_access(killed / ACCESS_FILE, access)
    code, output, errors = ftlayer("jobs")
    assert (code, output, str(GONE_PID) in errors) == (2, "", False)
    assert ftlayer("jobs", "forget")[0::2] == (0, "")
    assert json.loads(ftlayer("jobs", "forget", "left", "--json")[1])[0]["pid"] == GONE_PID


def test_beside_others_a_killed_store_is_told_of_where_nothing_was_found(
    vertex: EmbeddedVertex, store: Path, killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = tmp_path / "beside"
    beside.mkdir()
    link_access(beside, store / ACCESS_FILE)
    monkeypatch.setattr("ftlayer.monitor.sources.socket_directories", lambda: (tmp_path / "sockets", beside))
    code, output, errors = ftlayer("dead", "list")
    assert (code, output) == (0, "none\n")
    assert errors == (
        f"ftlayer: what the store of left has is not known: process {GONE_PID}, which served it, was killed: start the "
        f"program again; until then ftlayer inspect {killed} shows what its store has, and --store {killed} asks it\n"
    )
    code, output, errors = ftlayer("pending")
    assert (code, errors) == (0, "")


def test_a_killed_program_keeps_its_name_is_shown_last_and_names_what_it_ran(
    vertex: EmbeddedVertex, store: Path, killed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, output, errors = ftlayer("jobs", "--vertex", killed, "--vertex", store)
    assert (code, "clean-orders" in output) == (1, True)
    assert errors.startswith(f"ftlayer: vertex left gives no answer: process {GONE_PID}")
    sockets = killed.parent / "sockets"
    (sockets / "access.json").unlink()
    access = AccessFile(
        "grpc+unix:///tmp/x/board", "t" * 43, None, None, GONE_PID, job="sums with checkpoints in s3://b/c"
    )
    write_access(sockets / "access.json", access)
    code, output, errors = ftlayer("jobs", "sums")
    assert code == 2
    assert (
        f"what driver-{GONE_PID} ran is not known: process {GONE_PID}, which ran sums with checkpoints in"
        in errors
    )


def test_names_of_killed_programs_that_were_told_apart_stay_good(
    killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, beside = tmp_path / "other" / "left", tmp_path / "beside"
    for directory in (other, beside):
        directory.mkdir(parents=True)
    write_access(other / ACCESS_FILE, AccessFile("grpc+unix:///tmp/x/vertex", "t" * 43, None, None, GONE_PID))
    link_access(beside, other / ACCESS_FILE)
    found = (killed.parent / "sockets", beside)
    monkeypatch.setattr("ftlayer.monitor.sources.socket_directories", lambda: found)
    names = sorted(view["vertex"] for view in json.loads(ftlayer("jobs", "--json")[1])["vertices"])
    assert [marked("left", str(path)) for path in (killed, other)] in (names, names[::-1])
    code, _, errors = ftlayer("jobs", "forget", "left")
    assert (code, all(name in errors for name in names)) == (2, True), errors
    assert ftlayer("jobs", "forget", marked("left", str(other)))[0] == 0
    assert ftlayer("jobs", "forget", marked("left", str(killed)))[0] == 0


def test_one_of_two_vertices_that_gives_no_answer_is_said(
    vertex: EmbeddedVertex, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftlayer.cli.connection.DEADLINE_MS", 500)
    token = tmp_path / "token"
    token.write_text("a-token-of-some-length")
    token.chmod(0o600)
    gone = "grpc+unix:///tmp/ftlayer-no-socket-is-here"
    code, output, errors = ftlayer("jobs", "--vertex", store, "--vertex", gone, "--token-file", token)
    assert code == 1
    assert "gives no answer" in errors
    assert "no process listens there" in errors
    assert "Flight" not in errors
    assert "clean-orders" in output


@pytest.mark.parametrize("state", ["gone", "killed"])
def test_jobs_in_the_store_of_a_program_that_has_ended_do_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    store = tmp_path / "ended"
    options = VertexOptions(store, max_store_bytes=1 << 26)
    ended = replace(topology("sums"), state="finished", final=True)
    with EmbeddedVertex(options) as vertex, vertex.client() as client:
        for job in (topology(), ended):
            client.call(calls.AnnounceJob(job))
    if state == "killed":
        (store / ACCESS_FILE).write_text("left")
    code, output, _ = ftlayer("jobs", "--store", store, columns=120)
    rows = {line.split()[0]: line.split() for line in output.splitlines()}
    assert (code, rows["ended"][1], rows["orders"][2], rows["sums"][2]) == (0, state, state, "finished")
    said = {
        "gone": "and its program (process 4711 on w1) has ended: start it again if it is to go on",
        "killed": "its driver (process 4711 on w1) was killed",
    }
    code, output, _ = ftlayer("jobs", "orders", "--store", store)
    assert (code, output.splitlines()[0]) == (0, f"topology orders: {state}")
    assert said[state] in output
    assert "said last  orders: running" in output
    assert json.loads(ftlayer("jobs", "orders", "--store", store, "--json")[1])["state"] == state
    monkeypatch.setattr("ftlayer.cli.main.await_end", None)
    for order in (("stop",), ("drain",), ("cancel",), ("savepoint",), ("stack", "--slot", "0")):
        assert ftlayer(*order, "orders", "--store", store) == (
            1,
            "",
            f"ftlayer: {order[0]}: topology orders of ended ({store}) does not run, since its program has ended: start "
            "that again, and ask it without --store\n",
        )


# ---------------------------------------------------------------- orders


@contextmanager
def driver(
    vertex: EmbeddedVertex, job: calls.JobDetails, answer: Callable[[calls.JobOrder], calls.OrderAnswer]
) -> Iterator[list[calls.JobOrder]]:
    """Announce ``job`` as its driver does, and answer each new order once it is known to be taken."""
    over, done = threading.Event(), []

    def announce() -> None:
        answers: dict[str, calls.OrderAnswer] = {}
        with vertex.client() as client:
            while not over.wait(0.02):
                announced = client.call(calls.AnnounceJob(job, tuple(answers.values())))
                assert isinstance(announced, calls.Announced)
                listed = {order.id: order for order in announced.orders}
                answers = {name: answers[name] for name in answers if name in listed}
                for name, order in listed.items():
                    if name not in answers:
                        answers[name] = calls.OrderAnswer(name, calls.OrderState.TAKEN, "", job.at_ms)
                    elif answers[name].state is calls.OrderState.TAKEN:
                        done.append(order)
                        answers[name] = answer(order)

    with vertex.client() as first:
        first.call(calls.AnnounceJob(job))
    thread = threading.Thread(target=announce)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()


def ends(state: calls.OrderState, text: str) -> Callable[[calls.JobOrder], calls.OrderAnswer]:
    return lambda order: calls.OrderAnswer(order.id, state, text, order.asked_ms)


def _of_another_version(reply: calls.Reply) -> bytes:
    frame = msgpack.unpackb(encode_reply(reply))
    for announced in frame["fields"].get("jobs", ()):
        announced["job"]["instance"] = 1
    return msgpack.packb(frame)


def _health_of_another_version(**values: Any) -> bytes:
    return msgpack.packb(msgpack.unpackb(encode_health(**values)) | {"ftlayer": "9.9.0"})


def test_a_program_of_another_version_is_left_aside(
    vertex: EmbeddedVertex, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftlayer.monitor.local_board.encode_reply", _of_another_version)
    monkeypatch.setattr("ftlayer.monitor.local_board.encode_health", _health_of_another_version)
    sockets, board, beside = SocketDirectory.make(), LocalBoard(), tmp_path / "beside"
    assert sockets is not None
    beside.mkdir()
    link_access(beside, store / ACCESS_FILE)
    theirs = Path(sockets.path)
    monkeypatch.setattr("ftlayer.monitor.sources.socket_directories", lambda: (theirs, beside))
    with contextlib.closing(BoardServer(board, sockets)) as server:
        board.call(calls.AnnounceJob(topology("theirs")))
        name = f"driver-{os.getpid()}"
        why = (
            f"vertex {name} is left aside: the vertex at {server.address} runs ftlayer 9.9.0, and this is ftlayer "
            f"{__version__}: use the ftlayer of its own environment (a reply that this ftlayer cannot read: "
            "JobList.jobs[0].job: unknown field 'instance')"
        )
        aside = f"ftlayer: {why}; --vertex asks others without it\n"
        with driver(vertex, topology(), ends(calls.OrderState.DONE, "stopped")) as taken:
            done = ftlayer("stop", "orders")
        assert (done[:2], aside in done[2], len(taken)) == ((0, "stopped\n"), True, 1), done
        code, output, errors = ftlayer("jobs")
        assert (code, errors, f"look here: {why}" in output) == (0, aside, True), output
        assert "orders" in output
        code, output, errors = ftlayer("jobs", "--vertex", theirs / "access.json", "--vertex", store)
        assert (code, errors, "orders" in output) == (1, f"ftlayer: {why}\n", True)
        assert ftlayer("dead", "list", "--vertex", theirs / "access.json") == (1, "", f"ftlayer: {why}\n")
        monkeypatch.setattr("ftlayer.monitor.sources.socket_directories", lambda: (theirs,))
        assert ftlayer("stop", "orders") == (1, "", aside)


def test_a_savepoint_is_taken_from_outside_and_its_place_printed(vertex: EmbeddedVertex, store: Path) -> None:
    with driver(vertex, topology("saved"), ends(calls.OrderState.DONE, "/sp/savepoint-7")) as orders:
        code, output, _ = ftlayer("savepoint", "saved", "--directory", "/sp", "--vertex", store)
        assert (code, output) == (0, "/sp/savepoint-7\n")
        shown = json.loads(ftlayer("stack", "saved", "--slot", 2, "--json", "--vertex", store)[1])
        assert (shown["state"], shown["slot"], shown["action"]) == ("done", 2, "stack")
    saved, stack = orders
    assert (saved.action, saved.directory, saved.run) == (calls.OrderAction.SAVEPOINT, "/sp", "run-1")
    assert stack.by


def test_without_a_slot_the_stack_is_of_the_only_one(vertex: EmbeddedVertex, store: Path) -> None:
    with driver(vertex, topology("alone"), ends(calls.OrderState.DONE, "main")) as orders:
        assert ftlayer("stack", "alone", "--vertex", store)[:2] == (0, "main\n")
    assert [order.slot for order in orders] == [0]
    two = replace(topology("two"), slots=tuple(calls.SlotDetails(slot, "running") for slot in (0, 3)))
    with vertex.client() as client:
        client.call(calls.AnnounceJob(two))
    for name, said in (
        ("two", "--slot: say which; two has 0, 3"),
        ("clean-orders", "clean-orders has no slots: stack is of topologies that run"),
    ):
        code, _, errors = ftlayer("stack", name, "--vertex", store)
        assert (code, errors) == (2, f"ftlayer: {said}\n")


def test_an_order_that_is_refused_has_exit_code_1(vertex: EmbeddedVertex, store: Path) -> None:
    with driver(
        vertex, topology("acker"), ends(calls.OrderState.REFUSED, "acker mode has no savepoints")
    ) as orders:
        code, output, errors = ftlayer("stop", "acker", "--vertex", store)
        assert (code, output) == (1, "")
        assert errors.splitlines() == [
            f"ftlayer: stop of topology acker of ft ({store}) …",
            "ftlayer: stop of acker was refused: acker mode has no savepoints",
        ]
        code, _, errors = ftlayer("drain", "acker", "--timeout", "5m", "--vertex", store)
    assert [order.timeout_ms for order in orders] == [0, 300_000]


def test_a_directory_is_refused_for_a_query(vertex: EmbeddedVertex, store: Path) -> None:
    code, _, errors = ftlayer("stop", "clean-orders", "--directory", "/sp", "--vertex", store)
    assert (code, "--directory: clean-orders is a wrapped query" in errors) == (2, True)
    code, _, errors = ftlayer("cancel", "clean-orders", "--vertex", store)
    assert (code, "is not cancelled: ftlayer stop" in errors, "now" in errors) == (2, True, False)


def test_an_order_whose_driver_does_not_take_it_goes_on(vertex: EmbeddedVertex, store: Path) -> None:
    with vertex.client() as client:
        client.call(calls.AnnounceJob(topology("slow")))
    code, _, errors = ftlayer("savepoint", "slow", "--wait", "0s", "--vertex", store)
    assert code == 1
    assert "is still under way after 0s; it goes on: see ftlayer jobs slow" in errors


class Ending:
    """What asks a vertex that ends with its program behind the first answer."""

    def __init__(self, first: calls.OrderState) -> None:
        self._answers = [first]

    def client(self, vertex: str) -> Ending:
        return self

    def gather(self) -> tuple[VertexView, ...]:
        return (VertexView("ft", "", is_gone=True),)

    def call(self, call: calls.AskJob, *, deadline_ms: int) -> calls.OrderRecord:
        if not self._answers:
            raise VertexUnavailableError("no answer")
        answer = calls.OrderAnswer(call.order.id, self._answers.pop(), "", NOW_MS)
        return calls.OrderRecord(call.order, answer)


@pytest.mark.parametrize(
    ("action", "state", "end"),
    [
        ("stop", calls.OrderState.TAKEN, calls.OrderState.DONE),
        ("savepoint", calls.OrderState.TAKEN, calls.OrderState.FAILED),
        ("cancel", calls.OrderState.WAITING, calls.OrderState.FAILED),
    ],
)
def test_a_vertex_ends_with_the_program_that_an_order_has_ended(
    action: str, state: calls.OrderState, end: calls.OrderState
) -> None:
    order = calls.JobOrder("id", "orders", "run-1", calls.OrderAction(action), "me", NOW_MS)
    record = await_end(Ending(state), JobKey("ft", "orders"), order, 60_000)  # type: ignore[arg-type]
    assert (record.answer.state, "its program has ended" in record.answer.text) == (end, True)


def test_cancel_asks_first(vertex: EmbeddedVertex, store: Path) -> None:
    with driver(vertex, topology("ended"), ends(calls.OrderState.DONE, "")) as orders:
        code, _, errors = ftlayer("cancel", "ended", "--vertex", store)
        assert (code, f"Cancel topology ended of ft ({store}) now" in errors, orders) == (1, True, [])
        code, output, _ = ftlayer("cancel", "ended", "--yes", "--vertex", store)
        assert (code, output) == (0, "cancel of ended: done\n")


# ---------------------------------------------------------------- top


def test_top_is_a_line_a_job_without_a_terminal(vertex: EmbeddedVertex, store: Path) -> None:
    code, output, _ = ftlayer("top", "--count", 2, "--interval", "100ms", "--vertex", store)
    assert code == 0
    lines = [line.split("  ", 1)[1] for line in output.splitlines()]
    assert lines.count("orders: running, 1,234 records/s, ok") == 2
    assert lines.count("vertex ft: up, 0 pending, 0 waiting, 0 in delivery, 0 dead") == 2
    looks = ftlayer("top", "--json", "--count", 2, "--interval", "100ms", "--vertex", store)[1].splitlines()
    assert [json.loads(look)["vertices"][0]["vertex"] for look in looks] == ["ft", "ft"]


JOBS = [JobKey("ft", "a"), JobKey("ft", "b")]


@pytest.mark.parametrize(
    ("before", "key", "after"),
    [
        (Position(0), Key.DOWN, Position(1)),
        (Position(1), Key.DOWN, Position(1)),
        (Position(0), Key.UP, Position(0)),
        (Position(7), Key.UP, Position(0)),
        (Position(1), Key.ENTER, Position(1, JOBS[1])),
        (Position(1, JOBS[1]), Key.DOWN, Position(1, JOBS[1])),
        (Position(1, JOBS[1]), Key.BACK, Position(1)),
        (Position(1), Key.BACK, None),
        (Position(1, JOBS[1]), Key.QUIT, None),
    ],
)
def test_keys_lead_from_place_to_place(before: Position, key: Key, after: Position | None) -> None:
    assert moved(before, key, JOBS) == after
    assert moved(Position(3), Key.ENTER, []) == Position(0)


def test_keys_are_what_terminals_send_for_them() -> None:
    sent = {
        b"\x1b[A": Key.UP,
        b"\x1b[B\x1b[B": Key.DOWN,
        b"\r": Key.ENTER,
        b"\x1b": Key.BACK,
        b"qq": Key.QUIT,
    }
    assert {code: key_of(code) for code in sent} == sent
    assert [key_of(code) for code in (b"x", b"\x1b[H", b"")] == [None, None, None]


def test_the_state_of_a_job_that_cannot_be_asked_about_is_said() -> None:
    up, silent, gone = (
        VertexView("ft", "", is_up=True),
        VertexView("ft", ""),
        VertexView("ft", "", is_gone=True),
    )
    running = calls.AnnouncedJob(topology(), 0, False)
    ended = calls.AnnouncedJob(replace(topology(), state="ended", final=True), 0, False)
    assert [state_of(view, running) for view in (up, silent, gone)] == ["running", "no answer", "gone"]
    assert [state_of(view, ended) for view in (up, silent, gone)] == ["ended", "ended", "ended"]
    assert state_of(up, replace(running, is_silent=True)) == "silent"


def test_top_in_a_terminal_is_walked_by_keys(vertex: EmbeddedVertex, store: Path) -> None:
    ours, theirs = open_terminal()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "ftlayer.cli.main", "top", "--vertex", str(store)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"},
    )
    os.close(theirs)
    seen = b""

    def read_until(word: bytes) -> None:
        nonlocal seen
        while word not in seen:
            seen += os.read(ours, 65_536)
        seen = b""

    try:
        read_until(b"quit")
        os.write(ours, b"\x1b[B")
        read_until(b"quit")
        os.write(ours, b"\r")
        read_until(b"what happened")
        os.write(ours, b"\x1b")
        read_until(b"pending")
        os.write(ours, b"q")
        with contextlib.suppress(OSError):  # the terminal is gone with the process
            while os.read(ours, 65_536):
                continue
        assert process.wait(600) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
