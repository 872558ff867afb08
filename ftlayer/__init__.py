"""Record-level fault tolerance for PySpark streams: the public names."""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ftlayer.checkpoint.custom_storage import CheckpointStorage
from ftlayer.checkpoint.failure_policy import FailurePolicy
from ftlayer.checkpoint.migration import StateMigration
from ftlayer.checkpoint.options import CheckpointConfig, CheckpointingMode, Retention
from ftlayer.config import FTStatus, TopologyOptions
from ftlayer.errors import FTLayerError
from ftlayer.failures import FailException, PermanentFailure, RetryLater, RowsRejected
from ftlayer.java.machine import ensure_java_for_sessions
from ftlayer.restart import ExponentialDelay, FailureRate, FixedDelay, NoRestart

if TYPE_CHECKING:
    from ftlayer.dead_letters.letter import DeadLetter
    from ftlayer.functions.aggregates.calls import Aggregate, count, mean
    from ftlayer.functions.aggregates.calls import max as max
    from ftlayer.functions.aggregates.calls import min as min
    from ftlayer.functions.aggregates.calls import sum as sum
    from ftlayer.functions.context import Context
    from ftlayer.functions.current import CurrentRecord, current_record
    from ftlayer.functions.process import LAST_WATERMARK_MS, CoProcessFunction, ProcessFunction
    from ftlayer.functions.ttl import StateTtl
    from ftlayer.runtime.driver.events import JobState
    from ftlayer.runtime.driver.job import Job
    from ftlayer.runtime.environment import StreamEnvironment
    from ftlayer.spark.facade import FTLayer
    from ftlayer.spark.query.listener import TrackedQueryListener
    from ftlayer.spark.query.supervisor import TrackedQuery
    from ftlayer.spark.tracked import TrackedStream
    from ftlayer.topology.connectors import partitions
    from ftlayer.topology.operators import PushSource
    from ftlayer.topology.streams.data_stream import DataStream
    from ftlayer.topology.streams.keyed_stream import ConnectedStreams, KeyedStream
    from ftlayer.topology.streams.windowed_stream import WindowedStream, session, sliding, tumbling
    from ftlayer.vertex.calls import StreamOptions

__version__ = "0.2.0.dev0"

# Without max, min and sum: ``from ftlayer import *`` hides no built-in.
__all__ = [
    "LAST_WATERMARK_MS",
    "Aggregate",
    "CheckpointConfig",
    "CheckpointStorage",
    "CheckpointingMode",
    "CoProcessFunction",
    "ConnectedStreams",
    "Context",
    "CurrentRecord",
    "DataStream",
    "DeadLetter",
    "ExponentialDelay",
    "FTLayer",
    "FTLayerError",
    "FTStatus",
    "FailException",
    "FailurePolicy",
    "FailureRate",
    "FixedDelay",
    "Job",
    "JobState",
    "KeyedStream",
    "NoRestart",
    "PermanentFailure",
    "ProcessFunction",
    "PushSource",
    "Retention",
    "RetryLater",
    "RowsRejected",
    "StateMigration",
    "StateTtl",
    "StreamEnvironment",
    "StreamOptions",
    "TopologyOptions",
    "TrackedQuery",
    "TrackedQueryListener",
    "TrackedStream",
    "WindowedStream",
    "count",
    "current_record",
    "mean",
    "partitions",
    "session",
    "sliding",
    "tumbling",
]

_MODULES = {
    "LAST_WATERMARK_MS": "ftlayer.functions.process",
    "Aggregate": "ftlayer.functions.aggregates.calls",
    "CoProcessFunction": "ftlayer.functions.process",
    "ConnectedStreams": "ftlayer.topology.streams.keyed_stream",
    "Context": "ftlayer.functions.context",
    "CurrentRecord": "ftlayer.functions.current",
    "DataStream": "ftlayer.topology.streams.data_stream",
    "DeadLetter": "ftlayer.dead_letters.letter",
    "FTLayer": "ftlayer.spark.facade",
    "Job": "ftlayer.runtime.driver.job",
    "JobState": "ftlayer.runtime.driver.events",
    "KeyedStream": "ftlayer.topology.streams.keyed_stream",
    "ProcessFunction": "ftlayer.functions.process",
    "PushSource": "ftlayer.topology.operators",
    "StateTtl": "ftlayer.functions.ttl",
    "StreamEnvironment": "ftlayer.runtime.environment",
    "StreamOptions": "ftlayer.vertex.calls",
    "TrackedQuery": "ftlayer.spark.query.supervisor",
    "TrackedQueryListener": "ftlayer.spark.query.listener",
    "TrackedStream": "ftlayer.spark.tracked",
    "WindowedStream": "ftlayer.topology.streams.windowed_stream",
    "count": "ftlayer.functions.aggregates.calls",
    "current_record": "ftlayer.functions.current",
    "max": "ftlayer.functions.aggregates.calls",
    "mean": "ftlayer.functions.aggregates.calls",
    "min": "ftlayer.functions.aggregates.calls",
    "partitions": "ftlayer.topology.connectors",
    "session": "ftlayer.topology.streams.windowed_stream",
    "sliding": "ftlayer.topology.streams.windowed_stream",
    "sum": "ftlayer.functions.aggregates.calls",
    "tumbling": "ftlayer.topology.streams.windowed_stream",
}


def __getattr__(name: str) -> Any:
    """Load what needs more than the standard library when it is first asked for.

    Spark's Python workers import this package, and most of them have no use for it.
    """
    if name in _MODULES:
        import_module(
            "ftlayer.records.kernels"
        )  # Without the C extension it says so here, not in some worker.
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'ftlayer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__version__"})


# Spark says it of itself at each start, and it is not a user's to mend: ftlayer is tested with pandas 3.
warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning, r"pyspark\.")

# A program makes its Spark session behind its imports; the Java of the extra `java` must be known by then.
ensure_java_for_sessions()
