"""Barrier mode's half in a slot's process: the storage of checkpoints, and the thread that writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from ftlayer.checkpoint.pieces import Piece
from ftlayer.checkpoint.snapshots import Restore, SubtaskRestore
from ftlayer.checkpoint.storage.contract import SlotStorage
from ftlayer.checkpoint.storage.opening import slot_storage
from ftlayer.errors import CheckpointDamagedError
from ftlayer.functions.failures import this_process
from ftlayer.partitioning.key_groups import groups_of
from ftlayer.records.ids import U64Array
from ftlayer.runtime.barrier_mode.slot.barriers import CheckpointParts
from ftlayer.runtime.barrier_mode.slot.in_flight import put_in_flight
from ftlayer.runtime.barrier_mode.slot.instructions import (
    BeginSnapshot,
    CancelSnapshot,
    DropFiles,
    GiveUpSnapshot,
    KeepFiles,
    ReleaseSnapshot,
    SnapshotCaptured,
)
from ftlayer.runtime.barrier_mode.slot.rules import BarrierSlot
from ftlayer.runtime.barrier_mode.slot.snapshotting import SnapshotRunner, stopwatch_ms
from ftlayer.runtime.barrier_mode.slot.suspecting import Suspecting
from ftlayer.runtime.barrier_mode.task.contract import Checkpointed
from ftlayer.runtime.barrier_mode.task.mode import BarrierTaskMode
from ftlayer.runtime.connectors.sinks import open_sink
from ftlayer.runtime.protocol.deaths import Death
from ftlayer.runtime.protocol.messages import Deploy
from ftlayer.runtime.protocol.order import CheckpointPlan
from ftlayer.runtime.slot.instructions import ModeInstruction
from ftlayer.runtime.slot.mode import SlotParts, misplaced
from ftlayer.runtime.slot.shell import SlotContext
from ftlayer.runtime.task.contract import TaskKey
from ftlayer.state.contract import BackendSpec, CheckpointedBackend
from ftlayer.state.opening import open_backend


@dataclass(frozen=True)
class BarrierSlotFactory:
    plan: CheckpointPlan
    restarts_in_place = True

    def instance(self, slot: SlotContext) -> BarrierSlotShell:
        return BarrierSlotShell(self.plan, slot)


@dataclass(frozen=True)
class _Opened:
    """What is there once the slot is deployed."""

    storage: SlotStorage
    checkpointed: Mapping[TaskKey, Checkpointed]


class BarrierSlotShell:
    """`ftlayer.runtime.slot.shell.SlotModeShell` of a job with checkpoints.

    Attributes:
        snapshots: writes them; None before there are tasks.
    """

    keeps_misfits = False
    touch_timeout_ms = None
    tracer = None
    """See `SlotModeShell.tracer`: no record has a root."""

    def __init__(self, plan: CheckpointPlan, slot: SlotContext) -> None:
        self.snapshots: SnapshotRunner | None = None
        self._plan = plan
        self._slot = slot
        self._opened: _Opened | None = None
        self._restored: Restore | None = None  # what it begins with
        self._suspecting = Suspecting(slot, plan.config.state_directory)

    def open(self, deploy: Deploy) -> BarrierTaskMode:
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
        sinks = partial(open_sink, run=self._slot.run_of(deploy), checkpoint_key=plan.key, place=place)
        self._suspecting.begin(deploy)
        tasks = BarrierTaskMode(
            _by_subtask(deploy.restore), partial(self._open_state, storage), sinks, self._suspecting.of, place
        )
        self._opened = _Opened(storage, tasks.checkpointed)
        return tasks

    def rules(self, parts: SlotParts) -> BarrierSlot:
        opened = self._opened
        assert opened is not None
        self.snapshots = SnapshotRunner(
            opened.storage, len(parts.seating.seats), self._slot.tell, self._slot.post
        )
        checkpoints = CheckpointParts(self._plan.config, opened.checkpointed, stopwatch_ms)
        rules = BarrierSlot(checkpoints, parts)
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
            case BeginSnapshot(key, barrier, pending):
                snapshots.begin(key, barrier, pending)
            case SnapshotCaptured(key, checkpoint, channels, times):
                snapshots.captured(key, checkpoint, channels, times)
            case GiveUpSnapshot(key, checkpoint, reason):
                snapshots.give_up(key, checkpoint, reason)
            case CancelSnapshot(key, checkpoint):
                snapshots.cancel(key, checkpoint)
            case ReleaseSnapshot(key, checkpoint):
                snapshots.over(key, checkpoint)
            case KeepFiles(checkpoint):
                snapshots.completed(checkpoint)
            case DropFiles(checkpoint):
                snapshots.aborted(checkpoint)
            case _:
                raise misplaced(instruction)

    def touch(self, roots: list[U64Array]) -> None:
        """See `SlotModeShell.touch`: no record has roots."""

    def deaths(self) -> tuple[Death, ...]:
        return self._suspecting.deaths()

    def damaged(self, error: BaseException) -> int:
        if self._restored is None or not isinstance(error, CheckpointDamagedError):
            return 0
        return self._restored.checkpoint

    def end(self, *, over: bool, stands: int) -> None:
        """See `SlotModeShell.end`: give up what is being written, and what no checkpoint can hold."""
        self._suspecting.end()
        if self._opened is None or self.snapshots is None:
            return
        self.snapshots.close(over=over)
        for key, task in self._opened.checkpointed.items():
            task.discard(stands, self.snapshots.latest_acked(key))

    def close(self) -> None:
        """See `SlotModeShell.close`: `end` has closed everything."""

    def _open_state(
        self, storage: SlotStorage, uid: str, subtask: int, keys: Mapping[str, pa.Schema]
    ) -> CheckpointedBackend:
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
