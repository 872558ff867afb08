"""The rules of a slot: which task runs next, where its elements go, and what waits for what.

No I/O, no threads and no clock: events come in, instructions go out. A task is run while all its outputs have room;
the loop goes on with the others. So no slot ever waits for another one inside a send, which two slots could do for each
other without end.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pyarrow as pa

from ftlayer.common.checks import fast_dataclass
from ftlayer.common.clock import Now
from ftlayer.common.rules.histogram import Exemplar
from ftlayer.config import TopologyOptions
from ftlayer.errors import CodecError
from ftlayer.records.ids import U64Array
from ftlayer.runtime.handler import RecordIds
from ftlayer.runtime.protocol.channel_frames import ElementCodec, decode_grants, is_limits
from ftlayer.runtime.protocol.messages import Barrier, Batch
from ftlayer.runtime.slot.rules import events
from ftlayer.runtime.slot.rules.credit import MAX_WAIT_MS, Crediting
from ftlayer.runtime.slot.rules.mode import ModeEvent, OpenRules, SlotParts
from ftlayer.runtime.slot.rules.outgoing import Outgoing, RemoteOutput
from ftlayer.runtime.slot.rules.subtask import Seat, counters_of, exemplars_of, seat_tasks
from ftlayer.runtime.task import actions as task_actions
from ftlayer.runtime.task.contract import Task, TaskKey
from ftlayer.topology.job_graph import JobGraph

# Whose turn it is in a slot: one task after the other, each for as many elements as it has channels that wait.
#
# A turn for each task alone would be unfair to those that many send to: a task behind an exchange gets records from
# every slot, and would have as much time as the one task here that makes some of them. What the others send would pile
# up until they have no credit left and wait, while this slot reads on.
#
# Tasks that a barrier waits in come first, though: the sooner it is through, the sooner channels that it has blocked
# go on, and the younger is the checkpoint. Not without end: the barrier of one task may be stuck behind records for
# another one, which has to take those before it can come.


IN_HASTE = 8
"""So many turns in a row go to tasks with barriers, if there are such tasks; the next one is an ordinary one."""


class Turns:
    """Goes round the tasks of a slot."""

    def __init__(self, seats: Sequence[Seat]) -> None:
        """``seats`` from sinks to sources; so they are served, and those with barriers the other way round."""
        self._seats = seats
        self._upstream_first = tuple(reversed(seats))
        self._in_haste = 0
        self._at = 0
        self._left = 0  # turns of the one that it is at; 0: it has not begun

    def next(self) -> Seat | None:
        """Return a task that has something to do and room for what comes of it; None if there is none.

        Without barriers, every such task comes round again before another one has had more turns than channels.
        """
        if self._in_haste < IN_HASTE:
            for seat in self._upstream_first:
                if seat.inbox.turns and seat.inbox.has_barriers and seat.can_run:
                    self._in_haste += 1
                    return seat
        self._in_haste = 0
        return self._round()

    def _round(self) -> Seat | None:
        for step in range(len(self._seats)):
            at = (self._at + step) % len(self._seats)
            seat = self._seats[at]
            if seat.inbox.turns and seat.can_run:
                if step or not self._left:
                    self._at, self._left = at, len(seat.inbox.turns)
                self._left -= 1
                if not self._left:
                    self._at = (at + 1) % len(self._seats)
                return seat
        return None


Happening = (
    events.FrameCame
    | events.CreditCame
    | events.TimePassed
    | events.Turn
    | events.Rest
    | events.RowsRead
    | events.SourceEnded
    | events.SlotStarted
    | events.PeerReached
    | events.PeerBroke
    | events.PeersGone
    | events.PeersReplaced
    | ModeEvent
)

SlotEvent = events.RunTask | Happening


@fast_dataclass
class Working:
    """What the loop is busy with: a chain, its task, the roots of its batch, and since when (monotone, ms).

    ``lineage`` says which of the batch's rows has which roots; None where there is no batch.
    """

    uid: str
    task: Task
    roots: tuple[U64Array, ...]
    since_ms: int
    lineage: RecordIds | None = None


class SlotCore:
    """The tasks of one slot.

    Attributes:
        graph, slot: whose tasks, and which of its slots.
        working: what runs now; None between two tasks. Any thread may read it.
    """

    def __init__(
        self,
        graph: JobGraph,
        slot: int,
        tasks: dict[TaskKey, Task],
        options: TopologyOptions,
        open_rules: OpenRules,
    ) -> None:
        """``tasks`` are all of `JobGraph.subtasks_in` the slot; ``open_rules`` makes the mode's rules."""
        self.graph, self.slot = graph, slot
        self._codec = ElementCodec(graph.edges)
        self._seating = seat_tasks(graph, slot, tasks, options, self._codec)
        self._seats = list(self._seating.seats.values())
        self._open = len(self._seats)  # those whose task has not ended
        self._turns = Turns(self._seats)
        self._outgoing = Outgoing(self._seating.remote, options.batch_age_ms)
        self._credit = Crediting(self._seating.senders, options.channel_bytes)
        self._dropped = 0
        self._activity = 0
        self.working: Working | None = None
        self._coming: tuple[U64Array, ...] = ()  # of what a task is to work on next
        self._mode = open_rules(
            SlotParts(graph, options, self._seating, self._codec, self._outgoing, self._credit)
        )

    # ------------------------------------------------------------ events

    def handle(self, event: SlotEvent, now: Now) -> list[events.SlotInstruction]:
        """Take an event; return what is to be done, in its order. User functions run in the course of `RunTask` alone.

        All that the events before have returned must be carried out by now, save runs and what follows them; when
        that is so for all of it, `carried_out` says it. Raises
        `CodecError` for an element, or credit, that cannot be one, and whatever a task raises.
        """
        if self._outgoing.handed:
            self._outgoing.carried_out()
        if isinstance(event, events.RunTask):
            return self._run(event, now)
        instructions = self._decide(event, now)
        coming: tuple[U64Array, ...] = ()
        for each in instructions:
            if isinstance(each, events.RunTask):
                coming += each.roots
        self._coming = coming
        return instructions

    def carried_out(self) -> None:
        """All that `handle` has returned so far is carried out: it is not held here any more."""
        if self._outgoing.handed:
            self._outgoing.carried_out()

    def _decide(self, event: Happening, now: Now) -> list[events.SlotInstruction]:
        match event:
            case events.FrameCame(slot, _, data):
                self._frame_came(slot, data)
                return []
            case events.CreditCame(_, _, data):
                tell = self._outgoing.limited if is_limits(data) else self._outgoing.granted
                return [each for channel, size in decode_grants(data) for each in tell(channel, size)]
            case events.TimePassed(cpu_ms):
                return self._tick(now, cpu_ms)
            case events.Turn():
                return self._turn(now)
            case events.Rest():
                # Credit and XORs are due a little later: at a low rate they would double the number of calls.
                return [
                    *self._outgoing.flush(),
                    *self._give_back_due(now.mono_ms),
                    *self._mode.rest(now.mono_ms),
                ]
            case events.RowsRead(key, _, rows):
                seat = self._seating.seats[key]
                seat.records_in += rows.payload.num_rows
                return [*self._mode.read(seat, event, now.mono_ms)]
            case events.SourceEnded(key):
                seat = self._seating.seats[key]
                seat.reading = False
                return [events.RunTask(key, task_actions.SourceOver()), *self._mode.source_ended(seat)]
            case events.SlotStarted():
                return [events.RunTask(seat.key, task_actions.TaskStart()) for seat in self._seats]
            case events.PeerReached(slot):
                return [*self._outgoing.peer_up(slot)]
            case events.PeerBroke(slot):
                self._outgoing.peer_lost(slot)
                return []
            case events.PeersGone(slots):
                return self._peers_gone(slots)
            case events.PeersReplaced(slots):
                return [*self._mode.peers_replaced(slots)]
            case _:
                return [*self._mode.handle(event, now)]

    def _frame_came(self, slot: int, data: pa.Buffer) -> None:
        channel, element = self._codec.decode(data)
        seat = self._seating.receivers.get(channel)
        if seat is None or self._seating.senders[channel] != slot:
            raise CodecError(f"slot {slot} sent an element of {channel}, which does not lead from it to here")
        self._activity += 1
        seat.inbox.put(channel, element, data.size)
        if isinstance(element, Barrier):
            self._mode.arrived(channel, element, data.size)

    def _peers_gone(self, slots: tuple[int, ...]) -> list[events.SlotInstruction]:
        self._activity += len(slots)
        resets: list[events.SlotInstruction] = []
        for slot in slots:
            self._dropped += self._outgoing.drop_peer(slot)
            for channel, sender in self._seating.senders.items():
                if sender == slot:
                    seat = self._seating.receivers[channel]
                    self._dropped += seat.inbox.drop(channel)
                    self._credit.forget(channel)
                    resets.append(events.RunTask(seat.key, task_actions.ChannelReset(channel)))
        return [*self._mode.peers_gone(slots), *resets]

    # ------------------------------------------------------------ running

    def _tick(self, now: Now, cpu_ms: int) -> list[events.SlotInstruction]:
        instructions: list[events.SlotInstruction] = [
            *self._outgoing.flush_aged(now.mono_ms, cpu_ms),
            *self._give_back_due(now.mono_ms),
            *self._mode.on_time(now),
        ]
        for seat in self._seats:
            if seat.wake_ms is not None and seat.wake_ms <= now.mono_ms:
                seat.wake_ms = None
                seat.is_held = False
                instructions.append(events.RunTask(seat.key, task_actions.TimeCame(), counts=False))
        return instructions

    def _turn(self, now: Now) -> list[events.SlotInstruction]:
        seat = self._turns.next()
        if seat is None:
            return []
        rows = sys.maxsize
        if seat.rate_limit is not None and seat.inbox.has_records_next:
            rows = seat.rows_allowed(now.mono_ms, seat.rate_limit)
            if not rows:
                return []
        taken = seat.inbox.take(rows)
        channel, element = taken.channel, taken.element
        instructions: list[events.SlotInstruction] = []
        if taken.credit:
            instructions += self._credit.give_back(channel, taken.credit, now.mono_ms)
        if not isinstance(element, Batch):
            mark = self._mode.takes(seat, channel, element, now)
            instructions += (
                [events.RunTask(seat.key, task_actions.ElementCame(channel, element))]
                if mark is None
                else mark
            )
            return instructions
        seat.records_in += element.payload.num_rows
        if seat.bucket is not None:
            seat.bucket.take(element.num_rows)
        instructions += self._mode.worked(seat, taken.credit or taken.size, now.mono_ms)
        lineage = element.lineage
        roots = () if lineage is None else (lineage.roots,)
        return [
            *instructions,
            events.RunTask(seat.key, task_actions.ElementCame(channel, element), roots, lineage),
        ]

    def _run(self, run: events.RunTask, now: Now) -> list[events.SlotInstruction]:
        seat = self._seating.seats[run.key]
        self.working = Working(seat.uid, seat.task, run.roots, now.mono_ms, run.lineage)
        self._coming = ()
        if isinstance(run.event, events.ModeWork):
            actions = self._mode.work(seat, run.event, now)
        else:
            actions = seat.task.handle(run.event, now)
        instructions: list[events.SlotInstruction] = []
        for action in actions:
            instructions += self._act(seat, action, now.mono_ms)
        self.working = None
        self._activity += run.counts
        instructions += self._mode.ran(seat, run.event, now)
        return instructions

    def _act(self, seat: Seat, action: task_actions.Action, now_ms: int) -> Sequence[events.SlotInstruction]:
        match action:
            case task_actions.Send(channel, element):
                output = seat.outputs[channel]
                if isinstance(element, Batch):
                    seat.records_out += element.payload.num_rows
                if isinstance(output, RemoteOutput):
                    return self._outgoing.send(output, element, now_ms)
                output.send(element, now_ms)
            case task_actions.WakeAt(mono_ms):
                seat.wake_at(mono_ms)
            case task_actions.HoldInput(mono_ms):
                seat.hold_until(mono_ms)
            case task_actions.TaskEnded():
                self._open -= not seat.ended
                seat.ended = True
            case _:
                return self._mode.act(seat, action, now_ms)
        return ()

    def _give_back_due(self, now_ms: int) -> list[events.Grant]:
        return self._credit.send_all() if self._is_credit_due(now_ms) else []

    def _is_credit_due(self, now_ms: int) -> bool:
        since = self._credit.since_ms
        return since is not None and (since + MAX_WAIT_MS <= now_ms or not self._open)

    # ------------------------------------------------------------ what is known of it

    @property
    def can_run(self) -> bool:
        for seat in self._seats:
            if seat.inbox.turns and seat.can_run:
                return True
        return False

    def is_due(self, now_ms: int) -> bool:
        for seat in self._seats:
            if seat.wake_ms is not None and seat.wake_ms <= now_ms:
                return True
        return bool(self._outgoing.aging) or self._is_credit_due(now_ms) or self._mode.is_due(now_ms)

    @property
    def due_ms(self) -> int | None:
        """When `TimePassed` or `Rest` has something to do (monotone, ms); None: not until something happens."""
        found, since = self._mode.due_ms, self._credit.since_ms
        if since is not None and (found is None or since + MAX_WAIT_MS < found):
            found = since + MAX_WAIT_MS
        for seat in self._seats:
            if seat.wake_ms is not None and (found is None or seat.wake_ms < found):
                found = seat.wake_ms
        return found

    def may_read(self, key: TaskKey) -> bool:
        seat = self._seating.seats[key]
        return seat.reading and seat.has_room and self._mode.may_read(seat)

    def reads_early(self, key: TaskKey) -> bool:
        return self._mode.reads_early(self._seating.seats[key])

    def rows_wanted(self, key: TaskKey) -> int:
        return self._mode.rows_wanted(key)

    def unsent_to(self, slot: int) -> bool:
        return self._outgoing.unsent_to(slot)

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
        return not self._open and self.is_quiet and self._credit.since_ms is None

    @property
    def seats(self) -> Sequence[Seat]:
        return self._seats

    def is_stalled(self, seat: Seat) -> bool:
        """Whether a task has something and no room for what comes of it, or a source may not read; for any thread."""
        return not self.may_read(seat.key) if seat.reading else bool(seat.inbox.turns) and not seat.has_room

    def counters(self) -> dict[str, int]:
        """Return totals by name; may be called by any thread.

        They are those of `counters_of`, those of the mode, ``persisted``, ``replayed``, ``failed`` and ``dropped``
        records.
        """
        none = dict.fromkeys(("persisted", "replayed", "failed"), 0)
        return none | {"dropped": self._dropped} | self._mode.counters() | counters_of(self._seats)

    def exemplars(self) -> dict[str, Exemplar]:
        """Return exemplars of durations by their counters; may be called by any thread."""
        return self._mode.exemplars() | exemplars_of(self._seats)

    def held_roots(self) -> list[U64Array]:
        """Return the roots of all that waits here, save what is being worked on; may be called by any thread.

        What `handle` has returned waits here until it is carried out.
        """
        held: list[U64Array] = []
        for seat in self._seats:
            held += seat.inbox.roots()
            held.append(seat.task.held_roots())
        return [*held, *self._outgoing.roots(), *self._mode.held_roots(), *self._coming]

    def validate(self) -> None:
        for seat in self._seats:
            seat.validate()
        for output in self._seating.remote.values():
            output.validate()
        self._mode.validate()
