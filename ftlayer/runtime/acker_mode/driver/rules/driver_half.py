"""Acker mode's half in the driver: what the rules want of the vertex, and what the vertex says of circuit breakers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias, assert_never

from ftlayer.common.rules.circuit import CircuitState, CircuitStatus
from ftlayer.common.rules.restart import RestartStrategy
from ftlayer.errors import FTLayerError, VertexError
from ftlayer.runtime.acker_mode.driver.job_vertex import JobVertexCalls
from ftlayer.runtime.acker_mode.driver.rules.isolation import (
    AllThrough,
    Isolation,
    RecallAll,
    ReplayInput,
    Step,
    Tell,
)
from ftlayer.runtime.driver.rules import events
from ftlayer.runtime.driver.rules.events import (
    SOON_MS,
    SUSPICIOUS_LOSSES,
    Crew,
    SlotRecord,
    conviction,
    died,
    given_up,
)
from ftlayer.runtime.driver.rules.job_rules import (
    DriverMode,
    FailureNoted,
    JobContext,
    JobMode,
    LossesForgiven,
    ModeInstruction,
    StopJob,
)
from ftlayer.runtime.driver.rules.job_status import IsolationStatus
from ftlayer.runtime.protocol import messages
from ftlayer.vertex.calls import StreamOptions, StreamStatus, StreamStatusCall

logger = logging.getLogger(__name__)


ASK_MS = 1_000
"""The vertex is asked this often, and no breaker is open for less."""


class CircuitWatch:
    """Told where the breakers are, it says what has changed. Asks for nothing where there are none."""

    def __init__(self, job: str, *, has_any: bool) -> None:
        self._job = job
        self._has_any = has_any
        self._asked_ms: int | None = None
        self._known: dict[str, CircuitStatus] = {}

    def is_due(self, now_ms: int) -> bool:
        """Whether to ask now; if so, that is taken as done."""
        if not self._has_any or (self._asked_ms is not None and now_ms - self._asked_ms < ASK_MS):
            return False
        self._asked_ms = now_ms
        return True

    def told(self, circuits: Mapping[str, CircuitStatus]) -> list[str]:
        """Return a line for each breaker that has opened, or closed, since the last time."""
        lines = []
        for name, status in circuits.items():
            before = self._known.get(name, CircuitStatus())
            where = f"topology {self._job!r}" + (f", {name!r}" if name else "")
            if status.opened > before.opened:
                lines.append(
                    f"{where}: {status.failed:,} of {status.records:,} records failed, more than max_failing: its "
                    f"sources pause, and no attempt is used up; the next trial comes in {status.next_trial_in_ms:,} ms"
                )
            if status.state is CircuitState.CLOSED and (
                before.state is not CircuitState.CLOSED or status.opened > before.opened
            ):
                lines.append(f"{where}: the trial went well, it goes on")
        self._known = dict(circuits)
        return lines


RETRY_MS = 50
"""Between two tries: a round trip to slots and vertex takes a millisecond."""

LONGEST_RETRY_MS = 1_000
"""Records that wait for their pause are looked for at their time, but at the latest after this."""

HELD_MS = 2_000
"""What is pending for so long while nothing moves is held on purpose: in a join, or by a sink that writes rarely."""


@dataclass(frozen=True, slots=True)
class ProbeAll:
    number: int


@dataclass(frozen=True, slots=True)
class AskStatus:
    number: int


@dataclass(frozen=True, slots=True)
class NothingLeft: ...


def drained(status: StreamStatus, now_ms: int) -> bool:
    return status.drained


class GroupSettled:
    """Whether what was let out has come to its end; other records may be due or wait."""

    def __init__(self) -> None:
        self._pending, self._since_ms = -1, 0

    def __call__(self, status: StreamStatus, now_ms: int) -> bool:
        if status.pending != self._pending:
            self._pending, self._since_ms = status.pending, now_ms
        return not status.pending or now_ms - self._since_ms >= HELD_MS


def at_rest(status: StreamStatus, now_ms: int) -> bool:
    """Whether slots without anything to do are all that is waited for: yes."""
    return True


class _EndPhase(Enum):
    WATCHING = auto()
    FIRST_ROUND = auto()
    VERTEX_ASKED = auto()
    SECOND_ROUND = auto()
    OVER = auto()


class EndDetection:
    """When a bounded job may end, or a group of replays is settled: whether nothing happens any more, anywhere.

    Two rounds of probes around a look at the vertex, after the two-wave idea of termination detection (Mattern,
    "Algorithms for distributed termination detection", 1987): if every slot is quiet in both rounds and did nothing
    between them, and the vertex held nothing in between, then no slot has a record, and none is on its way: a record
    on its way has a root, and that would be pending.

    Told of every heartbeat and answer; says what to do next. Numbers of probes and questions only grow.
    """

    def __init__(self) -> None:
        self._number = 0
        self._is_empty: Callable[[StreamStatus, int], bool] = drained
        self._not_before_ms = 0
        self._phase = _EndPhase.WATCHING
        self._answers: dict[int, int] = {}
        self._first_round: dict[int, int] = {}

    def restart(self, is_empty: Callable[[StreamStatus, int], bool] = drained) -> None:
        """Begin again: a slot was lost, or ``is_empty`` of the vertex is to be found out."""
        self._phase = _EndPhase.WATCHING
        self._is_empty = is_empty

    def heartbeat(self, slot: int, heartbeat: messages.Heartbeat) -> None:
        if self._phase in (_EndPhase.FIRST_ROUND, _EndPhase.SECOND_ROUND):
            if not heartbeat.quiet:
                self._phase = _EndPhase.WATCHING
            elif heartbeat.probe == self._number:
                self._answers[slot] = heartbeat.activity

    def status(self, number: int, status: StreamStatus, now_ms: int) -> ProbeAll | None:
        if self._phase is not _EndPhase.VERTEX_ASKED or number != self._number:
            return None
        if self._is_empty(status, now_ms):
            return self._next_round(_EndPhase.SECOND_ROUND)
        self._phase = _EndPhase.WATCHING
        pause = RETRY_MS if status.pending or status.due else status.next_due_in_ms
        self._not_before_ms = now_ms + min(max(pause, RETRY_MS), LONGEST_RETRY_MS)
        return None

    def advance(
        self, latest: Mapping[int, messages.Heartbeat | None], now_ms: int
    ) -> ProbeAll | AskStatus | NothingLeft | None:
        """Return what to do now. ``latest`` has each running slot's last heartbeat."""
        match self._phase:
            case _EndPhase.WATCHING:
                if now_ms >= self._not_before_ms and all(beat and beat.quiet for beat in latest.values()):
                    self._not_before_ms = now_ms + RETRY_MS
                    return self._next_round(_EndPhase.FIRST_ROUND)
            case _EndPhase.FIRST_ROUND if self._answers.keys() >= latest.keys():
                self._first_round = dict(self._answers)
                self._phase = _EndPhase.VERTEX_ASKED
                return AskStatus(self._number)
            case _EndPhase.SECOND_ROUND if self._answers.keys() >= latest.keys():
                if self._answers == self._first_round:
                    self._phase = _EndPhase.OVER
                    return NothingLeft()
                self._phase = _EndPhase.WATCHING
        return None

    def _next_round(self, phase: _EndPhase) -> ProbeAll:
        self._number += 1
        self._phase = phase
        self._answers = {}
        return ProbeAll(self._number)


