"""What a wrapped stream is made of: its source, and the steps that were asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ftlayer.circuit import Limit
from ftlayer.functions.retry_rules import NO_RULES, RetryRules
from ftlayer.spark.circuits import WHOLE_QUERY
from ftlayer.spark.deliveries.ingest import stream_of_ingest
from ftlayer.spark.layer import FTLayerEngine
from ftlayer.spark.stages.steps import Step, plan_stages

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


@dataclass(frozen=True)
class SourceSpec:
    """The wrapped source: its DataFrame, name and key; or an ingest's; or one resumed by its carriers.

    ``rules`` and ``limit`` are its own, and the layer's where it has none.
    """

    frame: DataFrame
    name: str
    key: tuple[str, ...] = ()
    ingest: str = ""
    carrier: str = ""
    rules: RetryRules = NO_RULES
    limit: Limit | None = None


@dataclass(frozen=True)
class StreamPlan:
    """A source and the steps behind it: what a `TrackedStream` holds, and a `TrackedWriter` runs.

    Attributes:
        schema: the columns behind the last step.
        schemas: the columns behind each step.
        limits: of ``max_failing``, of the operators that have one.
    """

    layer: FTLayerEngine
    source: SourceSpec
    schema: StructType
    steps: tuple[Step, ...] = ()
    schemas: tuple[StructType, ...] = ()
    limits: tuple[tuple[str, Limit], ...] = ()

    @property
    def spark(self) -> SparkSession:
        return self.source.frame.sparkSession

    def then(self, step: Step, schema: StructType) -> StreamPlan:
        """Return the plan with another step, behind which the columns are ``schema``."""
        return replace(self, steps=(*self.steps, step), schemas=(*self.schemas, schema), schema=schema)

    def limited(self, uid: str, limit: Limit) -> StreamPlan:
        """Return the plan with an operator's limit."""
        return replace(self, limits=(*self.limits, (uid, limit)))

    def failing_limits(self) -> dict[str, Limit]:
        """Return how many may fail, by operator; "" for those without a limit of their own."""
        whole = self.source.limit
        return dict(self.limits) | ({} if whole is None else {WHOLE_QUERY: whole})

    def stage_schemas(self) -> tuple[StructType, ...]:
        """Return the columns after each stage of `plan_stages`."""
        schemas = []
        before = [self.source.frame.schema, *self.schemas]
        place = 0
        for stage in plan_stages(self.steps).stages:
            place += len(stage.frame_steps) + len(stage.functions)
            schemas.append(before[place])
        return tuple(schemas)


def stream_of_source(source: SourceSpec, query: str) -> str:
    """Return the name under which the vertex keeps a source's records for a query."""
    return stream_of_ingest(source.ingest) if source.ingest else f"{query}/{source.name}"
