"""The same query without fault tolerance: Spark's own plan, with nothing of ours in it but the functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from ftlayer.functions.chains.chain import Chain
from ftlayer.functions.steps import FunctionStep
from ftlayer.spark.stages.steps import FrameStep, StagePlan, Transform
from ftlayer.spark.stages.task import FT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

TRACKED_FT = "struct<root: bigint>"
"""The type of `FT` where a transform sees it (DDL)."""


def plain_rows(source: DataFrame, stages: StagePlan, schemas: Sequence[StructType]) -> DataFrame:
    """Apply the steps to ``source``. An exception of a function fails the query, as in Spark."""
    frame = source
    for stage, schema in zip(stages.stages, schemas, strict=True):
        frame = _frame_steps(frame, stage.frame_steps)
        if stage.functions:
            frame = frame.mapInArrow(_run(stage.functions), schema)
    return _frame_steps(frame, stages.before_sink)


def transform_plain(frame: DataFrame, step: Transform) -> DataFrame:
    """Apply a transform to rows that are not tracked.

    One that names the column `FT` in so many words gets a null there, which is taken off again: Spark's
    optimizer leaves nothing of it in the plan.
    """
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions

    try:
        result: DataFrame = step.function(frame)
    except AnalysisException as error:
        if f"`{FT}`" not in str(error):
            raise
        nothing = functions.lit(None).cast(TRACKED_FT)
        result = step.function(frame.withColumn(FT, nothing)).drop(FT)
    return result


def _frame_steps(frame: DataFrame, steps: Sequence[FrameStep]) -> DataFrame:
    from ftlayer.spark.stages.run import apply_frame_step

    for step in steps:
        frame = transform_plain(frame, step) if isinstance(step, Transform) else apply_frame_step(frame, step)
    return frame


def _run(
    functions: tuple[FunctionStep, ...],
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        chain = Chain(functions)
        for batch in batches:
            yield from chain.run_untracked(batch)

    return run
