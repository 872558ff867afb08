"""What limits a topology, in words.

Looked for from its ends up: the first chain that is busy all the time and has one before it that has to wait. Where
such a chain is not busy all the time, what is behind it is slow outside: a service that it waits for, or a sink.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ftlayer.vertex.calls.jobs import JobDetails, JobPlan, SubtaskDetails

BUSY = 0.8
BACK_PRESSURED = 0.5
"""Shares of the last second from which a chain counts as busy, and as back-pressured."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The chain ``uid`` limits the job, most of all in ``slot``; ``text`` says so."""

    uid: str
    slot: int
    text: str


def bottleneck(job: JobDetails) -> Bottleneck | None:
    """Return what limits a job; None where nothing does, or where its plan is not known."""
    if job.plan is None or job.final:
        return None
    before = _neighbours((edge.target, edge.source) for edge in job.plan.edges if not edge.feedback)
    for uid in _from_the_ends(job.plan):
        waiting = [
            busiest for above in before.get(uid, ()) if (busiest := _most_waiting(job, above)) is not None
        ]
        own = max(_subtasks(job, uid), key=lambda subtask: subtask.busy, default=None)
        if waiting and own is not None and own.back_pressured < BACK_PRESSURED:
            return _found(job, own, max(waiting, key=lambda subtask: subtask.back_pressured))
    return None


def _found(job: JobDetails, own: SubtaskDetails, waiting: SubtaskDetails) -> Bottleneck:
    is_busy = own.busy >= BUSY
    what = f"busy {own.busy:.0%} in slot {own.slot}"
    why = "" if is_busy else ", so it waits for something outside"
    text = (
        f"{own.uid} is what limits {job.name}: {what}{why}; {waiting.uid} before it waits "
        f"{waiting.back_pressured:.0%} of its time"
    )
    return Bottleneck(own.uid, own.slot, text)


def _subtasks(job: JobDetails, uid: str) -> list[SubtaskDetails]:
    return [subtask for subtask in job.subtasks if subtask.uid == uid]


def _most_waiting(job: JobDetails, uid: str) -> SubtaskDetails | None:
    most = max(_subtasks(job, uid), key=lambda subtask: subtask.back_pressured, default=None)
    return most if most is not None and most.back_pressured >= BACK_PRESSURED else None


def _neighbours(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for uid, other in pairs:
        found.setdefault(uid, []).append(other)
    return found


def _from_the_ends(plan: JobPlan) -> Iterator[str]:
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
