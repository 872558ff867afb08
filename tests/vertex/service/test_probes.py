"""Probes over HTTP: of a shard whose store hangs, and of processes that recover, fill, hang and stop."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from ftlayer.cli.main import app
from ftlayer.common.clock import Now
from ftlayer.errors import IntakeTimeoutError, VertexUnavailableError
from ftlayer.vertex.calls import Envelope, Ingest, OpenQuery
from ftlayer.vertex.client.client import VertexClient
from ftlayer.vertex.rules.operating import STUCK_AFTER_MS
from ftlayer.vertex.service.metrics import Metrics, Probes
from ftlayer.vertex.service.shard import Shard, ShardParts

TOKEN = "a-token-that-is-long-enough"
PATIENCE_S = 120.0


def ask(port: int, path: str, timeout_s: float = PATIENCE_S) -> tuple[int, dict[str, Any]]:
    """Return the status and the JSON that a probe gets; status 0 where nothing listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=timeout_s) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)
    except (urllib.error.URLError, ConnectionError):
        return 0, {}


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, is_so
        time.sleep(0.02)


# ---------------------------------------------------------------- a shard in this process


class Clock:
    """A clock that the test moves."""

    ms = 1_000_000

    def now(self) -> Now:
        return Now(self.ms, self.ms)


@dataclasses.dataclass
class OneShard:
    """A vertex of one shard."""

    shard: Shard

    def pulses(self) -> list[Any]:
        return [self.shard.pulse()]


def test_a_writer_whose_store_hangs_fails_both_probes_until_it_goes_on(
    parts: ShardParts, store: Any, open_stream: Callable[..., Any]
) -> None:
    clock = Clock()
    shard = Shard(dataclasses.replace(parts, now=clock.now), "shard-000", lambda error: None)
    probes = Probes(lambda: clock.ms)
    probes.opened(OneShard(shard))
    probes.serving()
    with Metrics(_unasked, "127.0.0.1", 0, probes) as endpoint:
        port = endpoint.port
        assert port is not None
        assert ask(port, "/livez")[0] == ask(port, "/readyz")[0] == 200
        store.may_commit.clear()
        answers: list[Any] = []
        shard.submit(open_stream(), Envelope("me", 1), answers.append)
        assert store.commits_waiting.acquire(timeout=PATIENCE_S)
        clock.ms += STUCK_AFTER_MS - 1_000
        assert ask(port, "/livez")[0] == 200
        clock.ms += 1_001
        for path in ("/livez", "/readyz"):
            status, body = ask(port, path)
            assert status == 503
            assert body["reasons"] == [
                "shard 0: its writer has not come round for 30 s; the disk does not answer, or a call hangs"
            ]
            assert body["shards"][0]["seconds_since_turn"] == pytest.approx(30.001)
        store.may_commit.set()
        until(lambda: ask(port, "/livez")[0] == 200)
    shard.close()


def _unasked() -> Any:
    raise AssertionError("a probe gathers no metrics")


# ---------------------------------------------------------------- ftlayer serve


