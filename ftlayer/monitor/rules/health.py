"""How a job, a vertex, or all of them are: ok, look here, or broken, why, and where to go.

Broken: work has stopped, or is about to. Look here: it goes on, and someone should know. Every finding says in a
sentence what was seen; its place is where more is to be seen, and where the way out is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

from ftlayer.common.rules.circuit import CircuitState, CircuitStatus
from ftlayer.monitor.rules.names import VertexView, enumerated, spoken, state_of
from ftlayer.vertex import calls

# What limits a topology is looked for from its ends up: the first chain that is busy all the time and has one before it
# that has to wait. Where it is not busy all the time, it waits for something outside: a service, or a sink.

BUSY = 0.8
BACK_PRESSURED = 0.5
"""Shares of the last second from which a chain counts as busy, and as back-pressured."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The chain ``uid`` limits the job, most of all in ``slot``; ``text`` says so."""

    uid: str
    slot: int
    text: str


def bottleneck(job: calls.JobDetails) -> Bottleneck | None:
    """Return what limits a job; None where nothing does, or where its plan is not known."""
    if job.plan is None or job.final:
        return None
    before = _neighbours((edge.target, edge.source) for edge in job.plan.edges if not edge.feedback)
    for uid in _from_the_ends(job.plan):
        above = [subtask for subtask in job.subtasks if subtask.uid in before.get(uid, ())]
        waits = max(above, key=lambda subtask: subtask.back_pressured, default=None)
        subtasks = [subtask for subtask in job.subtasks if subtask.uid == uid]
        own = max(subtasks, key=lambda subtask: subtask.busy, default=None)
        if own is None or waits is None or not own.back_pressured < BACK_PRESSURED <= waits.back_pressured:
            continue
        why = "" if own.busy >= BUSY else ", so it waits for something outside"
        text = (
            f"{uid} is what limits {job.name}: busy {own.busy:.0%} in slot {own.slot}{why}; {waits.uid} before it "
            f"waits {waits.back_pressured:.0%} of its time"
        )
        return Bottleneck(uid, own.slot, text)
    return None


