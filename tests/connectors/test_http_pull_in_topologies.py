"""Server-Sent Events and polled JSON in topologies that lose their slot, of a server that cuts its connections."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from ftlayer import CheckpointConfig, FixedDelay, FTLayer, StreamEnvironment
from ftlayer.sinks import FileSink
from ftlayer.sources import PolledJsonSource, SseSource

pytestmark = [pytest.mark.spark, pytest.mark.campaign]

NUMBER = pa.schema([("number", pa.int64())])
COUNT, CUT, KILLS_AT = 2_000, 150, 700


class Handler(BaseHTTPRequestHandler):
    """Gives at most `CUT` numbers at a time, behind the last id or cursor."""

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        is_stream = self.path.startswith("/events")
        behind = self.headers.get("Last-Event-ID", "-1") if is_stream else query.get("since", ["-1"])[0]
        # A cursor is sent again with what has its value.
        first = int(behind) + (1 if is_stream or behind == "-1" else 0)
        numbers = range(first, min(first + CUT, COUNT))
        if is_stream:
            body = "retry: 20\n\n" + "".join(f"id: {number}\ndata: {number}\n\n" for number in numbers)
            # The last one is cut off.
            body += f"id: {numbers.stop}\ndata: {numbers.stop}\n"
        else:
            body = json.dumps([{"id": number} for number in numbers])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if is_stream else "application/json")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def source_of(kind: str, url: str) -> Any:
    if kind == "sse":
        return SseSource(f"{url}/events")
    return PolledJsonSource(f"{url}/items", cursor="id", param="since", interval="50ms")


def number_in(kind: str, directory: Path) -> Callable[[Any], Any]:
    """Make a record its number; one of them kills the process that meets it first."""

    def function(record: Any) -> int:
        number = int(record[3]) if kind == "sse" else int(json.loads(record[2])["id"])
        if number == KILLS_AT:
            with contextlib.suppress(FileExistsError):
                (directory / "killed").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return number

    return function


@pytest.mark.parametrize("kind", ["sse", "polled"])
def test_barrier_mode_reads_each_once(
    spark: Any, url: str, wait_until: Any, tmp_path: Path, kind: str
) -> None:
    env = StreamEnvironment(
        spark,
        name="pull",
        restart=FixedDelay(attempts=20, delay="10ms"),
        checkpointing=CheckpointConfig(interval="100ms", directory=str(tmp_path / "ck")),
    )
    numbers = env.source(source_of(kind, url), uid="pull").map(
        number_in(kind, tmp_path), NUMBER, uid="number"
    )
    numbers.sink(FileSink(str(tmp_path / "out")), uid="out")

    def found() -> list[int]:
        if not (tmp_path / "out").exists():
            return []
        read: list[int] = (
            ds.dataset(tmp_path / "out", NUMBER, format="parquet").to_table()["number"].to_pylist()
        )
        return read

    job = env.execute_async()
    try:
        wait_until(lambda: job.status().state.is_final or len(found()) >= COUNT, "all numbers")
    finally:
        job.cancel()
    assert (tmp_path / "killed").exists()
    assert sorted(found()) == list(range(COUNT))


@pytest.mark.parametrize("kind", ["sse", "polled"])
def test_acker_mode_loses_none(spark: Any, url: str, wait_until: Any, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    out.mkdir()

    def keep(batch: pa.RecordBatch) -> None:
        with (out / f"{os.getpid()}.txt").open("a") as file:
            file.writelines(f"{number}\n" for number in batch.column(0).to_pylist())

    def found() -> set[int]:
        return {int(line) for path in out.iterdir() for line in path.read_text().splitlines()}

    with FTLayer.embedded(str(tmp_path / "ft"), timeout="5s") as layer:
        env = StreamEnvironment(spark, layer, name="pull", restart=FixedDelay(attempts=20, delay="10ms"))
        numbers = env.source(source_of(kind, url), uid="pull")
        numbers.map(number_in(kind, tmp_path), NUMBER, uid="number").sink(keep, uid="kept")
        job = env.execute_async()
        try:
            wait_until(lambda: job.status().state.is_final or len(found()) >= COUNT, "all numbers")
        finally:
            job.cancel()
    assert (tmp_path / "killed").exists()
    assert found() == set(range(COUNT))
