"""Acker mode's rules in a slot: what waits for the vertex, what it is told, and which replays are let in."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol, assert_never, cast

from ftlayer.clock import Now
from ftlayer.records.ids import U64Array
from ftlayer.runtime.acker_mode.slot.acks import AckBuffer
from ftlayer.runtime.protocol.elements import Barrier, Element
from ftlayer.runtime.protocol.messages import (
    AllowReplays,
    EndReplays,
    FromSlot,
    LetOut,
    PauseIntake,
    ReplayNow,
    ResumeIntake,
)
from ftlayer.runtime.slot.events import ReplaysCame, RootsAccepted
from ftlayer.runtime.slot.mode import ModeAction, ModeEvent, SlotParts, misplaced, rows_of_sources
from ftlayer.runtime.slot.seat import Seat
from ftlayer.runtime.task.actions import (
    Acknowledge,
    AskReplays,
    DataEnded,
    FailRoots,
    PersistRoots,
    ReplaysOut,
)
from ftlayer.runtime.task.contract import ReplayTask, TaskKey
from ftlayer.runtime.task.events import PeersAway, PeersThere, Replayed, RowsPersisted
from ftlayer.topology.job_graph import Channel
from ftlayer.vertex.calls import Failure, Persist

PERSISTS_IN_FLIGHT = 16
"""A source reads on while this many of its batches, at most, wait for the vertex."""


class VertexCalls(Protocol):
    """The way to the vertex. Nothing here waits; answers come as events."""

    @property
    def may_persist(self) -> bool:
        """Whether more can be persisted without queueing here."""

    @property
    def is_quiet(self) -> bool:
        """Whether everything that changes something has its answer."""

    def persist(self, key: TaskKey, ticket: int, call: Persist) -> None:
        """Persist; `RootsAccepted` follows."""

    def xor(self, event: Acknowledge) -> None:
        """Tell of XOR events."""

    def fail(self, failures: tuple[Failure, ...]) -> None:
        """End attempts."""

    def take_replays(self, key: TaskKey, ask: AskReplays) -> None:
        """Ask for replays; `ReplaysCame` follows."""


class AckerSlot:
    """`ftlayer.runtime.slot.mode.SlotMode` of a job whose records the vertex follows."""

    def __init__(self, vertex: VertexCalls, tell: Callable[[FromSlot], None], parts: SlotParts) -> None:
        """``tell`` reaches the coordinator."""
        self.activity = 0
        self._vertex = vertex
        self._tell = tell
        self._seating = parts.seating
        self._rows = rows_of_sources(parts)
        self._seats = parts.seating.seats
        self._run = parts.run
        self._acks = AckBuffer()
        # The roots of `PersistRoots` that have no answer, by ticket; replaced, never changed.
        self._unaccepted: dict[TaskKey, dict[int, U64Array]] = {key: {} for key in self._seats}
        self._unasked: dict[TaskKey, AskReplays] = {}  # they wait for room
        self._totals = dict.fromkeys(("persisted", "replayed", "failed"), 0)
        self._paused = False
        self._away: set[int] = set()

    def handle(self, event: ModeEvent, now: Now) -> None:
        """See `SlotMode.handle`."""
        match event:
            case RootsAccepted(key, ticket):
                self._accepted(key, ticket, now)
            case ReplaysCame():
                self._replays_came(event, now)
            case ReplayNow() | PauseIntake() | ResumeIntake():
                if not isinstance(event, ReplayNow):
                    self._paused = isinstance(event, PauseIntake)
                for seat in self._replaying():
                    self._run(seat, event, now, counts=False)
            case AllowReplays(uid) | LetOut(uid):
                for seat in self._replaying():
                    if seat.uid == uid:
                        self._run(seat, event, now)
            case EndReplays():
                for seat in self._replaying():
                    self._run(seat, event, now)
            case _:
                raise misplaced(event)

    def act(self, seat: Seat, action: ModeAction, now_ms: int) -> None:
        """See `SlotMode.act`."""
        match action:
            case Acknowledge():
                self._acks.add(action, now_ms)
                self._send_due(now_ms)
            case PersistRoots(ticket, call):
                self.activity += 1
                self._unaccepted[seat.key] = {**self._unaccepted[seat.key], ticket: call.roots}
                self._vertex.persist(seat.key, ticket, call)
            case FailRoots(failures):
                self._totals["failed"] += len(failures)
                self._vertex.fail(failures)
            case AskReplays():
                if seat.has_room:
                    self._vertex.take_replays(seat.key, action)
                else:
                    self._unasked[seat.key] = action
            case ReplaysOut():
                self._tell(action)
            case DataEnded():
                raise misplaced(action)
            case _:
                assert_never(action)

    def _accepted(self, key: TaskKey, ticket: int, now: Now) -> None:
        seat = self._seats[key]
        self._totals["persisted"] += len(self._unaccepted[key][ticket])
        self._run(seat, RowsPersisted(ticket), now)
        # Behind the sends, which hold the roots from now on.
        waiting = self._unaccepted[key].items()
        self._unaccepted[key] = {number: roots for number, roots in waiting if number != ticket}

    def _replays_came(self, came: ReplaysCame, now: Now) -> None:
        """Nothing to do is no activity."""
        seat = self._seats[came.key]
        rows = sum(batch.payload.num_rows for batch in came.records)
        self._totals["replayed"] += rows
        seat.records_in += rows
        roots = tuple(batch.roots for batch in came.records)
        self._run(seat, Replayed(came.records, came.held), now, roots, counts=bool(rows))

    def _replaying(self) -> list[Seat]:
        """Return the replays that have not ended."""
        return [seat for seat in self._seats.values() if seat.is_replay and not seat.ended]

    # ------------------------------------------------------------ elements

    def arrived(self, channel: Channel, barrier: Barrier, size: int) -> None:
        """See `SlotMode.arrived`."""
        raise misplaced(barrier)

    def takes(self, seat: Seat, channel: Channel, mark: Element, now: Now) -> bool:
        """See `SlotMode.takes`."""
        return False

    def worked(self, seat: Seat, size: int, now_ms: int) -> None:
        """See `SlotMode.worked`."""

    def source_ended(self, seat: Seat) -> None:
        """See `SlotMode.source_ended`: the coordinator sees the end by the vertex."""

    # ------------------------------------------------------------ time

    def before_turn(self, now: Now) -> None:
        """See `SlotMode.before_turn`."""
        self._send_due(now.mono_ms)

    def on_time(self, now: Now) -> None:
        """Let replays be asked for where there is room again."""
        if self._away:
            return
        for key, ask in list(self._unasked.items()):
            if self._seats[key].has_room:
                del self._unasked[key]
                self._vertex.take_replays(key, ask)

    def rest(self, now_ms: int) -> None:
        """See `SlotMode.rest`. At a low rate calls at once would be twice as many."""
        self._send_due(now_ms)

    @property
    def due_ms(self) -> int | None:
        """See `SlotMode.due_ms`."""
        return self._acks.due_ms

    def _send_due(self, now_ms: int) -> None:
        if self._acks.is_due(now_ms):
            self._vertex.xor(self._acks.take())

    # ------------------------------------------------------------ peers

    def peers_dropped(self, slots: Collection[int], now: Now) -> None:
        """Ask for no replays until all are back.

        They would have to wait for these slots, or end the next process if one of them has ended this one.
        """
        self._away.update(slots)
        for seat in self._replaying():
            self._run(seat, PeersAway(), now, counts=False)

    def peers_back(self, slots: Collection[int], now: Now) -> None:
        """See `SlotMode.peers_back`."""
        self._away.difference_update(slots)
        if not self._away:
            for seat in self._replaying():
                self._run(seat, PeersThere(), now, counts=False)

    # ------------------------------------------------------------ what is known of it

    def may_read(self, seat: Seat) -> bool:
        """See `SlotMode.may_read`."""
        if self._paused or len(self._unaccepted[seat.key]) >= PERSISTS_IN_FLIGHT:
            return False
        return self._vertex.may_persist

    def rows_wanted(self, key: TaskKey) -> int:
        """See `SlotMode.rows_wanted`."""
        return self._rows[key]

    def unaccepted(self, key: TaskKey) -> Collection[int]:
        """See `SlotMode.unaccepted`."""
        return self._unaccepted[key]

    @property
    def is_open(self) -> bool:
        """See `SlotMode.is_open`. While intake is paused sources may go on, but no replays may be asked for."""
        if self._paused:
            return any(cast(ReplayTask, seat.task).is_asking for seat in self._replaying())
        return self._seating.is_reading

    @property
    def is_quiet(self) -> bool:
        """See `SlotMode.is_quiet`."""
        return not self._acks and not any(self._unaccepted.values()) and self._vertex.is_quiet

    def counters(self) -> dict[str, int]:
        """Return how many records were ``persisted``, ``replayed`` and ``failed``."""
        return dict(self._totals)

    def held_roots(self) -> list[U64Array]:
        """See `SlotMode.held_roots`: what the vertex was asked to persist, and what it has not been told of."""
        held = [roots for tickets in self._unaccepted.values() for roots in tickets.values()]
        # A function that takes long keeps the loop from sending them.
        return held + self._acks.roots()
