"""The vertex as a child process: it starts, dies, comes back, and goes with its driver."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from programs import is_running

from ftlayer import __version__
from ftlayer.config import ServeOptions, VertexOptions
from ftlayer.errors import (
    ConfigError,
    MachineError,
    StoreLockedError,
    StorePathError,
    VertexError,
    VertexUnavailableError,
)
from ftlayer.transport.tls import make_certificate
from ftlayer.vertex import calls
from ftlayer.vertex.calls import Accepted, Stats, StreamOpened, Xored
from ftlayer.vertex.client.client import VertexClient
from ftlayer.vertex.service import embedded as embedded_module
from ftlayer.vertex.service.embedded import ChildOrder, EmbeddedVertex
from ftlayer.vertex.service.serve import EXIT_FAULT, serve
from ftlayer.vertex.store.lmdb_store import LmdbStore

TOKEN = "t" * 32


def wait_until(condition: Callable[[], Any], timeout_s: float = 900) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        os.sched_yield()


def stats(client: VertexClient) -> dict[str, float]:
    reply: Any = client.call(Stats())
    values: dict[str, float] = reply.values
    return values


def test_a_killed_vertex_comes_back_with_its_records_and_clients_go_on(
    embedded: EmbeddedVertex, open_stream: Callable[..., Any], batches: Any
) -> None:
    with embedded.client() as client, client.pipeline() as pipeline:
        client.call(open_stream())
        assert pipeline.submit(batches.persist(5)).result() == Accepted(5)
        address, pid = embedded.address, embedded.pid
        embedded.kill()
        assert pipeline.submit(batches.persist(7)).result() == Accepted(7)
        assert client.health().incarnation == 2
        assert embedded.address == address
        assert address.startswith("grpc+unix://")
        assert embedded.pid != pid
        assert stats(client)["recovered"] == 5
        embedded.check()


def test_one_that_is_killed_while_it_starts_again_comes_back_too(embedded: EmbeddedVertex) -> None:
    for _ in range(2):
        pid = embedded.pid
        embedded.kill()
        wait_until(lambda pid=pid: embedded.pid not in (pid, None))
    with embedded.client() as client:
        assert client.health().incarnation >= 2
    embedded.check()


def test_a_driver_without_a_free_descriptor_starts_it_again_when_it_has_one(
    embedded: EmbeddedVertex, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def popen(*given: Any, **named: Any) -> Any:
        tries.append(1)
        if len(tries) <= 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return popen_before(*given, **named)

    popen_before = subprocess.Popen
    monkeypatch.setattr(embedded_module, "PAUSE_S", 0)
    monkeypatch.setattr(embedded_module, "subprocess", SimpleNamespace(PIPE=subprocess.PIPE, Popen=popen))
    pid = embedded.pid
    embedded.kill()
    wait_until(lambda: embedded.pid not in (pid, None) or has_given_up(embedded))
    embedded.check()
    assert len(tries) == 3


def test_stop_writes_down_what_completed(
    tmp_path: Path, open_stream: Callable[..., Any], batches: Any
) -> None:
    with EmbeddedVertex(VertexOptions(tmp_path / "vertex")) as vertex, vertex.client() as client:
        opened: Any = client.call(open_stream())
        assert isinstance(opened, StreamOpened)
        call = batches.persist(5)
        client.call(call)
        assert client.call(batches.xor(call, opened.incarnation)) == Xored(5, 0)
        pid = vertex.pid
        vertex.stop()
        vertex.stop()
        assert vertex.pid is None
        assert pid is not None
        assert not is_running(pid)
    with EmbeddedVertex(VertexOptions(tmp_path / "vertex")) as vertex, vertex.client() as client:
        assert stats(client)["recovered"] == 0


def test_it_cannot_be_started_twice(embedded: EmbeddedVertex) -> None:
    with pytest.raises(VertexError, match="another"):
        embedded.start()


def test_the_token_is_not_on_the_command_line(embedded: EmbeddedVertex) -> None:
    command = Path(f"/proc/{embedded.pid}/cmdline").read_bytes()
    assert embedded.token.encode() not in command


def test_off_loopback_it_has_a_certificate_of_its_own(
    tmp_path: Path, open_stream: Callable[..., Any]
) -> None:
    # Not loopback by its text, and yet an address every machine has.
    with EmbeddedVertex(VertexOptions(tmp_path / "vertex"), host="0.0.0.0") as vertex:
        assert vertex.root_certs is not None
        assert vertex.address.startswith("grpc+tls://0.0.0.0:")
        with vertex.client(deadline_ms=10_000) as client:
            assert isinstance(client.call(open_stream()), StreamOpened)
        stranger = VertexClient(vertex.address, vertex.token, root_certs=vertex.root_certs, deadline_ms=500)
        with stranger, pytest.raises(VertexUnavailableError):
            stranger.health()


# ---------------------------------------------------------------- what keeps it from starting


def test_what_is_wrong_with_the_store_is_raised(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "vertex"):
        with pytest.raises(StorePathError):
            EmbeddedVertex(VertexOptions(path)).start()
    (tmp_path / "held").mkdir()
    store = LmdbStore.open(tmp_path / "held" / "shard-000", max_store_bytes=8 << 20)
    with pytest.raises(StoreLockedError):
        EmbeddedVertex(VertexOptions(tmp_path / "held", max_store_bytes=8 << 20)).start()
    store.close()


def test_a_child_that_cannot_even_begin_leaves_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(VertexError, match=r"vertex\.log"):
        EmbeddedVertex(VertexOptions(tmp_path / "vertex")).start()


def has_given_up(vertex: EmbeddedVertex) -> bool:
    try:
        vertex.check()
    except VertexError:
        return True
    return False


def test_a_vertex_that_dies_again_and_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_module, "MAX_RESTARTS", 2)
    with EmbeddedVertex(VertexOptions(tmp_path / "missing" / "vertex")) as vertex:
        with vertex.client(deadline_ms=10_000) as client:
            for _ in range(3):
                client.health()
                pid = vertex.pid
                vertex.kill()
                wait_until(lambda pid=pid: vertex.pid not in (pid, None) or has_given_up(vertex))
        with pytest.raises(VertexError, match="3 times"):
            vertex.check()
        with vertex.client(deadline_ms=200) as client, pytest.raises(VertexUnavailableError):
            client.health()


# ---------------------------------------------------------------- with its driver

DRIVER = """
    import os, signal, sys
    from ftlayer.config import VertexOptions
    from ftlayer.vertex.service.embedded import EmbeddedVertex

    vertex = EmbeddedVertex(VertexOptions(sys.argv[1]))
    vertex.start()
    forked = 0
    if sys.argv[2] == "forked":
        # Holds a copy of the pipe, as a driver's multiprocessing worker does.
        forked = os.fork()
        if forked == 0:
            signal.pause()
    print(vertex.pid, forked, flush=True)
    sys.stdin.readline()
    if sys.argv[2] == "returns":
        sys.exit(0)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["killed", "returns", "forked"])
