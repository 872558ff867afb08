"""The tasks of a slot, made from its graph."""

from __future__ import annotations

from typing import cast

from ftlayer.handler.handler import FTHandler, Handler, NonFTHandler
from ftlayer.runtime.connectors.sinks import open_sink
from ftlayer.runtime.order import SlotOrder
from ftlayer.runtime.slot.seat import AnyTask, TaskKey
from ftlayer.runtime.slot.vertex_port import OpenedStream
from ftlayer.runtime.task.build import build_task
from ftlayer.runtime.task.contract import SinkBody
from ftlayer.stream.operators import Sink


def build_tasks(order: SlotOrder, run: str, opened: dict[str, OpenedStream]) -> dict[TaskKey, AnyTask]:
    """Make all tasks of a slot.

    Args:
        order: of the slot.
        run: names this instance's part in this run of the job: no other instance has the same.
        opened: what the vertex said of the graph's streams, which are on one shard; empty with FTStatus.OFF.

    Raises:
        InvalidTopologyError, ConfigError: a chain cannot be run, or its sink cannot be opened.
    """
    graph = order.graph
    # Streams of one job are on one shard.
    told = next(iter(opened.values()), None)

    def handler(uid: str) -> Handler:
        if told is None:
            return NonFTHandler()
        return FTHandler(uid, job=graph.name, run=run, shard=told.shard, shards=told.shards, exact=told.exact)

    def open_sinks(sink: Sink, subtask: int, parallelism: int) -> SinkBody:
        return open_sink(sink, subtask, parallelism, run)

    return {
        (uid, subtask): cast(
            AnyTask,
            build_task(graph, uid, subtask, handler(uid), options=order.options, open_sink=open_sinks),
        )
        for uid, subtask in graph.subtasks_in(order.slot)
    }
