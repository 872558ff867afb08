"""The recorded steps of a wrapped query, and the stages they run as.

A *stage* is one pass over the rows in Spark's Python workers: consecutive functions chained into one
``mapInArrow``. Before it stand the steps that Spark itself runs on DataFrames (repartition, transform).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ftlayer.errors import InvalidTopologyError
from ftlayer.functions.steps import FunctionStep
from ftlayer.records.keyhash import key_column, partition_of, spark_hash

# Key partitioning ahead of Spark's shuffle: a stage sorts its rows into pages by their target partition.
#
# Spark then moves whole pages (`DataFrame.repartitionById`) where it would move rows one by one. The target is
# what Spark's own ``repartition(partitions, *columns)`` gives: pmod of its hash over the columns.


@dataclass(frozen=True)
class Spread:
    """Rows go to the partition that the hash of ``columns`` names, of ``partitions``."""

    columns: tuple[str, ...]
    partitions: int

    def split(self, batches: Sequence[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the rows of ``batches`` (one schema) by partition, in their order; empty ones are left out."""
        if not batches:
            return
        rows = pa.concat_batches(batches)
        targets = partition_of(spark_hash([key_column(rows, name) for name in self.columns]), self.partitions)
        order = np.argsort(targets, kind="stable")
        rows = rows.take(pa.array(order))
        edges = np.searchsorted(targets[order], np.arange(self.partitions + 1))
        for partition in np.flatnonzero(np.diff(edges)):
            start, stop = int(edges[partition]), int(edges[partition + 1])
            yield int(partition), rows.slice(start, stop - start)


@dataclass(frozen=True)
class Repartition:
    """Spark's own repartition, by number, by key, or both.

    ``hashable``: our hash over the columns is Spark's, so that a stage can sort rows by their target.
    """

    partitions: int | None
    columns: tuple[str, ...]
    hashable: bool = False


@dataclass(frozen=True)
class Transform:
    """Spark's own operators on a DataFrame that has the column ``_ft`` beside the user's and must keep it."""

    uid: str
    function: Callable[[Any], Any]
    drops: bool


FrameStep = Repartition | Transform
Step = FunctionStep | FrameStep


@dataclass(frozen=True)
class Stage:
    """Frame steps that Spark runs, then functions chained into one pass."""

    frame_steps: tuple[FrameStep, ...]
    functions: tuple[FunctionStep, ...]

    @property
    def transforms(self) -> tuple[Transform, ...]:
        return tuple(step for step in self.frame_steps if isinstance(step, Transform))


@dataclass(frozen=True)
class StagePlan:
    """The stages of a query, and the repartitions left to do on the way to the sink."""

    stages: tuple[Stage, ...]
    before_sink: tuple[Repartition, ...]

    def key_after(self, number: int) -> Repartition | None:
        """Return the repartition by key that comes right behind a stage, None if something else does."""
        behind: Sequence[FrameStep] = self.before_sink
        if number + 1 < len(self.stages):
            behind = self.stages[number + 1].frame_steps
        first = behind[0] if behind else None
        return first if isinstance(first, Repartition) and first.hashable else None

    @property
    def keeps_source(self) -> bool:
        """Whether rows can fail behind the first stage, which then has to keep its source rows."""
        return len(self.stages) > 1


def plan_stages(steps: Sequence[Step]) -> StagePlan:
    """Cut ``steps`` into stages.

    The first stage is always there, with no functions if need be: it gives the rows their roots. A
    transform at the end gets a stage behind it, so that its result is materialized and counted.
    """
    stages: list[Stage] = []
    frame_steps: list[FrameStep] = []
    functions: list[FunctionStep] = []
    for step in steps:
        if isinstance(step, FrameStep):
            # Rows that get lost are put down to a stage's transforms together: they have to allow the same.
            mixed = isinstance(step, Transform) and any(
                isinstance(other, Transform) and other.drops != step.drops for other in frame_steps
            )
            if functions or not stages or mixed:
                stages.append(Stage(tuple(frame_steps), tuple(functions)))
                frame_steps, functions = [], []
            frame_steps.append(step)
        else:
            functions.append(step)
    if functions or not stages or any(isinstance(step, Transform) for step in frame_steps):
        stages.append(Stage(tuple(frame_steps), tuple(functions)))
        frame_steps = []
    rest = tuple(step for step in frame_steps if isinstance(step, Repartition))
    return StagePlan(tuple(stages), rest)


def check_unique(steps: Sequence[Step], uid: str) -> None:
    """Raise `InvalidTopologyError` where ``uid`` is taken: ids are derived from it."""
    if any(getattr(step, "uid", None) == uid for step in steps):
        raise InvalidTopologyError(
            f"two operators of this query are named {uid!r}; names must differ, since record ids are derived "
            "from them: pass name=… to one of them"
        )