def test_the_vertex_ends_with_its_driver_and_leaves_the_store_in_order(tmp_path: Path, how: str) -> None:
    path = tmp_path / "vertex"
    command = [sys.executable, "-c", textwrap.dedent(DRIVER), str(path), how]
    driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert driver.stdin is not None
    assert driver.stdout is not None
    vertex, forked = map(int, driver.stdout.readline().split())
    driver.stdin.write("\n")
    driver.stdin.flush()
    driver.wait(600)
    try:
        wait_until(lambda: not is_running(vertex))
        wait_until(lambda: opens(path))
    finally:
        if forked:
            os.kill(forked, signal.SIGKILL)


def opens(path: Path) -> bool:
    try:
        LmdbStore.open(path / "shard-000", max_store_bytes=8 << 30).close()
    except StoreLockedError:
        return False
    return True


def test_an_embedded_vertex_has_a_metrics_endpoint_where_it_is_asked_for(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with (
        EmbeddedVertex(VertexOptions(tmp_path / "vertex", metrics_port=port)),
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=600) as page,
    ):
        assert f'ftlayer_build_info{{version="{__version__}"}} 1.0' in page.read().decode()


# ---------------------------------------------------------------- serve

SERVE = """
    import os, sys
    from ftlayer.config import ServeOptions, VertexOptions
    from ftlayer.vertex.service.serve import EXIT_FAULT, serve
    options = ServeOptions(
        VertexOptions(sys.argv[1], metrics_port=int(sys.argv[3])), token=sys.argv[2], listen="127.0.0.1:0"
    )
    os._exit(serve(options, on_ready=lambda address: print(address, flush=True)))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_ends_well_at_a_signal_with_streams_open(
    tmp_path: Path, number: int, open_stream: Callable[..., Any], batches: Any
) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    command = [sys.executable, "-c", textwrap.dedent(SERVE), str(tmp_path / "vertex"), TOKEN, str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    with VertexClient(address, TOKEN, deadline_ms=10_000) as client, client.pipeline() as pipeline:
        opened: Any = client.call(open_stream())
        call = batches.persist(4)
        pipeline.submit(call).result()
        pipeline.submit(batches.xor(call, opened.incarnation)).result()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=600) as page:
            text = page.read().decode()
        labels = '{source="source",topology="job"}'
        assert f"ftlayer_records_persisted_total{labels} 4.0" in text
        assert f"ftlayer_records_completed_total{labels} 4.0" in text
        server.send_signal(number)
        assert server.wait(600) == 0
    assert opens(tmp_path / "vertex")


NEVER_COMPILED = """
    import os, sys, threading
    import ftlayer.vertex.service.serve as serving
    from ftlayer.config import ServeOptions, VertexOptions
    serving.warm_up = threading.Event().wait
    options = ServeOptions(VertexOptions(sys.argv[1]), token=sys.argv[2], listen="127.0.0.1:0")
    os._exit(serving.serve(options, on_ready=lambda address: print(address, flush=True)))
