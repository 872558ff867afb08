"""What drivers tell of their jobs, as they announce them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ftlayer.vertex.calls.jobs import AnnouncedJob, JobDetails, JobKind
from ftlayer.vertex.metrics import catalogue
from ftlayer.vertex.metrics.families import Families
from ftlayer.vertex.metrics.of_vertex import add_circuits, owner_label

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
        families.add(catalogue.JOB_STATE, float(job.state == state), {**of_job, "state": state})
    families.add(catalogue.JOB_RESTARTS, job.restarts, of_job)
    families.add(catalogue.JOB_UPTIME, max((job.ended_ms or job.at_ms) - job.since_ms, 0) / 1_000, of_job)
    families.add(catalogue.JOB_SILENT, float(announced.is_silent), of_job)
    _add_operators(families, job, labels)
    _add_batches(families, job, labels)
    _add_checkpoints(families, job, labels)
    _add_histograms(families, job, labels)
    if job.mode != "acker":  # the vertex tells of those that it has
        add_circuits(families, {job.owner: job.circuits}, {job.owner: labels})


def _add_operators(families: Families, job: JobDetails, owner: Mapping[str, str]) -> None:
    for each in job.subtasks:
        labels = {**owner, "operator": each.uid, "slot": str(each.slot)}
        families.add(catalogue.OPERATOR_IN, each.records_in, labels)
        families.add(catalogue.OPERATOR_OUT, each.records_out, labels)
        families.add(catalogue.OPERATOR_LATE, each.late, labels)
        families.add(catalogue.OPERATOR_BUSY, each.busy, labels)
        families.add(catalogue.OPERATOR_BACK_PRESSURED, each.back_pressured, labels)
        if each.watermark_ms is not None:
            lag_s = max(job.at_ms - each.watermark_ms, 0) / 1_000
            families.add(catalogue.OPERATOR_WATERMARK_LAG, lag_s, labels)
    for name, metric in catalogue.OPERATOR_FAILING.items():
        for key, count in sorted(job.counters.items()):
            kind, _, uid = key.partition("/")
            if kind == name and uid:
                families.add(metric, count, {**owner, "operator": uid})
    for key, value in sorted(job.counters.items()):
        kind, _, uid = key.partition("/")
        if kind == "lag" and uid:
            families.add(catalogue.SOURCE_LAG, value, {**owner, "source": uid})
        elif kind == "away" and uid:
            families.add(catalogue.SOURCE_AWAY, value / 1_000, {**owner, "source": uid})
    if "misfits" in job.counters:
        families.add(catalogue.SOURCE_MISFITS, job.counters["misfits"], owner)
    for edge in job.edges:
        labels = {**owner, "source": edge.source, "target": edge.target, "slot": str(edge.slot)}
        families.add(catalogue.EDGE_BYTES, edge.queued_bytes, labels)


def _add_batches(families: Families, job: JobDetails, owner: Mapping[str, str]) -> None:
    if job.kind is not JobKind.QUERY:
        return
    families.add(catalogue.BATCHES, job.counters.get("batches", 0), owner)
    for name, metric in catalogue.BATCH_ROWS.items():
        families.add(metric, job.counters.get(name, 0), owner)


def _add_checkpoints(families: Families, job: JobDetails, owner: Mapping[str, str]) -> None:
    totals = job.checkpoint_totals
    if totals is None:
        return
    for outcome, count in (("completed", totals.completed), ("failed", totals.failed)):
        families.add(catalogue.CHECKPOINTS, count, {**owner, "outcome": outcome})
    families.add(catalogue.CHECKPOINT_FAILURES, totals.failures_in_a_row, owner)
    if "checkpoint_bytes" in job.counters:
        families.add(catalogue.CHECKPOINT_BYTES, job.counters["checkpoint_bytes"], owner)
    if "letters_unsent" in job.counters:
        families.add(catalogue.LETTERS_UNSENT, job.counters["letters_unsent"], owner)


def _add_histograms(families: Families, job: JobDetails, owner: Mapping[str, str]) -> None:
    for key, details in sorted(job.histograms.items()):
        name, *parts = key.split("|")
        if name in catalogue.JOB_HISTOGRAMS:
            metric, names, more = catalogue.JOB_HISTOGRAMS[name]
            # A whole has an empty part, and no label for it.
            labels = {**owner, **more, **dict(zip(names, parts, strict=False))}
            families.observe(metric, details.histogram(), labels)
