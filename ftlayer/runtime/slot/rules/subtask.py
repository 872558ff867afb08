"""A task's place in its slot: the task, what waits for it, where it sends, and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from ftlayer.common.rules.circuit import CircuitStatus
from ftlayer.common.rules.histogram import Exemplar, Histogram
from ftlayer.config import TopologyOptions
from ftlayer.functions.token_bucket import TokenBucket
from ftlayer.runtime.protocol import messages
from ftlayer.runtime.protocol.channel_frames import ElementCodec
from ftlayer.runtime.protocol.messages import MAX_TIME_MS, MIN_TIME_MS
from ftlayer.runtime.slot.rules.inbox import FeedbackOutput, Inbox, inbox_for
from ftlayer.runtime.slot.rules.outgoing import LocalOutput, Output, RemoteOutput
from ftlayer.runtime.task.chain_task import NO_FAILURES, ChainTask, FailureCounts
from ftlayer.runtime.task.contract import Task, TaskKey
from ftlayer.runtime.task.iteration import HeadTask
from ftlayer.topology.job_graph import Channel, JobGraph, JobVertex, rate_limit_of
from ftlayer.topology.operators import Replay, Source

HEARD_AFTER = 2
"""After so many heartbeats a slot has heard, by the driver, what another one's say."""


@dataclass(slots=True, eq=False)
class Seat:
    """One subtask in its slot.

    Attributes:
        uid, subtask, task: which one.
        inbox: what waits for it.
        outputs: where it sends, by channel.
        is_source, is_replay, is_sink: what it is; a sink is a chain without outputs.
        last: the uid of the chain's last operator, which is the sink's if there is one.
        reading: a source that has not ended.
        ended: it has said `TaskEnded`.
        wake_ms: when its `on_time` is to be called; None: not at all.
        is_held: it takes nothing from its inbox until then.
        rate_limit: how many records a second it takes at most; None: as many as come.
        bucket: what it may take by that; None before it has taken any, and without a limit.
        records_in, records_out: counts of records.
    """

    uid: str
    subtask: int
    task: Task
    inbox: Inbox
    is_source: bool
    is_replay: bool
    is_sink: bool
    last: str
    outputs: dict[Channel, Output] = field(default_factory=dict)
    reading: bool = False
    ended: bool = False
    wake_ms: int | None = None
    is_held: bool = False
    rate_limit: float | None = None
    bucket: TokenBucket | None = None
    records_in: int = 0
    records_out: int = 0
    key: TaskKey = field(init=False)

    def __post_init__(self) -> None:
        self.key = self.uid, self.subtask

    @property
    def has_room(self) -> bool:
        for output in self.outputs.values():
            if not output.has_room:
                return False
        return True

    @property
    def can_run(self) -> bool:
        return bool(self.inbox.turns) and not self.is_held and self.has_room

    @property
    def late(self) -> int:
        """How many records came too late; any thread may look. See `counters_of`."""
        count: int = getattr(self.task, "late", 0)
        return count

    @property
    def failures(self) -> FailureCounts:
        """What has failed in it, where records fail alone; any thread may look."""
        counts: FailureCounts = getattr(self.task, "failures", NO_FAILURES)
        return counts

    def circuits(self, now_ms: int) -> dict[str, CircuitStatus]:
        """Return where its circuit breakers are, by operator; any thread may look."""
        return self.task.circuits(now_ms) if isinstance(self.task, ChainTask) else {}

    @property
    def latencies(self) -> dict[str, Histogram]:
        """How old records are at its sink, by ``"<source>|<sink>"``; any thread may look."""
        by_source: Mapping[str, Histogram] = getattr(self.task, "latencies", {})
        return {f"{source}|{self.last}": histogram for source, histogram in by_source.items()}

    @property
    def watermark_ms(self) -> int | None:
        """The event time that the task has come to; None before it has come to any, and at its end. For any thread."""
        time_ms: int = getattr(self.task, "watermark_ms", MIN_TIME_MS)
        return time_ms if MIN_TIME_MS < time_ms < MAX_TIME_MS else None

    def rows_allowed(self, mono_ms: int, rate_limit: float) -> int:
        """Return how many records it may take now, and hold it until it may take some if that is none."""
        if self.bucket is None:
            self.bucket = TokenBucket(rate_limit, mono_ms)
        rows = self.bucket.available(mono_ms)
        if not rows:
            # For a burst rather than for one record: a turn for each would be dear.
            self.hold_until(mono_ms + self.bucket.wait_ms(max(1.0, self.bucket.capacity / 2)))
        return rows

    def hold_until(self, mono_ms: int) -> None:
        """Take nothing from the inbox until then, or until its `on_time` is called earlier."""
        self.is_held = True
        self.wake_at(mono_ms)

    def validate(self) -> None:
        assert self.wake_ms is not None or not self.is_held, f"{self.key} is held without end"
        self.inbox.validate()

    def wake_at(self, mono_ms: int) -> None:
        self.wake_ms = mono_ms if self.wake_ms is None else min(self.wake_ms, mono_ms)


@dataclass(frozen=True)
class Seating:
    """All tasks of a ``slot`` and the channels between them and to other slots.

    ``seats`` are ordered from sinks to sources. ``remote`` are the channels to other slots, ``senders`` says
    which slot the elements of a channel come from that leads into this one.
    """

    slot: int
    seats: dict[TaskKey, Seat]
    remote: dict[Channel, RemoteOutput]
    receivers: dict[Channel, Seat]
    senders: dict[Channel, int]

    @property
    def is_reading(self) -> bool:
        for seat in self.seats.values():
            if seat.reading:
                return True
        return False


