"""Any order of events, with a task that does what handlers say: what it was given is compared with the channels."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ftlayer.checkpoint.barrier import Alignment, Barrier, CancelMarker, SnapshotKind
from ftlayer.checkpoint.handlers import (
    AllBarriers,
    BarrierHandler,
    BlockChannel,
    Decision,
    GiveUp,
    StopCapture,
    TakeSnapshot,
    Unblock,
    make_handler,
)
from ftlayer.checkpoint.options import CheckpointingMode

TIMEOUT_MS = 50


@dataclass(frozen=True)
class Record:
    number: int


@dataclass(frozen=True)
class End:
    pass


@dataclass
class Lane:
    """A channel: what has arrived and waits, and what there was of it."""

    queue: deque[Record | Barrier | CancelMarker | End] = field(default_factory=deque)
    arrived: int = 0
    handed: int = 0
    last: int = 0
    # Checkpoint → how many records came before its barrier.
    barriers: dict[int, int] = field(default_factory=dict)
    ended: bool = False
    end_was_handed: bool = False
    blocked: bool = False


class Owner(RuleBasedStateMachine):
    """A task's slot: lets elements arrive and hands them on, in an order that Hypothesis chooses."""

    mode = CheckpointingMode.EXACTLY_ONCE
    unaligned = False

    @initialize(channels=st.integers(1, 4))
    def begin(self, channels: int) -> None:
        self.handler: BarrierHandler = make_handler(self.mode, self.unaligned, channels)
        self.lanes = [Lane() for _ in range(channels)]
        self.now_ms = 0
        self.known: dict[int, Barrier] = {}
        self.taken: list[int] = []
        self.given_up: set[int] = set()
        self.complete: set[int] = set()
        self.aborted: set[int] = set()
        self.cancelled: set[int] = set()
        # What belongs to unaligned snapshots: checkpoint → channel → records, and channels that still add to it.
        self.captured: dict[int, list[int]] = {}
        self.capturing: dict[int, int] = {}

    # ------------------------------------------------------------ what comes

    @rule(data=st.data(), records=st.integers(1, 3))
    def records_arrive(self, data: st.DataObject, records: int) -> None:
        channel = self.pick_open(data)
        if channel is not None:
            for _ in range(records):
                self.arrive(channel, Record(self.lanes[channel].arrived))

    @rule(data=st.data(), ahead=st.integers(1, 2), turned=st.booleans())
    def barrier_arrives(self, data: st.DataObject, ahead: int, turned: bool) -> None:
        channel = self.pick_open(data)
        if channel is not None:
            self.arrive(channel, self.barrier(self.lanes[channel].last + ahead, turned))

    @rule(data=st.data(), ahead=st.integers(0, 2))
    def marker_arrives(self, data: st.DataObject, ahead: int) -> None:
        channel = self.pick_open(data)
        if channel is not None:
            checkpoint = max(1, self.lanes[channel].last + ahead)
            self.cancelled.add(checkpoint)
            self.arrive(channel, CancelMarker(checkpoint))

    @rule(data=st.data())
    def channel_ends(self, data: st.DataObject) -> None:
        channel = self.pick_open(data)
        if channel is not None and data.draw(st.integers(0, 4)) == 0:
            self.arrive(channel, End())

    @rule(passed=st.integers(1, 40))
    def time_passes(self, passed: int) -> None:
        self.now_ms += passed
        due = self.handler.due_ms
        decisions = self.handler.on_time(self.now_ms)
        assert bool(decisions) == (due is not None and due <= self.now_ms)
        self.carry_out(decisions)

    @rule(ahead=st.integers(-2, 2))
    def coordinator_aborts(self, ahead: int) -> None:
        checkpoint = max((lane.last for lane in self.lanes), default=0) + ahead
        if checkpoint > 0:
            self.aborted.add(checkpoint)
            decisions = self.handler.aborted(checkpoint, self.now_ms)
            assert not any(isinstance(d, GiveUp) and d.checkpoint == checkpoint for d in decisions)
            self.carry_out(decisions)

    # ------------------------------------------------------------ what the task gets

    @precondition(lambda self: self.ready())
    @rule(data=st.data())
    def hand_on(self, data: st.DataObject) -> None:
        self.hand(data.draw(st.sampled_from(self.ready())))

    def teardown(self) -> None:
        if not hasattr(self, "lanes"):
            return
        for channel, lane in enumerate(self.lanes):
            if not lane.ended:
                self.arrive(channel, End())
        while ready := self.ready():
            self.hand(ready[0])
        for lane in self.lanes:
            assert not lane.blocked
            assert not lane.queue
            assert lane.handed == lane.arrived
        assert not self.capturing
        self.check_at_the_end()

    def check_at_the_end(self) -> None:
        """A checkpoint whose barriers came on all channels, and that was not given up, was taken."""
        for checkpoint in self.known:
            came = all(checkpoint in lane.barriers for lane in self.lanes)
            if came and checkpoint not in self.aborted | self.cancelled:
                assert checkpoint in self.taken

    # ------------------------------------------------------------ invariants

    @invariant()
    def decided_once(self) -> None:
        if hasattr(self, "taken"):
            assert len(self.taken) == len(set(self.taken))
            assert self.taken == sorted(self.taken)

    # ------------------------------------------------------------ the owner's work

    def barrier(self, checkpoint: int, turned: bool) -> Barrier:
        barrier = self.known.get(checkpoint)
        if barrier is None:
            kind = SnapshotKind.SAVEPOINT if checkpoint % 4 == 0 else SnapshotKind.CHECKPOINT
            timeout = None if kind is SnapshotKind.SAVEPOINT or not self.unaligned else TIMEOUT_MS
            barrier = self.known[checkpoint] = Barrier(checkpoint, self.now_ms, timeout_ms=timeout, kind=kind)
        if turned and self.unaligned and barrier.kind is SnapshotKind.CHECKPOINT:
            return Barrier(checkpoint, barrier.started_ms, Alignment.UNALIGNED, barrier.timeout_ms)
        return barrier

    def pick_open(self, data: st.DataObject) -> int | None:
        channels = [channel for channel, lane in enumerate(self.lanes) if not lane.ended]
        return data.draw(st.sampled_from(channels)) if channels else None

    def ready(self) -> list[int]:
        lanes = getattr(self, "lanes", [])
        return [channel for channel, lane in enumerate(lanes) if lane.queue and not lane.blocked]

    def arrive(self, channel: int, element: Record | Barrier | CancelMarker | End) -> None:
        lane = self.lanes[channel]
        if isinstance(element, Barrier):
            lane.last = element.checkpoint
            lane.barriers[element.checkpoint] = lane.arrived
            if element.alignment is not Alignment.UNALIGNED:
                lane.queue.append(element)
            self.carry_out(self.handler.announced(channel, element, self.now_ms))
            return
        lane.queue.append(element)
        if isinstance(element, Record):
            lane.arrived += 1
            if channel in self.capturing:
                self.captured[self.capturing[channel]][channel] += 1
        elif isinstance(element, CancelMarker):
            lane.last = element.checkpoint
        else:
            lane.ended = True

    def hand(self, channel: int) -> None:
        lane = self.lanes[channel]
        match lane.queue.popleft():
            case Record():
                lane.handed += 1
            case Barrier() as barrier:
                self.carry_out(self.handler.barrier(channel, barrier, self.now_ms))
            case CancelMarker(checkpoint):
                self.carry_out(self.handler.cancelled(channel, checkpoint, self.now_ms))
            case End():
                lane.end_was_handed = True
                self.carry_out(self.handler.ended(channel, self.now_ms))

    def carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case BlockChannel(channel):
                    assert not self.lanes[channel].blocked
                    self.lanes[channel].blocked = True
                case Unblock(channel):
                    assert self.lanes[channel].blocked
                    self.lanes[channel].blocked = False
                case TakeSnapshot():
                    self.take(decision)
                case StopCapture(checkpoint, channel):
                    assert self.capturing.pop(channel) == checkpoint
                case AllBarriers(checkpoint):
                    self.check_captured(checkpoint)
                case GiveUp(checkpoint):
                    self.give_up(checkpoint)

    def take(self, decision: TakeSnapshot) -> None:
        checkpoint = decision.barrier.checkpoint
        assert checkpoint not in self.given_up | self.aborted
        self.taken.append(checkpoint)
        if decision.barrier.alignment is not Alignment.UNALIGNED:
            self.complete.add(checkpoint)
            self.check_aligned(checkpoint)
            return
        assert not self.capturing
        begun = [lane.handed for lane in self.lanes]
        for channel in decision.capture:
            self.capturing[channel] = checkpoint
            for element in self.lanes[channel].queue:
                if isinstance(element, Barrier) and element.checkpoint == checkpoint:
                    break
                begun[channel] += isinstance(element, Record)
        self.captured[checkpoint] = begun

    def check_aligned(self, checkpoint: int) -> None:
        """Just the records before the barriers have been handed on."""
        for lane in self.lanes:
            wanted = lane.barriers.get(checkpoint)
            if wanted is None:
                assert lane.end_was_handed
                wanted = lane.arrived
            assert lane.handed == wanted

    def check_captured(self, checkpoint: int) -> None:
        """What was handed on before the snapshot and what was captured are the records before the barriers."""
        assert checkpoint in self.taken
        assert checkpoint not in self.complete | self.given_up
        self.complete.add(checkpoint)
        for lane, held in zip(self.lanes, self.captured.pop(checkpoint), strict=True):
            wanted = lane.barriers.get(checkpoint)
            if wanted is None:
                assert lane.ended
                wanted = lane.arrived
            assert held == wanted

    def give_up(self, checkpoint: int) -> None:
        assert checkpoint not in self.given_up | self.aborted | self.complete
        self.given_up.add(checkpoint)
        self.captured.pop(checkpoint, None)
        assert checkpoint not in self.capturing.values()
        later = any(seen > checkpoint for lane in self.lanes for seen in lane.barriers)
        assert later or any(marker >= checkpoint for marker in self.cancelled)


class AtLeastOnceOwner(Owner):
    mode = CheckpointingMode.AT_LEAST_ONCE

    def check_aligned(self, checkpoint: int) -> None:
        """No record before a barrier is missing."""
        for lane in self.lanes:
            assert not lane.blocked
            assert lane.handed >= lane.barriers.get(checkpoint, 0)
            assert checkpoint in lane.barriers or lane.end_was_handed


class UnalignedOwner(Owner):
    unaligned = True

    def check_at_the_end(self) -> None:
        """Taken or given up: an unaligned one may have overtaken it."""
        for checkpoint in self.known:
            came = all(checkpoint in lane.barriers for lane in self.lanes)
            if came and checkpoint not in self.aborted | self.cancelled:
                assert checkpoint in self.complete | self.given_up
        assert set(self.taken) <= self.complete | self.given_up | self.aborted


for _owner in (Owner, AtLeastOnceOwner, UnalignedOwner):
    _owner.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

TestAligned = Owner.TestCase
TestAtLeastOnce = AtLeastOnceOwner.TestCase
TestUnaligned = UnalignedOwner.TestCase
