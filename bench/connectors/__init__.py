"""Ready-made sources beside a bare loop of the same client, in turns on the same server.

The loop fetches by batch, reads value, id and time of each message, and acknowledges the batch. Ours is a topology of
one subtask that drops its records, in barrier mode with a checkpoint a second: from its first record to its last.
"""

from __future__ import annotations

import os
import shutil
from functools import partial

from bench.connectors import webhook
from bench.connectors.amqp import AMQP
from bench.connectors.broker import Served
from bench.connectors.kafka import KAFKA
from bench.connectors.mqtt import MQTT
from bench.connectors.nats import NATS
from bench.connectors.reading import client_reads, reads
from bench.connectors.redis import REDIS
from bench.harness import Target, compared, in_turn, note
from bench.jobs import Jobs, session

BROKERS: dict[str, Served] = {"kafka": KAFKA, "nats": NATS, "redis": REDIS, "amqp": AMQP, "mqtt": MQTT}

TARGETS = {
    **{f"{name}_vs_client": Target(at_least=served.at_least) for name, served in BROKERS.items()},
    **webhook.TARGETS,
}

ONLY = "FTLAYER_BENCH_CONNECTORS"
"""An environment variable: names of what is measured (``redis,webhook``), else all is."""


def run(quick: bool, pairs: int) -> dict[str, float]:
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
                reads(jobs, broker, 2_000)
                messages = 50_000 if quick else 300_000
                both = {
                    f"{name}_client": partial(client_reads, broker, messages),
                    name: partial(reads, jobs, broker, messages),
                }
                found |= compared(in_turn(both, pairs), {f"{name}_vs_client": (name, f"{name}_client")})
        if "webhook" in wanted:
            found |= webhook.measured(jobs, 5.0, pairs)
    return found