def _neighbours(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for uid, other in pairs:
        found.setdefault(uid, []).append(other)
    return found


def _from_the_ends(plan: calls.JobPlan) -> Iterator[str]:
    """Give the chains so that each comes behind all that it sends to, an iteration's way back left out."""
    after = _neighbours((edge.source, edge.target) for edge in plan.edges if not edge.feedback)
    given: set[str] = set()
    for node in plan.nodes:
        todo = [node.uid]
        while todo:
            uid = todo[-1]
            ahead = [target for target in after.get(uid, ()) if target not in given and target not in todo]
            if ahead:
                todo.append(ahead[0])
                continue
            todo.pop()
            if uid not in given:
                given.add(uid)
                yield uid


LATELY_MS = 300_000
"""What happened in this time counts as now."""

MINUTE_MS = 60_000
SILENT_MS = 30_000
RESTARTS = 3
FULL_STORE = 0.9
FILLING_STORE = 0.7
FULL_INTAKE = 0.9
STUCK_MS = 60_000
INTERVALS = 3
WATERMARK_LAG = "watermark_lag_seconds"
"""The series of `Hour` that says how far a job's watermark is behind the clock."""

_LEAST_LAG_S = 60.0


class Health(StrEnum):
    OK = "ok"
    LOOK = "look here"
    BROKEN = "broken"

    @property
    def rank(self) -> int:
        return list(Health).index(self)


class Page(StrEnum):
    JOB = "job"
    CHECKPOINTS = "checkpoints"
    DEAD = "dead"
    RECORDS = "records"
    VERTEX = "vertex"


@dataclass(frozen=True, slots=True)
class PageLink:
    """Where to go: a page, and what it is about; "" is all."""

    page: Page
    vertex: str
    owner: str = ""
    stream: str = ""
    operator: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    health: Health
    text: str
    place: PageLink


@dataclass(frozen=True, slots=True)
class Judgement:
    """How something is, and why: the worst first."""

    health: Health
    findings: tuple[Finding, ...] = ()


def together(judgements: Iterable[Judgement]) -> Judgement:
    return _judged(finding for judgement in judgements for finding in judgement.findings)


def overall_health(views: Iterable[VertexView]) -> Judgement:
    """Judge all vertices with their jobs. What two of these say is said once."""
    views = tuple(views)
    judged = list(map(vertex_health, views))
    for view in views:
        for each in view.jobs:
            # Else it is told with its vertex.
            if view.is_up or view.is_gone or each.job.final or each.is_silent:
                judged.append(driver_health(view, each))
    return together(judged)


def job_health(view: VertexView, announced: calls.AnnouncedJob, hour: calls.Hour | None = None) -> Judgement:
    """Judge a job by what its driver said last, and by what its vertex holds of it; with ``hour`` by its watermark."""
    of_records = _judged(_findings_of_records(view, announced.job.owner))
    return together([driver_health(view, announced, hour), of_records])


def driver_health(
    view: VertexView, announced: calls.AnnouncedJob, hour: calls.Hour | None = None
) -> Judgement:
    job = announced.job
    if job.final:
        why = f": {job.last_failure}" if job.last_failure else ""
        text, place = f"{job.name} has failed{why}", PageLink(Page.JOB, view.vertex, job.owner)
        return _judged([Finding(Health.BROKEN, text, place)] if job.state == "failed" else [])
    if state_of(view, announced) != job.state:
        return _judged([_unheard(view, announced)])
    return _judged(
        [
            *_restarts(view.vertex, announced),
            *_circuits(PageLink(Page.JOB, view.vertex, job.owner), job.name, job.circuits),
            *_stuck_functions(view.vertex, job),
            *_sources_away(view.vertex, job),
            *_checkpoints(view.vertex, announced),
            *_died(view.vertex, announced),
            *_failing(view.vertex, job),
            *_watermark(view.vertex, job, hour),
        ]
    )


def _findings_of_records(view: VertexView, owner: str) -> Iterator[Finding]:
    if not view.is_up:
        return
    streams = tuple(stream for stream in view.streams if stream.owner == owner)
    names = {stream.stream for stream in streams}
    groups = tuple(group for group in view.groups if group.stream in names)
    is_only_one = all(group.stream in names for group in _late(view))
    died_lately = view.died_lately if groups and is_only_one else None
    narrowed = replace(view, streams=streams, groups=groups, died_lately=died_lately)
    yield from _dead(narrowed)
    yield from _intake(narrowed)


def vertex_health(view: VertexView) -> Judgement:
    """Judge a vertex by its last answers; its jobs are judged by themselves."""
    if view.is_gone:
        return _judged(_left_behind(view))
    if not view.is_up:
        return _judged(_silent_vertex(view))
    circuits = (
        finding
        for owner, circuits in view.circuits.items()
        for finding in _circuits(PageLink(Page.JOB, view.vertex, owner), owner, circuits)
        if owner not in {announced.job.owner for announced in view.jobs}
    )
    return _judged([*_store(view), *_dead(view), *_intake(view), *circuits, *_index(view)])


def _judged(findings: Iterable[Finding]) -> Judgement:
    ordered = sorted(findings, key=lambda finding: -finding.health.rank)
    return Judgement(ordered[0].health if ordered else Health.OK, tuple(ordered))


# ---------------------------------------------------------------- jobs


def _unheard(view: VertexView, announced: calls.AnnouncedJob) -> Finding:
    job, place = announced.job, PageLink(Page.JOB, view.vertex, announced.job.owner)
    where = f" (process {job.pid} on {job.host})" if job.pid else ""
    ago = spoken(view.heard_ago_ms(announced))
    if view.state == "gone":
        if job.state in ("draining", "ending", "stopping"):
            text = f"{job.name} was {job.state} when it was heard last, {ago} ago, and its program{where} has ended"
            return Finding(Health.OK, text, place)
        text = (
            f"{job.name} was {job.state} when it was heard last, {ago} ago, and its program{where} has ended: start it "
            "again if it is to go on"
        )
        return Finding(Health.LOOK, text, place)
    if view.state == "killed":
        text = f"{job.name} was {job.state} when it was heard last, {ago} ago: its driver{where} was killed"
        return Finding(Health.BROKEN, text, place)
    if announced.is_silent:
        text = f"the driver of {job.name}{where} has not been heard for {ago}: if it is gone, start it again"
        if announced.is_gone:
            text = f"the driver of {job.name}{where} has ended without a last word, heard {ago} ago: start it again"
        return Finding(Health.BROKEN, text, place)
    health = Health.BROKEN if view.asked_ms - view.as_of_ms >= SILENT_MS else Health.LOOK
    return Finding(health, f"{job.name} was heard {ago} ago: its vertex gives no answer", place)


def _restarts(vertex: str, announced: calls.AnnouncedJob) -> Iterator[Finding]:
    job, place = announced.job, PageLink(Page.JOB, vertex, announced.job.owner)
    late = [each for each in announced.incidents if each.at_ms > job.at_ms - LATELY_MS]
    for incident in late:
        if incident.kind == "restore":
            yield Finding(Health.LOOK, f"{job.name}: {incident.text}", place)
    times = sum(each.kind == "restart" for each in late)
    if times >= RESTARTS:
        why = f": {job.last_failure}" if job.last_failure else ""
        text = f"{job.name} was started again {times} times in {spoken(LATELY_MS)}{why}"
        yield Finding(Health.BROKEN, text, place)


def _circuits(place: PageLink, name: str, circuits: dict[str, CircuitStatus]) -> Iterator[Finding]:
    for operator, status in sorted(circuits.items()):
        if status.state is CircuitState.CLOSED:
            continue
        what = f"of {operator} in {name}" if operator else f"of {name}"
        trial = f"; the next trial is in {spoken(status.next_trial_in_ms)}" if status.next_trial_in_ms else ""
        text = (
            f"the circuit {what} is {status.state}: {status.failed:,} of {status.records:,} records failed, so work "
            f"pauses{trial}"
        )
        yield Finding(Health.LOOK, text, place)


def _stuck_functions(vertex: str, job: calls.JobDetails) -> Iterator[Finding]:
    for slot in job.slots:
        if slot.busy_ms >= STUCK_MS:
            what = slot.function or slot.busy
            text = f"{what} has not returned for {spoken(slot.busy_ms)} in slot {slot.slot} of {job.name}"
            yield Finding(Health.LOOK, text, PageLink(Page.JOB, vertex, job.owner, operator=slot.busy))


def _sources_away(vertex: str, job: calls.JobDetails) -> Iterator[Finding]:
    for key, away_ms in sorted(job.counters.items()):
        kind, _, uid = key.partition("/")
        if kind == "away" and away_ms >= SILENT_MS:
            why = f": {job.last_failure}" if repr(uid) in job.last_failure else ""
            text = f"source {uid} of {job.name} has not been able to read for {spoken(away_ms)}{why}"
            yield Finding(Health.LOOK, text, PageLink(Page.JOB, vertex, job.owner, operator=uid))


def _checkpoints(vertex: str, announced: calls.AnnouncedJob) -> Iterator[Finding]:
    job = announced.job
    totals = job.checkpoint_totals
    if totals is None:
        return
    place = PageLink(Page.CHECKPOINTS, vertex, job.owner)
    if totals.failures_in_a_row and 0 <= totals.tolerable_failures <= totals.failures_in_a_row:
        count = totals.failures_in_a_row
        text = (
            f"the last {'checkpoint' if count == 1 else f'{count} checkpoints'} of {job.name} failed, and "
            f"{totals.tolerable_failures} may: with the next one the job starts again"
        )
        yield Finding(Health.BROKEN, text, place)
    # None begins before the job runs, and none while it starts again.
    began = (each.at_ms for each in announced.incidents if each.kind == "state")
    since_ms = max(totals.last_completed_ms, job.since_ms, *began)
    if (
        job.state == "running"
        and totals.interval_ms
        and job.at_ms - since_ms > INTERVALS * totals.interval_ms
    ):
        text = (
            f"{job.name} has completed no checkpoint for {spoken(job.at_ms - since_ms)}; one is due every "
            f"{spoken(totals.interval_ms)}"
        )
        yield Finding(Health.LOOK, text, place)


def _died(vertex: str, announced: calls.AnnouncedJob) -> Iterator[Finding]:
    job = announced.job
    if 0 <= announced.died_ago_ms < LATELY_MS:
        text = f"{job.name} has made dead letters in the last {spoken(LATELY_MS)}, {job.dead:,} in this run"
        yield Finding(Health.LOOK, text, PageLink(Page.JOB, vertex, job.owner))


def _failing(vertex: str, job: calls.JobDetails) -> Iterator[Finding]:
    for key, count in sorted(job.counters.items()):
        kind, _, uid = key.partition("/")
        place = PageLink(Page.JOB, vertex, job.owner, operator=uid)
        if kind == "waiting" and uid and count:
            records = "1 record waits" if count == 1 else f"{count:,} records wait"
            yield Finding(Health.LOOK, f"{records} for a retry in {uid} of {job.name}", place)
        elif kind == "paused" and uid and count:
            where = "1 subtask" if count == 1 else f"{count:,} subtasks"
            text = (
                f"{uid} of {job.name} takes no new records in {where}: more fail than max_failing allows, or more wait "
                "than max_waiting does"
            )
            yield Finding(Health.LOOK, text, place)


def _watermark(vertex: str, job: calls.JobDetails, hour: calls.Hour | None) -> Iterator[Finding]:
    """Tell of a watermark that falls behind: each of the last minutes has a least lag above the one before."""
    if hour is None or job.kind is not calls.JobKind.TOPOLOGY:
        return
    a_minute = max(MINUTE_MS // hour.step_ms, 1)
    points = hour.series.get(WATERMARK_LAG, ())[-a_minute * LATELY_MS // MINUTE_MS :]
    minutes = [points[start : start + a_minute] for start in range(0, len(points), a_minute)]
    lags = [min(minute, key=lambda lag: math.inf if math.isnan(lag) else lag) for minute in minutes]
    is_known = len(points) * hour.step_ms >= LATELY_MS and not any(map(math.isnan, lags))
    if is_known and lags[-1] >= _LEAST_LAG_S and all(later > earlier for earlier, later in pairwise(lags)):
        text = (
            f"the watermark of {job.name} falls behind: {spoken(round(lags[-1] * 1_000))} now, "
            f"{spoken(round(lags[0] * 1_000))} {spoken(LATELY_MS)} ago"
        )
        yield Finding(Health.LOOK, text, PageLink(Page.JOB, vertex, job.owner))


# ---------------------------------------------------------------- vertices


def _silent_vertex(view: VertexView) -> Iterator[Finding]:
    place = PageLink(Page.VERTEX, view.vertex)
    if view.is_killed:
        names = sorted(job.job.name for job in view.jobs if not job.job.final)
        ran = f", which ran {enumerated(names)}" if names else ""
        yield Finding(Health.BROKEN, f"vertex {view.vertex}{ran}: {view.failure}", place)
        return
    if not view.as_of_ms:
        yield Finding(Health.LOOK if view.is_unreadable else Health.BROKEN, view.silence, place)
        return
    ago_ms = view.asked_ms - view.as_of_ms
    health = Health.BROKEN if ago_ms >= SILENT_MS else Health.LOOK
    yield Finding(health, f"vertex {view.vertex} was heard {spoken(ago_ms)} ago: {view.failure}", place)


def _left_behind(view: VertexView) -> Iterator[Finding]:
    if dead := int(view.stats.get("dead_letters", 0)):
        letters = "dead letter" if dead == 1 else "dead letters"
        text = (
            f"the program of vertex {view.vertex} has ended and left {dead:,} {letters} in its store: to change "
            "them start it again, or ftlayer serve the directory"
        )
        yield Finding(Health.LOOK, text, PageLink(Page.VERTEX, view.vertex))


def _store(view: VertexView) -> Iterator[Finding]:
    used = view.stats.get("used_share", 0.0)
    place = PageLink(Page.VERTEX, view.vertex)
    if used >= FULL_STORE:
        text = (
            f"the store of {view.vertex} is {used:.0%} full, and takes nothing new: purge dead letters, or start it "
            "with a larger store"
        )
        yield Finding(Health.BROKEN, text, place)
    elif used >= FILLING_STORE:
        text = f"the store of {view.vertex} is {used:.0%} full; from {FULL_STORE:.0%} on it takes nothing new"
        yield Finding(Health.LOOK, text, place)


def _dead(view: VertexView) -> Iterator[Finding]:
    late = _late(view)
    if not late and not view.died_lately:
        return
    operators = sorted({group.operator for group in late if group.operator})
    operator = operators[0] if len(operators) == 1 else ""
    streams = {group.stream for group in late}
    meant = [stream for stream in view.streams if stream.stream in streams]
    titles = sorted({stream.title or stream.owner or stream.stream for stream in meant})
    whose = f" of {enumerated(titles)}" if titles else ""
    where = f", all in {operator}" if operator else f", in {enumerated(operators)}" if operators else ""
    # As the vertex has counted, or else by the groups, of which some may be older.
    since_ms = view.as_of_ms - LATELY_MS
    is_exact = bool(view.died_lately) or all(group.first_seen_ms > since_ms for group in late)
    count = view.died_lately or sum(group.count if group.first_seen_ms > since_ms else 1 for group in late)
    records = f"{'' if is_exact else 'at least '}{count:,} {'record' if count == 1 else 'records'}"
    text = f"{records}{whose} became dead letters in the last {spoken(LATELY_MS)}{where}"
    stream = next(iter(streams)) if len(streams) == 1 else ""
    yield Finding(Health.LOOK, text, PageLink(Page.DEAD, view.vertex, stream=stream, operator=operator))


def _late(view: VertexView) -> list[calls.DeadGroup]:
    return [group for group in view.groups if group.last_seen_ms > view.as_of_ms - LATELY_MS]


def _intake(view: VertexView) -> Iterator[Finding]:
    for stream in view.streams:
        if stream.max_pending and stream.pending >= FULL_INTAKE * stream.max_pending:
            text = (
                f"{stream.title or stream.owner}/{stream.source} has {stream.pending:,} records pending of "
                f"{stream.max_pending:,} that may be: its source has to wait"
            )
            place = PageLink(Page.RECORDS, view.vertex, stream.owner, stream.stream)
            yield Finding(Health.LOOK, text, place)


def _index(view: VertexView) -> Iterator[Finding]:
    if view.indexed < 1:
        text = f"the dead letters of {view.vertex} are being counted anew: {view.indexed:.0%} are"
        yield Finding(Health.LOOK, text, PageLink(Page.DEAD, view.vertex))
