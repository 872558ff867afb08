"""Whether barriers of a job may overtake records, which become part of the checkpoint."""

from __future__ import annotations

from ftlayer.checkpoint.options import CheckpointConfig, CheckpointingMode
from ftlayer.topology.job_graph import JobGraph


def may_overtake(graph: JobGraph, config: CheckpointConfig) -> bool:
    """Whether they may: where the options say so, or where a chain may hold its input for long.

    Not where one checkpoint may begin before another is over, nor, unless it is forced, round a loop.
    """
    if config.unaligned:
        return True
    holds = any(vertex.failures is not None for vertex in graph.vertices)
    loops = any(edge.feedback for edge in graph.edges)
    exact = config.mode is CheckpointingMode.EXACTLY_ONCE
    return holds and exact and config.max_concurrent == 1 and (config.force_unaligned or not loops)
