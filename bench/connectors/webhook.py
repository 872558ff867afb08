"""A webhook that is durable in a vertex; load comes over 64 connections from a process on the other core."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

from bench.connectors.broker import free_port, is_listening
from bench.connectors.reading import Counted
from bench.harness import Target, spread
from bench.jobs import Jobs, wait_until
from bench.limits import Limits, StoreWrites

TARGETS = {"webhook_per_s": Target(at_least=3_000), "webhook_p99_ms": Target(at_most=50, unit="ms")}


ECHO_BYTES = 1_024
"""Of the frames of the Flight echo: a few requests together."""


def measured(jobs: Jobs, seconds: float, pairs: int) -> dict[str, float]:
    """Return what `bench.peers.http_load` says of a webhook in ``pairs`` runs, beside disk and Flight."""
    from ftlayer import FTLayer, StreamEnvironment
    from ftlayer.sources import WebhookSource

    folder, port = jobs.folder(), free_port()
    with FTLayer.embedded(folder / "ft") as layer:
        env = StreamEnvironment(jobs.spark, layer, name=jobs.name, parallelism=1)
        env.source(WebhookSource(f"127.0.0.1:{port}"), uid="hook").sink(Counted(str(folder)), uid="dropped")
        job = env.execute_async()
        try:
            wait_until(lambda: is_listening(port))
            _loaded(port, 2.0)
            writes = StoreWrites(folder / "ft", layer.vertex.pid)
            _loaded(port, 2.0)
            with Limits(folder, sync_bytes=writes.bytes_a_commit(), echo_bytes=ECHO_BYTES) as limits:
                runs = [limits.around(partial(_loaded, port, seconds)) for _ in range(pairs)]
        finally:
            job.cancel()
    found = limits.metrics()
    for name in runs[0][0]:
        found |= spread(f"webhook_{name}", [run[name] for run, _ in runs])
    over = [run["p99_ms"] / (limit.fdatasync.p99 + limit.echo.p99) for run, limit in runs]
    return found | spread("webhook_p99_over_limits", over)


def _loaded(port: int, seconds: float) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.peers.http_load", str(port), str(seconds)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return found
