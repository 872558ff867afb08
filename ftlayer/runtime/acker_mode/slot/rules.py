"""Acker mode's rules in a slot: what waits for the vertex, what it is told, and which replays are let in."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, assert_never, cast

from ftlayer.clock import Now
from ftlayer.histogram import Exemplar, Histogram
from ftlayer.records.ids import U64Array, ids_of
from ftlayer.runtime.acker_mode.slot.acks import AckBuffer
from ftlayer.runtime.acker_mode.slot.instructions import (
    FailCall,
    PersistCall,
    RangesCall,
    TakeReplaysCall,
    XorCall,
)
from ftlayer.runtime.acker_mode.task.range_source import RangeSourceTask
from ftlayer.runtime.protocol.durations import PERSIST, counters_of, exemplars_of
from ftlayer.runtime.protocol.elements import Barrier, Element
from ftlayer.runtime.protocol.messages import (
    AllowReplays,
    EndReplays,
    LetOut,
    PauseIntake,
    ReplayNow,
    ResumeIntake,
)
from ftlayer.runtime.slot.events import RangesCame, RangesRefused, ReplaysCame, RootsAccepted, RowsRead
from ftlayer.runtime.slot.instructions import ModeWork, RowsDone, RunTask, TellCoordinator
from ftlayer.runtime.slot.mode import (
    Instructions,
    ModeAction,
    ModeEvent,
    SlotParts,
    misplaced,
    rows_of_sources,
)
from ftlayer.runtime.slot.seat import Seat
from ftlayer.runtime.task.actions import (
    Acknowledge,
    Action,
    AskReplays,
    CallRanges,
    DataEnded,
    FailRoots,
    PersistRoots,
    ReplaysOut,
)
from ftlayer.runtime.task.contract import ReplayTask, TaskKey
from ftlayer.runtime.task.events import (
    PeersAway,
    PeersThere,
    RangesAnswered,
    RangesLost,
    Replayed,
    RowsPersisted,
    TaskEvent,
)
from ftlayer.topology.job_graph import Channel
from ftlayer.vertex.calls import RangesTold, Register


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


class AckerSlot:
    """`ftlayer.runtime.slot.mode.SlotMode` of a job whose records the vertex follows."""

    def __init__(self, vertex: VertexRoom, parts: SlotParts) -> None:
        self.activity = 0
        self._vertex = vertex
        self._seating = parts.seating
        self._rows = rows_of_sources(parts)
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
        self._unasked: dict[TaskKey, AskReplays] = {}  # they wait for room
        self._totals = dict.fromkeys(("persisted", "replayed", "failed"), 0)
        self._persist_times: dict[str, Histogram] = {}
        self._paused = False
        self._away: set[int] = set()

    def handle(self, event: ModeEvent, now: Now) -> Instructions:
        match event:
            case RootsAccepted():
                return self._roots_accepted(event, now)
            case RangesCame(key, number, reply):
                # Nothing to do is no activity.
                counts = not isinstance(reply, RangesTold) or bool(reply.wanted)
                return [RunTask(key, RangesAnswered(number, reply), counts=counts)]
            case RangesRefused():
                return self._ranges_refused(event)
            case ReplaysCame():
                return [self._replays_came(event)]
            case ReplayNow():
                return self._run_replays(event, counts=False)
            case PauseIntake():
                self._paused = True
                return self._run_replays(event, counts=False)
            case ResumeIntake():
                self._paused = False
                return [*self._run_replays(event, counts=False), *self._let_held_back()]
            case AllowReplays(uid) | LetOut(uid):
                return [run for run in self._run_replays(event) if run.key[0] == uid]
            case EndReplays():
                return self._run_replays(event)
            case _:
                raise misplaced(event)

    def _roots_accepted(self, accepted: RootsAccepted, now: Now) -> Instructions:
        key, ticket = accepted.key, accepted.ticket
        if key in self._ranged and ticket not in self._unaccepted[key]:
            return []  # of before the vertex was lost: registered anew since
        roots = self._unaccepted[key][ticket]
        self._totals["persisted"] += len(roots)
        root = int(roots[-1]) if len(roots) else 0
        times = self._persist_times.setdefault(key[0], Histogram())
        times.observe(accepted.took_s, root=root, at_ms=now.wall_ms)
        return [RunTask(key, RowsPersisted(ticket, accepted.segment))]

    def _ranges_refused(self, refused: RangesRefused) -> Instructions:
        """The vertex was lost: what a source has registered there is registered anew."""
        key = refused.key
        if self._ranged[key].incarnation != refused.incarnation:
            return []
        self._unaccepted[key] = {}
        self._held_back = [call for call in self._held_back if call.key != key]
        return [RunTask(key, RangesLost(refused.incarnation))]

    def _let_held_back(self) -> list[PersistCall]:
        calls, self._held_back = self._held_back, []
        for call in calls:
            self._wait_for(call)
        return calls

    def _wait_for(self, call: PersistCall) -> None:
        self._unaccepted[call.key] = {**self._unaccepted[call.key], call.ticket: ids_of(call.call.roots)}

    def _replays_came(self, came: ReplaysCame) -> RunTask:
        """Nothing to do is no activity."""
        rows = sum(batch.payload.num_rows for batch in came.records)
        self._totals["replayed"] += rows
        self._seats[came.key].records_in += rows
        roots = tuple(batch.roots for batch in came.records)
        return RunTask(came.key, Replayed(came.records, came.held), roots, counts=bool(rows))

    def _run_replays(self, event: TaskEvent, *, counts: bool = True) -> list[RunTask]:
        return [RunTask(seat.key, event, counts=counts) for seat in self._replaying()]

    def _replaying(self) -> list[Seat]:
        """Return the replays that have not ended."""
        return [seat for seat in self._seats.values() if seat.is_replay and not seat.ended]

    # ------------------------------------------------------------ tasks

    def work(self, seat: Seat, work: ModeWork, now: Now) -> list[Action]:
        raise misplaced(work)

    def act(self, seat: Seat, action: ModeAction, now_ms: int) -> Instructions:
        match action:
            case Acknowledge():
                self._acks.add(action, now_ms)
                return self._due_acks(now_ms)
            case PersistRoots(ticket, call):
                self.activity += 1
                asked = PersistCall(seat.key, ticket, call)
                if self._paused and isinstance(call, Register) and not call.wanted:
                    self._held_back.append(asked)
                    return []
                self._wait_for(asked)
                if seat.is_source and seat.key not in self._ranged:
                    self._numbers[seat.key, ticket] = self._read[seat.key]
                return [asked]
            case CallRanges(number, call):
                return [RangesCall(seat.key, number, call)]
            case FailRoots(failures):
                self._totals["failed"] += len(failures)
                return [FailCall(failures)]
            case AskReplays():
                if seat.has_room:
                    return [TakeReplaysCall(seat.key, action)]
                self._unasked[seat.key] = action
                return []
            case ReplaysOut():
                return [TellCoordinator(action)]
            case DataEnded():
                raise misplaced(action)
            case _:
                assert_never(action)

    def ran(self, seat: Seat, event: TaskEvent | ModeWork, now: Now) -> Instructions:
        """See `SlotMode.ran`. Sends hold the roots of what is persisted from here on."""
        if not isinstance(event, RowsPersisted):
            return ()
        waiting = self._unaccepted[seat.key].items()
        self._unaccepted[seat.key] = {ticket: roots for ticket, roots in waiting if ticket != event.ticket}
        number = self._numbers.pop((seat.key, event.ticket), None)
        return () if number is None else [RowsDone(seat.key, number)]

    def read(self, seat: Seat, read: RowsRead, now_ms: int) -> Instructions:
        """See `SlotMode.read`: rows are done once they are persisted, or the task keeps them."""
        if seat.key in self._ranged:
            return [RunTask(seat.key, read.rows), RowsDone(seat.key, read.number)]
        self._read[seat.key] = read.number
        return [RunTask(seat.key, read.rows)]

    def source_ended(self, seat: Seat) -> Instructions:
        """See `SlotMode.source_ended`: the coordinator sees the end by the vertex."""
        return ()

    # ------------------------------------------------------------ elements

    def arrived(self, channel: Channel, barrier: Barrier, size: int) -> None:
        raise misplaced(barrier)

    def takes(self, seat: Seat, channel: Channel, mark: Element, now: Now) -> None:
        """See `SlotMode.takes`."""

    def worked(self, seat: Seat, size: int, now_ms: int) -> Instructions:
        return ()

    # ------------------------------------------------------------ time

    def on_time(self, now: Now) -> Instructions:
        """Let replays be asked for where there is room again, and acknowledgements go that are due."""
        return [*self._due_acks(now.mono_ms), *self._asks_with_room()]

    def _asks_with_room(self) -> list[TakeReplaysCall]:
        if self._away:
            return []
        room = [key for key in self._unasked if self._seats[key].has_room]
        return [TakeReplaysCall(key, self._unasked.pop(key)) for key in room]

    def rest(self, now_ms: int) -> Instructions:
        return self._due_acks(now_ms)

    @property
    def due_ms(self) -> int | None:
        return self._acks.due_ms

    def _due_acks(self, now_ms: int) -> list[XorCall]:
        return [XorCall(self._acks.take())] if self._acks.is_due(now_ms) else []

    # ------------------------------------------------------------ peers

    def peers_gone(self, slots: Collection[int]) -> Instructions:
        """Ask for no replays until all are back.

        They would have to wait for these slots, or end the next process if one of them has ended this one.
        """
        self._away.update(slots)
        return self._run_replays(PeersAway(), counts=False)

    def peers_replaced(self, slots: Collection[int]) -> Instructions:
        self._away.difference_update(slots)
        return [] if self._away else self._run_replays(PeersThere(), counts=False)

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
        """Return how many records were ``persisted``, ``replayed`` and ``failed``, and how long persisting took."""
        return self._totals | counters_of(PERSIST, self._persist_times.copy())

    def exemplars(self) -> dict[str, Exemplar]:
        return exemplars_of(PERSIST, self._persist_times.copy())

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
