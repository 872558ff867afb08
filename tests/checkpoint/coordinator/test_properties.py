"""Any sequence of events, with subtasks and a storage that do what they like: what must hold after each of them."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ftlayer.checkpoint.barrier import Barrier, SnapshotKind
from ftlayer.checkpoint.coordinator.coordinator import CheckpointCoordinator
from ftlayer.checkpoint.coordinator.events import (
    Answer,
    BacklogChanged,
    CheckpointEvent,
    CheckpointInstruction,
    CheckpointRequested,
    CheckpointTick,
    CommitFailed,
    CommitSinks,
    Discard,
    DiscardParts,
    FailJob,
    FinishTasks,
    InputHeld,
    JobEnd,
    JobOver,
    JobStopping,
    NotifyAborted,
    NotifyCompleted,
    PartDeclined,
    PartWritten,
    Publish,
    Published,
    PublishFailed,
    RestoreFrom,
    SavepointRequested,
    SinksCommitted,
    StopRequested,
    SubtaskFinished,
    TasksRestarting,
    TasksRestored,
    TasksRunning,
    Trigger,
)
from ftlayer.checkpoint.coordinator.in_flight import JobFacts
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Checkpoint, Committable, OperatorInfo, SubtaskSnapshot
from ftlayer.common.clock import Now

SUBTASKS = (("source", 0), ("source", 1), ("sink", 0))
SOURCES = SUBTASKS[:2]
TIMEOUT_MS = 5_000
configs = st.builds(
    lambda interval, pause, concurrent, tolerable, retained, backlog: CheckpointConfig(
        interval=interval,
        timeout=TIMEOUT_MS / 1_000,
        min_pause=pause if concurrent == 1 else 0,
        max_concurrent=concurrent,
        tolerable_failures=tolerable,
        retained=retained,
        interval_during_backlog=backlog if interval else None,
    ),
    st.sampled_from([None, "1s", "3s"]),
    st.sampled_from([0, "700ms", "4s"]),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from([None, 0, "6s"]),
)


class Coordinated(RuleBasedStateMachine):
    """Keeps the books of everything that was decided, beside the coordinator."""

    def __init__(self) -> None:
        super().__init__()
        self.mono_ms = 0
        self.number = 0
        self.running = self.failing = self.over = False
        self.end_said = False
        self.barriers: dict[int, Barrier] = {}
        self.waiting: dict[int, set[tuple[str, int]]] = {}
        self.aborted: set[int] = set()
        self.published: dict[int, Checkpoint] = {}
        self.notified: list[int] = []
        self.in_flight: set[int] = set()
        self.to_publish: Checkpoint | None = None
        self.to_commit: CommitSinks | None = None
        self.committed: set[int] = set()
        self.restored_at = 0
        self.to_restore: list[int] = []
        self.open_requests: set[int] = set()
        self.discarded: set[int] = set()
        self.ended: set[tuple[str, int]] = set()
        self.last_completed_ms: int | None = None
        self.written: dict[int, Committable] = {}

    @initialize(config=configs, may_overtake=st.booleans())
    def begin(self, config: CheckpointConfig, may_overtake: bool) -> None:
        may_overtake = may_overtake and config.max_concurrent == 1
        self.config = config
        facts = JobFacts(
            "job",
            "run",
            128,
            (OperatorInfo("source", "source", "Source", 2),),
            frozenset(SUBTASKS),
            frozenset(SOURCES),
            may_overtake=may_overtake,
        )
        self.coordinator = CheckpointCoordinator(config, facts, highest=10)
        self.restart()

    # ------------------------------------------------------------ what is decided

    def call(self, event: CheckpointEvent) -> None:
        now = Now(self.mono_ms, self.mono_ms + 1_000_000)
        instructions = self.coordinator.handle(event, now)
        self.coordinator.validate()
        for instruction in instructions:
            self.note(instruction)

    def note(self, instruction: CheckpointInstruction) -> None:
        match instruction:
            case Trigger(barrier):
                self.triggered(barrier)
            case Publish(checkpoint, location):
                assert self.to_publish is None
                assert self.to_commit is None
                assert not self.waiting[checkpoint.checkpoint]
                assert len(checkpoint.subtasks) == len(SUBTASKS)
                assert location == self.barriers[checkpoint.checkpoint].location
                self.to_publish = checkpoint
            case CommitSinks(checkpoint):
                assert checkpoint.checkpoint in self.published
                assert self.commits(checkpoint.checkpoint)
                self.to_commit = instruction
            case NotifyCompleted(number):
                assert number in self.published
                assert self.commits(number)
                assert number not in self.notified
                # Whatever the sinks had written up to then is committed.
                assert all(each in self.committed for each in self.numbers(self.published[number]))
                assert not self.notified or number > self.notified[-1]
                self.notified.append(number)
            case NotifyAborted(number):
                assert number in self.in_flight
                assert number not in self.aborted
                self.aborted.add(number)
                self.in_flight.discard(number)
                # Only the storage knows whether one stands that is being written.
                assert self.to_publish is None or self.to_publish.checkpoint != number
            case Discard(checkpoint):
                number = checkpoint.checkpoint
                assert self.barriers[number].kind is SnapshotKind.CHECKPOINT
                assert number not in {each.checkpoint for each in self.coordinator.completed}
                assert number in self.published
                assert number not in self.discarded
                self.discarded.add(number)
            case DiscardParts(number):
                assert number in self.aborted
            case FailJob():
                assert self.running
                assert not self.failing
                self.failing = True
            case RestoreFrom(number, found):
                assert number in self.to_restore
                assert self.to_publish is None
                assert self.to_commit is None
                standing = [
                    each for each in self.published if self.commits(each) and each not in self.discarded
                ]
                assert (None if found is None else found.checkpoint) == max(standing, default=None)
                self.to_restore.remove(number)
            case Answer(request, answer, error):
                assert request in self.open_requests
                assert (answer is None) != (error is None)
                assert answer is None or answer.checkpoint in self.published
                self.open_requests.discard(request)
            case FinishTasks(drain):
                last = [number for number in self.notified if self.barriers[number].final]
                assert last
                assert not self.in_flight
                assert not drain or self.ended == set(SOURCES)
                self.end_said = True
                self.to_restore.clear()

    def triggered(self, barrier: Barrier) -> None:
        number = barrier.checkpoint
        assert number > max(self.barriers, default=10)
        assert self.running
        assert not self.failing
        assert not self.end_said
        if barrier.kind is SnapshotKind.CHECKPOINT:
            assert len(self.in_flight) < self.config.max_concurrent
            assert barrier.final == (self.ended == set(SOURCES))
            # (Those that users asked for wait for no pause.)
            if self.last_completed_ms is not None and not barrier.final and not self.manual:
                assert self.mono_ms - self.last_completed_ms >= self.config.min_pause_ms
            self.manual = False
        self.barriers[number] = barrier
        self.waiting[number] = set(SUBTASKS)
        self.in_flight.add(number)

    manual = False

    def commits(self, number: int) -> bool:
        barrier = self.barriers[number]
        return barrier.kind is SnapshotKind.CHECKPOINT or barrier.final

    def numbers(self, checkpoint: Checkpoint) -> set[int]:
        return {each.checkpoint for part in checkpoint.subtasks for each in part.committables}

    # ------------------------------------------------------------ what happens

    def live(self) -> bool:
        return not self.over

    @rule(ms=st.sampled_from([1, 100, 999, 1_000, 3_000]))
    def time_passes(self, ms: int) -> None:
        self.mono_ms += ms
        self.call(CheckpointTick())

    @rule()
    def time_passes_until_something_is_due(self) -> None:
        due = self.coordinator.due_ms
        if due is not None:
            assert due >= self.mono_ms, "what is due was not done"
            self.mono_ms = due
            self.call(CheckpointTick())
            assert self.coordinator.due_ms is None or self.coordinator.due_ms > self.mono_ms

    @rule(data=st.data())
    def a_subtask_writes(self, data: st.DataObject) -> None:
        missing = sorted(
            (number, subtask) for number, subtasks in self.waiting.items() for subtask in subtasks
        )
        if missing:
            self.ack(*data.draw(st.sampled_from(missing[:12])))

    @rule()
    def all_subtasks_write(self) -> None:
        for number in sorted(self.in_flight):
            for subtask in sorted(self.waiting[number]):
                self.ack(number, subtask)

    def ack(self, number: int, subtask: tuple[str, int]) -> None:
        self.waiting[number].discard(subtask)
        told = max(self.notified, default=0)
        # A sink's part has everything that it was not told to be committed.
        mine = [each for each in sorted(self.barriers) if told < each <= number and each > self.restored_at]
        committables = tuple(Committable("sink", b"", each) for each in mine) if subtask[0] == "sink" else ()
        self.call(PartWritten(number, SubtaskSnapshot(*subtask, committables=committables)))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), counts=st.booleans())
    def a_subtask_declines(self, data: st.DataObject, counts: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.in_flight)))
        if self.waiting[number]:
            subtask = data.draw(st.sampled_from(sorted(self.waiting[number])))
            self.call(PartDeclined(number, subtask, "cannot", counts=counts))

    @precondition(lambda self: self.to_publish is not None)
    @rule(works=st.sampled_from([True, True, True, False]))
    def it_is_published(self, works: bool) -> None:
        checkpoint, self.to_publish = self.to_publish, None
        assert checkpoint is not None
        number = checkpoint.checkpoint
        if not works:
            self.call(PublishFailed(number, "no space"))
            assert number in self.aborted
            return
        self.published[number] = checkpoint
        if not (self.numbers(checkpoint) - self.committed) or not self.commits(number) or self.over:
            self.completed(number)
        self.call(Published(checkpoint))

    @precondition(lambda self: self.to_commit is not None)
    @rule(works=st.sampled_from([True, True, True, False]))
    def its_sinks_are_committed(self, works: bool) -> None:
        decision, self.to_commit = self.to_commit, None
        assert decision is not None
        number = decision.checkpoint.checkpoint
        self.completed(number)
        if works:
            self.committed |= self.numbers(decision.checkpoint)
            self.call(SinksCommitted(number))
        else:
            self.call(CommitFailed(number, "no connection"))

    def completed(self, number: int) -> None:
        self.in_flight.discard(number)
        self.last_completed_ms = self.mono_ms

    @precondition(live)
    @rule(
        kind=st.sampled_from(
            [CheckpointRequested, CheckpointRequested, SavepointRequested, SavepointRequested, StopRequested]
        )
    )
    def a_user_asks(self, kind: type[CheckpointRequested | SavepointRequested | StopRequested]) -> None:
        self.number += 1
        self.open_requests.add(self.number)
        self.manual = self.manual or kind is CheckpointRequested
        self.call(
            CheckpointRequested(self.number) if kind is CheckpointRequested else kind(self.number, "/save")
        )

    @precondition(lambda self: self.running)
    @rule(subtask=st.sampled_from(SOURCES))
    def a_source_ends(self, subtask: tuple[str, int]) -> None:
        self.ended.add(subtask)
        self.call(SubtaskFinished(subtask))

    @rule(subtask=st.sampled_from(SOURCES), working_off=st.booleans())
    def a_source_has_a_backlog(self, subtask: tuple[str, int], working_off: bool) -> None:
        self.call(BacklogChanged(subtask, working_off))

    @rule(chains=st.frozensets(st.sampled_from(["source", "sink"])))
    def chains_hold_their_input(self, chains: frozenset[str]) -> None:
        self.call(InputHeld(chains))

    @precondition(live)
    @rule()
    def restart(self) -> None:
        self.running = self.failing = False
        self.ended.clear()
        self.number += 1
        self.to_restore.append(self.number)
        self.call(TasksRestarting(self.number))

    @precondition(
        lambda self: not self.running and not self.to_restore and not self.end_said and not self.over
    )
    @rule(damaged=st.sampled_from([0, 0, 0, 1, 2]))
    def the_job_runs_again(self, damaged: int) -> None:
        """So many of the latest checkpoints cannot be read."""
        kept = self.coordinator.completed
        found = kept[max(0, len(kept) - 1 - damaged)] if kept else None
        if found is not None:
            self.committed |= self.numbers(found)
            self.restored_at = max(self.barriers)
        self.call(TasksRestored(found))
        assert self.coordinator.completed == tuple(
            each for each in kept if found and each.checkpoint <= found.checkpoint
        )
        self.running = True
        self.call(TasksRunning())

    @precondition(live)
    @rule(end=st.sampled_from(JobEnd), cancelled=st.booleans(), sure=st.sampled_from([False] * 9 + [True]))
    def the_job_is_over(self, end: JobEnd, cancelled: bool, sure: bool) -> None:
        if not sure:
            return
        self.running = self.failing = False
        if cancelled:
            self.to_restore.clear()
            self.call(JobStopping())
            assert not self.in_flight - self.answered_later()
        self.over = True
        self.to_restore.clear()
        self.call(JobOver(end))

    def answered_later(self) -> set[int]:
        waiting = [self.to_publish, None if self.to_commit is None else self.to_commit.checkpoint]
        return {checkpoint.checkpoint for checkpoint in waiting if checkpoint is not None}

    # ------------------------------------------------------------ what holds

    @invariant()
    def each_checkpoint_has_one_end(self) -> None:
        assert not self.aborted & set(self.published)
        assert set(self.barriers) == self.aborted | set(self.published) | self.in_flight
        assert self.coordinator.in_progress == tuple(sorted(self.in_flight))

    @invariant()
    def as_many_are_kept_as_shall_be(self) -> None:
        kept = [each.checkpoint for each in self.coordinator.completed]
        assert kept == sorted(kept)
        extra = 0 if self.to_commit is None else 1
        # One whose sinks could not be committed is one more until the next is complete.
        failed = sum(number not in self.notified for number in kept)
        assert len(kept) <= self.config.retained + max(extra, failed)

    @invariant()
    def the_statistics_agree(self) -> None:
        counts = self.coordinator.counts
        assert counts.triggered == len(self.barriers)
        assert counts.failed == len(self.aborted)
        assert counts.in_progress == len(self.in_flight)
        assert counts.completed == len(self.barriers) - len(self.aborted) - len(self.in_flight)

    def teardown(self) -> None:
        """Nothing waits without end: with time, answers and a job that runs, all requests are answered."""
        if not hasattr(self, "config"):
            return
        for _ in range(100):
            if self.to_publish is not None:
                self.it_is_published(works=True)
            if self.to_commit is not None:
                self.its_sinks_are_committed(works=True)
            self.mono_ms += TIMEOUT_MS
            self.call(CheckpointTick())
            if self.failing and not self.over:
                self.restart()
            if not self.running and not self.to_restore and not self.end_said and not self.over:
                self.the_job_runs_again(damaged=0)
        assert not self.open_requests
        assert not self.to_restore
        # What is in flight now was triggered by the last tick.
        assert all(self.mono_ms - self.triggered_ms(number) < TIMEOUT_MS for number in self.in_flight)

    def triggered_ms(self, number: int) -> int:
        return self.barriers[number].started_ms - 1_000_000


def test_any_sequence_of_events() -> None:
    run_state_machine_as_test(
        Coordinated, settings=settings(max_examples=40, stateful_step_count=50, deadline=None)
    )
