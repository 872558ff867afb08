"""Barrier mode's half in a slot's process: the storage of checkpoints, and the thread that writes them."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.snapshots import (
    ChannelState,
    Piece,
    Restore,
    SnapshotTimes,
    SubtaskRestore,
    SubtaskSnapshot,
)
from ftlayer.checkpoint.storage.opening import SlotStorage, slot_storage
from ftlayer.checkpoint.storage.writer import PieceWriter
from ftlayer.common.clock import system_now
from ftlayer.common.printable import described, text_of
from ftlayer.common.rules.restart import is_programs, lasting
from ftlayer.errors import CheckpointDamagedError, CheckpointError, SnapshotCancelledError
from ftlayer.functions.chains.firing import never
from ftlayer.functions.failures import raise_signalled, this_process
from ftlayer.records.partitioning import groups_of
from ftlayer.runtime.barrier_mode.slot.in_flight import CapturedChannel, put_in_flight
from ftlayer.runtime.barrier_mode.slot.rules import barriers
from ftlayer.runtime.barrier_mode.slot.rules.slot_half import BarrierSlot
from ftlayer.runtime.barrier_mode.task.chain_suspects import ChainSuspects
from ftlayer.runtime.barrier_mode.task.mode import BarrierTaskMode, Checkpointed, PendingSnapshot
from ftlayer.runtime.connectors.sinks import open_sink
from ftlayer.runtime.protocol import messages
from ftlayer.runtime.protocol.messages import CheckpointPlan
from ftlayer.runtime.slot.black_box import SlotBox
from ftlayer.runtime.slot.rules.events import Event, ModeInstruction, SnapshotOver
from ftlayer.runtime.slot.rules.mode import SlotContext, SlotModeShell, SlotParts, misplaced
from ftlayer.runtime.task.contract import NO_SUSPECTS, Suspects, TaskKey
from ftlayer.state.contract import BackendSpec
from ftlayer.state.opening import LayeredBackend, open_backend

logger = logging.getLogger(__name__)


# The asynchronous part of a slot's snapshots: a thread that writes them, and says so when they are durable.
#
# One thread for all subtasks of the slot, one after the other: a checkpoint needs all of them in any case, and what is
# written together is synced together.


STOP_WAIT_S = 5.0
"""How long `close` waits for the thread: a write to a storage that does not answer cannot be interrupted."""


@dataclass(eq=False)
class _SubtaskSnapshot:
    """One subtask's part of a checkpoint.

    Attributes:
        cancelled: set by the loop, looked at by the thread.
        snapshot, channels, times: what is written so far; the thread's own.
    """

    key: TaskKey
    barrier: Barrier
    pending: PendingSnapshot
    began_ms: float
    cancelled: bool = False
    snapshot: SubtaskSnapshot | None = None
    channels: tuple[ChannelState, ...] | None = None
    times: SnapshotTimes | None = None


_Job = Callable[[], None]


class SnapshotRunner:
    """Carries out what `ftlayer.runtime.barrier_mode.slot.rules.barriers` says of snapshots, in the loop's thread.

    The subtask has acked when both `PendingSnapshot.write` and `CapturedChannel.write` of each channel are over and
    synced. ``pending`` of each `begin` is released once, in the loop's thread.
    """

    def __init__(
        self,
        storage: SlotStorage,
        subtasks: int,
        send: Callable[[messages.FromSlot], None],
        post: Callable[[Event], None],
    ) -> None:
        """``subtasks`` is how many the slot has; ``send`` reaches the coordinator, ``post`` the loop's mailbox."""
        self._storage = storage
        self._subtasks = subtasks
        self._send, self._post = send, post
        self._parts: dict[tuple[TaskKey, int], _SubtaskSnapshot] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._is_over = False
        # All below belongs to the thread.
        self._unsynced: list[tuple[_SubtaskSnapshot, SubtaskSnapshot]] = []
        self._acked: dict[int, int] = {}
        self._latest: dict[TaskKey, int] = {}
        self._thread = threading.Thread(target=self._run, name="ftlayer-snapshots", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ the loop's side

    def begin(self, key: TaskKey, barrier: Barrier, pending: PendingSnapshot) -> None:
        part = _SubtaskSnapshot(key, barrier, pending, stopwatch_ms())
        self._parts[key, barrier.checkpoint] = part
        self._jobs.put(lambda: self._write(part))

    def captured(
        self, key: TaskKey, checkpoint: int, channels: tuple[CapturedChannel, ...], times: SnapshotTimes
    ) -> None:
        part = self._parts.get((key, checkpoint))
        if part is not None:
            self._jobs.put(lambda: self._write_channels(part, channels, times))

    def give_up(self, key: TaskKey, checkpoint: int, reason: str) -> None:
        self._send(messages.SubtaskDeclined(checkpoint, *key, reason, counts=False))
        self.cancel(key, checkpoint)

    def cancel(self, key: TaskKey, checkpoint: int) -> None:
        part = self._parts.get((key, checkpoint))
        if part is not None and not part.cancelled:
            part.cancelled = True
            # If the thread had nothing to do for it, this is the only place that says that it is over.
            self._jobs.put(lambda: self._over(part))

    def over(self, key: TaskKey, checkpoint: int) -> None:
        part = self._parts.pop((key, checkpoint), None)
        if part is not None:
            part.pending.release()

    def completed(self, checkpoint: int) -> None:
        self._jobs.put(lambda: self._storage.completed(checkpoint))

    def aborted(self, checkpoint: int) -> None:
        self._jobs.put(lambda: self._storage.aborted(checkpoint))

    def close(self, *, over: bool = False) -> None:
        """Give up what is being written, and release everything. ``over``: see `SlotStorage.close`."""
        self._is_over = over
        for part in self._parts.values():
            part.cancelled = True
        self._jobs.put(None)
        self._thread.join(STOP_WAIT_S)
        for key, checkpoint in list(self._parts):
            self.over(key, checkpoint)

    def latest_acked(self, key: TaskKey) -> int:
        """Return the latest checkpoint that a task's part was acknowledged for, 0 for none; behind `close`."""
        return self._latest.get(key, 0)

    # ------------------------------------------------------------ the thread's side

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(job)
        self._storage.close(over=self._is_over)

    def _do(self, job: _Job) -> None:
        try:
            job()
            if self._jobs.empty():
                self._sync()
        except CheckpointError as error:
            # Of what completed or aborted asked for: the files are swept later.
            logger.warning("the storage of checkpoints: %s", error)

    def _write(self, part: _SubtaskSnapshot) -> None:
        def write(writer: PieceWriter) -> None:
            part.snapshot = part.pending.write(writer, lambda: part.cancelled)

        self._try(part, write)

    def _write_channels(
        self, part: _SubtaskSnapshot, channels: tuple[CapturedChannel, ...], times: SnapshotTimes
    ) -> None:
        def write(writer: PieceWriter) -> None:
            uid, subtask = part.key
            written = tuple(channel.write(writer, f"{uid}/{subtask}") for channel in channels)
            part.channels, part.times = written, times

        self._try(part, write)

    def _try(self, part: _SubtaskSnapshot, write: Callable[[PieceWriter], None]) -> None:
        if part.cancelled:
            return
        try:
            write(self._storage.writer(part.barrier))
        except SnapshotCancelledError:
            return
        except BaseException as error:  # noqa: BLE001 - declines the checkpoint, with this reason
            raise_signalled(error)
            self._decline(part, error)
            return
        if part.snapshot is not None and part.channels is not None and part.times is not None:
            in_flight = sum(channel.frames.length for channel in part.channels)
            times = replace(part.times, async_ms=stopwatch_ms() - part.began_ms, in_flight_bytes=in_flight)
            whole = replace(part.snapshot, channels=part.channels, times=times)
            self._unsynced.append((part, _measured(whole, part.barrier.checkpoint)))

    def _sync(self) -> None:
        """Make durable what was written since the last time, and say so."""
        unsynced, self._unsynced = self._unsynced, []
        for checkpoint in sorted({part.barrier.checkpoint for part, _ in unsynced}):
            mine = [(part, whole) for part, whole in unsynced if part.barrier.checkpoint == checkpoint]
            try:
                writer = self._storage.writer(mine[0][0].barrier)
                self._acked[checkpoint] = self._acked.get(checkpoint, 0) + len(mine)
                if self._acked[checkpoint] == self._subtasks:
                    del self._acked[checkpoint]
                    writer.close()
                else:
                    writer.sync()
            except BaseException as error:  # noqa: BLE001 - as above
                raise_signalled(error)
                for part, _ in mine:
                    self._decline(part, error)
                continue
            for part, whole in mine:
                if not part.cancelled:
                    self._latest[part.key] = max(checkpoint, self._latest.get(part.key, 0))
                    self._send(messages.SubtaskAcked(checkpoint, whole))
                self._over(part)

    def _decline(self, part: _SubtaskSnapshot, error: BaseException) -> None:
        logger.warning(
            "checkpoint %d: %s cannot take its part", part.barrier.checkpoint, part.key, exc_info=error
        )
        if not part.cancelled:
            part.cancelled = True
            reason = text_of(error) if isinstance(error, CheckpointError) else described(error)
            final = lasting(error)
            code = "" if final is None else final.code
            declined = messages.SubtaskDeclined(
                part.barrier.checkpoint, *part.key, reason, True, code, is_programs(error)
            )
            self._send(declined)
        self._over(part)

    def _over(self, part: _SubtaskSnapshot) -> None:
        self._post(SnapshotOver(part.key, part.barrier.checkpoint))


def stopwatch_ms() -> float:
    return time.perf_counter_ns() / 1e6


def _measured(snapshot: SubtaskSnapshot, checkpoint: int) -> SubtaskSnapshot:
    keyed = () if snapshot.keyed is None else snapshot.keyed.pieces
    aside = sum(len(item) for state in snapshot.operators for item in state.items)
    aside += sum(len(committable.message) for committable in snapshot.committables)
    aside += snapshot.times.in_flight_bytes
    return replace(
        snapshot,
        state_bytes=aside + sum(part.piece.length for part in keyed),
        written_bytes=aside + sum(part.piece.length for part in keyed if part.checkpoint == checkpoint),
    )


class Suspecting:
    """One instance's. Chains without a failure policy have no suspects."""

    def __init__(self, slot: SlotContext, directory: str | None) -> None:
        """``directory`` is for local files; None: the system's for temporary ones."""
        graph = slot.order.graph
        self.box = SlotBox(
            slot, directory, [vertex.uid for vertex in graph.vertices if vertex.failures is not None]
        )
        self._armed = False
        self._convictions: tuple[messages.Conviction, ...] = ()

    def begin(self, deploy: messages.Deploy) -> None:
        self._convictions = deploy.convictions
        self._armed = self.box.open() and deploy.armed

    def of(self, uid: str) -> Suspects:
        if uid not in self.box.chains:
            return NO_SUSPECTS
        return ChainSuspects(uid, armed=self._armed, convictions=self._convictions, notes=self.box.notes)


@dataclass(frozen=True)
class BarrierSlotFactory:
    plan: CheckpointPlan
    restarts_in_place = True

    def instance(self, slot: SlotContext) -> BarrierSlotShell:
        return BarrierSlotShell(self.plan, slot)


@dataclass(frozen=True)
class _Opened:
    storage: SlotStorage
    checkpointed: Mapping[TaskKey, Checkpointed]


class BarrierSlotShell(SlotModeShell):
    """Of a job with checkpoints.

    Attributes:
        snapshots: writes them; None before there are tasks.
    """

    def __init__(self, plan: CheckpointPlan, slot: SlotContext) -> None:
        self.snapshots: SnapshotRunner | None = None
        self._plan = plan
        self._slot = slot
        self._opened: _Opened | None = None
        self._rules: BarrierSlot | None = None
        self._restored: Restore | None = None  # what it begins with
        self._suspecting = Suspecting(slot, plan.config.state_directory)

    def open(self, deploy: messages.Deploy) -> BarrierTaskMode:
        order, plan = self._slot.order, self._plan
        self._restored = deploy.restore
        storage = slot_storage(
            plan.config,
            order.graph.name,
            plan.run,
            slot=order.slot,
            epoch=deploy.epoch,
            instance=self._slot.instance,
            key=plan.key,
        )
        place = this_process(f"slot {order.slot}")
        sinks = partial(open_sink, run=self._slot.run_of(deploy), checkpoint_key=order.key, place=place)
        self._suspecting.begin(deploy)
        tasks = BarrierTaskMode(
            _by_subtask(deploy.restore),
            partial(self._open_state, storage),
            sinks,
            self._suspecting.of,
            place,
            self._is_interrupted if plan.config.interruptible_timers else never,
        )
        self._opened = _Opened(storage, tasks.checkpointed)
        return tasks

    def rules(self, parts: SlotParts) -> BarrierSlot:
        opened = self._opened
        assert opened is not None
        self.snapshots = SnapshotRunner(
            opened.storage, len(parts.seating.seats), self._slot.tell, self._slot.post
        )
        checkpoints = barriers.CheckpointParts(self._plan.config, opened.checkpointed, stopwatch_ms)
        rules = self._rules = BarrierSlot(checkpoints, parts)
        if self._restored is not None:
            read = partial(_read, opened.storage, self._restored.location)
            put_in_flight(parts.graph, parts.seating, parts.codec, self._restored, read)
        return rules

    def positions(self, key: TaskKey) -> Mapping[str, bytes]:
        restored = _by_subtask(self._restored).get(key)
        return {} if restored is None else restored.positions

    def carry_out(self, instruction: ModeInstruction) -> None:
        snapshots = self.snapshots
        assert snapshots is not None
        match instruction:
            case barriers.BeginSnapshot(key, barrier, pending):
                snapshots.begin(key, barrier, pending)
            case barriers.SnapshotCaptured(key, checkpoint, channels, times):
                snapshots.captured(key, checkpoint, channels, times)
            case barriers.GiveUpSnapshot(key, checkpoint, reason):
                snapshots.give_up(key, checkpoint, reason)
            case barriers.CancelSnapshot(key, checkpoint):
                snapshots.cancel(key, checkpoint)
            case barriers.ReleaseSnapshot(key, checkpoint):
                snapshots.over(key, checkpoint)
            case barriers.KeepFiles(checkpoint):
                snapshots.completed(checkpoint)
            case barriers.DropFiles(checkpoint):
                snapshots.aborted(checkpoint)
            case _:
                raise misplaced(instruction)

    def deaths(self) -> tuple[messages.Death, ...]:
        return self._suspecting.box.deaths()

    def damaged(self, error: BaseException) -> int:
        if self._restored is None or not isinstance(error, CheckpointDamagedError):
            return 0
        return self._restored.checkpoint

    def end(self, *, over: bool, stands: int) -> None:
        """See `SlotModeShell.end`: give up what is being written, and what no checkpoint can hold."""
        self._suspecting.box.close()
        if self._opened is None or self.snapshots is None:
            return
        self.snapshots.close(over=over)
        for key, task in self._opened.checkpointed.items():
            task.discard(stands, self.snapshots.latest_acked(key))

    def _is_interrupted(self) -> bool:
        rules = self._rules
        return rules is not None and rules.interrupts(self._slot.barrier_waits(), system_now().mono_ms)

    def _open_state(
        self, storage: SlotStorage, uid: str, subtask: int, keys: Mapping[str, pa.Schema]
    ) -> LayeredBackend:
        graph, config, restore = self._slot.order.graph, self._plan.config, self._restored
        groups = groups_of(subtask, graph.vertex(uid).parallelism, graph.max_parallelism)
        spec = BackendSpec(groups.start, groups.stop, graph.max_parallelism, keys, config.state_directory)
        location = "" if restore is None else restore.location
        return open_backend(config, spec, _by_subtask(restore).get((uid, subtask)), storage, location)


def _by_subtask(restore: Restore | None) -> dict[TaskKey, SubtaskRestore]:
    return {} if restore is None else {(each.uid, each.subtask): each for each in restore.subtasks}


def _read(storage: SlotStorage, location: str, piece: Piece) -> bytes:
    with storage.open(location, piece) as file:
        return file.read()
