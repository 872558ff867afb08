"""The order that a slot is started with: travels in the closure of its Spark job, and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.config import TopologyOptions
from ftlayer.telemetry.settings import Tracing
from ftlayer.topology.job_graph import JobGraph
from ftlayer.transport.connection import Endpoint


@dataclass(frozen=True)
class CheckpointPlan:
    """A slot's settings for checkpoints.

    Attributes:
        config: as the user gave it.
        run: names this execution: its directory under ``config.directory``.
        key: what pieces are signed with, and what is pickled in them is trusted by.
    """

    config: CheckpointConfig
    run: str
    key: bytes = field(repr=False)


Mode = TypeVar("Mode")


@dataclass(frozen=True)
class SlotOrder(Generic[Mode]):
    """What a slot needs to know.

    Attributes:
        job: unique id of this execution.
        slot: which one it is.
        coordinator: where it registers; the other slots are reached in the same way. The certificate of a job off
            loopback is the one that all its processes have, and show to each other in both directions.
        graph: what runs.
        options: batching, credits, heartbeats.
        mode: a `ftlayer.runtime.slot.mode.SlotModeFactory`: the mode that the job runs in.
        listen_on: host that its channels listen on: ``127.0.0.1``, or "" for the address by which the slot
            reaches the coordinator.
        tls_cert, tls_key: PEM for its channels' server off loopback, else None.
        key: a secret of this run, in memory alone, which sealed payloads are checked by.
        sockets: directory of the job's Unix sockets, where its channels listen; "": they listen on ``listen_on``.
        tracing: which records are traced, as the driver's variables say; None: none.
    """

    job: str
    slot: int
    coordinator: Endpoint
    graph: JobGraph
    options: TopologyOptions
    mode: Mode
    listen_on: str
    tls_cert: bytes | None
    tls_key: bytes | None = field(repr=False)
    key: bytes = field(repr=False)
    sockets: str = ""
    tracing: Tracing | None = None
