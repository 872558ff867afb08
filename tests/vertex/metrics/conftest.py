"""Jobs as their drivers announce them, and a vertex with a Prometheus server that scrapes it."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from programs import find_program

from ftlayer.common.rules.circuit import CircuitState, CircuitStatus
from ftlayer.common.rules.histogram import BATCH_BOUNDS, LATENCY_BOUNDS, Histogram
from ftlayer.vertex import calls
from ftlayer.vertex.calls import (
    CheckpointTotals,
    EdgeDetails,
    HistogramDetails,
    JobDetails,
    JobKind,
    SubtaskDetails,
)
from ftlayer.vertex.client.client import VertexClient
from ftlayer.vertex.service.metrics import Metrics, vertex_families

SINCE_MS = 1_700_000_000_000
WAIT_S = 120.0


def _histogram(seconds: float, count: int, bounds: tuple[float, ...], root: int = 0) -> HistogramDetails:
    histogram = Histogram(bounds)
    histogram.observe(seconds, count, root=root, at_ms=SINCE_MS + 1_000)
    return HistogramDetails.of(histogram)


def _running(kind: JobKind, names: tuple[str, str, str, str], step: int, **seen: Any) -> JobDetails:
    """A job that runs, ``step`` seconds after its begin; ``names`` are its owner, name, run and mode."""
    owner, name, run, mode = names
    at_ms = SINCE_MS + 1_000 * step
    return JobDetails(owner, name, kind, run, mode, "running", False, SINCE_MS, at_ms, **seen)


def topology(step: int = 0) -> JobDetails:
    """A topology in barrier mode, ``step`` seconds after its begin, with all that a driver can know."""
    parts = ("start_delay", "alignment", "sync", "async")
    return _running(
        JobKind.TOPOLOGY,
        ("shop", "shop", "run-1", "barrier"),
        step,
        restarts=2,
        subtasks=(
            SubtaskDetails("orders", 0, 90 + step, 80 + step, busy=0.2, back_pressured=0.9),
            SubtaskDetails("parse", 0, 50, 40, busy=0.5, watermark_ms=SINCE_MS - 3_000, late=3),
            SubtaskDetails("parse", 0, 20, 10, busy=0.97, watermark_ms=SINCE_MS - 9_000),
            SubtaskDetails("parse", 1, 5, 5),
        ),
        edges=(EdgeDetails("orders", "parse", 0, 4_096, 12), EdgeDetails("orders", "parse", 1, 100, 1)),
        counters={
            "records_in": 90 + step,
            "checkpoint_bytes": 1_000 * step,
            "letters_unsent": 5,
            "retried/parse": 30 + step,
            "waiting/parse": 4,
            "lag/orders": 17,
            "misfits": 4,
            "dead/parse": 2 + step,
            "paused/parse": 1,
        },
        checkpoint_totals=CheckpointTotals(9, 0, 7 + step, 2, 1, 1, 3, 10_000),
        histograms={
            "persist|orders": _histogram(0.004, 10 + step, LATENCY_BOUNDS, root=0xABC),
            "end_to_end|orders|out": _histogram(0.3, 10 + step, LATENCY_BOUNDS, root=0xABC),
            "checkpoint|": _histogram(1.5, 7 + step, BATCH_BOUNDS),
            **{f"checkpoint_{part}|parse": _histogram(0.2, 7 + step, BATCH_BOUNDS) for part in parts},
            "of a later version|": _histogram(0.2, 1, BATCH_BOUNDS),
        },
        circuits={"parse": CircuitStatus(CircuitState.OPEN, 3, 100, 40, 700)},
    )


def query(step: int = 0) -> JobDetails:
    """A wrapped query, ``step`` seconds after its begin."""
    phases = ("run", "verdict", "seal", "sink", "commit")
    return _running(
        JobKind.QUERY,
        ("0123456789abcdef", "clean orders", "run-q", "acker"),
        step,
        counters={"batches": 3 + step, "records_in": 100 * step, "delivered": 5, "failed": 4, "dead": 1},
        histograms={
            "batch|": _histogram(0.8, 3 + step, BATCH_BOUNDS),
            **{f"batch_{phase}|": _histogram(0.1, 3 + step, BATCH_BOUNDS) for phase in phases},
        },
    )


@dataclass
class Jobs:
    """Makes jobs."""

    topology: Callable[..., JobDetails] = topology
    query: Callable[..., JobDetails] = query


@pytest.fixture(scope="session")
def jobs() -> Jobs:
    return Jobs()


# ---------------------------------------------------------------- a vertex with something to tell


@dataclass
class Shop:
    """A vertex with a topology and a query, whose figures grow with each `step`."""

    client: VertexClient
    port: int
    steps: int = field(default=0)

    def prepare(self) -> None:
        self.client.call(calls.ClaimJob("shop", "run-1"))
        self.client.call(calls.OpenStream("shop/orders", calls.StreamOptions(max_attempts=3)))
        opening = calls.OpenQuery("0123456789abcdef", "run-q", ("ingest/web",), title="clean orders")
        self.client.call(opening)

    def step(self) -> None:
        """Let records come, be done, fail and die; announce both jobs."""
        self.steps += 1
        roots = np.arange(1, 11, dtype=np.uint64) + np.uint64(100 * self.steps)
        incarnation = self.client.health().incarnation
        rows = pa.record_batch({"n": range(10)})
        self.client.call(calls.Persist("shop/orders", rows, roots, roots))
        self.client.call(calls.Xor(roots[:6], roots[:6], incarnation))
        failures = [calls.Failure(int(root), "it broke", "parse") for root in roots[6:8].tolist()]
        self.client.call(calls.Fail((replace(failures[0], fatal=True), failures[1]), incarnation))
        self.client.call(calls.Ingest("ingest/web", rows))
        self.client.call(calls.AnnounceJob(topology(self.steps)))
        self.client.call(calls.AnnounceJob(query(self.steps)))

    def scrape(self, accept: str = "text/plain") -> str:
        """Return what the endpoint says now."""
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}/metrics", headers={"Accept": accept})
        with urllib.request.urlopen(asked, timeout=WAIT_S) as page:
            text: str = page.read().decode()
        return text


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, serving: Any) -> Iterator[Shop]:
    with (
        serving(tmp_path_factory.mktemp("metrics") / "vertex") as running,
        Metrics(lambda: vertex_families(running.vertex, "1.2.3"), "127.0.0.1", 0) as endpoint,
    ):
        assert endpoint.port is not None
        it = Shop(running.client(), endpoint.port)
        it.prepare()
        it.step()
        yield it


# ---------------------------------------------------------------- Prometheus


def promtool(*arguments: str, stdin: str = "", directory: Path | None = None) -> tuple[int, str]:
    """Run promtool; return its exit code and all that it says."""
    ended = subprocess.run(
        [find_program("promtool"), *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        cwd=directory,
        timeout=WAIT_S,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


@dataclass
class Prometheus:
    """A Prometheus server."""

    url: str

    def ask(self, path: str, **parameters: Any) -> Any:
        """Return the data of an answer of its API."""
        encoded = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{encoded}", timeout=WAIT_S) as page:
                return json.load(page)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series that an expression has now."""
        result: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return result


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port: int = unused.getsockname()[1]
    return port


@contextmanager
def _server(directory: Path, target: int) -> Iterator[Prometheus]:
    port = _free_port()
    (directory / "prometheus.yml").write_text(
        "global: {scrape_interval: 250ms, scrape_timeout: 250ms}\n"
        f"scrape_configs: [{{job_name: ftlayer, static_configs: [{{targets: ['127.0.0.1:{target}']}}]}}]\n"
    )
    with (directory / "log").open("w") as log:
        server = subprocess.Popen(
            [
                find_program("prometheus"),
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--enable-feature=exemplar-storage",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        prometheus = Prometheus(f"http://127.0.0.1:{port}")
        _until_ready(prometheus, server, directory / "log")
        yield prometheus
    finally:
        server.terminate()
        server.wait()


def _until_ready(prometheus: Prometheus, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        assert server.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{prometheus.url}/-/ready", timeout=WAIT_S):
                return
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory, shop: Shop) -> Iterator[Prometheus]:
    with _server(tmp_path_factory.mktemp("prometheus"), shop.port) as it:
        yield it


@pytest.fixture(name="promtool", scope="session")
def promtool_fixture() -> Callable[..., tuple[int, str]]:
    return promtool
