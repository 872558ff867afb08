"""The mailbox loop of a slot: one thread that runs all its tasks, and waits for nothing but its mailbox."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic_ns, thread_time_ns, time_ns
from typing import assert_never

from ftlayer.clock import Now, system_now
from ftlayer.errors import CodecError, JobError, PeerLostError, PeerRefusedError, PeerUnreachableError
from ftlayer.records.ids import U64Array
from ftlayer.runtime.protocol.channel_frames import roots_in
from ftlayer.runtime.protocol.messages import (
    AskStack,
    AssignSplits,
    Cancel,
    Deploy,
    DropPeers,
    FromSlot,
    PauseIntake,
    PeersDropped,
    PeersUp,
    Probe,
    ResetTasks,
    SlotEnded,
    StopSources,
    TasksStarted,
    ToSlot,
)
from ftlayer.runtime.slot.core import SlotCore, SlotEvent
from ftlayer.runtime.slot.events import (
    CoordinatorLost,
    CoordinatorSaid,
    CreditCame,
    Event,
    FrameCame,
    LinkBroke,
    PartFailed,
    PeerBroke,
    PeerReached,
    PeersGone,
    PeersReplaced,
    RangesCame,
    RangesRefused,
    ReplaysCame,
    Rest,
    RootsAccepted,
    SlotStarted,
    SnapshotOver,
    TimePassed,
    Turn,
    Wake,
)
from ftlayer.runtime.slot.instructions import (
    Grant,
    ModeInstruction,
    RowsDone,
    RunTask,
    TellCoordinator,
    Transmit,
)
from ftlayer.runtime.slot.links import SlotLinks
from ftlayer.runtime.slot.mailbox import Mailbox
from ftlayer.runtime.slot.pulse import Pulse
from ftlayer.runtime.slot.sources import Sources
from ftlayer.runtime.slot.tracing import RunTracer

MAX_MAIL = 256
"""Events that are taken in a row before a task is run."""

UNREACHED_MS = 5_000
"""A peer that has never answered is waited for this long: if its process was just lost, the
coordinator hears of that at once."""

logger = logging.getLogger(__name__)


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
        mailbox: Mailbox[Event],
        links: SlotLinks,
        pulse: Pulse,
        send: Callable[[FromSlot], None],
        peer_timeout_ms: int,
        carry_out: Callable[[ModeInstruction], None],
        tracer: RunTracer | None = None,
    ) -> None:
        """``send`` reaches the coordinator, which has ``peer_timeout_ms`` to replace a peer that is lost.

        ``carry_out`` does what the mode's rules want done (see `SlotModeShell.carry_out`); ``tracer`` is told of all
        runs, None where nothing is traced.
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
        self._lost: dict[int, _Lost] = {}
        self._over = False
        self.reset: ResetTasks | None = None

    def run(self, deploy: Deploy) -> None:
        """Run the tasks until all have ended, the job is cancelled, or the coordinator is lost.

        Raises:
            PeerLostError: a peer could not be reached, and was not replaced.
            FTLayerError: of a source, of the vertex, of what another slot has sent.
            Exception: whatever a task raises.
        """
        self.begin(deploy)
        while self.turn():
            pass

    def begin(self, deploy: Deploy) -> None:
        """Start the tasks."""
        self._links.deploy(deploy)
        for slot in self._links.reached:
            self._take(PeerReached(slot))
        if deploy.paused:
            self._take(PauseIntake())
        self._take(SlotStarted())
        self._sources.start()
        self._send(TasksStarted())

    def turn(self) -> bool:
        """Take the mail and run one task, or wait if there is nothing to do; False when the slot has ended."""
        self._take_mail()
        if self._over:
            return False
        now = system_now()
        self._do(TimePassed(thread_time_ns() // 1_000_000), now)
        worked = self._core.can_run
        if worked:
            self._do(Turn(), now)
        idle = not worked and not len(self._mailbox)
        if self._sources.read(now, self._do, idle=idle) or not idle or len(self._mailbox):
            self._pulse.quiet = False
        elif self._core.has_ended:
            self._send(SlotEnded(self._core.counters()))
            return False
        else:
            self._rest(now)
        return True

    # ------------------------------------------------------------ doing

    def _take(self, event: SlotEvent) -> None:
        self._do(event, system_now())

    def _do(self, event: SlotEvent, now: Now) -> None:
        """Tell the rules of an event, and carry out what they want, with all that comes of it."""
        todo = deque(self._core.handle(event, now))
        while todo:
            instruction = todo.popleft()
            match instruction:
                case RunTask(key):
                    # All that was decided before has left.
                    self._busy.began(key, began_ns := monotonic_ns())
                    decided = self._core.handle(instruction, now)
                    todo.extendleft(reversed(decided))
                    self._busy.ended(ended_ns := monotonic_ns())
                    if self._tracer is not None:
                        end_ns = time_ns()
                        self._tracer.ran(instruction, decided, end_ns - (ended_ns - began_ns), end_ns)
                case Transmit(slot, frame):
                    self._links.transmit(slot, frame)
                case Grant(slot, grants):
                    self._links.grant(slot, grants)
                case TellCoordinator(message):
                    self._send(message)
                case RowsDone(key, number):
                    self._sources.done(key, number)
                case ModeInstruction():
                    self._carry_out(instruction)
                case _:
                    assert_never(instruction)
        self._core.carried_out()

    # ------------------------------------------------------------ waiting

    def _rest(self, now: Now) -> None:
        """Nothing can be run: let nothing wait for more, and wait for mail or for time."""
        self._do(Rest(), now)
        if self._core.has_ended:
            return
        self._look_for_peers(now.mono_ms)
        quiet = self._core.is_quiet
        if quiet and not self._pulse.quiet:
            self._pulse.quiet = True
            self._send(self._pulse.heartbeat())
        self._pulse.quiet = quiet
        due = self._due_ms()
        self._mailbox.wait(None if due is None else max(0, due - system_now().mono_ms) / 1_000)

    def _due_ms(self) -> int | None:
        dues = [self._core.due_ms, self._sources.due_ms, *(lost.deadline_ms for lost in self._lost.values())]
        return min((due for due in dues if due is not None), default=None)

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

    def _take_mail(self) -> None:
        for _ in range(MAX_MAIL):
            event = self._mailbox.take()
            if event is None or self._over:
                return
            self._handle(event)

    def _handle(self, event: Event) -> None:
        match event:
            case FrameCame(slot, instance) | CreditCame(slot, instance):
                if self._links.counts(slot, instance):
                    self._take_of(slot, event)
            case RootsAccepted() | ReplaysCame() | RangesCame() | RangesRefused() | SnapshotOver():
                self._take(event)
            case Wake():
                pass  # being awake is all
            case PartFailed(error):
                raise error
            case LinkBroke(slot, instance, reason, reached):
                if self._links.counts(slot, instance):
                    logger.warning("the stream to slot %s broke: %s", slot, reason)
                    self._take(PeerBroke(slot))
                    patience_ms = self._peer_timeout_ms if reached else UNREACHED_MS
                    self._lost[slot] = _Lost(system_now().mono_ms + patience_ms, reason, reached)
            case CoordinatorSaid(message):
                self._obey(message)
            case CoordinatorLost(reason):
                logger.warning("this slot ends: %s", reason)
                self._over = True

    def _take_of(self, slot: int, event: FrameCame | CreditCame) -> None:
        """Take what a peer has sent; what cannot be read is the stream's fault, and a new stream is another."""
        try:
            self._take(event)
        except CodecError as error:
            raise PeerRefusedError(f"what slot {slot} has sent cannot be read: {error}") from error

    def _obey(self, message: ToSlot) -> None:
        match message:
            case Deploy():
                raise JobError("the coordinator deployed a slot that was deployed before")
            case AskStack():
                raise JobError("the control client answers this, and the loop never gets it")
            case DropPeers(epoch, slots):
                self._drop(epoch, slots)
                self._send(PeersDropped(epoch))
            case PeersUp():
                for slot in self._links.up(message):
                    self._lost.pop(slot, None)
                    self._take(PeerReached(slot))
                self._take(PeersReplaced(tuple(peer.slot for peer in message.peers)))
            case AssignSplits():
                self._sources.assign(message)
            case StopSources():
                self._sources.finish()
            case ResetTasks():
                self.reset, self._over = message, True
                # What this instance has counted; the next one begins at 0.
                self._send(self._pulse.heartbeat())
            case Probe(number):
                self._pulse.quiet = self._core.is_quiet and not len(self._mailbox)
                self._send(self._pulse.heartbeat(number))
            case Cancel(reason):
                logger.info("this slot is cancelled: %s", reason)
                self._over = True
                self._send(SlotEnded(self._core.counters()))
            case _:
                self._take(message)

    def _drop(self, epoch: int, slots: tuple[int, ...]) -> None:
        self._links.drop(epoch, slots)
        for slot in slots:
            self._lost.pop(slot, None)
        self._take(PeersGone(slots))


def roots_in_mail(mailbox: Mailbox[Event]) -> Iterator[U64Array]:
    """Yield the roots of what the loop has not looked at yet; may be called by any thread."""
    for event in mailbox.waiting():
        if isinstance(event, FrameCame):
            yield roots_in(event.data)
        elif isinstance(event, ReplaysCame):
            for records in event.records:
                yield records.roots
