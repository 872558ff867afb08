"""Barrier mode's rules of a job: what restarts when a slot is lost. No I/O, no threads, no clock.

A job starts, and starts again, region by region (`regions_of`):

    lost → `PrepareRestore` → the restore point is known → `ResetTasks` to the survivors, who come back as new
    instances of their slots in the processes they have → all slots of the region are there, and the restart
    strategy's pause is over → `Deploy` with what each restores

So a survivor is not told to forget what it has written before it is certain which checkpoint stands. A further loss
before the deployment changes nothing but that one more instance is waited for: no checkpoint completes meanwhile.
When checkpoints are taken, and what becomes of them, is `ftlayer.checkpoint.coordinator`'s; which records end the
process that works on them, `KillerSearch`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ftlayer.checkpoint.snapshots import Restore
from ftlayer.common.rules.restart import (
    FixedDelay,
    RestartStrategy,
    gave_up,
    note_success,
    pause_after,
    restart_of,
)
from ftlayer.errors import SlotLostError, error_for_code
from ftlayer.runtime.driver.rules import events
from ftlayer.runtime.driver.rules.events import Crew, SlotRecord, convicted_by_deaths, died
from ftlayer.runtime.driver.rules.job_rules import FailureNoted, JobMode, ModeInstruction, StopJob, failed
from ftlayer.runtime.driver.rules.job_status import IsolationStatus
from ftlayer.runtime.protocol.messages import (
    Conviction,
    Death,
    Deploy,
    EndTasks,
    FromSlot,
    Hello,
    LoopWaits,
    ResetTasks,
)
from ftlayer.topology.job_graph import JobGraph
from ftlayer.topology.operators import IterationHead, ReaderSource, Source

MOST_EXCUSED = 8
"""So many losses in a search without a conviction are excused."""

CHECKPOINTS = 2
"""Complete ones without a further loss, after which the search is over."""

_Record = tuple[str, bytes]


class KillerSearch:
    """Finds records that end the process that works on them, from what processes have left in writing.

        a process has ended itself → tasks begin again *armed*: each notes the record that it has in hand → it ends
        again, record in hand → and once more, over the same record: that is *convicted*, and its chain makes it a dead
        letter

    The first death says of no record anything, so it takes three to convict one. What another process ended (the
    kernel for want of memory, Spark, a host that is gone) leaves nothing in writing, and convicts no record. Up to
    `MOST_EXCUSED` losses of a search are no failures to the restart strategy. The search is over when `CHECKPOINTS` are
    complete in which sources have read on since tasks began last: a source that has still to skip what it has read
    comes back to the record later.

    Attributes:
        active: whether tasks that begin now are to be armed.
    """

    def __init__(self) -> None:
        self.active = False
        self._known: set[str] = set()  # instances whose deaths are reported
        self._accused: set[_Record] = set()  # one process has ended over each
        self._convicted: dict[_Record, Conviction] = {}
        self._excused = 0
        self._found = 0
        self._completed = 0
        self._read: int | None = None
        self._read_before: int | None = None  # when tasks began last

    @property
    def convictions(self) -> tuple[Conviction, ...]:
        """Records that no complete checkpoint holds as dead."""
        return tuple(self._convicted.values())

    @property
    def status(self) -> IsolationStatus | None:
        return IsolationStatus(1, len(self._accused), self._found) if self.active else None

    def lost(self) -> bool:
        """An instance that ran was lost; return whether that is excused."""
        if not self.active or self._excused >= MOST_EXCUSED:
            return False
        self._excused += 1
        return True

    def died(self, deaths: Iterable[Death]) -> list[FailureNoted]:
        """Take what a slot has found of processes that are gone; return what is news: several may find the same."""
        news: list[FailureNoted] = []
        for death in deaths:
            if death.instance not in self._known:
                self._known.add(death.instance)
                news.append(FailureNoted(died(death), ended_itself=True))
                news += map(FailureNoted, self._look_into(death))
        return news

    def deployed(self) -> None:
        self._completed, self._read_before = 0, self._read

    def completed(self, condemned: Collection[_Record], read: int) -> None:
        for record in condemned:
            self._convicted.pop(record, None)
        self._read = read
        if self._read_before is None:
            self._read_before = read
        if not self.active or read <= self._read_before:
            return
        self._completed += 1
        if self._completed >= CHECKPOINTS:
            self.active = False
            self._accused.clear()
            self._excused = self._found = 0

    def validate(self) -> None:
        assert self.active or not self._accused, f"{self._accused} are accused, and no search runs"
        both = self._accused & self._convicted.keys()
        assert not both, f"{both} are convicted, and accused as well"

    def _look_into(self, death: Death) -> list[str]:
        self.active = True
        record = death.chain, death.digest
        # It may have died before its process knew of the conviction.
        if not death.digest or record in self._convicted:
            return []
        if record not in self._accused:
            self._accused.add(record)
            return []
        self._accused.remove(record)
        self._convicted[record] = conviction = convicted_by_deaths(death)
        self._found += 1
        self._excused = 0
        return [f"{death.chain!r} makes a record a dead letter: {conviction.reason}"]


_Instructions: TypeAlias = Sequence[ModeInstruction[events.BarrierInstruction]]

# A process that is gone is replaced at once and without limit: it is the region's restart that the strategy judges.
_AT_ONCE = FixedDelay(attempts=1 << 30, delay="1ms")


@dataclass(eq=False)
class Region:
    """Slots that restart together.

    Attributes:
        slots: their numbers.
        deployed: told to start their tasks, and none of them lost since.
        restore: what each slot begins with; None while that is not known.
        asked: number of the `PrepareRestore` that is out, 0 for none.
        not_before_ms: the restart strategy's pause.
    """

    slots: frozenset[int]
    deployed: bool = False
    restore: Mapping[int, Restore] | None = None
    restored: int = 0
    asked: int = 0
    not_before_ms: int = 0


class BarrierJob(JobMode[events.BarrierInstruction]):
    slot_restart = _AT_ONCE

    def __init__(
        self, crew: Crew, *, regions: Sequence[frozenset[int]], run: str, restart: RestartStrategy
    ) -> None:
        """``regions`` cover all slots; ``run`` names the execution. ``restart`` judges losses of regions."""
        super().__init__(crew, run)
        self._restart = restart
        self._regions = [Region(slots) for slots in regions]
        self._begun = False
        self._all_run = False
        self._asked = 0
        self._restore_fails = False
        self._restarts = self._restores_failed = 0
        self._succeeded = False
        self._search = KillerSearch()

    @property
    def restarts(self) -> int:
        """Of regions: those that one event takes back together count once."""
        return self._restarts

    @property
    def was_lost(self) -> bool:
        return self._restarts > 0

    @property
    def has_begun(self) -> bool:
        return self._begun

    @property
    def never_ran(self) -> bool:
        return not self.was_lost and not self._succeeded

    @property
    def is_complete(self) -> bool:
        return all(region.deployed for region in self._regions)

    @property
    def state(self) -> events.JobState | None:
        return events.JobState.RECOVERING if self._restore_fails and not self._begun else None

    @property
    def isolation(self) -> IsolationStatus | None:
        return self._search.status

    def begin(self) -> _Instructions:
        return [self._prepare(region) for region in self._regions]

    def handle(self, event: events.Event, now_ms: int) -> _Instructions:
        match event:
            case events.RestartRequested(reason):
                return self._fail_regions(self._regions, reason, now_ms)
            case events.RestoreReady():
                return self._restore_known(event, now_ms)
            case events.RestoreFailed():
                return self._restore_failed(event, now_ms)
            case events.CheckpointComplete(condemned, read):
                self._succeeded = True
                note_success(self._restart)
                self._search.completed(condemned, read)
            case events.EndTasksRequested(drain=True):
                self.is_ending = True
                return [*self._crew.tell_running(EndTasks())]
            case events.EndTasksRequested():
                return [StopJob(events.Over(events.JobState.ENDED), "the job was stopped with a savepoint")]
        return []

    def heard(self, slot: SlotRecord, message: FromSlot, now_ms: int) -> _Instructions:
        if isinstance(message, Hello):
            return [*self._search.died(message.deaths)]
        return []

    def validate(self) -> None:
        self._search.validate()
        numbers = sorted(number for region in self._regions for number in region.slots)
        assert numbers == [slot.number for slot in self._crew.slots], f"regions have the slots {numbers}"
        for region in self._regions:
            waits = bool(region.asked) + (region.restore is not None)
            assert waits <= 1, f"{region} is asked for what is known"
            assert not region.deployed or not waits, f"{region} is deployed, and is to be restored"
            slots = [self._crew.slots[number] for number in region.slots]
            assert not region.deployed or all(slot.deployed for slot in slots), f"{region} has lost a slot"

    def lost(self, slot: SlotRecord, now_ms: int, *, alone: bool) -> _Instructions:
        if self.is_ending:
            # The last checkpoint is committed: what remained was to say so.
            return [StopJob(events.Over(events.JobState.ENDED), "everything is done")]
        region = self._region(slot.number)
        excused = slot.silent and region.deployed and self._search.lost()
        return self._fail_regions([region], slot.failure, now_ms, excused=excused)

    def _fail_regions(
        self, regions: Sequence[Region], reason: str, now_ms: int, *, excused: bool = False
    ) -> _Instructions:
        """Take those that run back to a checkpoint; to the restart strategy that is one failure, or none."""
        running = [region for region in regions if region.deployed]
        if not running:
            return []
        pause = 0 if excused else pause_after(self._restart, now_ms)
        if pause is None:
            return [failed(SlotLostError(gave_up(self._restarts, reason)))]
        self._restarts += 1
        back = f"restart {self._restarts}: tasks go back to a checkpoint"
        again = back if excused else f"{back} {restart_of(self._restart, pause)}"
        self._all_run = False
        instructions: list[ModeInstruction[events.BarrierInstruction]] = [FailureNoted(reason, again)]
        for region in running:
            region.deployed = False
            region.not_before_ms = now_ms + pause
            instructions += [events.SlotDown(number) for number in sorted(region.slots)]
            instructions.append(self._prepare(region))
        return instructions

    def _prepare(self, region: Region) -> events.PrepareRestore:
        self._asked += 1
        region.asked, region.restore = self._asked, None
        return events.PrepareRestore(self._asked, tuple(sorted(region.slots)))

    def _restore_known(self, event: events.RestoreReady, now_ms: int) -> _Instructions:
        region = self._asked_by(event.number)
        if region is None:
            return []
        region.asked, region.restore, region.restored = 0, event.restores, event.checkpoint
        self._restore_fails = False
        self.epoch += 1
        reset = ResetTasks(self.epoch, stands=max(event.checkpoint, event.undecided))
        instructions: list[ModeInstruction[events.BarrierInstruction]] = []
        for number in sorted(region.slots):
            slot = self._crew.slots[number]
            if slot.deployed:
                instructions += self._crew.tell(slot, reset)
                # It comes back by itself, with a new name, in the process that it has.
                self._crew.drop(slot, now_ms)
        return instructions

    def _restore_failed(self, event: events.RestoreFailed, now_ms: int) -> _Instructions:
        region = self._asked_by(event.number)
        if region is None:
            return []
        self._restore_fails = True
        self._restores_failed += 1
        pause = None if event.lasting else pause_after(self._restart, now_ms)
        if event.lasting:
            return [failed(event.error)]
        if pause is None:
            tried = f"the restart strategy has given up after {self._restores_failed} restores that failed"
            return [failed(error_for_code(event.error.code)(f"{tried}, the last: {event.error}"))]
        region.asked, region.not_before_ms = 0, now_ms + pause
        return [FailureNoted(str(event.error))]

    def _asked_by(self, number: int) -> Region | None:
        return next((region for region in self._regions if region.asked == number), None)

    def go_on(self, now_ms: int) -> _Instructions:
        instructions = [each for region in self._regions for each in self._bring_up(region, now_ms)]
        if not self._all_run and self.is_complete and self._crew.all_started:
            self._all_run = True
            instructions.append(events.AllRunning())
        if self.is_ending and all(slot.ended for slot in self._crew.slots):
            instructions.append(StopJob(events.Over(events.JobState.ENDED)))
        return instructions

    def _bring_up(self, region: Region, now_ms: int) -> _Instructions:
        if region.deployed or now_ms < region.not_before_ms:
            return []
        if region.restore is None:
            return [] if region.asked else [self._prepare(region)]
        members = [self._crew.slots[number] for number in sorted(region.slots)]
        if not all(slot.hello for slot in members):
            return []
        restores, region.restore = region.restore, None
        region.deployed = True
        self._begun = self._begun or self.is_complete
        peers = tuple(slot.peer for slot in members)
        epoch, instance = max(self.epoch, 1), f"{self._run}/{self.epoch}"
        armed, convictions = self._search.active, self._search.convictions
        self._search.deployed()
        instructions: list[ModeInstruction[events.BarrierInstruction]] = []
        for slot in members:
            deploy = Deploy(
                epoch,
                instance,
                peers,
                restore=restores.get(slot.number),
                armed=armed,
                convictions=convictions,
            )
            instructions += self._crew.deploy(slot, deploy, now_ms)
        return [*instructions, events.RegionDeployed(tuple(sorted(region.slots)), region.restored)]

    def _region(self, slot: int) -> Region:
        return next(region for region in self._regions if slot in region.slots)


def regions_of(graph: JobGraph) -> tuple[frozenset[int], ...]:
    """Return which slots have to restart together: those that records can pass between, by their lowest numbers.

    Flink's pipelined regions, slot by slot: what fails is a process, and with it everything that runs in it. Slots that
    read one reader source belong together as well: its ranges are dealt out to all of them.
    """
    leader = list(range(graph.slots))

    def find(slot: int) -> int:
        while leader[slot] != slot:
            slot = leader[slot]
        return slot

    def join(one: int, other: int) -> None:
        first, second = sorted((find(one), find(other)))
        leader[second] = first

    for edge in graph.edges:
        for channel in graph.channels(edge):
            join(graph.slot_of(edge.source, channel.sender), graph.slot_of(edge.target, channel.receiver))
    for vertex in graph.vertices:
        first = vertex.operators[0]
        if isinstance(first, Source) and isinstance(first.connector, ReaderSource):
            for subtask in range(1, vertex.parallelism):
                join(0, subtask)
    found: dict[int, set[int]] = {}
    for slot in range(graph.slots):
        found.setdefault(find(slot), set()).add(slot)
    return tuple(frozenset(slots) for _, slots in sorted(found.items()))


class LoopWatch:
    """The loops of a job in which records may wait for another attempt.

    A head sees what its own slot holds of its loop. The driver knows by heartbeats what the others do, and tells it.
    """

    def __init__(self, graph: JobGraph) -> None:
        self._loops: dict[str, set[str]] = {}
        self._slots: dict[str, list[int]] = {}
        self._told: set[tuple[int, str]] = set()  # slots that were told that records wait
        for vertex in graph.vertices:
            if isinstance(vertex.operators[0], IterationHead):
                chains = graph.loop_of(vertex.uid)
                self._loops[vertex.uid] = {uid for uid in chains if graph.vertex(uid).failures is not None}
                subtasks = range(vertex.parallelism)
                self._slots[vertex.uid] = [graph.slot_of(vertex.uid, subtask) for subtask in subtasks]

    def waits_in(self, chains: Collection[str]) -> list[tuple[int, LoopWaits]]:
        """Records wait in these chains, and in no others; return whom to tell what."""
        messages: list[tuple[int, LoopWaits]] = []
        for head, loop in self._loops.items():
            waits = not loop.isdisjoint(chains)
            changed = [slot for slot in self._slots[head] if ((slot, head) in self._told) != waits]
            messages += [(slot, LoopWaits(head, waits)) for slot in changed]
            self._told ^= {(slot, head) for slot in changed}
        return messages

    def began(self, slots: Collection[int]) -> None:
        self._told = {(slot, head) for slot, head in self._told if slot not in slots}
