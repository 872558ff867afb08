"""A slot from its start to its end: what the function of its Spark job calls."""

from __future__ import annotations

import copy
import gc
import logging
import os
import pickle
import socket
import sys
import threading
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic_ns, thread_time_ns, time_ns
from typing import NoReturn, assert_never

from ftlayer.common.clock import Now, system_now
from ftlayer.common.printable import MAX_TEXT, described, text_of
from ftlayer.common.rules.restart import is_programs, lasting
from ftlayer.errors import (
    CodecError,
    FTLayerError,
    JobError,
    PeerLostError,
    PeerRefusedError,
    PeerUnreachableError,
    ProtocolError,
    SourceError,
)
from ftlayer.functions.failures import raise_signalled, traceback_of
from ftlayer.records.ids import U64Array
from ftlayer.runtime.connectors.lane import BatchLimits
from ftlayer.runtime.connectors.readers import SourceReader, open_reader
from ftlayer.runtime.pandas_later import leave_pandas_to_others
from ftlayer.runtime.protocol import messages
from ftlayer.runtime.protocol.channel_frames import PROTOCOL, decode_to_slot, encode, is_barrier, roots_in
from ftlayer.runtime.slot.links import ChannelServer, Roster, SlotLinks, receivers_of
from ftlayer.runtime.slot.pulse import Pulse
from ftlayer.runtime.slot.rules import events
from ftlayer.runtime.slot.rules.core import SlotCore, SlotEvent
from ftlayer.runtime.slot.rules.events import Mailbox
from ftlayer.runtime.slot.rules.mode import Order, RunTracer, SlotContext
from ftlayer.runtime.slot.sources import Reopening, Signal, Sources
from ftlayer.runtime.task.build import build_task
from ftlayer.runtime.task.chain_plan import TaskMode
from ftlayer.runtime.task.contract import UNKNOWN_RECORD, RecordNotes, Task, TaskKey
from ftlayer.topology.job_graph import JobGraph, placed
from ftlayer.topology.operators import Source
from ftlayer.transport.address import Address, parse_address
from ftlayer.transport.flight_connection import Endpoint, Exchange, FlightConnection, poll_in_place
from ftlayer.transport.frames import pack
from ftlayer.transport.sockets import SocketDirectory
from ftlayer.transport.unix_connection import remove_dead_sockets
from ftlayer.vertex.service.heap import keep_freed_memory

logger = logging.getLogger(__name__)


# How long `close` waits until what was sent is written and the coordinator has seen the end of the stream.
CLOSE_TIMEOUT_S = 5.0


class ControlClient:
    """Connects one instance of a slot with the coordinator.

    There is one stream and no second one: when it breaks, the instance is lost to the coordinator, which never
    talks to it again, and it has to end.
    """

    def __init__(self, endpoint: Endpoint, *, job: str, slot: int, instance: str) -> None:
        self._endpoint = endpoint
        hello = {"protocol": PROTOCOL, "job": job, "slot": slot, "instance": instance}
        connection = FlightConnection(endpoint, pack(hello, "descriptor"))
        self._stream: Exchange[messages.FromSlot] = Exchange("ftlayer-control", connection, _encoded)

    def start(self, on_message: Callable[[messages.ToSlot], None], on_lost: Callable[[str], None]) -> None:
        """Connect, and begin to receive.

        Both functions are called by a thread of this client: ``on_message`` with each message in order,
        ``on_lost`` at most once, with a reason, when the coordinator cannot be reached, the stream breaks, or the
        coordinator ends it or sends what cannot be read; never after `close`. Returns at once.
        """
        self._stream.start(
            lambda frame: on_message(_decoded(frame)), lambda error: on_lost(self._reason(error))
        )

    def send(self, message: messages.FromSlot) -> None:
        """Send ``message``; never waits and never raises: a stream that is broken is reported by ``on_lost``."""
        self._stream.send(message)

    def close(self) -> None:
        """Write what was sent, end the stream in order and give it up; may be called from any thread.

        Waits `CLOSE_TIMEOUT_S` at the longest for a coordinator that does not read.
        """
        self._stream.close(CLOSE_TIMEOUT_S)

    def _reason(self, error: BaseException | None) -> str:
        if error is None:
            return "the coordinator ended the control stream"
        if isinstance(error, FTLayerError):
            return str(error)
        return f"the control stream to {self._endpoint.address} broke: {error}"


