"""Words for what is known: durations, lists of names, the state of a job."""

from __future__ import annotations

from collections.abc import Sequence

from ftlayer.monitor.views import VertexView
from ftlayer.vertex.calls.jobs import AnnouncedJob


def spoken(milliseconds: int) -> str:
    """Return a duration as people say it: ``12 s``, ``5 min``, ``3 h 20 min``, ``2 days``."""
    seconds = max(milliseconds, 0) // 1_000
    if 0 < milliseconds < 1_000:
        return f"{milliseconds} ms"
    if seconds < 120:
        return f"{seconds} s"
    minutes = seconds // 60
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{hours // 24} days"


def enumerated(names: Sequence[str]) -> str:
    """Return names as a sentence has them: ``a, b and c``. One at least."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def state_of(view: VertexView, announced: AnnouncedJob) -> str:
    """Return a job's state in a word: what its driver said last, or why that need not be so any more.

    These are ``gone`` (its program has ended without a last word), ``killed`` (so was its driver), ``silent`` (its
    driver is not heard) and ``no answer`` (its vertex gives none).
    """
    if announced.job.final:
        return announced.job.state
    if view.is_gone or view.is_killed:
        return view.state
    if announced.is_silent:
        return "silent"
    return announced.job.state if view.is_up else view.state


def pace_of(view: VertexView, announced: AnnouncedJob) -> float | None:
    """Return how many records a second a job takes in; None where it has ended, or is not heard any more."""
    job = announced.job
    is_heard = not job.final and state_of(view, announced) == job.state
    return job.rates.get("records_in") if is_heard else None
