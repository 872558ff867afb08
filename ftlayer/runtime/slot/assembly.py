"""The tasks of a slot, made from its graph in the mode of its job."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import cast

import pyarrow as pa

from ftlayer.checkpoint.snapshots import Restore, SubtaskRestore
from ftlayer.checkpoint.storage.contract import SlotStorage
from ftlayer.handler.handler import FTHandler
from ftlayer.partitioning.key_groups import groups_of
from ftlayer.runtime.acker_mode.slot.vertex_port import OpenedStream
from ftlayer.runtime.acker_mode.task.mode import AckerTaskMode
from ftlayer.runtime.barrier_mode.task.mode import BarrierTaskMode
from ftlayer.runtime.connectors.sinks import open_sink
from ftlayer.runtime.protocol.order import CheckpointPlan, SlotOrder
from ftlayer.runtime.slot.seat import AnyTask
from ftlayer.runtime.task.build import build_task
from ftlayer.runtime.task.contract import TaskKey
from ftlayer.runtime.task.mode import TaskMode
from ftlayer.runtime.task.untracked import UntrackedTaskMode
from ftlayer.state.contract import BackendSpec, CheckpointedBackend
from ftlayer.state.opening import open_backend


def build_tasks(order: SlotOrder, mode: TaskMode) -> dict[TaskKey, AnyTask]:
    """Make all tasks of a slot; raises what `build_task` raises."""
    graph = order.graph
    return {
        (uid, subtask): cast(AnyTask, build_task(graph, uid, subtask, mode))
        for uid, subtask in graph.subtasks_in(order.slot)
    }


def mode_without_checkpoints(order: SlotOrder, run: str, opened: Mapping[str, OpenedStream]) -> TaskMode:
    """Return acker mode, or that of FTStatus.OFF.

    ``run`` names this instance's part in this run of the job: no other instance has the same. ``opened`` is what the
    vertex said of the graph's streams; empty with FTStatus.OFF.
    """
    sinks = partial(open_sink, run=run)
    # Streams of one job are on one shard.
    told = next(iter(opened.values()), None)
    if told is None:
        return UntrackedTaskMode(sinks)
    handler = partial(
        FTHandler, job=order.graph.name, run=run, shard=told.shard, shards=told.shards, exact=told.exact
    )
    return AckerTaskMode(handler, order.options, sinks)


def barrier_mode(
    order: SlotOrder, plan: CheckpointPlan, run: str, restore: Restore | None, storage: SlotStorage
) -> BarrierTaskMode:
    """Return barrier mode. ``restore`` is what the tasks begin with, None for nothing; it lies in ``storage``."""
    graph, config = order.graph, plan.config
    restored = restores_of(restore)

    def open_state(uid: str, subtask: int, keys: Mapping[str, pa.Schema]) -> CheckpointedBackend:
        groups = groups_of(subtask, graph.vertex(uid).parallelism, graph.max_parallelism)
        spec = BackendSpec(groups.start, groups.stop, graph.max_parallelism, keys, config.state_directory)
        location = "" if restore is None else restore.location
        return open_backend(config, spec, restored.get((uid, subtask)), storage, location)

    return BarrierTaskMode(restored, open_state, partial(open_sink, run=run, checkpoint_key=plan.key))


def restores_of(restore: Restore | None) -> dict[TaskKey, SubtaskRestore]:
    """Return what each subtask begins with."""
    return {} if restore is None else {(each.uid, each.subtask): each for each in restore.subtasks}