class Recalls:
    """Whether the vertex has recalled what was pending at the last loss.

    `ask` is for when everything is ready to go on. What a lost slot held is not touched until then, and would
    use up an attempt if it timed out: `meanwhile` has it recalled at once, for its time not to run. Once is not enough.
    Slots that have not heard of the loss yet go on to send to the lost one; and calls that the lost one has made may
    reach the vertex late, such as records that had to wait for room there, which the first recall has made.
    """

    def __init__(self, timeout_ms: int) -> None:
        self._number = 0
        # As often as slots touch what they hold.
        self._every_ms = max(1, timeout_ms // 3)
        self.is_done = False
        self._asked = False
        self._meanwhile: tuple[int, bool] | None = None
        self._meanwhile_ms = 0

    def forget(self) -> None:
        self.is_done = self._asked = False

    def ask(self) -> list[events.RecallStreams]:
        if self._asked:
            return []
        self._asked = True
        return self.recall()

    def is_due(self, epoch: int, all_know: bool, now_ms: int) -> bool:
        """Whether it is time for `meanwhile`: of a loss, when all others know of it, and again and again."""
        return self._meanwhile != (epoch, all_know) or now_ms - self._meanwhile_ms >= self._every_ms

    def meanwhile(self, epoch: int, all_know: bool, now_ms: int) -> list[events.RecallStreams]:
        """Have done what can be done while a slot is away."""
        self._meanwhile, self._meanwhile_ms = (epoch, all_know), now_ms
        return self.recall()

    def recall(self) -> list[events.RecallStreams]:
        """Have it done without waiting for it."""
        self._number += 1
        return [events.RecallStreams(self._number)]

    def answered(self, number: int) -> None:
        """Take an answer; only the one to the last question makes it done."""
        if number == self._number and self._asked:
            self._asked, self.is_done = False, True


_Instructions: TypeAlias = Sequence[ModeInstruction[events.AckerInstruction]]


class Suspicion:
    """Counts losses that follow each other; behind too many, replays come in by groups. Not for a job that stops."""

    def __init__(
        self, replays: Sequence[ReplayInput], crew: Crew, recalls: Recalls, detection: EndDetection
    ) -> None:
        self.isolation = Isolation(replays)
        self._crew = crew
        self._recalls = recalls
        self._detection = detection
        self._condemning = False
        self._repaired_ms = 0
        self.quick_losses = 0

    @property
    def watches(self) -> bool:
        """Whether `EndDetection` has something to find out: the end of the job, or of a group."""
        return not self.isolation.active or self.isolation.waits_for_rest

    def lost(self, slot: SlotRecord, now_ms: int, *, alone: bool) -> _Instructions:
        """A slot that ran was lost; ``alone``: it is not one of several that were lost together."""
        if alone:
            self.quick_losses = self.quick_losses + 1 if now_ms - self._repaired_ms < SOON_MS else 1
        slot.excused = self.isolation.active and self.isolation.lost(slot.number, now_ms)
        if self.isolation.active:
            if not slot.excused:
                self.quick_losses = 0
                slot.failure += " (while no record was out)"
        elif self.quick_losses >= SUSPICIOUS_LOSSES:
            self.isolation.begin()
            return self._crew.tell_running(messages.PauseIntake())
        return []

    def repaired(self, now_ms: int) -> None:
        self._repaired_ms = now_ms
        if self.isolation.active:
            self.isolation.deployed()
            self._detection.restart(at_rest)

    def died(self, deaths: Sequence[messages.Death]) -> _Instructions:
        """A new instance tells how others on its host have ended themselves."""
        for death in deaths:
            for slot in self._crew.slots:
                if slot.lost_instance == death.instance:
                    slot.death = death
        return [FailureNoted(died(death), ended_itself=True) for death in deaths]

    @property
    def has_convict(self) -> bool:
        """Whether there is a record that has to be condemned first: by a recall the vertex forgets its root."""
        return self.isolation.convicted is not None

    def condemn(self) -> _Instructions:
        """Have that record condemned, if that is not under way, and as soon as its slot can say how it ended."""
        found = self.isolation.convicted
        if found is None or self._condemning or self._crew.slots[found.slot].hello is None:
            return []
        self._condemning = True
        return [events.Condemn(conviction(found.root, self._crew.slots[found.slot]))]

    def condemned(self) -> None:
        self._condemning = False
        self.isolation.condemned()

    def recalled(self, rows: int, now_ms: int) -> _Instructions:
        return self._go(self.isolation.recalled(rows, now_ms))

    def took(self, report: messages.ReplaysOut, now_ms: int) -> _Instructions:
        instructions = self._go(self.isolation.took(report, now_ms))
        if self.isolation.group_is_out:
            self._detection.restart(GroupSettled())
        return instructions

    def at_rest(self, now_ms: int) -> _Instructions:
        """Nothing moves in any slot, and the group is settled."""
        return self._go(self.isolation.at_rest(now_ms))

    def tick(self, now_ms: int) -> _Instructions:
        return self._go(self.isolation.tick(now_ms))

    def _go(self, steps: Sequence[Step]) -> _Instructions:
        return [each for step in steps for each in self._step(step)]

    def _step(self, step: Step) -> _Instructions:
        match step:
            case RecallAll():
                return self._recalls.ask()
            case Tell(source, message):
                return self._crew.tell(self._crew.slots[source.slot], message)
            case AllThrough():
                self.quick_losses = 0
                self._detection.restart()
                forgiven = [LossesForgiven()] if self.isolation.found else []
                return [*forgiven, *self._crew.tell_running(messages.ResumeIntake())]


class AckerJob(JobMode[events.AckerInstruction]):
    """Of a job whose records the vertex follows: what is replayed when a slot is lost, and when it ends.

    A job starts when every slot has an instance, and is repaired when one is lost:

        lost → `DropPeers` to the others → all answered, and a new instance is there → the vertex recalls what is
        pending → `PeersUp` to the others, `Deploy` to the new one, `ReplayNow` to all

    From the loss on the vertex recalls what is pending, so that it does not time out; replays are not asked for
    before all slots are there again. A further loss at any point of this begins it again, with a higher epoch. Each
    epoch's instances get a name of their own, made from that of the execution (``run``): no root id is made twice.

    Where slots are lost again and again soon after that, a record may end the processes that work on it: `Isolation`
    takes over what is let in until it is found. No I/O, no threads, no clock.
    """

    def __init__(
        self,
        crew: Crew,
        *,
        run: str,
        restart: RestartStrategy,
        replays: Sequence[ReplayInput] = (),
        timeout_ms: int = StreamOptions().timeout_ms,
    ) -> None:
        """``restart`` says when the process of a slot that is lost is replaced.

        ``replays`` are all inputs by which the vertex lets records in again; none times out before ``timeout_ms``.
        """
        super().__init__(crew, run)
        self.slot_restart = restart
        self._recalls = Recalls(timeout_ms)
        self._detection = EndDetection()
        self._suspicion = Suspicion(replays, crew, self._recalls, self._detection)

    @property
    def isolation(self) -> IsolationStatus | None:
        return self._suspicion.isolation.status

    @property
    def on_trial(self) -> bool:
        """Whether a record is accused of ending processes, and one more loss proves it."""
        return self._suspicion.isolation.on_trial

    @property
    def restarts(self) -> int:
        """Of slots, each by itself. Those that a record ended count too."""
        return sum(slot.restarts for slot in self._crew.slots)

    @property
    def was_lost(self) -> bool:
        return self.epoch > 1

    @property
    def state(self) -> events.JobState | None:
        return events.JobState.ISOLATING if self._suspicion.isolation.active else None

    def begin(self) -> _Instructions:
        return [*self._recalls.ask()]

    def handle(self, event: events.Event, now_ms: int) -> _Instructions:
        match event:
            case events.StatusKnown():
                return self._probe(self._detection.status(event.number, event.status, now_ms))
            case events.RecallDone():
                self._recalls.answered(event.number)
                return self._suspicion.recalled(event.rows, now_ms)
            case events.Condemned():
                self._suspicion.condemned()
            case events.Tick():
                return self._suspicion.tick(now_ms)
        return []

    def heard(self, slot: SlotRecord, message: messages.FromSlot, now_ms: int) -> _Instructions:
        match message:
            case messages.Hello(deaths=deaths):
                return self._suspicion.died(deaths)
            case messages.Heartbeat() if slot.running:
                self._detection.heartbeat(slot.number, message)
            case messages.PeersDropped():
                slot.dropped_epoch = max(slot.dropped_epoch, message.epoch)
            case messages.SlotEnded() if slot.ended and not self.is_ending and not self._crew.all_deployed:
                return self._repair([], now_ms)
            case messages.ReplaysOut():
                return self._suspicion.took(message, now_ms)
        return []

    def lost_before(self) -> None:
        if self.epoch:
            # The others went on since the vertex was asked to recall.
            self._recalls.forget()

    def lost(self, slot: SlotRecord, now_ms: int, *, alone: bool) -> _Instructions:
        slot.lost_ms = now_ms
        if self.is_ending:
            # Everything is done and the vertex is empty: what remained was to say so.
            return [StopJob(events.Over(events.JobState.ENDED), "everything is done")]
        return [*self._suspicion.lost(slot, now_ms, alone=alone), *self._repair([slot.number], now_ms)]

    def _repair(self, lost: list[int], now_ms: int) -> list[events.JobInstruction]:
        """Begin a repair: slots that had ended start again as well."""
        gone = list(lost)
        for slot in self._crew.slots:
            if slot.ended:
                # Its channels to the new instance would never say that they end.
                self._crew.drop(slot, now_ms)
                slot.revived = True
                gone.append(slot.number)
        self.epoch += 1
        self._recalls.forget()
        self._detection.restart()
        for slot in self._crew.running:
            slot.asked_epoch = self.epoch
        told = self._crew.tell_running(messages.DropPeers(self.epoch, tuple(sorted(gone))))
        return told + [events.SlotDown(number) for number in gone]

    def explained(self, error: FTLayerError) -> FTLayerError:
        return given_up(error, self._suspicion.quick_losses)

    def go_on(self, now_ms: int) -> _Instructions:
        return [*self._bring_up(now_ms), *self._look_for_end(now_ms)]

    def last_wish(self, verdict: events.Over) -> Sequence[events.JobInstruction | events.AckerInstruction]:
        # The next start may be long after the timeout of what is pending.
        return [] if verdict.state is events.JobState.ENDED else self._recalls.recall()

    def validate(self) -> None:
        for slot in self._crew.slots:
            epochs = slot.dropped_epoch, slot.asked_epoch, self.epoch
            assert list(epochs) == sorted(epochs), f"slot {slot.number} is ahead of its epoch: {epochs}"
        assert not self._suspicion.isolation.active or self.was_lost, (
            "a record is looked for, and nothing was lost"
        )

    def _bring_up(self, now_ms: int) -> _Instructions:
        new = [slot for slot in self._crew.slots if not slot.deployed]
        if not new:
            return []
        others = list(self._crew.running)
        all_know = all(slot.dropped_epoch >= slot.asked_epoch for slot in others)
        if not all_know or not all(slot.hello for slot in self._crew.slots):
            return self._recall_meanwhile(all_know, now_ms)
        if not self._recalls.is_done:
            return self._suspicion.condemn() if self._suspicion.has_convict else self._recalls.ask()
        return self._deploy(new, others, now_ms)

    def _deploy(
        self, new: Sequence[SlotRecord], others: Sequence[SlotRecord], now_ms: int
    ) -> list[events.JobInstruction]:
        self.epoch = max(self.epoch, 1)
        arrived = messages.PeersUp(self.epoch, tuple(slot.peer for slot in new))
        peers = tuple(slot.peer for slot in self._crew.slots)
        searching = self._suspicion.isolation.active
        deploy = messages.Deploy(self.epoch, f"{self._run}/{self.epoch}", peers, searching)
        instructions = [each for slot in others for each in self._crew.tell(slot, arrived)]
        instructions += [each for slot in new for each in self._crew.deploy(slot, deploy, now_ms)]
        self._suspicion.repaired(now_ms)
        if not searching:
            instructions += [
                each for slot in self._crew.slots for each in self._crew.tell(slot, messages.ReplayNow())
            ]
        return instructions

    def _recall_meanwhile(self, all_know: bool, now_ms: int) -> _Instructions:
        if not self.epoch or not self._recalls.is_due(self.epoch, all_know, now_ms):
            return []
        if self._suspicion.has_convict:
            return self._suspicion.condemn()
        return self._recalls.meanwhile(self.epoch, all_know, now_ms)

    def _look_for_end(self, now_ms: int) -> _Instructions:
        if self.epoch and all(slot.ended for slot in self._crew.slots):
            return [StopJob(events.Over(events.JobState.ENDED))]
        if self.is_ending or not self._crew.all_deployed or not self._suspicion.watches:
            return []
        latest = {slot.number: slot.heartbeat for slot in self._crew.running}
        match self._detection.advance(latest, now_ms):
            case ProbeAll() as probe:
                return self._probe(probe)
            case AskStatus(number):
                return [events.AskVertexStatus(number)]
            case NothingLeft() if self._suspicion.isolation.active:
                return self._suspicion.at_rest(now_ms)
            case NothingLeft():
                self.is_ending = True
                return self._crew.tell_running(messages.EndReplays())
        return []

    def _probe(self, probe: ProbeAll | None) -> list[events.JobInstruction]:
        return [] if probe is None else self._crew.tell_running(messages.Probe(probe.number))


STATUS_DEADLINE_MS = 5_000


class AckerDriver(DriverMode[events.AckerInstruction]):
    def __init__(self, vertex: JobVertexCalls, job: JobContext) -> None:
        """``vertex`` has claimed the job, and is closed by this."""
        super().__init__(job)
        graph = job.graph
        self.rules = AckerJob(
            job.crew,
            run=job.run,
            restart=job.restart,
            replays=[ReplayInput(uid, graph.slot_of(uid, 0)) for uid in graph.replays],
            timeout_ms=min((options.timeout_ms for _, options in graph.options), default=0),
        )
        self._vertex = vertex
        self._circuits = CircuitWatch(
            graph.name, has_any=any(options.circuits for _, options in graph.options)
        )

    def carry_out(self, instruction: events.AckerInstruction) -> None:
        happened = self._job.happened
        match instruction:
            case events.RecallStreams(number):
                self._vertex.recall(lambda rows: happened(events.RecallDone(number, rows)), self._broken)
            case events.Condemn(failure):
                logger.warning("root %016x ends processes: %s", failure.root, failure.reason)
                self._vertex.condemn(failure, lambda: happened(events.Condemned(failure.root)), self._broken)
            case events.AskVertexStatus(number):
                self._vertex.status(lambda status: happened(events.StatusKnown(number, status)), self._broken)
            case _:
                assert_never(instruction)

    def after(self, event: events.Event, state: events.JobState, now_ms: int) -> None:
        if isinstance(event, events.StatusKnown):
            # A job that ends asks the vertex a last time: what it says of breakers is told too.
            self._log_circuits(event.status)
        if self._circuits.is_due(now_ms):
            self._vertex.status(
                lambda status: self._job.later(lambda: self._log_circuits(status)), self._broken
            )

    def vertex_status(self) -> StreamStatus | None:
        try:
            return self._vertex.client.call(
                StreamStatusCall(self._vertex.streams), deadline_ms=STATUS_DEADLINE_MS
            )
        except VertexError as error:
            logger.info("no status of the vertex: %s", error)
            return None

    def close(self) -> None:
        self._vertex.close()

    def _broken(self, error: FTLayerError) -> None:
        self._job.happened(events.Broken(error))

    def _log_circuits(self, status: StreamStatus) -> None:
        for line in self._circuits.told(status.circuits):
            logger.warning("%s", line)