class Manager:
    """What a service manager hears of a process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(PATIENCE_S)

    def hear(self, begin: str) -> str:
        """Wait for a message that begins so; return it."""
        while True:
            message = self._socket.recv(4_096).decode()
            if message.startswith(begin):
                return message

    def heard_nothing_but_old(self) -> bool:
        """Take what has come; return whether there was none."""
        self._socket.setblocking(False)
        try:
            self._socket.recv(4_096)
        except BlockingIOError:
            return True
        finally:
            self._socket.settimeout(PATIENCE_S)
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port: int = unused.getsockname()[1]
    return port


@dataclasses.dataclass
class Served:
    """A vertex that ``ftlayer serve`` runs, as a service manager would start it."""

    directory: Path
    process: subprocess.Popen[str]
    port: int
    listen: str
    manager: Manager

    def client(self) -> VertexClient:
        return VertexClient(f"grpc://{self.listen}", TOKEN)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the writer from its next transaction, as a disk that hangs would: another process has LMDB's lock."""
        code = (
            "import lmdb, sys\n"
            "store = lmdb.open(sys.argv[1], max_dbs=64, create=False, readonly=False, map_size=int(sys.argv[2]))\n"
            "with store.begin(write=True) as txn:\n"
            "    print('held', flush=True)\n"
            "    sys.stdin.read()\n"
            "    txn.abort()\n"
        )
        holder = subprocess.Popen(
            [sys.executable, "-c", code, str(self.directory / "store" / "shard-000"), str(32 << 20)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        try:
            yield
        finally:
            holder.communicate()


@contextmanager
def serving(directory: Path) -> Iterator[Served]:
    """Start a vertex; it may not serve yet."""
    (directory / "token").write_text(TOKEN)
    (directory / "token").chmod(0o600)
    manager_at = directory / "notify"
    manager_at.unlink(missing_ok=True)
    manager = Manager(manager_at)
    port, listen = _free_port(), f"127.0.0.1:{_free_port()}"
    command = [sys.executable, "-m", "ftlayer.cli.main", "serve", str(directory / "store")]
    options = ["--listen", listen, "--token-file", str(directory / "token"), "--metrics-port", str(port)]
    environ = os.environ | {"NOTIFY_SOCKET": str(manager_at), "WATCHDOG_USEC": "400000"}
    process = subprocess.Popen(
        [*command, *options, "--max-store", "32MiB", "--persist-timeout", "100ms"],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield Served(directory, process, port, listen, manager)
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


def _health(port: int, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["health", f"http://127.0.0.1:{port}", *options])
    return result.exit_code, result.output


def test_a_life_of_a_vertex_as_probes_and_a_service_manager_see_it(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        assert served.manager.hear("READY=1") == f"READY=1\nSTATUS=serving at grpc://{served.listen}"
        status, body = ask(served.port, "/readyz")
        assert (status, body["phase"], body["notes"]) == (200, "serving", [])
        assert _health(served.port) == (0, "serving: ok\n")
        code, said = _health(int(served.listen.partition(":")[2]))
        assert code == 1
        assert "answers, and not by HTTP" in said
        served.manager.hear("WATCHDOG=1")

        # The whole process stands still: no answer is an answer.
        served.process.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            ask(served.port, "/livez", timeout_s=0.5)
        served.process.send_signal(signal.SIGCONT)
        until(lambda: ask(served.port, "/livez")[0] == 200)

        _fill(served)
        status, body = ask(served.port, "/readyz")
        assert status == 200
        assert "at 90% intake waits, commits, requeues and purges go on" in body["notes"][0]
        code, said = _health(served.port)
        assert code == 0
        assert "note: shard 0: its store is 8" in said

        # The end: not ready first, while it still listens and the writer is not done.
        with served.held():
            served.process.send_signal(signal.SIGTERM)
            served.manager.hear("STOPPING=1")
            status, body = ask(served.port, "/readyz")
            assert (status, body["phase"]) == (503, "stopping")
            assert body["reasons"] == ["the vertex is stopping"]
            assert ask(served.port, "/livez")[0] == 200
            assert _health(served.port)[0] == 1
            assert _health(served.port, "--live")[0] == 0
            with socket.create_connection(("127.0.0.1", int(served.listen.partition(":")[2]))):
                assert served.process.poll() is None
        assert served.process.wait(PATIENCE_S) == 0
        code, said = _health(served.port)
        assert code == 1
        assert "gives no answer" in said


def _fill(served: Served) -> None:
    """Ingest until the store is full."""
    rows = pa.record_batch({"text": ["x" * 65_536] * 16})
    with served.client() as client:
        client.call(OpenQuery("reader", "run-1", ("ingest/web",)))

        def ingest_all() -> None:
            for _ in range(64):
                client.call(Ingest("ingest/web", rows))

        with pytest.raises(IntakeTimeoutError):
            ingest_all()


def test_while_it_recovers_a_vertex_is_live_and_not_ready(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        served.manager.hear("READY=1")
        served.process.terminate()
        assert served.process.wait(PATIENCE_S) == 0
        holding = served.held()
    with holding, serving(tmp_path) as again:
        until(lambda: ask(again.port, "/readyz")[0] == 503)
        body = ask(again.port, "/readyz")[1]
        assert (body["phase"], body["shards"]) == ("opening", [])
        assert ask(again.port, "/livez")[0] == 200
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"http://127.0.0.1:{again.port}/metrics", timeout=PATIENCE_S)


@pytest.mark.faults
def test_a_writer_that_hangs_is_seen_within_a_minute_by_probes_and_by_the_watchdog(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        served.manager.hear("WATCHDOG=1")
        with served.held(), served.client() as client:
            with pytest.raises(VertexUnavailableError):
                client.call(OpenQuery("reader", "run-1", ("ingest/web",)), deadline_ms=1_000)
            until(lambda: ask(served.port, "/livez")[0] == 503)
            assert "shard 0: its writer has not come round" in ask(served.port, "/readyz")[1]["reasons"][0]
            until(served.manager.heard_nothing_but_old)
        served.manager.hear("WATCHDOG=1")
        until(lambda: ask(served.port, "/livez")[0] == 200)
