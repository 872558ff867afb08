"""Ready-made sources beside a bare loop of the same client, in turns on the same server.

The loop fetches by batch, reads value, id and time of each message, and acknowledges the batch. Ours is a topology of
one subtask that drops its records, in barrier mode with a checkpoint a second: from its first record to its last.
"""

from __future__ import annotations

import os
import shutil
import statistics

from bench.connectors import webhook
from bench.connectors.amqp import AMQP
from bench.connectors.broker import Served
from bench.connectors.kafka import KAFKA
from bench.connectors.mqtt import MQTT
from bench.connectors.nats import NATS
from bench.connectors.reading import against_client
from bench.connectors.redis import REDIS
from bench.harness import Target, note
from bench.jobs import Jobs, session

BROKERS: dict[str, Served] = {
    "kafka": KAFKA,
    "nats": NATS,
    "redis": REDIS,
    "amqp": AMQP,
    "mqtt": MQTT,
}

TARGETS = {
    **{f"{name}_vs_client": Target(at_least=served.at_least) for name, served in BROKERS.items()},
    **webhook.TARGETS,
}

ROUNDS = 3

ONLY = "FTLAYER_BENCH_CONNECTORS"
"""An environment variable: names of what is measured (``redis,webhook``), else all is."""


def run(quick: bool) -> dict[str, float]:
    """Measure all sources whose servers are installed."""
    found: dict[str, float] = {}
    wanted = os.environ.get(ONLY, "").split(",") if os.environ.get(ONLY) else [*BROKERS, "webhook"]
    with session() as (root, spark):
        jobs = Jobs(root, spark)
        for name, served in BROKERS.items():
            if name not in wanted:
                continue
            if shutil.which(served.program) is None:
                note(f"{served.program} is not installed: {name} is left out")
                continue
            directory = root / name
            directory.mkdir()
            with served.start(directory) as broker:
                against_client(jobs, broker, 2_000)
                rates = [against_client(jobs, broker, 50_000 if quick else 300_000) for _ in range(ROUNDS)]
            found[f"{name}_vs_client"] = statistics.median(ours / bare for ours, bare in rates)
            found[f"{name}_per_s"] = statistics.median(ours for ours, _ in rates)
            found[f"{name}_client_per_s"] = statistics.median(bare for _, bare in rates)
        if "webhook" in wanted:
            found |= webhook.measured(jobs, 5.0 if quick else 20.0)
    return found