"""


def test_batches_of_a_query_do_not_wait_for_the_kernels_of_the_table(tmp_path: Path) -> None:
    """They take ten seconds the first time on a machine, and nothing in a micro-batch is followed by XOR."""
    command = [sys.executable, "-c", textwrap.dedent(NEVER_COMPILED), str(tmp_path / "vertex"), TOKEN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        rows = pa.record_batch({"value": ["good", "bad"]})
        roots = np.array([7, 8], np.uint64)
        failed = calls.SealedRows("q/lines", rows.slice(1), roots[1:], (calls.Failure(8, "broken"),))
        with VertexClient(address, TOKEN, deadline_ms=20_000) as client:
            opened: Any = client.call(calls.OpenQuery("q", "run", ("q/lines",), calls.StreamOptions()))
            client.call(calls.BeginBatch("q", opened.epoch, 0))
            sealed: Any = client.call(calls.Seal("q", opened.epoch, 0, {}, (failed,)))
            assert sealed.waiting == 1
            client.call(calls.Commit("q", opened.epoch, 0))
            status: Any = client.call(calls.QueryStatusCall("q"))
            assert status.waiting == 1
            assert stats(client)["tracked_roots"] == 0
        server.terminate()
        assert server.wait(600) == 0


KERNELS_FAIL = """
    import os, sys
    import ftlayer.vertex.service.serve as serving
    from ftlayer.config import ServeOptions, VertexOptions
    def fail():
        raise RuntimeError("no compiler")
    serving.warm_up = fail
    os._exit(serving.serve(ServeOptions(VertexOptions(sys.argv[1]), token=sys.argv[2], listen="127.0.0.1:0")))
