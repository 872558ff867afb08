"""All metrics there are: names as Prometheus and OpenTelemetry have them, what they count, and what it means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ftlayer.common.rules.circuit import CircuitState, CircuitStatus
from ftlayer.common.rules.histogram import Histogram
from ftlayer.vertex.calls import StatsReply, StreamDetails, StreamList
from ftlayer.vertex.calls.jobs import AnnouncedJob, JobDetails, JobKind

Labels = tuple[tuple[str, str], ...]


_UNITS = {"_seconds": "s", "_bytes": "By", "_ratio": "1"}


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Merge(StrEnum):
    """What becomes of two values with the same labels: of two queries of one name, of two subtasks in one slot."""

    SUM = "sum"
    LARGEST = "largest"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, its name without a counter's ``_total``. Durations are seconds, sizes bytes, ratios 0 to 1.

    Names end so; ``of`` is what is counted otherwise, in the singular.
    """

    name: str
    kind: MetricKind
    text: str
    merge: Merge = Merge.SUM
    of: str = ""

    @property
    def unit(self) -> str:
        """The unit as UCUM has it, for OpenTelemetry; "" where there is none."""
        for ending, unit in _UNITS.items():
            if self.name.endswith(ending):
                return unit
        return f"{{{self.of}}}" if self.of else ""


