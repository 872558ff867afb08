"""A webhook that is durable in a vertex; load comes over 64 connections from a process on the other core."""

from __future__ import annotations

import json
import subprocess
import sys

from bench.connectors.broker import free_port, is_listening
from bench.connectors.reading import Counted
from bench.harness import Target
from bench.jobs import Jobs, wait_until

TARGETS = {
    "webhook_per_s": Target(at_least=3_000),
    "webhook_p99_ms": Target(at_most=50, unit="ms"),
}


def measured(jobs: Jobs, seconds: float) -> dict[str, float]:
    """Return what `bench.peers.http_load` says of a webhook."""
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
            found = _loaded(port, seconds)
        finally:
            job.cancel()
    return {f"webhook_{name}": value for name, value in found.items()}


def _loaded(port: int, seconds: float) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.peers.http_load", str(port), str(seconds)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return found
