"""When a bounded job may end, or a group of replays is settled: detecting that nothing happens any more, anywhere.

Two rounds of probes around a look at the vertex, after the two-wave idea of termination detection (Mattern,
"Algorithms for distributed termination detection", 1987): if every slot is quiet in both rounds and did nothing
between them, and the vertex held nothing in between, then no slot has a record, and none is on its way: a record
on its way has a root, and that would be pending.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from ftlayer.runtime.protocol.messages import Heartbeat
from ftlayer.vertex.calls import StreamStatus

# Between two tries (ms): a round trip to slots and vertex takes a millisecond.
RETRY_MS = 50
# Records that wait for their pause are looked for at their time, but at the latest after this (ms).
LONGEST_RETRY_MS = 1_000
# What is pending for so long (ms) while nothing moves is held on purpose: in a join, or by a sink that writes rarely.
HELD_MS = 2_000


@dataclass(frozen=True, slots=True)
class ProbeAll:
    """Send this probe to every slot."""

    number: int


@dataclass(frozen=True, slots=True)
class AskStatus:
    """Ask the vertex what is pending."""

    number: int


@dataclass(frozen=True, slots=True)
class NothingLeft:
    """Everything is done."""


def drained(status: StreamStatus, now_ms: int) -> bool:
    """Whether a job may end with this left in the vertex."""
    return status.drained


class GroupSettled:
    """Whether what was let out has come to its end; other records may be due or wait."""

    def __init__(self) -> None:
        self._pending, self._since_ms = -1, 0

    def __call__(self, status: StreamStatus, now_ms: int) -> bool:
        """Take what the vertex says while no slot has anything to do."""
        if status.pending != self._pending:
            self._pending, self._since_ms = status.pending, now_ms
        return not status.pending or now_ms - self._since_ms >= HELD_MS


def at_rest(status: StreamStatus, now_ms: int) -> bool:
    """Whether slots without anything to do are all that is waited for: yes."""
    return True


class _EndPhase(Enum):
    WATCHING = auto()
    FIRST_ROUND = auto()
    VERTEX_ASKED = auto()
    SECOND_ROUND = auto()
    OVER = auto()


class EndDetection:
    """Told of every heartbeat and answer; says what to do next. Numbers of probes and questions only grow."""

    def __init__(self) -> None:
        self._number = 0
        self._is_empty: Callable[[StreamStatus, int], bool] = drained
        self._not_before_ms = 0
        self._phase = _EndPhase.WATCHING
        self._answers: dict[int, int] = {}
        self._first_round: dict[int, int] = {}

    def restart(self, is_empty: Callable[[StreamStatus, int], bool] = drained) -> None:
        """Begin again: a slot was lost or has begun afresh, or something else is to be found out.

        ``is_empty(status, now_ms)`` says whether the vertex has nothing any more that matters.
        """
        self._phase = _EndPhase.WATCHING
        self._is_empty = is_empty

    def heartbeat(self, slot: int, heartbeat: Heartbeat) -> None:
        if self._phase in (_EndPhase.FIRST_ROUND, _EndPhase.SECOND_ROUND):
            if not heartbeat.quiet:
                self._phase = _EndPhase.WATCHING
            elif heartbeat.probe == self._number:
                self._answers[slot] = heartbeat.activity

    def status(self, number: int, status: StreamStatus, now_ms: int) -> ProbeAll | None:
        """Take the vertex's answer."""
        if self._phase is not _EndPhase.VERTEX_ASKED or number != self._number:
            return None
        if self._is_empty(status, now_ms):
            return self._next_round(_EndPhase.SECOND_ROUND)
        self._phase = _EndPhase.WATCHING
        pause = RETRY_MS if status.pending or status.due else status.next_due_in_ms
        self._not_before_ms = now_ms + min(max(pause, RETRY_MS), LONGEST_RETRY_MS)
        return None

    def advance(
        self, latest: Mapping[int, Heartbeat | None], now_ms: int
    ) -> ProbeAll | AskStatus | NothingLeft | None:
        """Return what to do now. ``latest`` has each running slot's last heartbeat."""
        match self._phase:
            case _EndPhase.WATCHING:
                if now_ms >= self._not_before_ms and all(beat and beat.quiet for beat in latest.values()):
                    self._not_before_ms = now_ms + RETRY_MS
                    return self._next_round(_EndPhase.FIRST_ROUND)
            case _EndPhase.FIRST_ROUND if self._answers.keys() >= latest.keys():
                self._first_round = dict(self._answers)
                self._phase = _EndPhase.VERTEX_ASKED
                return AskStatus(self._number)
            case _EndPhase.SECOND_ROUND if self._answers.keys() >= latest.keys():
                if self._answers == self._first_round:
                    self._phase = _EndPhase.OVER
                    return NothingLeft()
                self._phase = _EndPhase.WATCHING
        return None

    def _next_round(self, phase: _EndPhase) -> ProbeAll:
        self._number += 1
        self._phase = phase
        self._answers = {}
        return ProbeAll(self._number)
