"""Who has changed what: a line for each change that somebody asked for, written in the transaction of the change."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence

from ftlayer.common.clock import Now
from ftlayer.errors import StoreDamagedError
from ftlayer.vertex.calls import AuditEntry, AuditPage, ListAudit
from ftlayer.vertex.calls.jobs import Hour, JobDetails
from ftlayer.vertex.rules.state import ShardState
from ftlayer.vertex.store import streams as stored
from ftlayer.vertex.store.key_value import KeyValueStore, ReadTransaction, WriteTransaction

# The last hour in figures: a point every ten seconds, taken when the next call comes, and not by a tick.


STEP_MS = 10_000
POINTS = 360

_SLOTS = POINTS + 1
"""One more than are shown: the step that is under way."""


class Ring:
    """Points of series, by name, for an hour's steps; NaN where there is none. Steps are of the monotone clock."""

    def __init__(self) -> None:
        self._series: dict[str, array[float]] = {}
        self._step = -1

    def put(self, step: int, values: Mapping[str, float]) -> None:
        """Set the points of a step that is not before the last one; a NaN leaves what is there."""
        self._come_to(step)
        for name, value in values.items():
            if not math.isnan(value):
                self._series.setdefault(name, array("d", [math.nan] * _SLOTS))[step % _SLOTS] = value

    def hour(self, now: Now) -> Hour:
        under_way = now.mono_ms // STEP_MS
        self._come_to(under_way)
        order = [step % _SLOTS for step in range(under_way - POINTS, under_way)]
        series = {name: tuple(points[slot] for slot in order) for name, points in self._series.items()}
        return Hour(STEP_MS, now.wall_ms - now.mono_ms % STEP_MS, series)

    def _come_to(self, step: int) -> None:
        for passed in range(max(self._step + 1, step - _SLOTS + 1), step + 1):
            for points in self._series.values():
                points[passed % _SLOTS] = math.nan
        self._step = max(self._step, step)


class VertexHour:
    """The hour of a shard: rates of ``in``, ``done``, ``failed`` and ``died`` records, what it holds, its store."""

    def __init__(self, state: ShardState, store: KeyValueStore, now: Now) -> None:
        self._state = state
        self._store = store
        self._ring = Ring()
        self._step = now.mono_ms // STEP_MS
        self._counted = self._counts()

    def advance(self, now: Now) -> None:
        """Take the points of the steps that are over. Call it before anything else happens at ``now``."""
        under_way = now.mono_ms // STEP_MS
        if under_way == self._step:
            return
        counted = self._counts()
        rates = {name: (counted[name] - self._counted[name]) * 1_000 / STEP_MS for name in counted}
        held = self._held()
        logged_ms = [stream.log_age.since_ms for stream in self._state.streams.values()]
        oldest_ms = min(filter(None, (*self._state.live.oldest_ms().values(), *logged_ms)), default=None)
        for step in range(max(self._step, under_way - _SLOTS), under_way):
            end_ms = now.wall_ms - (now.mono_ms - (step + 1) * STEP_MS)
            age_s = 0.0 if oldest_ms is None else max(end_ms - oldest_ms, 0) / 1_000
            self._ring.put(step, rates | held | {"oldest_seconds": age_s})
            rates = dict.fromkeys(rates, 0.0)
        self._counted = counted
        self._step = under_way

    def hour(self, now: Now) -> Hour:
        """Return the last hour; what was before the start of this incarnation is NaN."""
        self.advance(now)
        return self._ring.hour(now)

    def _counts(self) -> dict[str, int]:
        every = [stream.counters for stream in self._state.streams.values()]
        return {
            "in_per_second": sum(each.persisted + each.ingested for each in every),
            "done_per_second": sum(each.completed + each.delivered_done for each in every),
            "failed_per_second": sum(each.failed for each in every),
            "died_per_second": sum(each.dead for each in every),
        }

    def _held(self) -> dict[str, float]:
        streams = self._state.streams.values()
        return {
            "pending": float(sum(stream.in_flight for stream in streams)),
            "waiting": float(sum(stream.waiting + stream.due_rows for stream in streams)),
            "in_delivery": float(sum(stream.logged for stream in streams)),
            "dead": float(sum(stream.dead for stream in streams)),
            "used_share": self._store.used_share,
        }


class JobHours:
    """The hours of jobs, by owner: in each step the last that was announced."""

    def __init__(self) -> None:
        self._rings: dict[str, Ring] = {}

    def note(self, job: JobDetails, now: Now) -> None:
        self._rings.setdefault(job.owner, Ring()).put(now.mono_ms // STEP_MS, _figures(job))

    def forget(self, owner: str) -> None:
        self._rings.pop(owner, None)

    def hour(self, owner: str, now: Now) -> Hour:
        """Return a job's last hour; without any series where it was not heard since the start."""
        return self._rings.get(owner, Ring()).hour(now)


def _figures(job: JobDetails) -> dict[str, float]:
    watermarks = [each.watermark_ms for each in job.subtasks if each.watermark_ms is not None]
    checkpoints = [(it.ended_ms, it.duration_ms) for it in job.checkpoints if it.ended_ms and not it.failure]
    batches = [(it.at_ms, it.duration_ms) for it in job.batches]
    return {
        "in_per_second": job.rates.get("records_in", math.nan),
        "out_per_second": job.rates.get("records_out", math.nan),
        "done_per_second": job.rates.get("done", math.nan),
        "failed_per_second": job.rates.get("failed", math.nan),
        "busy": max((each.busy for each in job.subtasks), default=math.nan),
        "back_pressured": max((each.back_pressured for each in job.subtasks), default=math.nan),
        "watermark_lag_seconds": max(job.at_ms - min(watermarks), 0) / 1_000 if watermarks else math.nan,
        "queued_bytes": float(sum(each.queued_bytes for each in job.edges)) if job.edges else math.nan,
        "checkpoint_seconds": _longest(checkpoints, job.at_ms),
        "batch_seconds": _longest(batches, job.at_ms),
    }


def _longest(done: Sequence[tuple[int, float]], at_ms: int) -> float:
    """Return how many seconds the longest of those took that ended in the last step, or else the last one."""
    lately = [took_ms for ended_ms, took_ms in done if ended_ms > at_ms - STEP_MS]
    return max(lately or [took_ms for _, took_ms in done[-1:]], default=math.nan) / 1_000


KEEP = 100_000
KEEP_MS = 90 * 24 * 3_600_000
TRIM_AT_ONCE = 1_000
MAX_TEXT = 500
"""Characters of ``which`` and ``outcome``."""


def note(
    txn: WriteTransaction, now: Now, *, who: str, what: str, which: str, count: int, outcome: str
) -> None:
    stored.put_audit(txn, now.wall_ms, [who, what, which[:MAX_TEXT], count, outcome[:MAX_TEXT]])


def page(txn: ReadTransaction, call: ListAudit) -> AuditPage:
    entries: list[AuditEntry] = []
    for key, values in stored.latest_audit(txn, call.after):
        if len(entries) == call.limit:
            return AuditPage(tuple(entries), entries[-1].key)
        try:
            who, what, which, count, outcome = values
        except ValueError as error:
            raise StoreDamagedError(f"an entry of the audit log cannot be read: {error}") from error
        entries.append(AuditEntry(stored.audit_time(key), who, what, which, count, outcome, key))
    return AuditPage(tuple(entries), b"")


def trim(txn: WriteTransaction, now: Now) -> None:
    stored.trim_audit(txn, now.wall_ms - KEEP_MS, KEEP, TRIM_AT_ONCE)
