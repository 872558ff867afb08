"""The elements of a channel: record batches, and marks between them. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

import pyarrow as pa

from ftlayer.checkpoint.barrier import Barrier as Barrier
from ftlayer.checkpoint.barrier import CancelMarker as CancelMarker
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.common.checks import fast_dataclass
from ftlayer.common.rules.telemetry_settings import Tracing
from ftlayer.config import TopologyOptions
from ftlayer.records.ids import I64Array
from ftlayer.runtime.handler import RecordIds as RecordIds
from ftlayer.topology.job_graph import JobGraph
from ftlayer.transport.flight_connection import Endpoint


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
        mode: a `ftlayer.runtime.slot.rules.mode.SlotModeFactory`: the mode that the job runs in.
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


MIN_TIME_MS = -(2**63)
"""The watermark before the first one."""

MAX_TIME_MS = 2**63 - 1
"""The watermark behind the last record."""


@fast_dataclass
class Batch:
    """n records: the user's columns, their RecordIds (None with FTStatus.OFF), their times (None: none yet).

    ``times`` is int64[n], milliseconds since 1970. ``split``: the number of the split that a source has read them from,
    where a watermark is made of them; None: they are of none, or of several.
    """

    payload: pa.RecordBatch
    lineage: RecordIds | None = None
    times: I64Array | None = None
    split: int | None = None

    @property
    def num_rows(self) -> int:
        return int(self.payload.num_rows)


@fast_dataclass
class Watermark:
    """No record older than this comes on this channel any more (replays may)."""

    time_ms: int


@fast_dataclass
class Idle:
    """This channel holds no watermark back until its next `Watermark` (batches may come that are replays alone)."""


@fast_dataclass
class Splits:
    """The splits that a subtask of a source reads now, by number, of which each holds event time back.

    ``open`` are those that have more records, as far as is known, also if none was read yet, and ``done`` those of
    which some were read, as far as they go. ``quiet`` have no records now, and hold it where they are known.
    ``endless``: whether there is more of the open ones shows when it comes. It is part of no checkpoint.
    """

    open: tuple[int, ...]
    done: tuple[int, ...] = ()
    quiet: tuple[int, ...] = ()
    endless: bool = True


NAMED_SPLIT = 1 << 62
"""Numbers of splits from here on are those of names: they stay what they are from range to range."""


@fast_dataclass
class EndOfStream:
    """Nothing comes on this channel any more. Implies `MAX_TIME_MS`."""


@fast_dataclass
class LatencyMarker:
    """Records that ``source`` had read at ``wall_ms`` (Unix) are on their way before it; ``root`` is one of them, or 0.

    It says nothing of time or end, is part of no checkpoint, and may be lost with what carries it.
    """

    source: str
    wall_ms: int
    root: int = 0


Mark = Watermark | Idle | Splits | EndOfStream | Barrier | CancelMarker | LatencyMarker
Element = Batch | Mark