def seat_tasks(
    graph: JobGraph, slot: int, tasks: dict[TaskKey, Task], options: TopologyOptions, codec: ElementCodec
) -> Seating:
    """Connect the tasks of a slot with each other and with the outside; heads of iterations see their loops."""
    seats: dict[TaskKey, Seat] = {}
    receivers: dict[Channel, Seat] = {}
    senders: dict[Channel, int] = {}
    for uid in _from_sinks(graph):
        for subtask in range(graph.vertex(uid).parallelism):
            if (uid, subtask) not in tasks:
                continue
            channels = [
                channel
                for edge in graph.edges_into(uid)
                for channel in graph.channels(edge)
                if channel.receiver == subtask
            ]
            inbox = inbox_for(graph, uid, channels, options)
            seat = _seat(graph.vertex(uid), subtask, tasks[uid, subtask], inbox, graph)
            seats[seat.key] = seat
            for channel in channels:
                receivers[channel] = seat
                senders[channel] = graph.slot_of(graph.edges[channel.edge].source, channel.sender)
    remote: dict[Channel, RemoteOutput] = {}
    for seat in seats.values():
        for edge in graph.edges_from(seat.uid):
            for channel in graph.channels(edge):
                if channel.sender != seat.subtask:
                    continue
                target = graph.slot_of(edge.target, channel.receiver)
                if edge.feedback:
                    seat.outputs[channel] = FeedbackOutput(channel, receivers[channel].inbox)
                elif target == slot:
                    seat.outputs[channel] = LocalOutput(channel, receivers[channel].inbox)
                else:
                    output = RemoteOutput(channel, target, codec, options)
                    seat.outputs[channel] = remote[channel] = output
    _watch_loops(graph, seats, options)
    return Seating(slot, seats, remote, receivers, senders)


def counters_of(seats: Iterable[Seat]) -> dict[str, int]:
    """Return totals by name; may be called by any thread.

    ``records_in`` counts what sources read, ``records_out`` what chains without outputs were given, and
    ``…/<uid>`` what a chain took and sent (a copy a channel), ``late`` what came too late (to a join to be kept, to
    windows and an iteration to go anywhere), ``retried/<uid>``, ``dead/<uid>``, ``waiting/<uid>``,
    ``waiting_bytes/<uid>`` and ``paused/<uid>`` what `FailureCounts` says, and the counters of `END_TO_END` how old
    records were at sinks.
    """
    counters = Counter(dict.fromkeys(("records_in", "records_out", "late"), 0))
    for seat in seats:
        counters["records_in"] += seat.records_in if seat.is_source else 0
        counters["records_out"] += seat.records_in if seat.is_sink else 0
        counters[f"records_in/{seat.uid}"] += seat.records_in
        counters[f"records_out/{seat.uid}"] += seat.records_out
        counters.update(messages.counters_of(messages.END_TO_END, seat.latencies))
        if seat.late:
            counters["late"] += seat.late
            counters[f"late/{seat.uid}"] += seat.late
        failures = seat.failures
        if failures != NO_FAILURES:
            counters[f"retried/{seat.uid}"] += failures.retried
            counters[f"dead/{seat.uid}"] += failures.dead
            counters[f"waiting/{seat.uid}"] += failures.waiting
            counters[f"waiting_bytes/{seat.uid}"] += failures.waiting_bytes
            counters[f"paused/{seat.uid}"] += failures.paused
    return dict(counters)


def circuits_of(seats: Iterable[Seat], now_ms: int) -> dict[str, CircuitStatus]:
    """Return where circuit breakers are, by operator, at a monotone time; may be called by any thread.

    A slot has one subtask of a chain.
    """
    return {name: status for seat in seats for name, status in seat.circuits(now_ms).items()}


def exemplars_of(seats: Iterable[Seat]) -> dict[str, Exemplar]:
    """Return exemplars of the counters of `END_TO_END`; may be called by any thread."""
    found: dict[str, Exemplar] = {}
    for seat in seats:
        found |= messages.exemplars_of(messages.END_TO_END, seat.latencies)
    return found


def _seat(vertex: JobVertex, subtask: int, task: Task, inbox: Inbox, graph: JobGraph) -> Seat:
    first = vertex.operators[0]
    return Seat(
        vertex.uid,
        subtask,
        task,
        inbox,
        is_source=isinstance(first, Source),
        is_replay=isinstance(first, Replay),
        is_sink=not graph.edges_from(vertex.uid),
        last=vertex.operators[-1].uid,
        reading=isinstance(first, Source),
        rate_limit=rate_limit_of(first),
    )


def _from_sinks(graph: JobGraph) -> list[str]:
    order: list[str] = []
    seen: set[str] = set()

    def visit(uid: str) -> None:
        if uid not in seen:
            seen.add(uid)
            for edge in graph.edges_from(uid):
                visit(edge.target)
            order.append(uid)

    for vertex in graph.vertices:
        visit(vertex.uid)
    return order


def _watch_loops(graph: JobGraph, seats: dict[TaskKey, Seat], options: TopologyOptions) -> None:
    """Tell the heads of a slot how to see whether there is something in its part of their loops."""
    for seat in seats.values():
        if isinstance(seat.task, HeadTask):
            loop = graph.loop_of(seat.uid)
            keeps_failed = any(graph.vertex(uid).failures is not None for uid in loop)
            # Until heartbeats have told that records wait in other slots, or do no more.
            later_ms = HEARD_AFTER * options.heartbeat_ms if keeps_failed and graph.slots > 1 else 0
            here = [other for other in seats.values() if other.uid in loop]
            seat.task.watch(partial(_is_busy, here), later_ms)


def _is_busy(seats: list[Seat]) -> bool:
    return any(
        seat.inbox.has_records
        or seat.failures.waiting
        or any(isinstance(output, RemoteOutput) and not output.is_empty for output in seat.outputs.values())
        for seat in seats
    )
