"""Acker mode's half in a slot's process: the streams to the vertex."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, assert_never, cast

import numpy as np

from ftlayer import __version__
from ftlayer.common.checks import fast_dataclass
from ftlayer.common.clock import Now
from ftlayer.common.rules.histogram import Exemplar, Histogram
from ftlayer.common.rules.telemetry_settings import Tracing
from ftlayer.common.telemetry import EndedSpan, SpanError, SpanExport, open_spans
from ftlayer.functions.failures import this_process
from ftlayer.records.ids import U64Array, ids_of, operator_key
from ftlayer.records.traced import Sampler, attempt_span, record_span, span_within, trace_of
from ftlayer.runtime.acker_mode.slot.vertex_port import OpenedStream, VertexPort
from ftlayer.runtime.acker_mode.task.mode import AckerTaskMode, Holding
from ftlayer.runtime.acker_mode.task.range_source import RangeSourceTask
from ftlayer.runtime.connectors.offset_reader import partition_index
from ftlayer.runtime.connectors.sinks import open_sink
from ftlayer.runtime.handler import FTHandler, RecordIds, joined_values, origins_of
from ftlayer.runtime.protocol import messages
from ftlayer.runtime.slot.black_box import SlotBox
from ftlayer.runtime.slot.rules import mode
from ftlayer.runtime.slot.rules.events import (
    ModeInstruction,
    ModeWork,
    RangesCame,
    RangesRefused,
    ReplaysCame,
    RootsAccepted,
    RowsDone,
    RowsRead,
    RunTask,
    SlotInstruction,
    TellCoordinator,
)
from ftlayer.runtime.slot.rules.subtask import Seat
from ftlayer.runtime.task import actions
from ftlayer.runtime.task.contract import RecordNotes, ReplayTask, TaskKey
from ftlayer.vertex.calls import (
    AskRanges,
    EventIds,
    Failure,
    Persist,
    RangesTold,
    Register,
    StoreRows,
    TakeOver,
)
from ftlayer.vertex.client.client import VertexClient

CALL_ROOTS = 1 << 17
"""Events of one call: enough that the call itself costs nothing an event."""

MAX_WAIT_MS = 25
"""An event waits no longer for others: the vertex learns a little later that a record is done, and nothing waits
for that. A busy loop runs a few batches in it."""


class AckBuffer:
    def __init__(self) -> None:
        self._events: list[actions.Acknowledge] = []
        self._count = 0
        self._since_ms: int | None = None

    def __bool__(self) -> bool:
        return bool(self._events)

    def add(self, event: actions.Acknowledge, now_ms: int) -> None:
        if not len(event.roots):
            return
        self._events.append(event)
        self._count += len(event.roots)
        if self._since_ms is None:
            self._since_ms = now_ms

    def roots(self) -> list[U64Array]:
        """Return the roots of the events that wait; may be called by any thread."""
        return [event.roots for event in self._events]

    def is_due(self, now_ms: int) -> bool:
        return self._count >= CALL_ROOTS or (
            self._since_ms is not None and now_ms - self._since_ms >= MAX_WAIT_MS
        )

    @property
    def due_ms(self) -> int | None:
        return None if self._since_ms is None else self._since_ms + MAX_WAIT_MS

    def take(self) -> actions.Acknowledge:
        events, self._events = self._events, []
        self._count, self._since_ms = 0, None
        if len(events) == 1:
            return events[0]
        values = joined_values((event.roots, event.values) for event in events)
        roots = np.concatenate([event.roots for event in events])
        return actions.Acknowledge(roots, values, _joined_ids(events))


def _joined_ids(events: list[actions.Acknowledge]) -> EventIds | None:
    parts = [event.ids for event in events if event.ids is not None]
    if len(parts) < len(events):
        return None
    names: dict[str, int] = {}
    owners, offsets, total = [], [np.zeros(1, np.int32)], 0
    for part in parts:
        # Each part numbers its operators itself; -1 means the event's own id, and stays.
        numbers = [names.setdefault(name, len(names)) for name in part.operators]
        owners.append(np.array([*numbers, -1], np.int32)[part.owners])
        offsets.append(part.offsets[1:] + np.int32(total))
        total += len(part.ids)
    ids: U64Array = np.concatenate([part.ids for part in parts])
    return EventIds(ids, np.concatenate(offsets), np.concatenate(owners), tuple(names))


@fast_dataclass
class PersistCall(ModeInstruction):
    """Persist, or register; `RootsAccepted` follows, or for what is registered `RangesRefused`."""

    key: TaskKey
    ticket: int
    call: Persist | Register


@fast_dataclass
class RangesCall(ModeInstruction):
    """Make this call; `RangesCame` follows, or `RangesRefused`."""

    key: TaskKey
    number: int
    call: TakeOver | AskRanges | StoreRows


@fast_dataclass
class XorCall(ModeInstruction):
    event: actions.Acknowledge


@fast_dataclass
class FailCall(ModeInstruction):
    failures: tuple[Failure, ...]


@fast_dataclass
class TakeReplaysCall(ModeInstruction):
    key: TaskKey
    ask: actions.AskReplays


class VertexRoom(Protocol):
    """What the rules see of the way to the vertex."""

    @property
    def may_persist(self) -> bool:
        """Whether more can be persisted without queueing here."""

    @property
    def is_quiet(self) -> bool:
        """Whether everything that changes something has its answer."""


PERSISTS_IN_FLIGHT = 16
"""A source reads on while this many of its batches, at most, wait for the vertex."""


class AckerSlot(mode.SlotMode):
    """Of a job whose records the vertex follows."""

    def __init__(self, vertex: VertexRoom, parts: mode.SlotParts) -> None:
        self.activity = 0
        self._vertex = vertex
        self._seating = parts.seating
        self._rows = mode.rows_of_sources(parts)
        self._seats = parts.seating.seats
        self._ranged = {
            key: seat.task for key, seat in self._seats.items() if isinstance(seat.task, RangeSourceTask)
        }
        # New rows that were read again to get to what is behind others, while intake is paused.
        self._held_back: list[PersistCall] = []
        self._acks = AckBuffer()
        # The roots of `PersistRoots` that have no answer, by ticket; replaced, never changed.
        self._unaccepted: dict[TaskKey, dict[int, U64Array]] = {key: {} for key in self._seats}
        # What sources have read last, and what their tickets stand for.
        self._read: dict[TaskKey, int] = {}
        self._numbers: dict[tuple[TaskKey, int], int] = {}
        self._unasked: dict[TaskKey, actions.AskReplays] = {}  # they wait for room
        self._totals = dict.fromkeys(("persisted", "replayed", "failed", messages.SETTLED), 0)
        self._persist_times: dict[str, Histogram] = {}
        self._paused = False
        self._away: set[int] = set()

    def handle(self, event: mode.ModeEvent, now: Now) -> mode.Instructions:
        match event:
            case RootsAccepted():
                return self._roots_accepted(event, now)
            case RangesCame(key, number, reply):
                # Nothing to do is no activity.
                counts = not isinstance(reply, RangesTold) or bool(reply.wanted)
                return [RunTask(key, actions.RangesAnswered(number, reply), counts=counts)]
            case RangesRefused():
                return self._ranges_refused(event)
            case ReplaysCame():
                return [self._replays_came(event)]
            case messages.ReplayNow():
                return self._run_replays(event, counts=False)
            case messages.PauseIntake():
                self._paused = True
                return self._run_replays(event, counts=False)
            case messages.ResumeIntake():
                self._paused = False
                return [*self._run_replays(event, counts=False), *self._let_held_back()]
            case messages.AllowReplays(uid) | messages.LetOut(uid):
                return [run for run in self._run_replays(event) if run.key[0] == uid]
            case messages.EndReplays():
                return self._run_replays(event)
            case _:
                raise mode.misplaced(event)

    def _roots_accepted(self, accepted: RootsAccepted, now: Now) -> mode.Instructions:
        key, ticket = accepted.key, accepted.ticket
        if key in self._ranged and ticket not in self._unaccepted[key]:
            return []  # of before the vertex was lost: registered anew since
        roots = self._unaccepted[key][ticket]
        self._totals["persisted"] += len(roots)
        root = int(roots[-1]) if len(roots) else 0
        times = self._persist_times.setdefault(key[0], Histogram())
        times.observe(accepted.took_s, root=root, at_ms=now.wall_ms)
        return [RunTask(key, actions.RowsPersisted(ticket, accepted.segment))]

    def _ranges_refused(self, refused: RangesRefused) -> mode.Instructions:
        """The vertex was lost: what a source has registered there is registered anew."""
        key = refused.key
        if self._ranged[key].incarnation != refused.incarnation:
            return []
        self._unaccepted[key] = {}
        self._held_back = [call for call in self._held_back if call.key != key]
        return [RunTask(key, actions.RangesLost(refused.incarnation))]

    def _let_held_back(self) -> list[PersistCall]:
        calls, self._held_back = self._held_back, []
        for call in calls:
            self._wait_for(call)
        return calls

    def _wait_for(self, call: PersistCall) -> None:
        self._unaccepted[call.key] = {**self._unaccepted[call.key], call.ticket: ids_of(call.call.roots)}

    def _replays_came(self, came: ReplaysCame) -> RunTask:
        rows = sum(batch.payload.num_rows for batch in came.records)
        self._totals["replayed"] += rows
        self._seats[came.key].records_in += rows
        roots = tuple(batch.roots for batch in came.records)
        return RunTask(came.key, actions.Replayed(came.records, came.held), roots, counts=bool(rows))

    def _run_replays(self, event: actions.TaskEvent, *, counts: bool = True) -> list[RunTask]:
        return [RunTask(seat.key, event, counts=counts) for seat in self._replaying()]

    def _replaying(self) -> list[Seat]:
        return [seat for seat in self._seats.values() if seat.is_replay and not seat.ended]

    # ------------------------------------------------------------ tasks

    def act(self, seat: Seat, action: mode.ModeAction, now_ms: int) -> mode.Instructions:
        match action:
            case actions.Acknowledge():
                self._totals[messages.SETTLED] += len(action.roots)
                self._acks.add(action, now_ms)
                return self._due_acks(now_ms)
            case actions.PersistRoots(ticket, call):
                self.activity += 1
                asked = PersistCall(seat.key, ticket, call)
                if self._paused and isinstance(call, Register) and not call.wanted:
                    self._held_back.append(asked)
                    return []
                self._wait_for(asked)
                if seat.is_source and seat.key not in self._ranged:
                    self._numbers[seat.key, ticket] = self._read[seat.key]
                return [asked]
            case actions.CallRanges(number, call):
                return [RangesCall(seat.key, number, call)]
            case actions.FailRoots(failures):
                self._totals["failed"] += len(failures)
                self._totals[messages.SETTLED] += len(failures)
                return [FailCall(failures)]
            case actions.AskReplays():
                if seat.has_room:
                    return [TakeReplaysCall(seat.key, action)]
                self._unasked[seat.key] = action
                return []
            case actions.ReplaysOut():
                return [TellCoordinator(action)]
            case actions.DataEnded():
                raise mode.misplaced(action)
            case _:
                assert_never(action)

    def ran(self, seat: Seat, event: actions.TaskEvent | ModeWork, now: Now) -> mode.Instructions:
        """See `SlotMode.ran`. Sends hold the roots of what is persisted from here on."""
        if not isinstance(event, actions.RowsPersisted):
            return ()
        waiting = self._unaccepted[seat.key].items()
        self._unaccepted[seat.key] = {ticket: roots for ticket, roots in waiting if ticket != event.ticket}
        number = self._numbers.pop((seat.key, event.ticket), None)
        return () if number is None else [RowsDone(seat.key, number)]

    def read(self, seat: Seat, read: RowsRead, now_ms: int) -> mode.Instructions:
        if seat.key in self._ranged:
            return [RunTask(seat.key, read.rows), RowsDone(seat.key, read.number)]
        self._read[seat.key] = read.number
        return [RunTask(seat.key, read.rows)]

    # ------------------------------------------------------------ time

    def on_time(self, now: Now) -> mode.Instructions:
        return [*self._due_acks(now.mono_ms), *self._asks_with_room()]

    def _asks_with_room(self) -> list[TakeReplaysCall]:
        if self._away:
            return []
        room = [key for key in self._unasked if self._seats[key].has_room]
        return [TakeReplaysCall(key, self._unasked.pop(key)) for key in room]

    def is_due(self, now_ms: int) -> bool:
        return bool(self._unasked) or self._acks.is_due(now_ms)

    def rest(self, now_ms: int) -> mode.Instructions:
        return self._due_acks(now_ms)

    @property
    def due_ms(self) -> int | None:
        return self._acks.due_ms

    def _due_acks(self, now_ms: int) -> list[XorCall]:
        return [XorCall(self._acks.take())] if self._acks.is_due(now_ms) else []

    # ------------------------------------------------------------ peers

    def peers_gone(self, slots: Collection[int]) -> mode.Instructions:
        """Ask for no replays until all are back.

        They would have to wait for these slots, or end the next process if one of them has ended this one.
        """
        self._away.update(slots)
        return self._run_replays(actions.PeersAway(), counts=False)

    def peers_replaced(self, slots: Collection[int]) -> mode.Instructions:
        self._away.difference_update(slots)
        return [] if self._away else self._run_replays(actions.PeersThere(), counts=False)

    # ------------------------------------------------------------ what is known of it

    def may_read(self, seat: Seat) -> bool:
        if len(self._unaccepted[seat.key]) >= PERSISTS_IN_FLIGHT:
            return False
        if self._paused and not (seat.key in self._ranged and self._ranged[seat.key].rereads):
            return False
        return self._vertex.may_persist

    def reads_early(self, seat: Seat) -> bool:
        """See `SlotMode.reads_early`: while no batch before has to be answered, as Nagle's algorithm sends.

        So a vertex that is busy gets larger batches, not more of them.
        """
        return not self._unaccepted[seat.key]

    def rows_wanted(self, key: TaskKey) -> int:
        return self._rows[key]

    @property
    def is_open(self) -> bool:
        """See `SlotMode.is_open`. While intake is paused sources may go on, but no replays may be asked for.

        What sources keep may have to go out again: the vertex may have been lost, which is not known yet. While intake
        is paused what is read anew is kept until it is resumed.
        """
        if self._paused:
            asks = any(cast(ReplayTask, seat.task).is_asking for seat in self._replaying())
            return asks or any(task.rereads for task in self._ranged.values())
        return self._seating.is_reading or any(task.keeps for task in self._ranged.values())

    @property
    def is_quiet(self) -> bool:
        return not self._acks and not any(self._unaccepted.values()) and self._vertex.is_quiet

    def counters(self) -> dict[str, int]:
        return self._totals | messages.counters_of(messages.PERSIST, self._persist_times.copy())

    def exemplars(self) -> dict[str, Exemplar]:
        return messages.exemplars_of(messages.PERSIST, self._persist_times.copy())

    def held_roots(self) -> list[U64Array]:
        """See `SlotMode.held_roots`: what the vertex was asked to persist, and what it has not been told of."""
        held = [roots for tickets in self._unaccepted.values() for roots in tickets.values()]
        # A function that takes long keeps the loop from sending them.
        return held + self._acks.roots()

    def validate(self) -> None:
        for key, ticket in self._numbers:
            assert ticket in self._unaccepted[key], (
                f"{key}: ticket {ticket} has rows, and its roots are forgotten"
            )
        for key in self._unasked:
            assert self._seats[key].is_replay, f"{key} asks for replays, and is none"


MAX_A_RUN = 2_048
"""Of one batch no more records than these have spans: so many wait for the collector at most."""


class AckerTracer:
    """`ftlayer.runtime.slot.rules.mode.RunTracer` of acker mode, where records have roots. For the loop's thread."""

    def __init__(self, sampler: Sampler, topology: str, slot: int, send: Callable[[EndedSpan], None]) -> None:
        self._sampler = sampler
        self._topology = topology
        self._slot = slot
        self._send = send
        # When a task made roots, and which of them are followed, until the vertex has stored them.
        self._made: dict[tuple[TaskKey, int], tuple[int, list[int]]] = {}

    def ran(self, run: RunTask, decided: Sequence[SlotInstruction], start_ns: int, end_ns: int) -> None:
        event = run.event
        if run.lineage is not None:
            self._worked(run, run.lineage, decided, start_ns, end_ns)
        elif isinstance(event, actions.Replayed):
            for records in event.records:
                self._replayed(run.key, records.roots, records.origins, records.attempts, start_ns, end_ns)
        elif isinstance(event, actions.RowsPersisted):
            self._persisted(run.key, event.ticket, decided, end_ns)
        for each in decided:
            if isinstance(each, PersistCall):
                roots = ids_of(each.call.roots)
                followed = roots[self._sampler.mask(roots)][:MAX_A_RUN].tolist()
                if followed:
                    self._made[each.key, each.ticket] = start_ns, followed

    def _worked(
        self, run: RunTask, lineage: RecordIds, decided: Sequence[SlotInstruction], start_ns: int, end_ns: int
    ) -> None:
        """A chain has taken a batch: each record in it that is followed has a span of that time."""
        origins = origins_of(lineage)
        followed = np.flatnonzero(self._sampler.mask(origins))[:MAX_A_RUN]
        if not len(followed):
            return
        failures = _failures(decided)
        of_root = dict(zip(lineage.roots[followed].tolist(), origins[followed].tolist(), strict=True))
        uid, subtask = run.key
        for root, origin in of_root.items():
            parent = attempt_span(root)
            self._emit(
                origin,
                span_within(parent, operator_key(uid), subtask, start_ns),
                parent,
                uid,
                (start_ns, end_ns),
                {**self._told(run.key, root), "ftlayer.batch.records": len(lineage)},
                failures.get(root),
            )

    def _replayed(
        self,
        key: TaskKey,
        roots: U64Array,
        origins: U64Array,
        attempts: np.ndarray[tuple[int], np.dtype[np.int32]],
        start_ns: int,
        end_ns: int,
    ) -> None:
        for place in np.flatnonzero(self._sampler.mask(origins))[:MAX_A_RUN].tolist():
            root, origin = int(roots[place]), int(origins[place])
            parent = attempt_span(root)
            told = {**self._told(key, root), "ftlayer.attempt": int(attempts[place])}
            span = span_within(parent, operator_key(key[0]))
            self._emit(origin, span, parent, f"replay {key[0]}", (start_ns, end_ns), told)

    def _persisted(self, key: TaskKey, ticket: int, decided: Sequence[SlotInstruction], end_ns: int) -> None:
        """The vertex has stored new roots: the first span of each trace, from their making to their leaving."""
        start_ns, followed = self._made.pop((key, ticket), (0, []))
        failures = _failures(decided) if followed else {}
        for root in followed:
            told, times = self._told(key, root), (start_ns, end_ns)
            self._emit(root, record_span(root), 0, key[0], times, told, failures.get(root))

    def _told(self, key: TaskKey, root: int) -> dict[str, str | int | bool]:
        return {
            "ftlayer.topology": self._topology,
            "ftlayer.operator": key[0],
            "ftlayer.subtask": key[1],
            "ftlayer.slot": self._slot,
            "ftlayer.root": f"{root:016x}",
        }

    def _emit(
        self,
        origin: int,
        span: int,
        parent: int,
        name: str,
        times: tuple[int, int],
        told: dict[str, str | int | bool],
        failure: Failure | None = None,
    ) -> None:
        error = None if failure is None else SpanError(failure.reason, failure.operator, failure.traceback)
        self._send(EndedSpan(trace_of(origin), span, parent, name, *times, told, error))


