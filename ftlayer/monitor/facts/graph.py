"""Facts of what a topology runs on: its graph, the operators with their subtasks, its slots, its edges."""

from __future__ import annotations

from ftlayer.monitor.facts.common import Facts, event_time, seconds
from ftlayer.monitor.facts.masking import masked_failure
from ftlayer.vertex.calls.jobs import FAILING, JobDetails, SubtaskDetails


def plan_facts(job: JobDetails) -> Facts:
    """Return the graph of a job whose plan is known."""
    assert job.plan is not None
    return {
        "nodes": [
            {"uid": node.uid, "names": list(node.names), "parallelism": node.parallelism}
            for node in job.plan.nodes
        ],
        "edges": [
            {
                "source": edge.source,
                "target": edge.target,
                "partitioner": edge.partitioner,
                "tag": edge.tag,
                "feedback": edge.feedback,
            }
            for edge in job.plan.edges
        ],
    }


def operator_facts(job: JobDetails) -> list[Facts]:
    """Return the chains with their subtasks: totals of the run, the busiest one's shares, the least watermark.

    A subtask counts from 0 again when its slot is started again, and is not there any more when the job has ended.
    """
    found: dict[str, list[SubtaskDetails]] = {}
    for subtask in job.subtasks:
        found.setdefault(subtask.uid, []).append(subtask)
    names = {} if job.plan is None else {node.uid: list(node.names) for node in job.plan.nodes}
    order = list(names) + [uid for uid in found if uid not in names]
    return [_operator(uid, names.get(uid, []), found.get(uid, []), job) for uid in order]


def _operator(uid: str, names: list[str], subtasks: list[SubtaskDetails], job: JobDetails) -> Facts:
    def total(name: str) -> int:
        counted: int = sum(getattr(subtask, name) for subtask in subtasks)
        return job.counters.get(f"{name}/{uid}", counted)

    marks = [subtask.watermark_ms for subtask in subtasks if subtask.watermark_ms is not None]
    mark = min(marks, default=None)
    return {
        "uid": uid,
        "names": names,
        "parallelism": len(subtasks),
        "records_in": total("records_in"),
        "records_out": total("records_out"),
        "in_per_second": sum(subtask.in_per_s for subtask in subtasks),
        "out_per_second": sum(subtask.out_per_s for subtask in subtasks),
        "busy_ratio": max((subtask.busy for subtask in subtasks), default=0.0),
        "back_pressured_ratio": max((subtask.back_pressured for subtask in subtasks), default=0.0),
        "watermark": None if mark is None else event_time(mark),
        "watermark_lag_seconds": None if mark is None else seconds(job.at_ms - mark),
        "late": total("late"),
        "source_lag_records": job.counters.get(f"lag/{uid}"),
        **{name: job.counters.get(f"{name}/{uid}", 0) for name in FAILING},
        "subtasks": [
            {
                "slot": subtask.slot,
                "records_in": subtask.records_in,
                "records_out": subtask.records_out,
                "in_per_second": subtask.in_per_s,
                "out_per_second": subtask.out_per_s,
                "busy_ratio": subtask.busy,
                "back_pressured_ratio": subtask.back_pressured,
                "watermark": None if subtask.watermark_ms is None else event_time(subtask.watermark_ms),
                "late": subtask.late,
            }
            for subtask in sorted(subtasks, key=lambda subtask: subtask.slot)
        ],
    }


def slot_facts(job: JobDetails, *, mask: bool = False) -> list[Facts]:
    return [
        {
            "slot": slot.slot,
            "state": slot.state,
            "host": slot.host,
            "pid": slot.pid,
            "heartbeat_age_seconds": None if slot.heartbeat_age_ms < 0 else seconds(slot.heartbeat_age_ms),
            "busy": slot.busy,
            "busy_seconds": seconds(slot.busy_ms),
            "function": slot.function,
            "restarts": slot.restarts,
            "failure": masked_failure(slot.failure) if mask else slot.failure,
        }
        for slot in job.slots
    ]


def edge_facts(job: JobDetails) -> list[Facts]:
    """Return what is queued on each edge, of all slots."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for edge in job.edges:
        queued, rows = found.get((edge.source, edge.target), (0, 0))
        found[edge.source, edge.target] = queued + edge.queued_bytes, rows + edge.queued_rows
    return [
        {"source": source, "target": target, "queued_bytes": queued, "queued_rows": rows}
        for (source, target), (queued, rows) in found.items()
    ]
