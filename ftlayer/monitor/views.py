"""What is known of a vertex: its last answers, and of when they are."""

from __future__ import annotations

from dataclasses import dataclass, field

from ftlayer.circuit import CircuitStatus
from ftlayer.vertex.calls.jobs import AnnouncedJob
from ftlayer.vertex.calls.records import DeadGroup, StreamDetails


@dataclass(frozen=True, slots=True)
class VertexView:
    """A vertex, or a board that a driver serves for itself, at its last answer. Times are Unix ms of this machine.

    Attributes:
        vertex: its short name, unique among those that are looked at.
        path: the directory of its store, "" where that is not known.
        is_up: whether it has answered when it was asked last, at ``asked_ms``.
        as_of_ms: when it gave what stands here, 0 if it never did.
        is_gone: its driver has ended, and it with it: there is nothing to ask any more, and nothing wrong.
        is_killed: its driver was killed, and it with it.
        is_stored: it is a directory with what drivers have said last, and ``address`` the directory.
        failure: why it gave no answer, "" while it is up.
        has_records: False for a driver's own board, which keeps no records.
        stats: counters and gauges by name, as `ftlayer.vertex.calls.StatsReply` has them.
        circuits: circuit breakers by name, by topology or query.
        indexed: share of the dead letters that ``groups`` counts.
        died_lately: how many records died in the last 5 minutes; None where that is not known, as behind a restart.
    """

    vertex: str
    address: str
    path: str = ""
    is_up: bool = False
    asked_ms: int = 0
    as_of_ms: int = 0
    is_gone: bool = False
    is_killed: bool = False
    is_stored: bool = False
    failure: str = ""
    has_records: bool = True
    stats: dict[str, float] = field(default_factory=dict)
    circuits: dict[str, dict[str, CircuitStatus]] = field(default_factory=dict)
    jobs: tuple[AnnouncedJob, ...] = ()
    streams: tuple[StreamDetails, ...] = ()
    groups: tuple[DeadGroup, ...] = ()
    indexed: float = 1.0
    died_lately: int | None = None

    def heard_ago_ms(self, announced: AnnouncedJob) -> int:
        """Return how long ago a job of it was heard, by when the vertex was asked last."""
        return announced.heard_ago_ms + max(self.asked_ms - self.as_of_ms, 0)

    @property
    def state(self) -> str:
        """How it is in a word: ``up``, ``no answer``, ``gone``, ``killed``; ``stored`` for a directory."""
        if self.is_gone or self.is_killed:
            return "gone" if self.is_gone else "killed"
        return ("stored" if self.is_stored else "up") if self.is_up else "no answer"
