"""All metrics there are: names as Prometheus and OpenTelemetry have them, what they count, and what it means."""

from __future__ import annotations

from ftlayer.vertex.metrics.families import Merge, Metric, MetricKind

_SINCE = "since the start of the vertex"


def _counter(name: str, text: str, of: str = "") -> Metric:
    return Metric(f"ftlayer_{name}", MetricKind.COUNTER, text, of=of)


def _gauge(name: str, text: str, merge: Merge = Merge.SUM, of: str = "") -> Metric:
    return Metric(f"ftlayer_{name}", MetricKind.GAUGE, text, merge, of)


def _histogram(name: str, text: str) -> Metric:
    return Metric(f"ftlayer_{name}", MetricKind.HISTOGRAM, text)


BUILD_INFO = _gauge("build_info", "1, with the version of ftlayer as a label.", Merge.LARGEST)

# ---------------------------------------------------------------- a vertex: records by stream

RECORDS = {
    "persisted": _counter("records_persisted", f"Records in flight that were stored, {_SINCE}.", of="record"),
    "ingested": _counter("records_ingested", f"Records that ingests accepted, {_SINCE}.", of="record"),
    "registered": _counter(
        "records_registered", f"Records that are followed until they are done, {_SINCE}.", of="record"
    ),
    "completed": _counter(
        "records_completed", f"Records in flight that came to be done, {_SINCE}.", of="record"
    ),
    "delivered_done": _counter(
        "records_delivered",
        f"Records delivered to micro-batches that a commit finished, {_SINCE}.",
        of="record",
    ),
    "replayed": _counter(
        "records_replayed", f"Records given out again for another attempt, {_SINCE}.", of="record"
    ),
    "dead": _counter("records_died", f"Records that became dead letters, {_SINCE}.", of="record"),
    "requeued": _counter(
        "records_requeued", f"Dead letters that were given another round of attempts, {_SINCE}.", of="record"
    ),
    "purged": _counter("records_purged", f"Dead letters that were removed, {_SINCE}.", of="record"),
    "recalled": _counter(
        "records_recalled",
        f"Records in flight that became due at once because their task was lost, {_SINCE}.",
        of="record",
    ),
    "recovered": _counter(
        "records_recovered", "Records that were in flight when the vertex started.", of="record"
    ),
    "cancelled_replays": _counter(
        "replays_cancelled",
        f"Records that timed out and came to be done before their replay went out, {_SINCE}.",
        of="record",
    ),
}
"""By the name in `StreamDetails.counters`."""

ATTEMPTS_FAILED = _counter(
    "attempts_failed",
    f"Attempts that ended in a failure, {_SINCE}, by cause: sealed by a micro-batch, reported, or timeout.",
    of="attempt",
)
CAUSES = {"failed_sealed": "sealed", "failed_explicit": "reported", "timed_out": "timeout"}
"""The label ``cause`` by the name in `StreamDetails.counters`."""

PENDING = _gauge("records_pending", "Records in flight, now.", of="record")
PENDING_LIMIT = _gauge(
    "records_pending_limit",
    "Records in flight and in delivery at which intake waits (max_pending).",
    of="record",
)
WAITING = _gauge("records_waiting", "Failed records that wait for their pause or are due, now.", of="record")
IN_DELIVERY = _gauge(
    "records_in_delivery", "Accepted or due records that no micro-batch has committed, now.", of="record"
)
DEAD_LETTERS = _gauge("dead_letters", "Dead letters held, now.", of="record")
OLDEST = _gauge(
    "oldest_record_age_seconds",
    "How long the oldest record that is in flight or waits has been there; 0 where there is none or it is not known.",
    Merge.LARGEST,
)
COMPLETION = _histogram(
    "record_completion_seconds",
    "From the registration of the attempt that completed to its completion, of records in flight.",
)

# ---------------------------------------------------------------- a vertex: itself