"""


def test_kernels_that_cannot_be_compiled_end_the_vertex(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(KERNELS_FAIL), str(tmp_path / "vertex"), TOKEN]
    ended = subprocess.run(command, timeout=900, check=False, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == EXIT_FAULT
    assert "no compiler" in ended.stderr


NO_DESCRIPTOR_AT_FIRST = """
    import errno, os, sys, threading
    import ftlayer.vertex.service.serve as serving
    from ftlayer.config import ServeOptions, VertexOptions
    stop, asked = threading.Event(), []
    def warm_up():
        asked.append(1)
        if len(asked) == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        stop.set()
    serving.warm_up = warm_up
    options = ServeOptions(VertexOptions(sys.argv[1]), token=sys.argv[2], listen="127.0.0.1:0")
    os._exit(serving.serve(options, stop=stop))
"""


def test_kernels_wait_for_a_descriptor(tmp_path: Path) -> None:
    """Callers without a token may hold all of them for a while."""
    command = [sys.executable, "-c", textwrap.dedent(NO_DESCRIPTOR_AT_FIRST), str(tmp_path / "vertex"), TOKEN]
    assert subprocess.run(command, timeout=900, check=False).returncode == 0


@pytest.mark.parametrize(
    ("kind", "limit", "said"),
    [(resource.RLIMIT_NOFILE, 40, "40 files"), (resource.RLIMIT_AS, 1 << 30, "of address space")],
)
def test_a_start_that_limits_do_not_allow_is_one_sentence(
    tmp_path: Path, kind: int, limit: int, said: str
) -> None:
    options = VertexOptions(str(tmp_path / "vertex"), max_store_bytes=64 << 20)
    order = ChildOrder(ServeOptions(options, token=TOKEN, listen="127.0.0.1:0")).to_line()
    served = [
        sys.executable,
        "-m",
        "ftlayer.cli.main",
        "serve",
        str(tmp_path / "vertex"),
        "--max-store=64MiB",
    ]
    for command in ([sys.executable, "-m", "ftlayer.vertex.service"], served):
        ended = subprocess.run(
            command,
            input=order,
            preexec_fn=lambda: resource.setrlimit(kind, (limit, limit)),
            env=os.environ | {"FTLAYER_TOKEN": TOKEN},
            capture_output=True,
            timeout=900,
            check=False,
        )
        assert ended.returncode == 1
        assert said.encode() in ended.stdout + ended.stderr
        assert ended.stderr.count(b"\n") == 1
    assert not (tmp_path / "vertex").exists()


INTERRUPTED = """
    import os, signal, sys, threading
    from ftlayer.config import ServeOptions, VertexOptions
    from ftlayer.vertex.service.serve import EXIT_FAULT, serve

    class Interrupted(threading.Event):
        def wait(self, timeout=None):
            with self._cond:
                signal.raise_signal(signal.SIGINT)
            return super().wait(timeout)

    options = ServeOptions(VertexOptions(sys.argv[1]), token=sys.argv[2], listen="127.0.0.1:0")
    os._exit(serve(options, stop=Interrupted()))
"""


def test_serve_ends_at_a_signal_that_comes_while_it_begins_to_wait(tmp_path: Path) -> None:
    """A handler runs in the middle of `Event.wait`, which holds a lock then."""
    command = [sys.executable, "-c", textwrap.dedent(INTERRUPTED), str(tmp_path / "vertex"), TOKEN]
    assert subprocess.run(command, timeout=900, check=False).returncode == 0


def test_serve_says_what_is_wrong_with_its_address(tmp_path: Path, running: Any) -> None:
    taken = f"127.0.0.1:{running.server.port}"
    made = make_certificate(["192.0.2.7"])
    for listen in (taken, "127.0.0.1:1", "192.0.2.7:0", "no.such.host.example:0"):
        certificate = {} if listen.startswith("127") else {"tls_cert": made.cert, "tls_key": made.key}
        if listen.endswith(":1") and os.geteuid() == 0:
            continue  # root may listen there
        with pytest.raises(MachineError if listen == taken else ConfigError, match="listen"):
            serve(ServeOptions(VertexOptions(tmp_path / "other"), TOKEN, listen, **certificate))


def test_only_the_owner_reads_the_log(embedded: EmbeddedVertex, tmp_path: Path) -> None:
    assert (tmp_path / "vertex" / "vertex.log").stat().st_mode & 0o777 == 0o600
