"""Record-level fault tolerance for PySpark streams: the public names."""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ftlayer.checkpoint.custom_storage import CheckpointStorage, FileStatus, StoredOutput
from ftlayer.checkpoint.options import (
    CheckpointConfig,
    CheckpointingMode,
    FailurePolicy,
    Retention,
    StateMigration,
)
from ftlayer.common.failures import FailException, PermanentFailure, RetryLater, RowsRejected
from ftlayer.common.java import ensure_java_for_sessions
from ftlayer.common.rules.restart import ExponentialDelay, FailureRate, FixedDelay, NoRestart, RestartStrategy
from ftlayer.config import FTStatus, TopologyOptions
from ftlayer.errors import FTLayerError

if TYPE_CHECKING:
    from ftlayer.checkpoint.dead_letters.letter import DeadLetter
    from ftlayer.checkpoint.dead_letters.reader import DeadLetterReader
    from ftlayer.checkpoint.snapshots import Checkpoint
    from ftlayer.checkpoint.storage.loading import JobResult
    from ftlayer.common.rules.circuit import CircuitStatus
    from ftlayer.functions.aggregate_calls import Aggregate, count, mean
    from ftlayer.functions.aggregate_calls import max as max
    from ftlayer.functions.aggregate_calls import min as min
    from ftlayer.functions.aggregate_calls import sum as sum
    from ftlayer.functions.current import CurrentRecord, current_record
    from ftlayer.functions.handles import (
        AggregatingHandle,
        ListHandle,
        MapHandle,
        ReducingHandle,
        ValueHandle,
    )
    from ftlayer.functions.keyed import StateTtl
    from ftlayer.functions.process import (
        LAST_WATERMARK_MS,
        Context,
        CoProcessFunction,
        KeyTimers,
        ProcessFunction,
    )
    from ftlayer.functions.windows import Window
    from ftlayer.monitor.console.options import ConsoleProcess
    from ftlayer.runtime.driver.job import Job
    from ftlayer.runtime.driver.rules.events import JobState
    from ftlayer.runtime.driver.rules.job_status import ChainStatus, JobStatus
    from ftlayer.runtime.environment import StreamEnvironment
    from ftlayer.spark.deliveries.ingest_reader import IngestStream
    from ftlayer.spark.facade import FTLayer
    from ftlayer.spark.query.supervisor import TrackedQuery
    from ftlayer.spark.query.writer import TrackedQueryListener, TrackedWriter
    from ftlayer.spark.tracked import TrackedStream
    from ftlayer.topology.connectors import partitions
    from ftlayer.topology.operators import Push, PushSource
    from ftlayer.topology.streams.data_stream import DataStream
    from ftlayer.topology.streams.keyed_stream import ConnectedStreams, IterativeStream, KeyedStream
    from ftlayer.topology.streams.windowed_stream import WindowedStream, session, sliding, tumbling
    from ftlayer.vertex.calls import QueryStatus, StreamOptions, StreamStatus
    from ftlayer.vertex.calls.jobs import (
        BatchDetails,
        CheckpointDetails,
        CheckpointTotals,
        EdgeDetails,
        Incident,
        SlotDetails,
        SubtaskDetails,
    )

__version__ = "0.2.0.dev0"