class Families:
    """Samples by metric, in the order in which metrics first came. Those with the same labels become one."""

    def __init__(self) -> None:
        self._values: dict[Metric, dict[Labels, float]] = {}
        self._histograms: dict[Metric, dict[Labels, Histogram]] = {}

    def add(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Add a sample of a counter or gauge; an empty label is left out."""
        samples = self._values.setdefault(metric, {})
        key = _key(labels)
        before = samples.get(key)
        if before is None:
            samples[key] = value
        elif metric.merge is Merge.LARGEST:
            samples[key] = max(before, value)
        else:
            samples[key] = before + value

    def observe(self, metric: Metric, histogram: Histogram, labels: Mapping[str, str]) -> None:
        """Add a histogram; one of other bounds (of another ftlayer) is left out, as is an empty label."""
        samples = self._histograms.setdefault(metric, {})
        key = _key(labels)
        mine = samples.setdefault(key, Histogram(histogram.bounds))
        if mine.bounds == histogram.bounds:
            mine.merge(histogram)

    def values(self) -> Iterator[tuple[Metric, list[tuple[dict[str, str], float]]]]:
        for metric, samples in self._values.items():
            yield metric, [(dict(labels), value) for labels, value in samples.items()]

    def histograms(self) -> Iterator[tuple[Metric, list[tuple[dict[str, str], Histogram]]]]:
        for metric, samples in self._histograms.items():
            yield metric, [(dict(labels), histogram) for labels, histogram in samples.items()]


def _key(labels: Mapping[str, str]) -> Labels:
    return tuple(sorted((name, value) for name, value in labels.items() if value))


_SINCE = "since the start of the vertex"


def _counter(name: str, text: str, of: str = "") -> Metric:
    return Metric(f"ftlayer_{name}", MetricKind.COUNTER, text, of=of)


def _gauge(name: str, text: str, merge: Merge = Merge.SUM, of: str = "") -> Metric:
    return Metric(f"ftlayer_{name}", MetricKind.GAUGE, text, merge, of)


def _histogram(name: str, text: str) -> Metric:
    return Metric(f"ftlayer_{name}", MetricKind.HISTOGRAM, text)


BUILD_INFO = _gauge("build_info", "1, with the version of ftlayer as a label.", Merge.LARGEST)

RECORDS = {
    name: _counter(metric, f"{text}, {_SINCE}.", of="record")
    for name, metric, text in (
        ("persisted", "records_persisted", "Records in flight that were stored"),
        ("ingested", "records_ingested", "Records that ingests accepted"),
        ("registered", "records_registered", "Records that are followed until they are done"),
        ("completed", "records_completed", "Records in flight that came to be done"),
        ("delivered_done", "records_delivered", "Records delivered to micro-batches that a commit finished"),
        ("replayed", "records_replayed", "Records given out again for another attempt"),
        ("dead", "records_died", "Records that became dead letters"),
        ("requeued", "records_requeued", "Dead letters that were given another round of attempts"),
        ("purged", "records_purged", "Dead letters that were removed"),
        (
            "recalled",
            "records_recalled",
            "Records in flight that became due at once because their task was lost",
        ),
        (
            "cancelled_replays",
            "replays_cancelled",
            "Records that timed out and came to be done before their replay went out",
        ),
    )
} | {
    "recovered": _counter(
        "records_recovered", "Records that were in flight when the vertex started.", of="record"
    )
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
    "checkpoint_part_seconds", "A part of a subtask's snapshot: start_delay, alignment, sync, async."
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


OwnerLabels = Mapping[str, Mapping[str, str]]
"""By owner: the label with the name that people gave, ``query`` or ``topology``."""


def owner_labels(streams: StreamList) -> OwnerLabels:
    return {each.owner: owner_label(each.kind, each.title) for each in streams.streams if each.owner}


def owner_label(kind: JobKind | None, name: str) -> dict[str, str]:
    """Return the label that names an owner; an ingest that no query reads has none."""
    return {"query" if kind is JobKind.QUERY else "topology": name} if name else {}


def add_build(families: Families, version: str) -> None:
    families.add(BUILD_INFO, 1, {"version": version})


def add_vertex(families: Families, stats: StatsReply, streams: StreamList, version: str, now_ms: int) -> None:
    """Add the samples of a vertex. Streams of which nothing is held and nothing was seen are left out."""
    add_build(families, version)
    for name, metric in VERTEX.items():
        families.add(metric, stats.values[name], {})
    for name, kind in IGNORED.items():
        families.add(EVENTS_IGNORED, stats.values[name], {"kind": kind})
    for stream in streams.streams:
        if _is_shown(stream):
            _add_stream(families, stream, now_ms)
    add_circuits(families, stats.circuits, owner_labels(streams))


def add_circuits(
    families: Families, circuits: Mapping[str, Mapping[str, CircuitStatus]], owners: OwnerLabels
) -> None:
    """Add circuit breakers, by owner and by name (of an operator, "" for all others)."""
    for owner, by_name in sorted(circuits.items()):
        for name, status in sorted(by_name.items()):
            labels = {**owners.get(owner, {"topology": owner}), "circuit": name}
            families.add(CIRCUIT_OPENED, status.opened, labels)
            for state in CircuitState:
                value = float(status.state is state)
                families.add(CIRCUIT_STATE, value, {**labels, "state": state})


def _is_shown(stream: StreamDetails) -> bool:
    """A store keeps the streams of queries that are long gone: each would be forty series of zeros."""
    held = stream.pending + stream.waiting + stream.in_delivery + stream.dead
    return bool(held or any(stream.counters.values()))


def _add_stream(families: Families, stream: StreamDetails, now_ms: int) -> None:
    labels = {**owner_label(stream.kind, stream.title), "source": stream.source}
    for name, metric in RECORDS.items():
        families.add(metric, stream.counters[name], labels)
    for name, cause in CAUSES.items():
        families.add(ATTEMPTS_FAILED, stream.counters[name], {**labels, "cause": cause})
    families.add(PENDING, stream.pending, labels)
    families.add(PENDING_LIMIT, stream.max_pending, labels)
    families.add(WAITING, stream.waiting, labels)
    families.add(IN_DELIVERY, stream.in_delivery, labels)
    families.add(DEAD_LETTERS, stream.dead, labels)
    age_ms = max(now_ms - stream.oldest_ms, 0) if stream.oldest_ms else 0
    families.add(OLDEST, age_ms / 1_000, labels)
    if stream.completion is not None:
        families.observe(COMPLETION, stream.completion.histogram(), labels)


SHOWN_AFTER_END_MS = 300_000
"""A job that is over, or whose driver is silent, is told of for so long: long enough for an alert to see it."""

STATES = {
    JobKind.TOPOLOGY: (
        "starting",
        "initializing",
        "running",
        "recovering",
        "isolating",
        "draining",
        "stopping",
        "ending",
        "ended",
        "cancelled",
        "failed",
    ),
    JobKind.QUERY: ("running", "restarting", "ended", "failed"),
}
"""The states of `JobDetails.state`: each is a series, so that one that is left goes to 0."""


def is_shown(job: AnnouncedJob) -> bool:
    """Whether a job is told of: it is alive, or has been over for less than `SHOWN_AFTER_END_MS`."""
    return job.heard_ago_ms < SHOWN_AFTER_END_MS


def add_jobs(families: Families, jobs: Iterable[AnnouncedJob]) -> None:
    """Add the samples of jobs that are told of; they are as `GetJob` gives them."""
    for announced in jobs:
        if is_shown(announced):
            _add_job(families, announced)


def _add_job(families: Families, announced: AnnouncedJob) -> None:
    job = announced.job
    labels = owner_label(job.kind, job.name)
    of_job = {**labels, "kind": str(job.kind)}
    for state in dict.fromkeys((*STATES[job.kind], job.state)):
        families.add(JOB_STATE, float(job.state == state), {**of_job, "state": state})
    families.add(JOB_RESTARTS, job.restarts, of_job)
    families.add(JOB_UPTIME, max((job.ended_ms or job.at_ms) - job.since_ms, 0) / 1_000, of_job)
    families.add(JOB_SILENT, float(announced.is_silent), of_job)
    _add_operators(families, job, labels)
    _add_batches(families, job, labels)
    _add_checkpoints(families, job, labels)
    _add_histograms(families, job, labels)
    if job.mode not in ("acker", ""):  # the vertex tells of those that it has
        add_circuits(families, {job.owner: job.circuits}, {job.owner: labels})


def _add_operators(families: Families, job: JobDetails, owner: Mapping[str, str]) -> None:
    for each in job.subtasks:
        labels = {**owner, "operator": each.uid, "slot": str(each.slot)}
        families.add(OPERATOR_IN, each.records_in, labels)
        families.add(OPERATOR_OUT, each.records_out, labels)
        families.add(OPERATOR_LATE, each.late, labels)
        families.add(OPERATOR_BUSY, each.busy, labels)
        families.add(OPERATOR_BACK_PRESSURED, each.back_pressured, labels)
        if each.watermark_ms is not None:
            lag_s = max(job.at_ms - each.watermark_ms, 0) / 1_000
            families.add(OPERATOR_WATERMARK_LAG, lag_s, labels)
    for name, metric in OPERATOR_FAILING.items():
        for key, count in sorted(job.counters.items()):
            kind, _, uid = key.partition("/")
            if kind == name and uid:
                families.add(metric, count, {**owner, "operator": uid})
    for key, value in sorted(job.counters.items()):
        kind, _, uid = key.partition("/")
        if kind == "lag" and uid:
            families.add(SOURCE_LAG, value, {**owner, "source": uid})
        elif kind == "away" and uid:
            families.add(SOURCE_AWAY, value / 1_000, {**owner, "source": uid})
    if "misfits" in job.counters:
        families.add(SOURCE_MISFITS, job.counters["misfits"], owner)
    for edge in job.edges:
        labels = {**owner, "source": edge.source, "target": edge.target, "slot": str(edge.slot)}
        families.add(EDGE_BYTES, edge.queued_bytes, labels)


def _add_batches(families: Families, job: JobDetails, owner: Mapping[str, str]) -> None:
    if job.kind is not JobKind.QUERY:
        return
    families.add(BATCHES, job.counters.get("batches", 0), owner)
    for name, metric in BATCH_ROWS.items():
        families.add(metric, job.counters.get(name, 0), owner)


def _add_checkpoints(families: Families, job: JobDetails, owner: Mapping[str, str]) -> None:
    totals = job.checkpoint_totals
    if totals is None:
        return
    for outcome, count in (("completed", totals.completed), ("failed", totals.failed)):
        families.add(CHECKPOINTS, count, {**owner, "outcome": outcome})
    families.add(CHECKPOINT_FAILURES, totals.failures_in_a_row, owner)
    if "checkpoint_bytes" in job.counters:
        families.add(CHECKPOINT_BYTES, job.counters["checkpoint_bytes"], owner)
    if "letters_unsent" in job.counters:
        families.add(LETTERS_UNSENT, job.counters["letters_unsent"], owner)


def _add_histograms(families: Families, job: JobDetails, owner: Mapping[str, str]) -> None:
    for key, details in sorted(job.histograms.items()):
        name, *parts = key.split("|")
        if name in JOB_HISTOGRAMS:
            metric, names, more = JOB_HISTOGRAMS[name]
            # A whole has an empty part, and no label for it.
            labels = {**owner, **more, **dict(zip(names, parts, strict=False))}
            families.observe(metric, details.histogram(), labels)