def _encoded(message: messages.FromSlot) -> bytes:
    try:
        return encode(message)
    except FTLayerError as error:
        raise ProtocolError(f"a message to the coordinator cannot be written: {error}") from error


def _decoded(frame: bytes) -> messages.ToSlot:
    try:
        return decode_to_slot(frame)
    except FTLayerError as error:
        raise ProtocolError(f"the coordinator sent what cannot be read: {error}") from error


NO_SOCKET = "channels to slots of this machine go over the network, too"


class ListeningPlaces:
    """The places of one instance, until `close`.

    Attributes:
        address: of its Flight server.
        socket: path of its Unix socket, "" where none can be made.
    """

    def __init__(self, order: Order, instance: str) -> None:
        """Use the job's directory of sockets, or, where there is none, make one of this instance's own.

        What killed processes have left in either is removed.
        """
        self._own: SocketDirectory | None = None
        name = f"{order.slot}-{instance[:12]}"
        if order.sockets:
            remove_dead_sockets(Path(order.sockets), f"{order.slot}-*")
            self.address = Address(path=f"{order.sockets}/{name}")
            self.socket = f"{order.sockets}/{name}-unix"
        else:
            self._own = SocketDirectory.make(NO_SOCKET)
            self.address = Address(order.listen_on or _address_towards(order.coordinator.address))
            self.socket = "" if self._own is None else f"{self._own.path}/{name}"

    def close(self) -> None:
        if self._own is not None:
            self._own.remove()


def _address_towards(text: str) -> str:
    """Return the address of this machine by which it reaches another; sends nothing."""
    address = parse_address(text, "coordinator")
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address.host, address.port))
        own: str = probe.getsockname()[0]
        return own


MAX_MAIL = 256
"""Events that are taken in a row before a task is run."""

UNREACHED_MS = 5_000
"""A peer that has never answered is waited for this long: if its process was just lost, the
coordinator hears of that at once."""


@dataclass(frozen=True)
class _Lost:
    """A peer that cannot be reached; by ``deadline_ms`` the coordinator has to have said what becomes of it."""

    deadline_ms: int
    reason: str
    reached: bool