# Without max, min and sum: ``from ftlayer import *`` hides no built-in.
__all__ = [
    "LAST_WATERMARK_MS",
    "Aggregate",
    "AggregatingHandle",
    "BatchDetails",
    "ChainStatus",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointDetails",
    "CheckpointStorage",
    "CheckpointTotals",
    "CheckpointingMode",
    "CircuitStatus",
    "CoProcessFunction",
    "ConnectedStreams",
    "ConsoleProcess",
    "Context",
    "CurrentRecord",
    "DataStream",
    "DeadLetter",
    "DeadLetterReader",
    "EdgeDetails",
    "ExponentialDelay",
    "FTLayer",
    "FTLayerError",
    "FTStatus",
    "FailException",
    "FailurePolicy",
    "FailureRate",
    "FileStatus",
    "FixedDelay",
    "Incident",
    "IngestStream",
    "IterativeStream",
    "Job",
    "JobResult",
    "JobState",
    "JobStatus",
    "KeyTimers",
    "KeyedStream",
    "ListHandle",
    "MapHandle",
    "NoRestart",
    "PermanentFailure",
    "ProcessFunction",
    "Push",
    "PushSource",
    "QueryStatus",
    "ReducingHandle",
    "RestartStrategy",
    "Retention",
    "RetryLater",
    "RowsRejected",
    "SlotDetails",
    "StateMigration",
    "StateTtl",
    "StoredOutput",
    "StreamEnvironment",
    "StreamOptions",
    "StreamStatus",
    "SubtaskDetails",
    "TopologyOptions",
    "TrackedQuery",
    "TrackedQueryListener",
    "TrackedStream",
    "TrackedWriter",
    "ValueHandle",
    "Window",
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
    name: module
    for module, names in {
        "ftlayer.checkpoint.snapshots": "Checkpoint",
        "ftlayer.checkpoint.storage.loading": "JobResult",
        "ftlayer.common.rules.circuit": "CircuitStatus",
        "ftlayer.monitor.console.options": "ConsoleProcess",
        "ftlayer.checkpoint.dead_letters.letter": "DeadLetter",
        "ftlayer.checkpoint.dead_letters.reader": "DeadLetterReader",
        "ftlayer.functions.aggregate_calls": "Aggregate count max mean min sum",
        "ftlayer.functions.current": "CurrentRecord current_record",
        "ftlayer.functions.handles": "AggregatingHandle ListHandle MapHandle ReducingHandle ValueHandle",
        "ftlayer.functions.keyed": "StateTtl",
        "ftlayer.functions.process": "LAST_WATERMARK_MS Context CoProcessFunction KeyTimers ProcessFunction",
        "ftlayer.functions.windows": "Window",
        "ftlayer.runtime.driver.rules.events": "JobState",
        "ftlayer.runtime.driver.job": "Job",
        "ftlayer.runtime.driver.rules.job_status": "ChainStatus JobStatus",
        "ftlayer.runtime.environment": "StreamEnvironment",
        "ftlayer.spark.deliveries.ingest_reader": "IngestStream",
        "ftlayer.spark.facade": "FTLayer",
        "ftlayer.spark.query.supervisor": "TrackedQuery",
        "ftlayer.spark.query.writer": "TrackedQueryListener TrackedWriter",
        "ftlayer.spark.tracked": "TrackedStream",
        "ftlayer.topology.connectors": "partitions",
        "ftlayer.topology.operators": "Push PushSource",
        "ftlayer.topology.streams.data_stream": "DataStream",
        "ftlayer.topology.streams.keyed_stream": "ConnectedStreams IterativeStream KeyedStream",
        "ftlayer.topology.streams.windowed_stream": "WindowedStream session sliding tumbling",
        "ftlayer.vertex.calls": "QueryStatus StreamOptions StreamStatus",
        "ftlayer.vertex.calls.jobs": "BatchDetails CheckpointDetails CheckpointTotals EdgeDetails Incident SlotDetails "
        "SubtaskDetails",
    }.items()
    for name in names.split()
}


if not TYPE_CHECKING:  # To a type checker each name would be there.

    def __getattr__(name: str) -> Any:
        """Load what needs more than the standard library when it is first asked for.

        Spark's Python workers import this package, and most of them have no use for it.
        """
        if name in _MODULES:
            # Without the C extension it says so here, not in some worker.
            import_module("ftlayer.records.kernels")
            return getattr(import_module(_MODULES[name]), name)
        raise AttributeError(f"module 'ftlayer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__version__"})


# Spark says it of itself at each start, and it is not a user's to mend: ftlayer is tested with pandas 3.
warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning, r"pyspark\.")

# A program makes its Spark session behind its imports; the Java of the extra `java` must be known by then.
ensure_java_for_sessions()
