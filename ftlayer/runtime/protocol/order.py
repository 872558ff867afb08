"""The order that a slot is started with: travels in the closure of its Spark job, and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, field

from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.config import TopologyOptions
from ftlayer.topology.job_graph import JobGraph
from ftlayer.transport.client import Endpoint
from ftlayer.vertex.client.client import VertexClient


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


@dataclass(frozen=True)
class SlotOrder:
    """What a slot needs to know.

    Attributes:
        job: unique id of this execution.
        slot: which one it is.
        coordinator: where it registers; the other slots are reached in the same way. The certificate of a job off
            loopback is the one that all its processes have, and show to each other in both directions.
        graph: what runs.
        options: batching, credits, heartbeats.
        vertex: the client to talk to the vertex with; None with FTStatus.OFF.
        listen_on: host that its channels listen on: ``127.0.0.1``, or "" for the address by which the slot
            reaches the coordinator.
        tls_cert, tls_key: PEM for its channels' server off loopback, else None.
        key: the job's secret, which sealed payloads are checked by.
        checkpoints: barrier mode is on; None: it is not.
        sockets: directory of the job's Unix sockets, where its channels listen; "": they listen on ``listen_on``.
    """

    job: str
    slot: int
    coordinator: Endpoint
    graph: JobGraph
    options: TopologyOptions
    vertex: VertexClient | None
    listen_on: str
    tls_cert: bytes | None
    tls_key: bytes | None = field(repr=False)
    key: bytes = field(repr=False)
    checkpoints: CheckpointPlan | None = None
    sockets: str = ""
