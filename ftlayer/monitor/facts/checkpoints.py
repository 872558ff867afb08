"""Facts of checkpoints: their totals, and each with its parts."""

from __future__ import annotations

from ftlayer.monitor.facts.common import Facts, iso, seconds
from ftlayer.monitor.facts.masking import masked_failure
from ftlayer.vertex.calls.jobs import CheckpointDetails, CheckpointTotals, JobDetails


def checkpoints_facts(job: JobDetails, *, mask: bool = False) -> Facts | None:
    """Return the totals of a job's checkpoints and those that are known, the latest first; null if it takes none."""
    if job.checkpoint_totals is None:
        return None
    latest = sorted(job.checkpoints, key=lambda checkpoint: -checkpoint.number)
    return {
        **_checkpoint_totals(job.checkpoint_totals),
        "items": [checkpoint_facts(checkpoint, mask=mask) for checkpoint in latest],
    }


def _checkpoint_totals(totals: CheckpointTotals) -> Facts:
    return {
        "triggered": totals.triggered,
        "in_progress": totals.in_progress,
        "completed": totals.completed,
        "failed": totals.failed,
        "restored": totals.restored,
        "failures_in_a_row": totals.failures_in_a_row,
        "tolerable_failures": None if totals.tolerable_failures < 0 else totals.tolerable_failures,
        "interval_seconds": seconds(totals.interval_ms) if totals.interval_ms else None,
        "last_completed": iso(totals.last_completed_ms),
        "directory": totals.directory,
        "savepoint_directory": totals.savepoint_directory,
        "retained": list(totals.retained),
    }


def checkpoint_facts(checkpoint: CheckpointDetails, *, mask: bool = False) -> Facts:
    """Return a checkpoint: its sums and longest parts, by operator, and all of its subtasks."""
    uids = dict.fromkeys(part.uid for part in checkpoint.subtasks)
    parts = [
        {
            "operator": part.uid,
            "subtask": part.subtask,
            "start_delay_seconds": seconds(part.start_delay_ms),
            "alignment_seconds": seconds(part.alignment_ms),
            "sync_seconds": seconds(part.sync_ms),
            "async_seconds": seconds(part.async_ms),
            "written_bytes": part.written_bytes,
            "state_bytes": part.state_bytes,
            "in_flight_bytes": part.in_flight_bytes,
            "unaligned": part.unaligned,
        }
        for part in checkpoint.subtasks
    ]
    return {
        "checkpoint": checkpoint.number,
        "kind": checkpoint.kind,
        "state": checkpoint.state,
        "final": checkpoint.final,
        "triggered": iso(checkpoint.triggered_ms),
        "ended": iso(checkpoint.ended_ms),
        "duration_seconds": seconds(checkpoint.duration_ms),
        "acked": len(checkpoint.subtasks),
        "expected": checkpoint.expected,
        "location": checkpoint.location,
        "failure": masked_failure(checkpoint.failure) if mask else checkpoint.failure,
        **_summed(parts),
        "operators": [
            {"operator": uid, **_summed([part for part in parts if part["operator"] == uid])} for uid in uids
        ],
        "subtasks": parts,
    }


def _summed(parts: list[Facts]) -> Facts:
    """Return parts of a checkpoint together: bytes added up, the longest of each duration."""
    durations = ("start_delay_seconds", "alignment_seconds", "sync_seconds", "async_seconds")
    sizes = ("written_bytes", "state_bytes", "in_flight_bytes")
    return {
        **{name: max((part[name] for part in parts), default=0.0) for name in durations},
        **{name: sum(part[name] for part in parts) for name in sizes},
        "unaligned": any(part["unaligned"] for part in parts),
    }