class SlotLoop:
    """See the module. `run` returns when the slot has ended, and raises what it fails with.

    Attributes:
        reset: what the coordinator said, if the slot has ended to begin again from a checkpoint; None otherwise.
    """

    def __init__(
        self,
        core: SlotCore,
        sources: Sources,
        mailbox: Mailbox[events.Event],
        links: SlotLinks,
        pulse: Pulse,
        send: Callable[[messages.FromSlot], None],
        peer_timeout_ms: int,
        carry_out: Callable[[events.ModeInstruction], None],
        tracer: RunTracer | None = None,
        notes: RecordNotes | None = None,
    ) -> None:
        """``send`` reaches the coordinator, which has ``peer_timeout_ms`` to replace a peer that is lost.

        ``carry_out`` does what the mode's rules want done (see `SlotModeShell.carry_out`); ``tracer`` is told of all
        runs, None where nothing is traced; ``notes`` of the chain that runs while a record is looked for.
        """
        self._core = core
        self._sources = sources
        self._mailbox = mailbox
        self._links = links
        self._pulse = pulse
        self._busy = pulse.busy
        self._send = send
        self._peer_timeout_ms = peer_timeout_ms
        self._carry_out = carry_out
        self._tracer = tracer
        self._notes = notes
        self._lost: dict[int, _Lost] = {}
        self._over = False
        self.reset: messages.ResetTasks | None = None

    def run(self, deploy: messages.Deploy) -> None:
        """Run the tasks until all have ended, the job is cancelled, or the coordinator is lost.

        Raises:
            PeerLostError: a peer could not be reached, and was not replaced.
            FTLayerError: of a source, of the vertex, of what another slot has sent.
            Exception: whatever a task raises.
        """
        self.begin(deploy)
        while self.turn():
            pass

    def begin(self, deploy: messages.Deploy) -> None:
        self._links.deploy(deploy)
        for slot in self._links.reached:
            self._take(events.PeerReached(slot))
        if deploy.paused:
            self._take(messages.PauseIntake())
        else:
            self._notes = None
        self._take(events.SlotStarted())
        self._sources.start()
        self._send(messages.TasksStarted())

    def turn(self) -> bool:
        """Take the mail and run one task, or wait if there is nothing to do; False when the slot has ended."""
        for _ in range(min(MAX_MAIL, len(self._mailbox.items))):
            event = self._mailbox.take()
            if event is None or self._over:
                break
            self._handle(event)
        if self._over:
            return False
        now, core, mail = system_now(), self._core, self._mailbox.items
        if core.is_due(now.mono_ms):
            self._do(events.TimePassed(thread_time_ns() // 1_000_000), now)
        worked = core.can_run
        if worked:
            self._do(events.TURN, now)
        idle = not worked and not mail
        if self._sources.read(now, self._do, idle=idle) or not idle or mail:
            self._pulse.quiet = False
        else:
            return self._rest(now)
        return True

    # ------------------------------------------------------------ doing

    def _take(self, event: SlotEvent) -> None:
        self._do(event, system_now())

    def _do(self, event: SlotEvent, now: Now) -> None:
        instructions = self._core.handle(event, now)
        if not instructions:
            return
        todo = deque(instructions)
        while todo:
            instruction = todo.popleft()
            match instruction:
                case events.RunTask(key):
                    # All that was decided before has left.
                    self._busy.began(key, began_ns := monotonic_ns())
                    if self._notes is not None:
                        self._notes.about_to(key[0], UNKNOWN_RECORD)
                    decided = self._core.handle(instruction, now)
                    todo.extendleft(reversed(decided))
                    self._busy.ended(ended_ns := monotonic_ns())
                    if self._notes is not None:
                        self._notes.over()
                    if self._tracer is not None:
                        end_ns = time_ns()
                        self._tracer.ran(instruction, decided, end_ns - (ended_ns - began_ns), end_ns)
                case events.Transmit(slot, frame):
                    self._links.transmit(slot, frame)
                case events.Grant(slot, grants):
                    self._links.grant(slot, grants)
                case events.TellCoordinator(message):
                    self._send(message)
                case events.RowsDone(key, number):
                    self._sources.done(key, number)
                case events.ModeInstruction():
                    self._carry_out(instruction)
                case _:
                    assert_never(instruction)
        self._core.carried_out()

    # ------------------------------------------------------------ waiting

    def _rest(self, now: Now) -> bool:
        """Nothing can be run: let nothing wait for more, and wait for mail or for time; False: the slot has ended."""
        self._do(events.REST, now)
        quiet = self._core.is_quiet
        if quiet and self._core.has_ended:
            self._send(messages.SlotEnded(self._core.counters()))
            return False
        if self._lost:
            self._look_for_peers(now.mono_ms)
        if quiet and not self._pulse.quiet:
            self._pulse.quiet = True
            self._send(self._pulse.heartbeat())
        self._pulse.quiet = quiet
        dues = [lost.deadline_ms for lost in self._lost.values()] if self._lost else []
        for due in (self._core.due_ms, self._sources.due_ms):
            if due is not None:
                dues.append(due)
        self._mailbox.wait(max(0, min(dues) - system_now().mono_ms) / 1_000 if dues else None)
        return True

    def _look_for_peers(self, now_ms: int) -> None:
        for slot, lost in list(self._lost.items()):
            if lost.deadline_ms > now_ms:
                continue
            if self._core.unsent_to(slot):
                where = f"slot {slot} at {self._links.address_of(slot)} cannot be reached ({lost.reason})"
                if not lost.reached:
                    raise PeerUnreachableError(
                        f"{where}, though it reaches the driver: each slot has to be reached by the others at the "
                        "address by which its machine reaches the driver, on any port"
                    )
                raise PeerLostError(f"{where}, and was not replaced within {self._peer_timeout_ms} ms")
            self._lost[slot] = _Lost(now_ms + self._peer_timeout_ms, lost.reason, lost.reached)

    # ------------------------------------------------------------ mail

    def _handle(self, event: events.Event) -> None:
        match event:
            case events.FrameCame(slot, instance) | events.CreditCame(slot, instance):
                if not self._links.counts(slot, instance):
                    return
                try:
                    self._do(event, system_now())
                except CodecError as error:
                    # A new stream would be another.
                    raise PeerRefusedError(f"what slot {slot} has sent cannot be read: {error}") from error
            case (
                events.RootsAccepted()
                | events.ReplaysCame()
                | events.RangesCame()
                | events.RangesRefused()
                | events.SnapshotOver()
            ):
                self._take(event)
            case events.Wake():
                pass  # being awake is all
            case events.PartFailed(error):
                raise error
            case events.LinkBroke(slot, instance, reason, reached):
                if self._links.counts(slot, instance):
                    logger.warning("the stream to slot %s broke: %s", slot, reason)
                    self._take(events.PeerBroke(slot))
                    patience_ms = self._peer_timeout_ms if reached else UNREACHED_MS
                    self._lost[slot] = _Lost(system_now().mono_ms + patience_ms, reason, reached)
            case events.CoordinatorSaid(message):
                self._obey(message)
            case events.CoordinatorLost(reason):
                logger.warning("this slot ends: %s", reason)
                self._over = True

    def _obey(self, message: messages.ToSlot) -> None:
        match message:
            case messages.Deploy():
                raise JobError("the coordinator deployed a slot that was deployed before")
            case messages.AskStack():
                raise JobError("the control client answers this, and the loop never gets it")
            case messages.DropPeers(epoch, slots):
                self._links.drop(epoch, slots)
                for slot in slots:
                    self._lost.pop(slot, None)
                self._take(events.PeersGone(slots))
                self._send(messages.PeersDropped(epoch))
            case messages.PeersUp():
                for slot in self._links.up(message):
                    self._lost.pop(slot, None)
                    self._take(events.PeerReached(slot))
                self._take(events.PeersReplaced(tuple(peer.slot for peer in message.peers)))
            case messages.AssignSplits():
                self._sources.assign(message)
            case messages.StopSources():
                self._sources.finish()
            case messages.ResetTasks():
                self.reset, self._over = message, True
                # What this instance has counted; the next one begins at 0.
                self._send(self._pulse.heartbeat())
            case messages.Probe(number):
                self._pulse.quiet = self._core.is_quiet and not self._mailbox.items
                self._send(self._pulse.heartbeat(number))
            case messages.Cancel(reason):
                logger.info("this slot is cancelled: %s", reason)
                self._over = True
                self._send(messages.SlotEnded(self._core.counters()))
            case _:
                self._take(message)


def bears_barrier(event: events.Event) -> bool:
    if isinstance(event, events.FrameCame):
        return is_barrier(event.data)
    return isinstance(event, events.CoordinatorSaid) and isinstance(event.message, messages.TriggerCheckpoint)


def roots_in_mail(mailbox: Mailbox[events.Event]) -> Iterator[U64Array]:
    """Yield the roots of what the loop has not looked at yet; may be called by any thread."""
    for event in mailbox.waiting():
        if isinstance(event, events.FrameCame):
            yield roots_in(event.data)
        elif isinstance(event, events.ReplaysCame):
            for records in event.records:
                yield records.roots


MAX_CHARS = 60_000


def stacks(first: int) -> str:
    """Return the stack of each thread of this process, that of the thread with the id ``first`` in front.

    As Python's tracebacks are written: the line that runs now comes last.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = dict(sys._current_frames())
    own = threading.get_ident()
    order = sorted(frames, key=lambda ident: (ident != first, names.get(ident, ""), ident))
    parts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frames[ident]))}"
        for ident in order
        if ident != own
    ]
    return "\n".join(parts)[:MAX_CHARS]


HARD_EXIT_S = 5.0
"""A slot that has lost its coordinator and does not come out of a user's function by then ends its process."""

ANY_CHECKPOINT = 2**63 - 1

YOUNG_OBJECTS = 50_000
"""Records live for a batch, and so does what they replace in state, where that may be undone. Most of what is looked at
earlier is still in use: at 10,000 that took 100 ns a record of a chain with a policy."""

SWITCH_S = 0.001
"""How long a thread that has a message waits for one that computes: Python's default is the age of a batch."""

_exit_without_a_word = os._exit
"""As it is now: a mode may note who calls ``os._exit`` while its tasks run, and that is about users' functions."""


def run_slot(order: Order) -> None:
    """Run the tasks of a slot until they end, the job is cancelled, or the coordinator is lost.

    What the slot fails with goes to the coordinator (`SlotFailed`) and is not raised: the coordinator decides
    whether the slot is started again. In barrier mode it begins again in this very process, as an instance of
    another name: when it is told to (`ResetTasks`), and when a task of it has failed. Must not be called in a
    process forked from one that has used gRPC.
    """
    leave_pandas_to_others()
    poll_in_place()
    if not order.mode.restarts_in_place:
        _run_instance(_Slot(order))
        return
    from pyspark import cloudpickle

    # Each instance has functions of its own: what one remembers beside its state is in no checkpoint.
    plan: bytes = cloudpickle.dumps(order)  # type: ignore[no-untyped-call]
    while _run_instance(_Slot(pickle.loads(plan))):
        # What the last instance held is gone before the next one restores as much again.
        gc.collect()


def _run_instance(slot: _Slot) -> bool:
    try:
        return slot.run()
    except BaseException as error:  # noqa: BLE001 - told to the coordinator, who judges it
        raise_signalled(error)
        slot.fail(error)
        return slot.outlives(error)
    finally:
        slot.close()


class _Slot:
    def __init__(self, order: Order) -> None:
        self._order = order
        self._instance = uuid.uuid4().hex
        self._mailbox: Mailbox[events.Event] = Mailbox(bears_barrier)
        self._roster = Roster(order.job, self._instance)
        self._control = ControlClient(
            order.coordinator, job=order.job, slot=order.slot, instance=self._instance
        )
        self._mode = order.mode.instance(
            SlotContext(
                order, self._instance, self._mailbox.put, self._control.send, self._mailbox.has_urgent
            )
        )
        self._places: ListeningPlaces | None = None
        self._server: ChannelServer | None = None
        self._links: SlotLinks | None = None
        self._sources: Sources | None = None
        self._core: SlotCore | None = None
        self._pulse: Pulse | None = None
        # The checkpoint that stands, once the coordinator has said: till then any that was acknowledged may be it.
        self._stands = ANY_CHECKPOINT
        self._is_over = False
        self._closed = threading.Event()
        self._loop_thread = 0

    def run(self) -> bool:
        order = self._order
        # First: what fails from here on has to be told.
        self._loop_thread = threading.get_ident()
        self._control.start(self._heard, self._lost)
        server = self._listen()
        self._links = SlotLinks(
            order.job,
            order.slot,
            self._instance,
            order.coordinator,
            server,
            self._roster,
            receivers_of(order.graph, order.slot),
            self._mailbox.put,
        )
        self._pulse = self._make_pulse()
        address, host, deaths = str(server.address), socket.gethostname(), self._mode.deaths()
        self._control.send(
            messages.Hello(order.slot, self._instance, address, host, os.getpid(), deaths, server.socket)
        )
        self._pulse.start()
        deploy = self._wait_for_deploy()
        if deploy is None:
            return False
        loop = self._deploy(deploy, self._pulse, self._links)
        with tuned_interpreter():
            loop.run(deploy)
        if loop.reset is not None:
            self._stands = loop.reset.stands
        self._is_over = loop.reset is None
        return loop.reset is not None

    def outlives(self, error: BaseException) -> bool:
        """Whether the process is good for another instance after this error: where only a task has failed."""
        return (
            self._order.mode.restarts_in_place
            and self._core is not None
            and not isinstance(error, MemoryError | PeerUnreachableError)
        )

    def fail(self, error: BaseException) -> None:
        logger.error("slot %s fails", self._order.slot, exc_info=error)
        final = lasting(error)
        said = error if final is None else final
        reason = text_of(said) if isinstance(said, FTLayerError) else described(said)
        trace = traceback_of(error, MAX_TEXT)
        damaged = self._mode.damaged(error)
        code = "" if final is None else final.code
        blamed = self._blamed(said)
        if final is not None:
            reason = placed(reason, blamed, self._order.graph)
        counters = {} if self._core is None else self._core.counters()
        # With checkpoints the driver knows what has succeeded.
        works = not self._order.mode.restarts_in_place and messages.has_worked(counters)
        from_the_start = isinstance(error, PeerUnreachableError) or (is_programs(error) and not works)
        self._control.send(
            messages.SlotFailed(reason, blamed, trace, from_the_start, damaged, code, counters)
        )

    def _blamed(self, error: BaseException) -> str:
        """Return the uid of the operator that an error comes from, or of the chain that was at work; "" for none."""
        if isinstance(error, FTLayerError) and error.operator:
            return error.operator
        if isinstance(error, SourceError) and self._sources is not None:
            return self._sources.asked
        working = None if self._core is None else self._core.working
        return "" if working is None else working.uid

    def close(self) -> None:
        if self._sources is not None:
            self._sources.stop()
        self._mode.end(over=self._is_over, stands=self._stands)
        if self._pulse is not None:
            self._pulse.stop()
        if self._links is not None:
            self._links.close()
        self._control.close()
        if self._server is not None:
            self._server.close()
        if self._places is not None:
            self._places.close()
        self._mode.close()
        self._closed.set()

    # ------------------------------------------------------------ before it is deployed

    def _listen(self) -> ChannelServer:
        order = self._order
        certificate = None
        if order.tls_cert is not None and order.tls_key is not None:
            certificate = order.tls_cert, order.tls_key
        self._places = places = ListeningPlaces(order, self._instance)
        self._server = ChannelServer(
            places.address,
            token=order.coordinator.token,
            roster=self._roster,
            admit_timeout_s=order.options.start_timeout_ms / 1_000,
            post=self._mailbox.put,
            certificate=certificate,
            socket=places.socket,
        )
        return self._server

    def _wait_for_deploy(self) -> messages.Deploy | None:
        while True:
            event = self._mailbox.take()
            match event:
                case None:
                    self._mailbox.wait(None)
                case events.CoordinatorSaid(messages.Deploy() as deploy):
                    return deploy
                case events.CoordinatorSaid(messages.Cancel()):
                    self._control.send(messages.SlotEnded())
                    return None
                case events.CoordinatorLost(reason):
                    logger.warning("this slot ends: %s", reason)
                    return None
                case _:
                    raise JobError(f"the coordinator began with {event} where Deploy was expected")

    # ------------------------------------------------------------ deployed

    def _deploy(self, deploy: messages.Deploy, pulse: Pulse, links: SlotLinks) -> SlotLoop:
        order = self._order
        tasks = build_tasks(order.graph, order.slot, self._mode.open(deploy))
        core = SlotCore(order.graph, order.slot, tasks, order.options, self._mode.rules)
        self._core = core
        self._sources = self._open_sources(core)
        pulse.watch(core)
        return SlotLoop(
            core,
            self._sources,
            self._mailbox,
            links,
            pulse,
            self._control.send,
            order.options.heartbeat_timeout_ms,
            self._mode.carry_out,
            self._mode.tracer,
            self._mode.notes,
        )

    def _open_sources(self, core: SlotCore) -> Sources:
        order, graph = self._order, self._order.graph
        sources = Sources(core, self._control.send)
        for uid, subtask in graph.subtasks_in(order.slot):
            source = graph.vertex(uid).operators[0]
            if not isinstance(source, Source):
                continue
            limits = BatchLimits(
                core.rows_wanted((uid, subtask)),
                order.options.batch_age_ms,
                keeps_misfits=graph.tracked or graph.vertex(uid).failures is not None,
            )
            signal = Signal(lambda: self._mailbox.put(events.Wake()))
            positions = self._mode.positions((uid, subtask))
            open_from = self._opener(source, subtask, limits, signal)
            reopening = Reopening(partial(open_from, again=True), positions, copy.deepcopy(source.restart))
            sources.add((uid, subtask), open_from(positions), signal, limits, reopening)
        return sources

    def _opener(
        self, source: Source, subtask: int, limits: BatchLimits, wake: Signal
    ) -> Callable[..., SourceReader]:
        order = self._order
        parallelism = order.graph.vertex(source.uid).parallelism

        def open_from(positions: Mapping[str, bytes], *, again: bool = False) -> SourceReader:
            return open_reader(
                source,
                subtask,
                parallelism,
                positions=positions,
                limits=limits,
                key=order.key,
                wake=wake,
                job=order.graph.name,
                again=again,
            )

        return open_from

    def _make_pulse(self) -> Pulse:
        return Pulse(
            self._control.send,
            self._order.options.heartbeat_ms,
            timeout_ms=self._mode.touch_timeout_ms,
            touch=self._mode.touch,
            held=self._held_outside,
            of_sources=self._counters_of_sources,
            transports=lambda: {} if self._links is None else self._links.transports(),
            on_error=lambda error: self._mailbox.put(events.PartFailed(error)),
        )

    def _held_outside(self) -> list[U64Array]:
        assert self._links is not None
        return [*roots_in_mail(self._mailbox), *self._links.roots()]

    def _counters_of_sources(self, mono_ms: int) -> dict[str, int]:
        return {} if self._sources is None else self._sources.counters(mono_ms)

    def _heard(self, message: messages.ToSlot) -> None:
        """Called by the control client's thread, which answers by itself what must not wait for the loop."""
        if isinstance(message, messages.AskStack):
            self._control.send(messages.StackTaken(message.number, stacks(self._loop_thread)))
        else:
            self._mailbox.put(events.CoordinatorSaid(message))

    def _lost(self, reason: str) -> None:
        """Called by the control client's thread: end, whether the loop is stuck in a user's function or not."""
        self._mailbox.put(events.CoordinatorLost(reason))
        threading.Thread(target=self._exit_late, name="ftlayer-exit", daemon=True).start()

    def _exit_late(self) -> None:
        if not self._closed.wait(HARD_EXIT_S):
            _exit_now()


def build_tasks(graph: JobGraph, slot: int, mode: TaskMode) -> dict[TaskKey, Task]:
    return {(uid, subtask): build_task(graph, uid, subtask, mode) for uid, subtask in graph.subtasks_in(slot)}


@contextmanager
def tuned_interpreter() -> Iterator[None]:
    """Collect garbage more rarely, and never look at what is there already; hand over to other threads sooner.

    At Python's defaults the cyclic collector takes a third of a slot's time.
    """
    keep_freed_memory()
    thresholds, switch_s = gc.get_threshold(), sys.getswitchinterval()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *thresholds[1:])
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        # The process goes on to other Spark tasks.
        sys.setswitchinterval(switch_s)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _exit_now() -> NoReturn:
    _exit_without_a_word(75)