EVENTS_IGNORED = _counter(
    "events_ignored",
    f"Events and records that had no effect, {_SINCE}, by kind: late (of records that are not followed any more), "
    "orphan (of records that were never registered), duplicate (records under an id that another record had).",
    of="event",
)
IGNORED = {"late_ignored": "late", "orphans_dropped": "orphan", "duplicate_roots": "duplicate"}
"""The label ``kind`` by the name in `StatsReply.values`."""

VERTEX = {
    "deduplicated_calls": _counter(
        "calls_repeated", f"Calls of clients that came again and had their effect once, {_SINCE}.", of="call"
    ),
    "reading_seconds": _counter(
        "reading_seconds",
        f"How long listings and other questions of tools have kept the rules from everything else, {_SINCE}.",
    ),
    "shards_full": _gauge(
        "shards_full", "Shards whose intake waits for room in the store, or on its disk, now.", of="shard"
    ),
    "used_bytes": _gauge("store_used_bytes", "Bytes of the store's map that are in use, of all shards, now."),
    "used_share": _gauge(
        "store_used_ratio", "Share of the store's map that is in use, of the fullest shard, now."
    ),
    "incarnation": _gauge("store_incarnation", "How often the store was opened, the sum over its shards."),
    "tracked_roots": _gauge("tracked_roots", "Records in flight that the acker follows, now.", of="record"),
    "orphans": _gauge(
        "orphans", "Records of which events came, and which are not registered yet, now.", of="record"
    ),
    "streams": _gauge("streams", "Streams of records that the vertex knows, now.", of="stream"),
    "live_segments": _gauge(
        "live_segments", "Segments of the store that hold records in flight, now.", of="segment"
    ),
}
"""By the name in `StatsReply.values`."""

CIRCUIT_STATE = _gauge(
    "circuit_state", "1 for the state that a circuit breaker is in, 0 for the others.", Merge.LARGEST
)
CIRCUIT_OPENED = _counter(
    "circuit_opened", "How often a circuit breaker has opened, trials that failed included.", of="opening"
)

OTLP_EXPORTS = _counter(
    "otlp_exports",
    "Pushes of metrics to an OpenTelemetry collector since the start of the process, by outcome: done, failed.",
    of="push",
)

# ---------------------------------------------------------------- jobs, as their drivers announce them

JOB_STATE = _gauge("job_state", "1 for the state that a job is in, 0 for the others.", Merge.LARGEST)
JOB_RESTARTS = _counter(
    "job_restarts", "How often something of a job was started again, in this run.", of="restart"
)
JOB_UPTIME = _gauge("job_uptime_seconds", "How long this run of a job has gone on.", Merge.LARGEST)
JOB_SILENT = _gauge(
    "job_silent",
    "1 for a job whose driver has not been heard for 30 s and said no last word, 0 otherwise.",
    Merge.LARGEST,
)

OPERATOR_IN = _counter(
    "operator_records_in", "Records that an operator's chain has taken in this run.", of="record"
)
OPERATOR_OUT = _counter(
    "operator_records_out", "Records that an operator's chain has sent in this run.", of="record"
)
OPERATOR_LATE = _counter(
    "operator_records_late",
    "Records that came to an operator too late: to a join to be kept, to windows or an iteration to go anywhere.",
    of="record",
)
OPERATOR_FAILING = {
    "retried": _counter(
        "operator_records_retried",
        "Attempts behind the first, of records that failed in an operator's chain in this run.",
        of="attempt",
    ),
    "waiting": _gauge(
        "operator_records_waiting",
        "Records that failed in an operator's chain and wait for their next attempt, now.",
        of="record",
    ),
    "dead": _counter(
        "operator_records_died",
        "Records that became dead letters in an operator's chain in this run.",
        of="record",
    ),
    "paused": _gauge(
        "operator_paused",
        "Subtasks of an operator's chain that take no input now, since too many of its records fail or wait.",
        of="subtask",
    ),
}
"""By the name in `ftlayer.vertex.calls.jobs.FAILING`; of chains of barrier mode with a policy for records that fail."""

