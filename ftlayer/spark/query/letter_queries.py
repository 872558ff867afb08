"""The queries of this program that read dead letters as a stream, so that a drain can wait for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ftlayer.dead_letters.reader import FORMAT
from ftlayer.spark.query.supervisor import LetterQuery, QuerySupervisor

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


# Between two runs a wrapped query is none of Spark's active ones: its supervisor will start it again.
_wrapped: WeakKeyDictionary[QuerySupervisor, frozenset[str]] = WeakKeyDictionary()


def note_wrapped(query: QuerySupervisor, frame: DataFrame) -> None:
    """Remember a wrapped query if its source has dead letters in it."""
    streams = _streams_of(frame._jdf.queryExecution().analyzed())
    if streams:
        _wrapped[query] = streams


def letter_queries(spark: SparkSession, stream: str) -> list[LetterQuery]:
    """Return the active queries that read the dead letters of ``stream``: wrapped ones, and Spark's of this session."""
    wrapped = [query for query, streams in list(_wrapped.items()) if stream in streams and query.isActive]
    runs = {query.runId for query in wrapped}
    plain = [
        query
        for query in spark.streams.active
        if str(query.runId) not in runs and stream in _streams_of(query._jsq.streamingQuery().analyzedPlan())
    ]
    return [*wrapped, *plain]


def _streams_of(plan: Any) -> frozenset[str]:
    """Return the streams whose dead letters are read in an analyzed plan."""
    leaves = plan.collectLeaves()
    sources = [leaves.apply(place) for place in range(leaves.size())]
    return frozenset(
        name
        for source in sources
        if source.nodeName() == "StreamingRelationV2" and source.sourceName() == FORMAT
        for name in source.extraOptions().get("streams").split("\n")
    )
