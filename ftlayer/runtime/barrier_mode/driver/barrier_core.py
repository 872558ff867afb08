"""The coordinator's rules in barrier mode: what restarts when a slot is lost. No I/O, no threads, no clock.

A job starts, and starts again, region by region (`ftlayer.runtime.barrier_mode.driver.regions`):

    lost → `PrepareRestore` → the restore point is known → `ResetTasks` to the survivors, who come back as new
    instances of their slots in the processes they have → all slots of the region are there, and the restart
    strategy's pause is over → `Deploy` with what each restores

So a survivor is not told to forget what it has written before it is certain which checkpoint stands. A further loss
before the deployment changes nothing but that one more instance is waited for: no checkpoint completes meanwhile.
When checkpoints are taken, and what becomes of them, is `ftlayer.checkpoint.coordinator`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ftlayer.checkpoint.snapshots import Restore
from ftlayer.config import TopologyOptions
from ftlayer.errors import SlotLostError
from ftlayer.restart import FixedDelay, RestartStrategy
from ftlayer.runtime.driver.events import (
    AllRunning,
    EndTasksRequested,
    Event,
    JobInstruction,
    JobState,
    Over,
    PrepareRestore,
    RegionDeployed,
    RestartRequested,
    RestoreFailed,
    RestoreReady,
    SlotDown,
)
from ftlayer.runtime.driver.job_core import JobCore
from ftlayer.runtime.driver.slot_record import SlotRecord
from ftlayer.runtime.protocol.messages import (
    Deploy,
    EndTasks,
    FromSlot,
    ResetTasks,
    SlotEnded,
)

# A process that is gone is replaced at once and without limit: it is the region's restart that the strategy judges.
_AT_ONCE = FixedDelay(attempts=1 << 30, delay=1)


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


class BarrierJobCore(JobCore):
    """The state of one execution of a job with checkpoints. Times are of one monotone clock (ms)."""

    def __init__(
        self,
        *,
        regions: Sequence[frozenset[int]],
        run: str,
        options: TopologyOptions,
        restart: RestartStrategy,
    ) -> None:
        """``regions`` cover all slots; ``run`` names the execution."""
        super().__init__(sum(map(len, regions)), options, _AT_ONCE)
        self._run = run
        self._restart = restart
        self._regions = [Region(slots) for slots in regions]
        self._begun = False
        self._all_run = False
        self._asked = 0
        self._restore_fails = False
        self._restarts = 0

    @property
    def restarts(self) -> int:
        """See `JobCore.restarts`: regions. Those that one event takes back together count once."""
        return self._restarts

    @property
    def _was_lost(self) -> bool:
        return self._restarts > 0

    @property
    def _has_begun(self) -> bool:
        return self._begun

    @property
    def _never_ran(self) -> bool:
        return not self._was_lost

    @property
    def _is_complete(self) -> bool:
        return all(region.deployed for region in self._regions)

    def _state_before_it_runs(self) -> JobState:
        return JobState.RECOVERING if self._restore_fails else JobState.STARTING

    def _begin(self, now_ms: int) -> list[JobInstruction]:
        return [each for region in self._regions for each in self._prepare(region)]

    def _take(self, event: Event, now_ms: int) -> list[JobInstruction]:
        match event:
            case RestartRequested(reason):
                return self._fail_regions(self._regions, reason, now_ms)
            case RestoreReady():
                return self._restore_known(event, now_ms)
            case RestoreFailed():
                return self._restore_failed(event, now_ms)
            case EndTasksRequested(drain=True):
                self._ending = True
                return self._crew.tell_running(EndTasks())
            case EndTasksRequested():
                return self._stop(Over(JobState.ENDED), "the job was stopped with a savepoint", now_ms)
        return []

    def _heard(self, slot: SlotRecord, message: FromSlot, now_ms: int) -> list[JobInstruction]:
        if isinstance(message, SlotEnded):
            slot.ended = slot.deployed
        return []

    # ------------------------------------------------------------ losses

    def _lost(self, slot: SlotRecord, now_ms: int, *, alone: bool) -> list[JobInstruction]:
        if self._ending:
            # The last checkpoint is committed: what remained was to say so.
            return self._stop(Over(JobState.ENDED), "everything is done", now_ms)
        return self._fail_regions([self._region(slot.number)], slot.failure, now_ms)

    def _fail_regions(self, regions: Sequence[Region], reason: str, now_ms: int) -> list[JobInstruction]:
        """Take those that run back to a checkpoint; to the restart strategy that is one failure."""
        failed = [region for region in regions if region.deployed]
        if not failed or self._end is not None:
            return []
        self.last_failure = reason
        pause = self._restart.on_failure(now_ms)
        if pause is None:
            error = SlotLostError(f"the restart strategy has given up. Last failure: {reason}")
            return self._fail(error, now_ms)
        self._restarts += 1
        self._all_run = False
        instructions: list[JobInstruction] = []
        for region in failed:
            region.deployed = False
            region.not_before_ms = now_ms + pause
            instructions += [SlotDown(number) for number in sorted(region.slots)]
            instructions += self._prepare(region)
        return instructions

    def _prepare(self, region: Region) -> list[JobInstruction]:
        self._asked += 1
        region.asked, region.restore = self._asked, None
        return [PrepareRestore(self._asked, tuple(sorted(region.slots)))]

    def _restore_known(self, event: RestoreReady, now_ms: int) -> list[JobInstruction]:
        region = next((region for region in self._regions if region.asked == event.number), None)
        if region is None or self._end is not None:
            return []
        region.asked, region.restore, region.restored = 0, event.restores, event.checkpoint
        self._restore_fails = False
        self.epoch += 1
        reset = ResetTasks(self.epoch, stands=max(event.checkpoint, event.undecided))
        instructions: list[JobInstruction] = []
        for number in sorted(region.slots):
            slot = self.slots[number]
            if slot.deployed:
                instructions += self._crew.tell(slot, reset)
                # It comes back by itself, with a new name, in the process that it has.
                self._crew.drop(slot, now_ms)
        return instructions

    def _restore_failed(self, event: RestoreFailed, now_ms: int) -> list[JobInstruction]:
        region = next((region for region in self._regions if region.asked == event.number), None)
        if region is None or self._end is not None:
            return []
        self.last_failure = str(event.error)
        self._restore_fails = True
        pause = None if event.lasting else self._restart.on_failure(now_ms)
        if pause is None:
            return self._fail(event.error, now_ms)
        region.asked, region.not_before_ms = 0, now_ms + pause
        return []

    # ------------------------------------------------------------ going on

    def _go_on(self, now_ms: int) -> list[JobInstruction]:
        instructions = [each for region in self._regions for each in self._bring_up(region, now_ms)]
        if not self._all_run and self._is_complete and self._crew.all_started:
            self._all_run = True
            instructions.append(AllRunning())
        if self._ending and all(slot.ended for slot in self.slots):
            instructions += self._stop(Over(JobState.ENDED), "", now_ms)
        return instructions

    def _bring_up(self, region: Region, now_ms: int) -> list[JobInstruction]:
        if region.deployed or now_ms < region.not_before_ms:
            return []
        if region.restore is None:
            return [] if region.asked else self._prepare(region)
        members = [self.slots[number] for number in sorted(region.slots)]
        if not all(slot.hello for slot in members):
            return []
        restores, region.restore = region.restore, None
        region.deployed = True
        self._begun = self._begun or self._is_complete
        peers = tuple(slot.peer for slot in members)
        epoch, instance = max(self.epoch, 1), f"{self._run}/{self.epoch}"
        instructions: list[JobInstruction] = []
        for slot in members:
            deploy = Deploy(epoch, instance, peers, restore=restores.get(slot.number))
            instructions += self._crew.deploy(slot, deploy, now_ms)
        return [*instructions, RegionDeployed(tuple(sorted(region.slots)), region.restored)]

    def _region(self, slot: int) -> Region:
        return next(region for region in self._regions if slot in region.slots)
