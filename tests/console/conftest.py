"""A console without a server, over a vertex in memory: requests go to its application, its calls to the vertex."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
from starlette.testclient import TestClient

from ftlayer.common.clock import Now
from ftlayer.errors import FTLayerError, VertexUnavailableError
from ftlayer.monitor.console.options import ConsoleOptions
from ftlayer.monitor.console.searching import Console
from ftlayer.monitor.console.serve import create_app
from ftlayer.monitor.gather import Gatherer
from ftlayer.monitor.sources import VertexSource
from ftlayer.vertex.calls import (
    AnnounceJob,
    BatchDetails,
    Call,
    CheckpointDetails,
    CheckpointTotals,
    EdgeDetails,
    Envelope,
    Fail,
    Failure,
    HistogramDetails,
    Incident,
    JobDetails,
    JobKind,
    JobPlan,
    OpenStream,
    Persist,
    PlanEdge,
    PlanNode,
    Reply,
    SlotDetails,
    StreamOptions,
    SubtaskCheckpointDetails,
    SubtaskDetails,
)
from ftlayer.vertex.rules.layer import FTLayerCore
from ftlayer.vertex.rules.state import LayerOptions
from ftlayer.vertex.service.shard import ShardParts
from ftlayer.vertex.service.vertex import Vertex
from ftlayer.vertex.store import MemoryStore

ORIGIN = "http://localhost"
TOKENS = {"operator": "operator-token-of-this-test", "reader": "reader-token-of-this-test"}


@dataclass
class ManualClock:
    """A clock that a test moves."""

    now: Now = field(default_factory=lambda: Now(1_000_000, 1_790_000_000_000))

    def __call__(self) -> Now:
        return self.now

    def move(self, ms: int) -> None:
        """Let time pass."""
        self.now = Now(self.now.mono_ms + ms, self.now.wall_ms + ms)


class LiveVertex:
    """A vertex over a `MemoryStore`, called without a wire; `call` and `close` are what a gatherer needs."""

    def __init__(self, path: Path, clock: Callable[[], Now]) -> None:
        self.clock = clock
        self.faults: list[Exception] = []
        parts = ShardParts(
            open_store=MemoryStore,
            make_layer=lambda store, now: FTLayerCore(store, LayerOptions(tracker="exact"), now),
            persist_timeout_ms=5_000,
            now=clock,
        )
        self.vertex = Vertex(path, [parts], self.faults.append)
        self.is_gone = False
        self._sequence = 0
        self._root = 0

    def call(self, call: Call, *, deadline_ms: int | None = None) -> Reply:
        """Make one call and return its reply."""
        if self.is_gone:
            raise VertexUnavailableError("nobody listens there")
        answered = threading.Event()
        answers: list[Reply | FTLayerError] = []

        def answer(reply: Reply | FTLayerError) -> None:
            answers.append(reply)
            answered.set()

        self._sequence += 1
        envelope = Envelope(f"test-{self._sequence}", 1) if call.enveloped else None
        self.vertex.submit(call, envelope, answer)
        assert answered.wait(60), call
        if isinstance(answers[0], FTLayerError):
            raise answers[0]
        return answers[0]

    def close(self) -> None:
        """Stay open: the fixture closes it."""

    def announce(self, job: JobDetails) -> None:
        """Have a driver announce a job."""
        self.call(AnnounceJob(job))

    def open(self, stream: str) -> None:
        """Open a stream whose records are dead after one attempt."""
        self.call(OpenStream(stream, StreamOptions(max_attempts=1)))

    def persist(self, stream: str, rows: list[dict[str, Any]]) -> list[int]:
        """Register records, and return their roots."""
        roots = np.arange(self._root + 1, self._root + 1 + len(rows), dtype=np.uint64)
        self._root += len(rows)
        self.call(Persist(stream, pa.RecordBatch.from_pylist(rows), roots, roots * np.uint64(3)))
        return [int(root) for root in roots]

    def kill(self, stream: str, rows: list[dict[str, Any]], operator: str, reason: str) -> None:
        """Make dead letters."""
        roots = self.persist(stream, rows)
        failures = tuple(Failure(root, reason, operator, f"Traceback\n{reason}") for root in roots)
        self.call(Fail(failures, self.vertex.incarnation))


def topology(clock: Callable[[], Now], name: str = "orders", **changes: Any) -> JobDetails:
    """A topology in barrier mode as its driver announces it: ``parse`` holds ``lines`` up."""
    now_ms = clock().wall_ms
    part = SubtaskCheckpointDetails("parse", 0, 12, 30, 4.5, 220.0, 1 << 20, 1 << 24, 0, False)
    done = CheckpointDetails(
        41,
        "checkpoint",
        "completed",
        True,
        now_ms - 2_000,
        now_ms - 800,
        1_200,
        1,
        (part,),
        "/cp/orders/chk-41",
    )
    failed = CheckpointDetails(
        42, "checkpoint", "failed", True, now_ms - 500, now_ms, 500, 1, failure="slot 1 was lost"
    )
    details = JobDetails(
        owner=name,
        name=name,
        kind=JobKind.TOPOLOGY,
        run="run-1",
        mode="barrier",
        state="running",
        final=False,
        since_ms=now_ms - 7_200_000,
        at_ms=now_ms,
        host="driver-1",
        pid=4_100,
        line="61.2k records/s in 2 slots",
        plan=JobPlan(
            (PlanNode("lines", ("lines",), 1), PlanNode("parse", ("parse", "valid"), 2)),
            (PlanEdge("lines", "parse", "rebalance"),),
        ),
        slots=(
            SlotDetails(0, "running", "worker-1", 4_711, 300),
            SlotDetails(1, "running", "worker-2", 4_712, 300, "parse", 1_900, "app.parse_line"),
        ),
        subtasks=(
            SubtaskDetails("lines", 0, 900, 900, 61_200.0, 61_200.0, 0.2, 0.88),
            SubtaskDetails("parse", 0, 400, 400, 30_000.0, 30_000.0, 0.5, 0.0, now_ms - 4_000),
            SubtaskDetails("parse", 1, 400, 400, 31_200.0, 31_200.0, 0.97, 0.0, now_ms - 4_000),
        ),
        edges=(EdgeDetails("lines", "parse", 1, 4_300_000, 9_000),),
        histograms={"end_to_end|lines|out": HistogramDetails((0.1, 0.2), (0, 10, 0), 1.5)},
        rates={"records_in": 61_200.0},
        incidents=(Incident(now_ms - 60_000, "restart", "exit code -9", 1),),
        checkpoint_totals=CheckpointTotals(
            42, 0, 41, 1, 0, 1, 3, 10_000, "/cp", "/savepoints", ("/cp/orders/chk-41",), now_ms - 800
        ),
        checkpoints=(done, failed),
    )
    return replace(details, **changes)


def query(clock: Callable[[], Now], owner: str = "ab" * 16, **changes: Any) -> JobDetails:
    """A wrapped query as its driver announces it."""
    now_ms = clock().wall_ms
    phases = {"run": 500.0, "verdict": 40.0, "seal": 60.0, "sink": 180.0, "commit": 50.0}
    details = JobDetails(
        owner=owner,
        name="clean-orders",
        kind=JobKind.QUERY,
        run="run-9",
        mode="",
        state="running",
        final=False,
        since_ms=now_ms - 900_000,
        at_ms=now_ms,
        line="batch 7: 4,383 rows",
        rates={"records_in": 4_300.0},
        batches=tuple(BatchDetails(n, now_ms - 9_000, 4_383, 2, 3, 1, 830.0, phases) for n in range(8)),
        links={"Spark UI": "http://driver-1:4040/"},
    )
    return replace(details, **changes)


class Visitor:
    """A browser at the console; it follows no redirect."""

    tokens = TOKENS
    origin = ORIGIN

    def __init__(self, client: TestClient) -> None:
        self.client = client

    def get(self, path: str, **options: Any) -> httpx.Response:
        """Open a page."""
        return self.client.get(path, **options)

    def log_in(self, role: str) -> Visitor:
        """Log in as the form does, as the user of this role."""
        answer = self.client.post("/login", data={"token": TOKENS[role]}, headers={"origin": ORIGIN})
        assert answer.status_code == 303, answer.text
        return self

    @property
    def csrf(self) -> str:
        """The token that is in this session's forms."""
        return self.get("/nothing-here").text.split('name="csrf" value="', 1)[1].split('"', 1)[0]

    def post(self, path: str, fields: dict[str, Any] | None = None, **options: Any) -> httpx.Response:
        """Send a form as one of the console's pages does."""
        return self.client.post(
            path, data={"csrf": self.csrf} | (fields or {}), headers={"origin": ORIGIN}, **options
        )

    def api(self, role: str, method: str, path: str, **options: Any) -> httpx.Response:
        """Call the API with the token of this role's user; "" sends none."""
        headers = {"authorization": f"Bearer {TOKENS[role]}"} if role else {}
        return self.client.request(method, f"/api/v1{path}", headers=headers, **options)


