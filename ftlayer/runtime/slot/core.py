"""The rules of a slot: which task runs next, where its elements go, and what waits for what.

No I/O, no threads and no clock: events come in as calls, what is to be done goes out through `Links` and the ports of
the mode. A task is run while all its outputs have room; the loop goes on with the others. So no slot ever
waits for another one inside a send, which two slots could do for each other without end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection

import pyarrow as pa

from ftlayer.clock import Now
from ftlayer.config import TopologyOptions
from ftlayer.errors import CodecError
from ftlayer.handler.lineage import Lineage
from ftlayer.records.ids import U64Array
from ftlayer.runtime.protocol.channel_frames import ElementCodec
from ftlayer.runtime.protocol.credit_frames import decode_grants, is_limits
from ftlayer.runtime.protocol.elements import Barrier, Batch, Element
from ftlayer.runtime.slot.crediting import Crediting
from ftlayer.runtime.slot.loop_watch import watch_loops
from ftlayer.runtime.slot.mode import ModeEvent, OpenRules, SlotParts
from ftlayer.runtime.slot.outgoing import Outgoing
from ftlayer.runtime.slot.outputs import RemoteOutput
from ftlayer.runtime.slot.ports import Links, Working
from ftlayer.runtime.slot.seat import Seat, counters_of, seat_tasks
from ftlayer.runtime.slot.turns import Turns
from ftlayer.runtime.task.actions import (
    Action,
    HoldInput,
    Send,
    TaskEnded,
    WakeAt,
)
from ftlayer.runtime.task.contract import Task, TaskKey
from ftlayer.runtime.task.events import (
    ChannelReset,
    ElementCame,
    SourceOver,
    SourceRows,
    TaskEvent,
    TaskStart,
    TimeCame,
)
from ftlayer.topology.job_graph import Channel, JobGraph


class SlotCore:
    """The tasks of one slot.

    Attributes:
        working: what runs now; None between two tasks. Any thread may read it.
    """

    def __init__(
        self,
        graph: JobGraph,
        slot: int,
        tasks: dict[TaskKey, Task],
        options: TopologyOptions,
        links: Links,
        open_rules: OpenRules,
    ) -> None:
        """``tasks`` are all of `JobGraph.subtasks_in` the slot; ``open_rules`` makes the mode's rules."""
        self._codec = ElementCodec(graph.edges)
        self._seating = seat_tasks(graph, slot, tasks, options, self._codec)
        self._seats = list(self._seating.seats.values())
        watch_loops(graph, self._seating)
        self._turns = Turns(self._seats)
        self._outgoing = Outgoing(self._seating.remote, links, options.batch_age_ms)
        self._credit = Crediting(links, self._seating.senders, options.channel_bytes)
        self._dropped = 0
        self._activity = 0
        self.working: Working | None = None
        parts = SlotParts(
            graph,
            options,
            self._seating,
            self._codec,
            self._outgoing,
            self._credit,
            self._run,
            self._run_part,
        )
        self._mode = open_rules(parts)

    # ------------------------------------------------------------ events

    def start(self, now: Now) -> None:
        """Start all tasks."""
        for seat in self._seats:
            self._run(seat, TaskStart(), now)

    def frame(self, slot: int, data: pa.Buffer) -> None:
        """An element has come from a slot; `CodecError` if it cannot be one."""
        channel, element = self._codec.decode(data)
        seat = self._seating.receivers.get(channel)
        if seat is None or self._seating.senders[channel] != slot:
            raise CodecError(f"slot {slot} sent an element of {channel}, which does not lead from it to here")
        self._activity += 1
        seat.inbox.put(channel, element, data.size)
        if isinstance(element, Barrier):
            self._mode.arrived(channel, element, data.size)

    def granted(self, data: bytes) -> None:
        """Credit has come back, or receivers say how much they want in flight."""
        tell = self._outgoing.limited if is_limits(data) else self._outgoing.granted
        for channel, size in decode_grants(data):
            tell(channel, size)

    def handle(self, event: ModeEvent, now: Now) -> None:
        """Take what the mode alone understands."""
        self._mode.handle(event, now)

    def rows(self, key: TaskKey, rows: SourceRows, now: Now) -> tuple[int, ...]:
        """A source has read rows; returns the tickets of what is persisted for them."""
        seat = self._seating.seats[key]
        seat.records_in += rows.payload.num_rows
        before = frozenset(self._mode.unaccepted(key))
        self._run(seat, rows, now)
        self._mode.worked(seat, rows.payload.num_rows, now.mono_ms)
        return tuple(ticket for ticket in self._mode.unaccepted(key) if ticket not in before)

    def source_ended(self, key: TaskKey, now: Now) -> None:
        """A source has no more rows."""
        seat = self._seating.seats[key]
        seat.reading = False
        self._run(seat, SourceOver(), now)
        self._mode.source_ended(seat)

    # ------------------------------------------------------------ peers

    def peer_up(self, slot: int) -> None:
        """A slot can be sent to."""
        self._outgoing.peer_up(slot)

    def peer_lost(self, slot: int) -> None:
        """A slot cannot be reached: hold what is for it."""
        self._outgoing.peer_lost(slot)

    def drop_peer(self, slot: int, now: Now) -> None:
        """A slot is gone, and another instance will take its place: forget what was for it and came of it."""
        self._activity += 1
        self._mode.peers_dropped((slot,), now)
        self._dropped += self._outgoing.drop_peer(slot)
        for channel, sender in self._seating.senders.items():
            if sender == slot:
                seat = self._seating.receivers[channel]
                self._dropped += seat.inbox.drop(channel)
                self._credit.forget(channel)
                self._run(seat, ChannelReset(channel), now)

    def peers_back(self, slots: Collection[int], now: Now) -> None:
        """These slots have new instances."""
        self._mode.peers_back(slots, now)

    def unsent_to(self, slot: int) -> bool:
        """Whether anything waits for, or is on its way to, a slot."""
        return self._outgoing.unsent_to(slot)

    # ------------------------------------------------------------ running

    def run_next(self, now: Now) -> bool:
        """Run the next task that has something to do and room for what comes of it; whether there was one."""
        self._outgoing.flush_aged(now.mono_ms)
        self._give_back_due(now.mono_ms)
        self._mode.before_turn(now)
        seat = self._turns.next()
        if seat is None:
            return False
        self._run_input(seat, now)
        return True

    def on_time(self, now: Now) -> None:
        """Call the tasks whose time has come, and do what the mode has to."""
        self._mode.on_time(now)
        for seat in self._seats:
            if seat.wake_ms is not None and seat.wake_ms <= now.mono_ms:
                seat.wake_ms = None
                seat.is_held = False
                self._run(seat, TimeCame(), now, counts=False)

    @property
    def due_ms(self) -> int | None:
        """When `on_time` or `idle` has something to do (monotone, ms); None: not until something happens."""
        dues = [seat.wake_ms for seat in self._seats]
        dues += (self._credit.due_ms, self._mode.due_ms)
        return min((due for due in dues if due is not None), default=None)

    def idle(self, now_ms: int) -> None:
        """There is nothing else to do: let no record wait for others, and what is due go.

        Credit is due a little later: at a low rate it would double the number of calls.
        """
        self._outgoing.flush()
        self._give_back_due(now_ms)
        self._mode.rest(now_ms)

    def may_read(self, key: TaskKey) -> bool:
        """Whether a source should read on."""
        seat = self._seating.seats[key]
        return seat.reading and seat.has_room and self._mode.may_read(seat)

    def rows_wanted(self, key: TaskKey) -> int:
        """Return how many rows a source should read at a time."""
        return self._mode.rows_wanted(key)

    # ------------------------------------------------------------ what is known of it

    @property
    def activity(self) -> int:
        """Grows with everything that happens (see `Heartbeat`); any thread may read it."""
        return self._activity + self._mode.activity

    @property
    def is_quiet(self) -> bool:
        """Whether nothing more comes by itself and nothing waits, here, for the mode's calls, or for another slot."""
        return (
            not self._mode.is_open
            and all(seat.inbox.is_empty for seat in self._seats)
            and self._outgoing.is_empty
            and self._mode.is_quiet
        )

    @property
    def has_ended(self) -> bool:
        """Whether all tasks have ended and everything they sent was taken and told."""
        return self._all_ended() and self.is_quiet and self._credit.due_ms is None

    def counters(self) -> dict[str, int]:
        """Return totals by name; may be called by any thread.

        They are those of `ftlayer.runtime.slot.seat.counters_of`, those of the mode, ``persisted``, ``replayed``,
        ``failed`` and ``dropped`` records.
        """
        none = dict.fromkeys(("persisted", "replayed", "failed"), 0)
        return none | {"dropped": self._dropped} | self._mode.counters() | counters_of(self._seats)

    def held_roots(self) -> list[U64Array]:
        """Return the roots of all that waits here, save what is being worked on; may be called by any thread."""
        held: list[U64Array] = []
        for seat in self._seats:
            held += seat.inbox.roots()
            held.append(seat.task.held_roots())
        for output in self._seating.remote.values():
            held += output.roots()
        return held + self._mode.held_roots()

    # ------------------------------------------------------------ doing

    def _run_input(self, seat: Seat, now: Now) -> None:
        rows = seat.rows_allowed(now.mono_ms) if seat.inbox.has_records_next else sys.maxsize
        if not rows:
            return
        taken = seat.inbox.take(rows)
        channel, element = taken.channel, taken.element
        lineage = None
        if taken.credit:
            self._credit.give_back(channel, taken.credit, now.mono_ms)
        if isinstance(element, Batch):
            seat.records_in += element.num_rows
            if seat.bucket is not None:
                seat.bucket.take(element.num_rows)
            lineage = element.lineage
            self._mode.worked(seat, taken.credit or taken.size, now.mono_ms)
        elif self._mode.takes(seat, channel, element, now):
            return
        roots = () if lineage is None else (lineage.roots,)
        self._run(seat, ElementCame(channel, element), now, roots, lineage=lineage)

    def _run(
        self,
        seat: Seat,
        event: TaskEvent,
        now: Now,
        roots: tuple[U64Array, ...] = (),
        *,
        lineage: Lineage | None = None,
        counts: bool = True,
    ) -> None:
        self._work(seat, lambda: seat.task.handle(event, now), now, roots, lineage)
        if counts:
            self._activity += 1

    def _run_part(self, seat: Seat, work: Callable[[], list[Action]], now: Now) -> None:
        self._work(seat, work, now)
        self._activity += 1

    def _work(
        self,
        seat: Seat,
        work: Callable[[], list[Action]],
        now: Now,
        roots: tuple[U64Array, ...] = (),
        lineage: Lineage | None = None,
    ) -> None:
        self.working = Working(seat.uid, seat.task, roots, now.mono_ms, lineage)
        for action in work():
            self._do(seat, action, now.mono_ms)
        self.working = None

    def _do(self, seat: Seat, action: Action, now_ms: int) -> None:
        match action:
            case Send(channel, element):
                self._send(seat, channel, element, now_ms)
            case WakeAt(mono_ms):
                seat.wake_at(mono_ms)
            case HoldInput(mono_ms):
                seat.hold_until(mono_ms)
            case TaskEnded():
                seat.ended = True
            case _:
                self._mode.act(seat, action, now_ms)

    def _send(self, seat: Seat, channel: Channel, element: Element, now_ms: int) -> None:
        output = seat.outputs[channel]
        if isinstance(element, Batch):
            seat.records_out += element.num_rows
        if isinstance(output, RemoteOutput):
            self._outgoing.send(output, element, now_ms)
        else:
            output.send(element, now_ms)

    def _give_back_due(self, now_ms: int) -> None:
        due = self._credit.due_ms
        if due is not None and (due <= now_ms or self._all_ended()):
            self._credit.send_all()

    def _all_ended(self) -> bool:
        return all(seat.ended for seat in self._seats)
