"""The tasks of a slot, made from its graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import pyarrow as pa

from ftlayer.checkpoint.snapshots import Restore, SubtaskRestore
from ftlayer.checkpoint.storage.contract import SlotStorage
from ftlayer.handler.handler import FTHandler, Handler, NonFTHandler
from ftlayer.partitioning.key_groups import groups_of
from ftlayer.runtime.acker_mode.slot.vertex_port import OpenedStream
from ftlayer.runtime.connectors.sinks import open_sink
from ftlayer.runtime.protocol.order import SlotOrder
from ftlayer.runtime.slot.seat import AnyTask, TaskKey
from ftlayer.runtime.task.build import build_task
from ftlayer.runtime.task.contract import SinkBody
from ftlayer.state.contract import BackendSpec, CheckpointedBackend
from ftlayer.state.opening import open_backend
from ftlayer.topology.operators import Sink


def build_tasks(
    order: SlotOrder,
    run: str,
    opened: dict[str, OpenedStream],
    restore: Restore | None = None,
    storage: SlotStorage | None = None,
) -> dict[TaskKey, AnyTask]:
    """Make all tasks of a slot.

    Args:
        order: of the slot.
        run: names this instance's part in this run of the job: no other instance has the same.
        opened: what the vertex said of the graph's streams, which are on one shard; empty with FTStatus.OFF.
        restore: with checkpoints: what the tasks begin with, None for nothing.
        storage: with checkpoints: where that lies.

    Raises:
        InvalidTopologyError, ConfigError: a chain cannot be run, or its sink cannot be opened.
        CheckpointError: state cannot be restored.
    """
    graph = order.graph
    # Streams of one job are on one shard.
    told = next(iter(opened.values()), None)

    def handler(uid: str) -> Handler:
        if told is None:
            return NonFTHandler()
        return FTHandler(uid, job=graph.name, run=run, shard=told.shard, shards=told.shards, exact=told.exact)

    def open_sinks(sink: Sink, subtask: int, parallelism: int) -> SinkBody:
        key = None if order.checkpoints is None else order.checkpoints.key
        return open_sink(sink, subtask, parallelism, run, key)

    restored = restores_of(restore)

    def open_state(uid: str, subtask: int, keys: Mapping[str, pa.Schema]) -> CheckpointedBackend:
        assert order.checkpoints is not None
        assert storage is not None
        config = order.checkpoints.config
        groups = groups_of(subtask, graph.vertex(uid).parallelism, graph.max_parallelism)
        spec = BackendSpec(groups.start, groups.stop, graph.max_parallelism, keys, config.state_directory)
        location = "" if restore is None else restore.location
        return open_backend(config, spec, restored.get((uid, subtask)), storage, location)

    return {
        (uid, subtask): cast(
            AnyTask,
            build_task(
                graph,
                uid,
                subtask,
                handler(uid),
                options=order.options,
                open_sink=open_sinks,
                restore=restored.get((uid, subtask)),
                open_backend=open_state if graph.checkpointed else None,
            ),
        )
        for uid, subtask in graph.subtasks_in(order.slot)
    }


def restores_of(restore: Restore | None) -> dict[TaskKey, SubtaskRestore]:
    """Return what each subtask begins with."""
    return {} if restore is None else {(each.uid, each.subtask): each for each in restore.subtasks}