@pytest.fixture
def manual_clock() -> Callable[..., ManualClock]:
    """Make clocks."""
    return ManualClock


@pytest.fixture
def clock() -> ManualClock:
    """The console's clock."""
    return ManualClock()


@pytest.fixture
def login_file(tmp_path: Path) -> Path:
    """An operator and a reader."""
    path = tmp_path / "logins"
    path.write_text(f"# who\noperator ada {TOKENS['operator']}\n\nreader bob {TOKENS['reader']}\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def vertex(tmp_path: Path, clock: ManualClock) -> Iterator[LiveVertex]:
    """A vertex, which the console calls ``shop``."""
    path = tmp_path / "vertex"
    path.mkdir()
    live = LiveVertex(path, clock)
    yield live
    live.vertex.close()
    assert not live.faults


@pytest.fixture
def make_console(
    login_file: Path, vertex: LiveVertex, clock: ManualClock
) -> Iterator[Callable[..., Console]]:
    """Make consoles over the vertex, with options of their own."""
    made: list[Console] = []

    def make(**options: Any) -> Console:
        gatherer = Gatherer(
            lambda: [VertexSource("shop", "grpc://127.0.0.1:7077", "token", path="/var/lib/shop")],
            clock=clock,
            connect=lambda source, label: vertex,
        )
        made.append(Console.of(ConsoleOptions(login_file=login_file, **options), gatherer, clock))
        return made[-1]

    yield make
    for console in made:
        console.watch.close()


@pytest.fixture
def console(make_console: Callable[..., Console]) -> Console:
    """A console on loopback, which has asked its vertex once."""
    console = make_console()
    console.watch.refresh()
    return console


@pytest.fixture
def visitor(console: Console) -> Iterator[Visitor]:
    """Somebody who has not logged in."""
    with TestClient(create_app(console), ORIGIN, follow_redirects=False) as client:
        yield Visitor(client)


@pytest.fixture(name="topology")
def topology_fixture(clock: ManualClock) -> Callable[..., JobDetails]:
    """Make topologies."""
    return lambda name="orders", **changes: topology(clock, name, **changes)


@pytest.fixture(name="query")
def query_fixture(clock: ManualClock) -> Callable[..., JobDetails]:
    """Make wrapped queries."""
    return lambda owner="ab" * 16, **changes: query(clock, owner, **changes)


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """What a test makes a console of its own of, one that lives longer than a test."""
    return SimpleNamespace(
        LiveVertex=LiveVertex, topology=topology, query=query, tokens=TOKENS, visitor=Visitor
    )
