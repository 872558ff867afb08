"""The coordinator's rules in barrier mode: what restarts when a slot is lost. No I/O, no threads, no clock.

A job starts, and starts again, region by region (`ftlayer.runtime.coordinator.regions`):

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
from ftlayer.errors import FTLayerError, SlotLostError, error_for_code
from ftlayer.restart import FixedDelay, RestartStrategy
from ftlayer.runtime.coordinator.crew import Crew
from ftlayer.runtime.coordinator.events import (
    Broke,
    Broken,
    CancelRequested,
    Decision,
    DrainRequested,
    EndTasksRequested,
    Event,
    JobState,
    Over,
    PrepareRestore,
    RegionDeployed,
    RestartRequested,
    RestoreFailed,
    RestoreReady,
    Said,
    SendTo,
    SlotDown,
    SlotUp,
    SparkJobEnded,
    Tick,
)
from ftlayer.runtime.coordinator.isolation import IsolationStatus
from ftlayer.runtime.coordinator.reasons import never_works, not_up, reason_of, with_spark_error
from ftlayer.runtime.coordinator.slot_record import SlotRecord
from ftlayer.runtime.coordinator.stopping import Stopping
from ftlayer.runtime.coordinator.upkeep import Upkeep
from ftlayer.runtime.messages import (
    Cancel,
    Deploy,
    EndTasks,
    Heartbeat,
    Hello,
    ResetTasks,
    SlotEnded,
    SlotFailed,
    StopSources,
)

# A process that is gone is replaced at once and without limit: it is the region's restart that the strategy judges.
_AT_ONCE = FixedDelay(attempts=1 << 30, delay=1)


@dataclass(eq=False)
class Region:
    """Slots that restart together.

    Attributes:
        slots: their numbers.
        running: deployed, and none of them lost since.
        restore: what each slot begins with; None while that is not known.
        asked: number of the `PrepareRestore` that is out, 0 for none.
        not_before_ms: the restart strategy's pause.
    """

    slots: frozenset[int]
    running: bool = False
    restore: Mapping[int, Restore] | None = None
    restored: int = 0
    asked: int = 0
    not_before_ms: int = 0


class BarrierJobCore:
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
        self._run = run
        self._options = options
        self._restart = restart
        self._out: list[Decision] = []
        self._crew = Crew(sum(map(len, regions)), self._out)
        self._regions = [Region(slots) for slots in regions]
        self.slots = self._crew.slots
        self.epoch = 0
        self.restarts = 0
        self.last_failure = ""
        self._draining = False
        self._ending = False
        self._begun = False
        self._asked = 0
        self._end: Stopping | None = None
        self._started_ms = self._last_ms = 0
        self._upkeep = Upkeep(options, _AT_ONCE, self._out)

    @property
    def state(self) -> JobState:
        """Where the job is."""
        if self._end is not None:
            return self._end.verdict.state if self._end.over else JobState.STOPPING
        if not self._begun:
            return JobState.STARTING
        if self._ending:
            return JobState.ENDING
        if not all(region.running for region in self._regions):
            return JobState.RECOVERING
        return JobState.DRAINING if self._draining else JobState.RUNNING

    @property
    def isolation(self) -> IsolationStatus | None:
        """None: no record is looked for in barrier mode."""
        return None

    def start(self, now_ms: int) -> list[Decision]:
        """Begin: find out what is restored, and submit the slots."""
        self._started_ms = self._last_ms = now_ms
        for region in self._regions:
            self._prepare(region)
        for slot in self.slots:
            self._upkeep.submit(slot, now_ms)
        return self._decided()

    def handle(self, event: Event, now_ms: int) -> list[Decision]:
        """Take one event and return what is to be done, in order."""
        if self._end is not None and self._end.over:
            return []
        self._mind_the_gap(now_ms)
        match event:
            case Said(number, instance, message):
                self._said(self.slots[number], instance, message, now_ms)
            case Broke(number, instance, reason):
                slot = self.slots[number]
                if slot.is_instance(instance) and not slot.ended:
                    self._lose(slot, reason, now_ms)
            case SparkJobEnded():
                self._spark_job_ended(self.slots[event.slot], event, now_ms)
            case CancelRequested(reason):
                self._stop(Over(JobState.CANCELLED), reason, now_ms)
            case DrainRequested():
                self._drain()
            case RestartRequested(reason):
                for region in self._regions:
                    self._fail_region(region, reason, now_ms)
            case RestoreReady():
                self._restore_known(event, now_ms)
            case RestoreFailed():
                self._restore_failed(event, now_ms)
            case EndTasksRequested(drain=True):
                self._ending = True
                self._crew.tell_running(EndTasks())
            case EndTasksRequested():
                self._stop(Over(JobState.ENDED), "the job was stopped with a savepoint", now_ms)
            case Broken(error):
                self._fail(error, now_ms)
            case Tick():
                self._check_silence(now_ms)
        self._advance(now_ms)
        return self._decided()

    def _decided(self) -> list[Decision]:
        out = list(self._out)
        self._out.clear()
        return out

    # ------------------------------------------------------------ what slots say

    def _said(self, slot: SlotRecord, instance: str, message: object, now_ms: int) -> None:
        if isinstance(message, Hello):
            self._hello(slot, message, now_ms)
            return
        if not slot.is_instance(instance):
            if isinstance(message, SlotFailed) and slot.hello is None and self._end is None:
                slot.failure = self.last_failure = f"slot {slot.number}: {reason_of(message)}"
            return
        slot.heard_ms = now_ms
        match message:
            case Heartbeat():
                slot.heartbeat = message
            case SlotFailed(code=code) if code:
                self._fail(error_for_code(code)(message.reason), now_ms)
            case SlotFailed(lasting=True) if self.restarts == 0:
                self._fail(never_works(slot.number, message), now_ms)
            case SlotFailed():
                self._lose(slot, reason_of(message), now_ms, message.operator)
            case SlotEnded():
                slot.ended = slot.deployed

    def _hello(self, slot: SlotRecord, hello: Hello, now_ms: int) -> None:
        if self._stopping() or slot.ended:
            self._out.append(SendTo(slot.number, hello.instance, Cancel("the job does not need it any more")))
            return
        if slot.hello is not None:
            self._crew.tell(slot, Cancel("another process has taken its place"))
            self._lose(slot, "another process took its place", now_ms)
            if self._stopping():
                return
        slot.connect(hello, now_ms)
        slot.submit_at_ms = None

    def _spark_job_ended(self, slot: SlotRecord, event: SparkJobEnded, now_ms: int) -> None:
        if event.attempt != slot.attempt:
            return
        if self._end is not None:
            slot.submitted = False
            return
        error = self._upkeep.ended(slot, event)
        if event.error is not None and slot.hello is None:
            self.last_failure = slot.loss = slot.failure
        if error is not None:
            self._fail(error, now_ms)

    # ------------------------------------------------------------ losses

    def _check_silence(self, now_ms: int) -> None:
        limit = self._options.heartbeat_timeout_ms
        for slot in self.slots:
            if self._end is None and slot.running and now_ms - slot.heard_ms >= limit:
                self._lose(slot, f"it was not heard of for {limit} ms", now_ms)
                self._upkeep.cancel(slot, now_ms)

    def _lose(self, slot: SlotRecord, reason: str, now_ms: int, operator: str = "") -> None:
        was_deployed = slot.deployed
        busy = "" if slot.heartbeat is None else slot.heartbeat.busy
        slot.disconnect(now_ms + self._options.start_timeout_ms)
        if self._end is not None:
            return
        slot.failure = with_spark_error(f"slot {slot.number}: {reason}", slot.spark_error)
        self.last_failure = slot.failure
        if not was_deployed:
            return
        slot.loss, slot.loss_in = slot.failure, operator or busy
        slot.restarts += 1
        if self._ending:
            # The last checkpoint is committed: what remained was to say so.
            self._stop(Over(JobState.ENDED), "everything is done", now_ms)
        else:
            self._fail_region(self._region(slot.number), slot.failure, now_ms)

    def _fail_region(self, region: Region, reason: str, now_ms: int) -> None:
        if not region.running or self._end is not None:
            return
        region.running = False
        self.last_failure = reason
        self.restarts += 1
        pause = self._restart.on_failure(now_ms)
        if pause is None:
            self._fail(SlotLostError(f"the restart strategy has given up. Last failure: {reason}"), now_ms)
            return
        region.not_before_ms = now_ms + pause
        self._out.extend(SlotDown(number) for number in sorted(region.slots))
        self._prepare(region)

    def _prepare(self, region: Region) -> None:
        self._asked += 1
        region.asked, region.restore = self._asked, None
        self._out.append(PrepareRestore(self._asked, tuple(sorted(region.slots))))

    def _restore_known(self, event: RestoreReady, now_ms: int) -> None:
        region = next((region for region in self._regions if region.asked == event.number), None)
        if region is None or self._end is not None:
            return
        region.asked, region.restore, region.restored = 0, event.restores, event.checkpoint
        self.epoch += 1
        for number in sorted(region.slots):
            slot = self.slots[number]
            if slot.deployed:
                stands = max(event.checkpoint, event.undecided)
                self._crew.tell(slot, ResetTasks(self.epoch, stands))
                # It comes back by itself, with a new name, in the process that it has.
                slot.disconnect(now_ms + self._options.start_timeout_ms)

    def _restore_failed(self, event: RestoreFailed, now_ms: int) -> None:
        region = next((region for region in self._regions if region.asked == event.number), None)
        if region is None or self._end is not None:
            return
        self.last_failure = str(event.error)
        pause = None if event.lasting else self._restart.on_failure(now_ms)
        if pause is None:
            self._fail(event.error, now_ms)
            return
        region.asked, region.not_before_ms = 0, now_ms + pause

    # ------------------------------------------------------------ going on

    def _advance(self, now_ms: int) -> None:
        if self._end is None:
            self._keep_slots_up(now_ms)
        if self._end is None:
            for region in self._regions:
                self._bring_up(region, now_ms)
            if self._ending and all(slot.ended for slot in self.slots):
                self._stop(Over(JobState.ENDED), "", now_ms)
        if self._end is not None and self._end.advance(now_ms):
            self._out.append(self._end.verdict)

    def _keep_slots_up(self, now_ms: int) -> None:
        late = not self._begun and now_ms - self._started_ms >= self._options.start_timeout_ms
        if late and not all(slot.hello for slot in self.slots):
            self._fail(not_up(self.slots, self._options.start_timeout_ms), now_ms)
        for slot in self.slots:
            if slot.hello is None and not slot.ended and self._end is None:
                error = self._upkeep.keep_up(slot, now_ms)
                if error is not None:
                    self._fail(error, now_ms)

    def _bring_up(self, region: Region, now_ms: int) -> None:
        if region.running or now_ms < region.not_before_ms:
            return
        if region.restore is None:
            if not region.asked:
                self._prepare(region)
            return
        members = [self.slots[number] for number in sorted(region.slots)]
        if not all(slot.hello for slot in members):
            return
        region.running = True
        self._begun = self._begun or all(region.running for region in self._regions)
        peers = tuple(slot.peer for slot in members)
        for slot in members:
            restore = region.restore.get(slot.number)
            deploy = Deploy(max(self.epoch, 1), f"{self._run}/{self.epoch}", peers, restore=restore)
            self._crew.tell(slot, deploy)
            slot.deployed, slot.heard_ms = True, now_ms
            if self._draining:
                self._crew.tell(slot, StopSources())
            self._out.append(SlotUp(slot.number))
        region.restore = None
        self._out.append(RegionDeployed(tuple(sorted(region.slots)), region.restored))

    def _drain(self) -> None:
        if not self._draining and self._end is None:
            self._draining = True
            self._crew.tell_running(StopSources())

    # ------------------------------------------------------------ coming to an end

    def _fail(self, error: FTLayerError, now_ms: int) -> None:
        self.last_failure = str(error)
        self._stop(Over(JobState.FAILED, error), str(error).partition("\n")[0], now_ms)

    def _stop(self, verdict: Over, reason: str, now_ms: int) -> None:
        if self._end is None:
            self._end = Stopping(verdict, self.slots, self._out, now_ms)
            self._end.begin(reason)

    # ------------------------------------------------------------ small ones

    def _stopping(self) -> bool:
        return self._end is not None

    def _region(self, slot: int) -> Region:
        return next(region for region in self._regions if slot in region.slots)

    def _mind_the_gap(self, now_ms: int) -> None:
        """Where the driver itself stood still, silence says nothing of the slots: give them the time back."""
        gap = now_ms - self._last_ms
        self._last_ms = now_ms
        if gap >= self._options.heartbeat_timeout_ms // 2:
            for slot in self.slots:
                slot.heard_ms += gap
