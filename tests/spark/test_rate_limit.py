"""Rate limits of a wrapped query's functions, without Spark."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from ftlayer.errors import ConfigError
from ftlayer.spark.plan.stream_plan import SourceSpec, StreamPlan
from ftlayer.spark.tracked import TrackedStream

V = StructType([StructField("v", LongType())])


async def look_up(record: dict[str, Any]) -> dict[str, Any]:
    return record


STREAM = TrackedStream(StreamPlan(None, SourceSpec(None, "numbers"), V))  # type: ignore[arg-type]
LIMITED: list[Callable[[Any], TrackedStream]] = [
    lambda rate: STREAM.map(dict, V, rate_limit=rate),
    lambda rate: STREAM.flat_map(dict, V, rate_limit=rate),
    lambda rate: STREAM.filter(dict, rate_limit=rate),
    lambda rate: STREAM.map_async(look_up, V, rate_limit=rate),
]


@pytest.mark.parametrize("limited", LIMITED)
@pytest.mark.parametrize("rate", [100, 0.5, None])
def test_it_reaches_the_step(limited: Callable[[Any], TrackedStream], rate: float | None) -> None:
    (step,) = limited(rate)._plan.steps
    assert step.rate_limit == rate  # type: ignore[union-attr]


@pytest.mark.parametrize("limited", LIMITED)
@pytest.mark.parametrize("rate", [0, -1, 0.0001, 2e9, math.inf, math.nan, True, "100/s"])
def test_what_is_no_rate_is_refused_at_once(limited: Callable[[Any], TrackedStream], rate: Any) -> None:
    with pytest.raises(ConfigError, match=r"(dict|look_up): rate_limit: expected a number from 0\.001"):
        limited(rate)