OPERATOR_BUSY = _gauge(
    "operator_busy_ratio", "Share of the last second in which a subtask of an operator worked.", Merge.LARGEST
)
OPERATOR_BACK_PRESSURED = _gauge(
    "operator_back_pressured_ratio",
    "Share of the last second in which a subtask had input and could not send what becomes of it.",
    Merge.LARGEST,
)
OPERATOR_WATERMARK_LAG = _gauge(
    "operator_watermark_lag_seconds",
    "How far an operator's event time is behind its driver's clock.",
    Merge.LARGEST,
)
SOURCE_LAG = _gauge(
    "source_lag_records",
    "Records of a source's system that a job had not read when the system was asked last.",
    Merge.LARGEST,
    of="record",
)
SOURCE_MISFITS = _counter(
    "source_misfits",
    "Times, names, headers beside the payloads of a job's sources that did not fit in this run: null, or replaced.",
    of="value",
)
SOURCE_AWAY = _gauge(
    "source_away_seconds",
    "For how long a source's system cannot be read, or does not answer; 0 while it can.",
    Merge.LARGEST,
)
EDGE_BYTES = _gauge("edge_queued_bytes", "Bytes that wait at the end of an edge, in one slot.")

BATCHES = _counter("batches", "Micro-batches of a query that have ended in this run.", of="batch")
BATCH_ROWS = {
    "records_in": _counter("batch_rows_read", "Rows of a query's micro-batches in this run.", of="record"),
    "delivered": _counter(
        "batch_rows_from_vertex",
        "Of the rows of micro-batches, those from the vertex: replays, ingested ones.",
        of="record",
    ),
    "failed": _counter(
        "batch_rows_failed", "Records of a query's micro-batches that failed, in this run.", of="record"
    ),
    "dead": _counter(
        "batch_rows_died",
        "Of the records that failed in micro-batches, those that are dead letters.",
        of="record",
    ),
}
"""By the name in `JobDetails.counters`."""
BATCH = _histogram("batch_seconds", "From the begin of a micro-batch to its commit.")
BATCH_PHASE = _histogram("batch_phase_seconds", "A phase of a micro-batch: run, verdict, seal, sink, commit.")

PERSIST = _histogram("persist_seconds", "From a slot's call that stores records to the vertex's answer.")
END_TO_END = _histogram(
    "end_to_end_latency_seconds",
    "From the moment at which a source had read records until a sink was done with them; sampled once a second.",
)
CHECKPOINT = _histogram("checkpoint_seconds", "From the trigger of a checkpoint to its completion.")
CHECKPOINT_PART = _histogram(
    "checkpoint_part_seconds",
    "A part of a subtask's snapshot: start_delay, alignment, sync, async.",
)
CHECKPOINTS = _counter(
    "checkpoints", "Checkpoints and savepoints of this run, by outcome: completed, failed.", of="checkpoint"
)
CHECKPOINT_BYTES = _counter(
    "checkpoint_written_bytes", "Bytes that completed checkpoints of this run have written."
)
LETTERS_UNSENT = _gauge(
    "dead_letters_unsent",
    "Dead letters of a topology in barrier mode that wait to be sent to its vertex, or to be written to a file, now.",
    of="record",
)
CHECKPOINT_FAILURES = _gauge(
    "checkpoint_failures_in_a_row",
    "Checkpoints that have failed since the last one that completed.",
    of="checkpoint",
)

JOB_HISTOGRAMS: dict[str, tuple[Metric, tuple[str, ...], dict[str, str]]] = {
    "persist": (PERSIST, ("source",), {}),
    "end_to_end": (END_TO_END, ("source", "operator"), {}),
    "batch": (BATCH, (), {}),
    **{
        f"batch_{phase}": (BATCH_PHASE, (), {"phase": phase})
        for phase in ("run", "verdict", "seal", "sink", "commit")
    },
    "checkpoint": (CHECKPOINT, (), {}),
    **{
        f"checkpoint_{part}": (CHECKPOINT_PART, ("operator",), {"part": part})
        for part in ("start_delay", "alignment", "sync", "async")
    },
}
"""By the metric in `JobDetails.histograms`: the metric, a label for each part behind a bar, and labels besides."""
