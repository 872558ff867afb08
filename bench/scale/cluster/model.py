"""The steady state of a keyed job on a cluster, from the cost of each record and each message.

The job is that of `bench.topology`: a source, one exchange by key, a count. Every slot has as many records as any
other, and a source that never waits. What a slot does in a second is at most the CPU time that it has; the rate is the
highest that keeps to that, and to the one thread of the vertex's shard (all streams of a topology are on one).

Where the vertex is the limit, the slots are idle and send what they have at once; what they take then is not the
model's. Not in the model either: skewed keys, slow machines, caches, switches between threads, the latency and the
limits of a network, start and recovery.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ftlayer.config import TopologyOptions
from ftlayer.runtime.slot.rules.outgoing import AGES_A_FRAME, LONGEST_AGES

CHAINS = 2
"""Of the job; each has a subtask in every slot, which tells the coordinator of its part of a checkpoint."""


@dataclass(frozen=True)
class Costs:
    """CPU µs of one of each kind, at both of its ends unless said otherwise.

    Attributes:
        record: by mode, a record in the slots: functions, conversions, state, and what tracking adds.
        vertex_record: by mode, a record in the vertex; a mode without a vertex is not in it.
        frame: a frame of records, whatever is in it, with the run of the receiver's chain.
        part: one channel's part of a source's batch.
        message: a message without records over Flight: a credit, a barrier.
        heartbeat: one, at the coordinator; ``heartbeat_peer`` for each slot that it names more.
        record_bytes: of a record in a frame.
    """

    record: Mapping[str, float]
    vertex_record: Mapping[str, float]
    frame: float
    part: float
    message: float
    heartbeat: float
    heartbeat_peer: float
    record_bytes: float

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> Costs:
        """Make them of what `written` returned."""
        return cls(**written)

    def written(self) -> dict[str, Any]:
        """Return them as they are kept in a JSON file."""
        return asdict(self)


@dataclass(frozen=True)
class Cluster:
    """Slots and what they have; ``cores_a_slot`` below 1: they share cores. Checkpoints are ``interval_s`` apart."""

    slots: int
    slots_a_machine: int = 4
    cores_a_slot: float = 1.0
    interval_s: float = 1.0
    network_bytes_a_s: float = 1.25e9


def frames_a_second(rows: float, cluster: Cluster, options: TopologyOptions, barriers: bool) -> float:
    """Return how many frames a busy slot sends, of ``rows`` that leave it in a second.

    A channel's frame leaves when it is full, when the slot's CPU time has paid for it, when it is the oldest possible
    (`ftlayer.runtime.slot.rules.outgoing`), or in front of a barrier.
    """
    channels = cluster.slots - 1
    if channels == 0 or rows <= 0:
        return 0.0
    age_s = options.batch_age_ms / 1_000
    paid = cluster.cores_a_slot / (AGES_A_FRAME * age_s) if age_s else float("inf")
    waits = [options.batch_rows * channels / rows, max(age_s, channels / paid), LONGEST_AGES * age_s]
    if barriers:
        waits.append(cluster.interval_s)
    return min(rows, channels / min(waits)) if min(waits) > 0 else rows


def slot_us(
    rate: float, mode: str, costs: Costs, cluster: Cluster, options: TopologyOptions
) -> dict[str, float]:
    """Return the CPU µs of one slot in a second in which it reads ``rate`` records, by what they are for."""
    channels = cluster.slots - 1
    rows = rate * channels / cluster.slots
    barriers = mode == "barriers"
    frames = frames_a_second(rows, cluster, options, barriers)
    # Credit goes back a quarter of a channel's limit at a time, or soon after: no more often than frames come.
    marks = channels / cluster.interval_s if barriers else 0.0
    return {
        "records": rate * costs.record[mode],
        "frames": frames * costs.frame,
        "parts": rate / options.batch_rows * cluster.slots * costs.part,
        "credits": frames * costs.message,
        "barriers": marks * costs.message,
    }


def predicted(
    mode: str, costs: Costs, cluster: Cluster, options: TopologyOptions | None = None
) -> dict[str, float]:
    """Return the highest rate, what the CPU time goes to, and how much of each limit is used.

    ``…_share`` are of the slots' CPU time; ``vertex_used``, ``coordinator_used`` of one thread, ``network_used`` of
    what a machine sends: 1 is all of it. The rate keeps to the slots' and the vertex's. ``slot_used`` is below 1
    where the vertex is the limit.
    """
    options = options or TopologyOptions()
    slots = cluster.slots
    have_us = cluster.cores_a_slot * 1e6
    low, high = 0.0, have_us / costs.record[mode]
    if vertex_us := costs.vertex_record.get(mode, 0.0):
        high = min(high, 1e6 / vertex_us / slots)
    if sum(slot_us(high, mode, costs, cluster, options).values()) > have_us:
        for _ in range(60):
            middle = (low + high) / 2
            over = sum(slot_us(middle, mode, costs, cluster, options).values()) > have_us
            low, high = (low, middle) if over else (middle, high)
        high = low
    rate = high
    parts = slot_us(rate, mode, costs, cluster, options)
    taken = sum(parts.values())
    rows = rate * (slots - 1) / slots
    frames = frames_a_second(rows, cluster, options, mode == "barriers")
    beats = slots / (options.heartbeat_ms / 1_000) * (costs.heartbeat + (slots - 1) * costs.heartbeat_peer)
    acks = slots * (CHAINS + 1) / cluster.interval_s * costs.message if mode == "barriers" else 0.0
    far = max(0, slots - cluster.slots_a_machine) / slots
    return {
        "records_per_s": rate * slots,
        "cpu_us": taken / rate if rate else float("inf"),
        "slot_used": taken / have_us,
        **{f"{name}_share": each / taken if taken else 0.0 for name, each in parts.items()},
        "rows_a_frame": rows / frames if frames else 0.0,
        "vertex_used": rate * slots * vertex_us / 1e6,
        "coordinator_used": (beats + acks) / 1e6,
        "network_used": min(slots, cluster.slots_a_machine)
        * rate
        * far
        * costs.record_bytes
        / cluster.network_bytes_a_s,
        "channels": slots * (slots - 1),
        "channels_mib": (slots - 1) * options.channel_bytes / (1 << 20),
    }
