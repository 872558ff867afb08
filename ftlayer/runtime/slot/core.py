"""The rules of a slot: which task runs next, where its elements go, and what waits for what.

No I/O, no threads and no clock: events come in as calls, what is to be done goes out through `Links` and
`VertexCalls`. A task is run while all its outputs have room; the loop goes on with the others. So no slot ever
waits for another one inside a send, which two slots could do for each other without end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import cast

import pyarrow as pa

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.pieces import Piece
from ftlayer.checkpoint.snapshots import Restore
from ftlayer.clock import Now
from ftlayer.config import TopologyOptions
from ftlayer.errors import CodecError
from ftlayer.handler.lineage import Lineage
from ftlayer.records.ids import U64Array
from ftlayer.runtime.acker_mode.slot.acks import AckBuffer
from ftlayer.runtime.barrier_mode.slot.barriers import Barriers
from ftlayer.runtime.barrier_mode.slot.restoring import put_in_flight
from ftlayer.runtime.protocol.channel_frames import ElementCodec
from ftlayer.runtime.protocol.credit_frames import decode_grants, is_limits
from ftlayer.runtime.protocol.elements import Batch, Element
from ftlayer.runtime.slot.crediting import Crediting
from ftlayer.runtime.slot.debloating import Debloating
from ftlayer.runtime.slot.loop_watch import watch_loops
from ftlayer.runtime.slot.outgoing import Outgoing
from ftlayer.runtime.slot.outputs import RemoteOutput
from ftlayer.runtime.slot.ports import CheckpointParts, Links, VertexCalls, Working
from ftlayer.runtime.slot.seat import AnyTask, Seat, counters_of, seat_tasks
from ftlayer.runtime.slot.turns import Turns
from ftlayer.runtime.task.actions import (
    Acknowledge,
    Action,
    AskReplays,
    DataEnded,
    FailRoots,
    HoldInput,
    PersistRoots,
    ReplaysOut,
    Send,
    TaskEnded,
    WakeAt,
)
from ftlayer.runtime.task.contract import InputTask, ReplayTask, SourceRows, SourceTask, TaskKey
from ftlayer.topology.job_graph import Channel, JobGraph
from ftlayer.vertex.calls import Records

PERSISTS_IN_FLIGHT = 16
"""A source reads on while this many of its batches, at most, wait for the vertex."""


class SlotCore:
    """The tasks of one slot.

    Attributes:
        activity: grows with everything that happens (see `Heartbeat`).
        working: what runs now; None between two tasks. Any thread may read it.
        data_ended: iterations that have come to their end, for the coordinator to be told, and removed.
    """

    def __init__(
        self,
        graph: JobGraph,
        slot: int,
        tasks: dict[TaskKey, AnyTask],
        options: TopologyOptions,
        links: Links,
        vertex: VertexCalls | None,
        checkpoints: CheckpointParts | None = None,
    ) -> None:
        """``tasks`` are all of `JobGraph.subtasks_in` the slot.

        ``vertex`` is None where nothing is tracked, ``checkpoints`` outside barrier mode.
        """
        self._graph = graph
        self._options = options
        self._codec = ElementCodec(graph.edges)
        self._links = links
        self._vertex = vertex
        self._seating = seat_tasks(graph, slot, tasks, options, self._codec)
        self._seats = list(self._seating.seats.values())
        watch_loops(graph, self._seating)
        self._turns = Turns(self._seats)
        self._outgoing = Outgoing(self._seating.remote, links, options.batch_age_ms)
        self._acks = AckBuffer()
        self._credit = Crediting(links, self._seating.senders, options.channel_bytes)
        self._totals = dict.fromkeys(("persisted", "replayed", "failed", "dropped"), 0)
        self._paused = False
        self._final: int | None = None  # the checkpoint that the job ends with
        self._away: set[int] = set()
        self._reports: list[ReplaysOut] = []
        self.activity = 0
        self.data_ended: list[DataEnded] = []
        self.working: Working | None = None
        self._barriers: Barriers | None = None
        self._debloating: Debloating | None = None
        if checkpoints is not None:
            self._barriers = Barriers(
                graph,
                self._seating,
                self._codec,
                checkpoints,
                self._outgoing,
                self._credit,
                self._run,
            )
            config = checkpoints.config
            if config.debloating:
                self._debloating = Debloating(self._seating, self._credit, config.debloat_target_ms, options)

    # ------------------------------------------------------------ events

    def start(self, now: Now) -> None:
        """Start all tasks."""
        for seat in self._seats:
            self._run(seat, lambda seat=seat: seat.task.start(now), now)  # type: ignore[misc]

    def frame(self, slot: int, data: pa.Buffer) -> None:
        """An element has come from a slot; `CodecError` if it cannot be one."""
        channel, element = self._codec.decode(data)
        seat = self._seating.receivers.get(channel)
        if seat is None or self._seating.senders[channel] != slot:
            raise CodecError(f"slot {slot} sent an element of {channel}, which does not lead from it to here")
        self.activity += 1
        seat.inbox.put(channel, element, data.size)
        if isinstance(element, Barrier):
            self._checkpoints().arrived(channel, element, data.size)

    def granted(self, data: bytes) -> None:
        """Credit has come back, or receivers say how much they want in flight."""
        tell = self._outgoing.limited if is_limits(data) else self._outgoing.granted
        for channel, size in decode_grants(data):
            tell(channel, size)

    def accepted(self, key: TaskKey, ticket: int, now: Now) -> None:
        """What a task asked to be persisted is."""
        seat = self._seating.seats[key]
        self._totals["persisted"] += len(seat.unaccepted[ticket])
        self._run(seat, lambda: seat.task.accepted(ticket, now), now)
        # Behind the sends, which hold the roots from now on.
        seat.unaccepted = {number: roots for number, roots in seat.unaccepted.items() if number != ticket}

    def replays(self, key: TaskKey, records: tuple[Records, ...], now: Now, held: bool = False) -> None:
        """What a task asked the vertex for; nothing to do is no activity."""
        seat = self._seating.seats[key]
        task = cast(ReplayTask, seat.task)
        rows = sum(batch.payload.num_rows for batch in records)
        self._totals["replayed"] += rows
        seat.records_in += rows
        roots = tuple(batch.roots for batch in records)
        self._run(seat, lambda: task.replays(records, now, held=held), now, roots, counts=bool(rows))

    def rows(self, key: TaskKey, rows: SourceRows, now: Now) -> tuple[int, ...]:
        """A source has read rows; returns the tickets of what is persisted for them."""
        seat = self._seating.seats[key]
        task = cast(SourceTask, seat.task)
        seat.records_in += rows.payload.num_rows
        before = seat.unaccepted
        self._run(seat, lambda: task.rows(rows, now), now)
        if self._debloating is not None:
            self._debloating.read(seat, rows.payload.num_rows, now.mono_ms)
        return tuple(ticket for ticket in seat.unaccepted if ticket not in before)

    def source_ended(self, key: TaskKey, now: Now) -> None:
        """A source has no more rows."""
        seat = self._seating.seats[key]
        task = cast(SourceTask, seat.task)
        seat.reading = False
        self._run(seat, lambda: task.end(now), now)

    def poll_replays(self, now: Now) -> None:
        """Replays may be due."""
        for seat in self._replaying():
            task = cast(ReplayTask, seat.task)
            self._run(seat, lambda task=task: task.poll(now), now, counts=False)  # type: ignore[misc]

    def pause(self) -> None:
        """Let nothing new in (see `PauseIntake`)."""
        self._paused = True
        for seat in self._replaying():
            cast(ReplayTask, seat.task).pause()

    def resume(self, now: Now) -> None:
        """Go on as usual."""
        self._paused = False
        for seat in self._replaying():
            task = cast(ReplayTask, seat.task)
            self._run(seat, lambda task=task: task.resume(now), now, counts=False)  # type: ignore[misc]

    def allow_replays(self, uid: str, group: int, limit: int, now: Now) -> None:
        """Let one replay input take so many while the others take none."""
        for seat in self._replaying():
            if seat.uid == uid:
                task = cast(ReplayTask, seat.task)
                self._run(seat, lambda task=task: task.allow(group, limit, now), now)  # type: ignore[misc]

    def let_out(self, uid: str, group: int, now: Now) -> None:
        """Let what an input has kept go out."""
        for seat in self._replaying():
            if seat.uid == uid:
                task = cast(ReplayTask, seat.task)
                self._run(seat, lambda task=task: task.let_out(group, now), now)  # type: ignore[misc]

    def take_reports(self) -> list[ReplaysOut]:
        """Return what is to be told the coordinator since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def end_replays(self, now: Now) -> None:
        """Nothing is pending any more."""
        for seat in self._replaying():
            task = cast(ReplayTask, seat.task)
            self._run(seat, lambda task=task: task.end(now), now)  # type: ignore[misc]

    # ------------------------------------------------------------ checkpoints

    def restore_in_flight(self, restore: Restore, read: Callable[[Piece], bytes]) -> None:
        """Put records that were in flight where they were; before `start`, and before anything comes.

        ``read`` returns the bytes of a piece. Raises what it raises, and

            IncompatibleCheckpointError: the graph is another one, where these records are concerned.
            CheckpointDamagedError, CodecError: the bytes are not what was written.
        """
        put_in_flight(self._graph, self._seating, self._codec, restore, read)

    def trigger(self, barrier: Barrier, now: Now) -> None:
        """Let the sources take their snapshots, and send ``barrier``."""
        self.activity += 1
        if barrier.final:
            # What came behind it would be in no checkpoint.
            self._final = barrier.checkpoint
        self._checkpoints().trigger(barrier, now)

    def checkpoint_completed(self, checkpoint: int) -> None:
        """See `ftlayer.runtime.protocol.messages.CheckpointCompleted`."""
        self._checkpoints().completed(checkpoint)

    def checkpoint_aborted(self, checkpoint: int, now: Now) -> None:
        """See `ftlayer.runtime.protocol.messages.CheckpointAborted`."""
        self.activity += 1
        if checkpoint == self._final:
            self._final = None
        self._checkpoints().aborted(checkpoint, now)

    def end_tasks(self, now: Now) -> None:
        """See `ftlayer.runtime.protocol.messages.EndTasks`."""
        self._checkpoints().end_sources(now)

    # ------------------------------------------------------------ peers

    def peer_up(self, slot: int) -> None:
        """A slot can be sent to."""
        self._outgoing.peer_up(slot)

    def peer_lost(self, slot: int) -> None:
        """A slot cannot be reached: hold what is for it."""
        self._outgoing.peer_lost(slot)

    def drop_peer(self, slot: int, now: Now) -> None:
        """A slot is gone, and another instance will take its place: forget what was for it and came of it.

        Until `peers_back` no replays are asked for: they would have to wait for it, or end the next process if it was
        one of them that has ended this one.
        """
        self.activity += 1
        self._away.add(slot)
        for replaying in self._replaying():
            cast(ReplayTask, replaying.task).hold()
        self._totals["dropped"] += self._outgoing.drop_peer(slot)
        for channel, sender in self._seating.senders.items():
            if sender == slot:
                seat = self._seating.receivers[channel]
                self._totals["dropped"] += seat.inbox.drop(channel)
                self._credit.forget(channel)
                task = cast(InputTask, seat.task)
                self._run(seat, lambda task=task, channel=channel: task.reset(channel, now), now)  # type: ignore[misc]

    def peers_back(self, slots: Iterable[int], now: Now) -> None:
        """These slots have new instances."""
        self._away.difference_update(slots)
        if not self._away:
            for seat in self._replaying():
                task = cast(ReplayTask, seat.task)
                self._run(seat, lambda task=task: task.go_on(now), now, counts=False)  # type: ignore[misc]

    def unsent_to(self, slot: int) -> bool:
        """Whether anything waits for, or is on its way to, a slot."""
        return self._outgoing.unsent_to(slot)

    # ------------------------------------------------------------ running

    def run_next(self, now: Now) -> bool:
        """Run the next task that has something to do and room for what comes of it; whether there was one."""
        self._outgoing.flush_aged(now.mono_ms)
        self._send_due(now.mono_ms)
        if self._barriers is not None:
            self._barriers.settle(now)
        seat = self._turns.next()
        if seat is None:
            return False
        self._run_input(seat, now)
        return True

    def on_time(self, now: Now) -> None:
        """Call the tasks whose time has come, and let replays be asked for where there is room again.

        In a checkpointed graph, barriers that have come ahead of records are looked at too.
        """
        if self._barriers is not None:
            self._barriers.on_time(now)
        if self._debloating is not None:
            self._debloating.look(now.mono_ms)
        for seat in self._seats:
            if seat.wake_ms is not None and seat.wake_ms <= now.mono_ms:
                seat.wake_ms = None
                seat.is_held = False
                self._run(seat, lambda seat=seat: seat.task.on_time(now), now, counts=False)  # type: ignore[misc]
            if seat.asked is not None and seat.has_room and not self._away and self._vertex is not None:
                ask, seat.asked = seat.asked, None
                self._vertex.take_replays(seat.key, ask)

    @property
    def due_ms(self) -> int | None:
        """When `on_time` or `idle` has something to do (monotone, ms); None: not until something happens."""
        dues = [seat.wake_ms for seat in self._seats]
        dues += (self._acks.due_ms, self._credit.due_ms)
        if self._barriers is not None:
            dues.append(self._barriers.due_ms)
        return min((due for due in dues if due is not None), default=None)

    def idle(self, now_ms: int) -> None:
        """There is nothing else to do: let no record wait for others, and what is due go.

        XORs and credit are due a little later: at a low rate they would double the number of calls.
        """
        self._outgoing.flush()
        self._send_due(now_ms)

    def may_read(self, key: TaskKey) -> bool:
        """Whether a source should read on."""
        seat = self._seating.seats[key]
        if (
            self._paused
            or self._final is not None
            or not seat.reading
            or not seat.has_room
            or len(seat.unaccepted) >= PERSISTS_IN_FLIGHT
        ):
            return False
        return self._vertex is None or self._vertex.may_persist

    def rows_wanted(self, key: TaskKey) -> int:
        """Return how many rows a source should read at a time."""
        return self._options.batch_rows if self._debloating is None else self._debloating.rows_wanted(key)

    # ------------------------------------------------------------ what is known of it

    @property
    def is_quiet(self) -> bool:
        """Whether all sources have ended and nothing waits, here, for the vertex, or for another slot.

        While intake is paused sources need not have ended, but no replays may be asked for.
        """
        if self._paused:
            entering = any(cast(ReplayTask, seat.task).is_asking for seat in self._replaying())
        else:
            entering = any(seat.reading for seat in self._seats)
        return (
            not entering
            and not any(not seat.inbox.is_empty or seat.unaccepted for seat in self._seats)
            and self._outgoing.is_empty
            and not self._acks
            and (self._vertex is None or self._vertex.is_quiet)
        )

    @property
    def has_ended(self) -> bool:
        """Whether all tasks have ended and everything they sent was taken and told."""
        return self._all_ended() and self.is_quiet and self._credit.due_ms is None

    def counters(self) -> dict[str, int]:
        """Return totals by name; may be called by any thread.

        They are those of `ftlayer.runtime.slot.seat.counters_of`, ``persisted``, ``replayed``, ``failed`` and
        ``dropped`` records, and with checkpoints those of `Barriers.counters`.
        """
        counters = dict(self._totals)
        if self._barriers is not None:
            counters |= self._barriers.counters()
        return counters | counters_of(self._seats)

    def held_roots(self) -> list[U64Array]:
        """Return the roots of all that waits here, save what is being worked on; may be called by any thread."""
        held: list[U64Array] = []
        for seat in self._seats:
            held += seat.inbox.roots()
            held += seat.unaccepted.values()
            held.append(seat.task.held_roots())
        for output in self._seating.remote.values():
            held += output.roots()
        # A function that takes long keeps the loop from sending them.
        held += self._acks.roots()
        return held

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
            if self._debloating is not None:
                self._debloating.taken(seat, taken.credit or taken.size, now.mono_ms)
        elif self._barriers is not None and self._barriers.took(seat, channel, element, now):
            return
        task = cast(InputTask, seat.task)
        roots = () if lineage is None else (lineage.roots,)
        self._run(seat, lambda: task.input(channel, element, now), now, roots, lineage=lineage)

    def _run(
        self,
        seat: Seat,
        work: Callable[[], list[Action]],
        now: Now,
        roots: tuple[U64Array, ...] = (),
        *,
        lineage: Lineage | None = None,
        counts: bool = True,
    ) -> None:
        self.working = Working(seat.uid, seat.task, roots, now.mono_ms, lineage)
        for action in work():
            self._do(seat, action, now.mono_ms)
        self.working = None
        if counts:
            self.activity += 1

    def _do(self, seat: Seat, action: Action, now_ms: int) -> None:
        match action:
            case Send(channel, element):
                self._send(seat, channel, element, now_ms)
            case Acknowledge():
                self._acks.add(action, now_ms)
                if self._acks.is_due(now_ms):
                    self._send_acks()
            case PersistRoots(ticket, call):
                self.activity += 1
                seat.unaccepted = {**seat.unaccepted, ticket: call.roots}
                self._tracking().persist(seat.key, ticket, call)
            case FailRoots(failures):
                self._totals["failed"] += len(failures)
                self._tracking().fail(failures)
            case AskReplays():
                if seat.has_room:
                    self._tracking().take_replays(seat.key, action)
                else:
                    seat.asked = action
            case ReplaysOut():
                self._reports.append(action)
            case WakeAt(mono_ms):
                seat.wake_at(mono_ms)
            case HoldInput(mono_ms):
                seat.hold_until(mono_ms)
            case DataEnded():
                self.data_ended.append(action)
            case TaskEnded():
                seat.ended = True

    def _send(self, seat: Seat, channel: Channel, element: Element, now_ms: int) -> None:
        output = seat.outputs[channel]
        if isinstance(element, Batch):
            seat.records_out += element.num_rows
        if isinstance(output, RemoteOutput):
            self._outgoing.send(output, element, now_ms)
        else:
            output.send(element, now_ms)

    def _send_due(self, now_ms: int) -> None:
        if self._acks.is_due(now_ms):
            self._send_acks()
        due = self._credit.due_ms
        if due is not None and (due <= now_ms or self._all_ended()):
            self._credit.send_all()

    def _send_acks(self) -> None:
        self._tracking().xor(self._acks.take())

    def _all_ended(self) -> bool:
        return all(seat.ended for seat in self._seats)

    def _checkpoints(self) -> Barriers:
        if self._barriers is None:
            raise CodecError("a barrier, or a message on checkpoints, came to a graph without checkpoints")
        return self._barriers

    def _tracking(self) -> VertexCalls:
        assert self._vertex is not None, "a task of an untracked graph talked to the vertex"
        return self._vertex

    def _replaying(self) -> list[Seat]:
        return [seat for seat in self._seats if seat.is_replay and not seat.ended]