def _failures(decided: Sequence[SlotInstruction]) -> dict[int, Failure]:
    return {failure.root: failure for failure in _failed(decided)}


def _failed(decided: Sequence[SlotInstruction]) -> Iterator[Failure]:
    for each in decided:
        if isinstance(each, FailCall):
            yield from each.failures


@dataclass(frozen=True)
class AckerSlotFactory:
    """`ftlayer.runtime.slot.rules.mode.SlotModeFactory`. ``client`` is what the vertex is talked to with."""

    client: VertexClient
    restarts_in_place = False

    def instance(self, slot: mode.SlotContext) -> AckerSlotShell:
        return AckerSlotShell(self.client, slot)


class AckerSlotShell(mode.SlotModeShell):
    def __init__(self, client: VertexClient, slot: mode.SlotContext) -> None:
        self._client = client
        self._slot = slot
        self._graph = slot.order.graph
        self._place = this_process(f"slot {slot.order.slot}")
        self._port: VertexPort | None = None
        self._opened: dict[str, OpenedStream] = {}
        self._spans: SpanExport | None = None
        self._tracer: AckerTracer | None = None
        self._box = SlotBox(slot, None, [vertex.uid for vertex in self._graph.vertices])

    @property
    def touch_timeout_ms(self) -> int | None:
        return min((options.timeout_ms for _, options in self._graph.options), default=None)

    def open(self, deploy: messages.Deploy) -> AckerTaskMode:
        """Declare the job's streams. Raises what `VertexClient.call` raises."""
        order = self._slot.order
        self._open_tracer(order.tracing)
        self._box.open()
        self._port = VertexPort(self._client, self._graph.options, self._slot.post, order.job)
        self._opened = self._port.open()
        # Streams of one job are on one shard.
        told = next(iter(self._opened.values()))
        run = self._slot.run_of(deploy)
        handler = partial(
            FTHandler, job=self._graph.name, run=run, shard=told.shard, shards=told.shards, exact=told.exact
        )
        holding = Holding(run, self._known_partitions)
        return AckerTaskMode(
            handler, order.options, partial(open_sink, run=run), holding, is_first=deploy.epoch == 1
        )

    def _known_partitions(self, uid: str, subtask: int) -> list[str]:
        parallelism = self._graph.vertex(uid).parallelism
        held = self._opened[self._graph.stream_of(uid)].held
        return [name for name in held if partition_index(name) % parallelism == subtask]

    def _open_tracer(self, tracing: Tracing | None) -> None:
        if tracing is not None:
            self._spans = open_spans(tracing, "ftlayer-slot", __version__)
        if tracing is not None and self._spans is not None:
            slot = self._slot.order.slot
            self._tracer = AckerTracer(Sampler(tracing.ratio), self._graph.name, slot, self._spans.send)

    @property
    def tracer(self) -> AckerTracer | None:
        return self._tracer

    @property
    def notes(self) -> RecordNotes:
        return self._box.notes

    def rules(self, parts: mode.SlotParts) -> AckerSlot:
        assert self._port is not None
        return AckerSlot(self._port, parts)

    def positions(self, key: TaskKey) -> Mapping[str, bytes]:
        return self._opened[self._graph.stream_of(key[0])].positions

    def carry_out(self, instruction: ModeInstruction) -> None:
        assert self._port is not None
        match instruction:
            case PersistCall(key, ticket, call):
                self._port.persist(key, ticket, call)
            case RangesCall(key, number, call):
                self._port.call_ranges(key, number, call)
            case XorCall(event):
                self._port.xor(event)
            case FailCall(failures):
                self._port.fail(tuple(replace(failure, place=self._place) for failure in failures))
            case TakeReplaysCall(key, ask):
                self._port.take_replays(key, ask)
            case _:
                raise mode.misplaced(instruction)

    def touch(self, roots: list[U64Array]) -> None:
        if self._port is not None and roots:
            self._port.touch(roots)

    def deaths(self) -> tuple[messages.Death, ...]:
        return self._box.deaths()

    def end(self, *, over: bool, stands: int) -> None:
        self._box.close()

    def close(self) -> None:
        if self._port is not None:
            self._port.close()
        if self._spans is not None:
            self._spans.close()
