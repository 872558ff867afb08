"""Attempts of records that are followed as traces: when each began, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ftlayer.common.clock import Now
from ftlayer.records.failures import Failure
from ftlayer.records.ids import U64Array
from ftlayer.records.traced import Sampler
from ftlayer.vertex.store.rows import RowInfo

MAX_OPEN = 1 << 16
"""So many attempts are followed at a time; what begins beyond is not."""


class Outcome(StrEnum):
    """How an attempt ended. ``lost``: with its slot, and the record goes on under another root."""

    COMPLETED = "completed"
    FAILED = "failed"
    DEAD = "dead"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class EndedAttempt:
    """One attempt of a record; times are Unix ms. ``cause`` is None where it completed or was lost."""

    origin: int
    root: int
    number: int
    stream: str
    began_ms: int
    ended_ms: int
    outcome: Outcome
    cause: Failure | None = None


@dataclass(frozen=True, slots=True)
class _Open:
    origin: int
    number: int
    stream: str
    began_ms: int


class FollowedAttempts:
    """Attempts that go on, and those that have ended. A first root says itself whether it is followed."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._open: dict[int, _Open] = {}
        self._replays: dict[int, int] = {}  # of records that are followed: origin → root
        self._replay_roots: U64Array | None = None  # those of `_replays`, until they change
        self._ended: list[EndedAttempt] = []

    def registered(self, stream: str, roots: U64Array, now: Now) -> None:
        for root in roots[self._sampler.mask(roots)].tolist():
            self._begin(root, _Open(root, 1, stream, now.wall_ms))

    def let_out(self, stream: str, info: RowInfo, now: Now) -> None:
        places = np.flatnonzero(self._sampler.mask(info.origins)).tolist()
        for place in places:
            root, origin = int(info.roots[place]), int(info.origins[place])
            before = self._replays.pop(origin, origin)
            if before in self._open:
                self._end(before, Outcome.LOST, now)
            if self._begin(root, _Open(origin, int(info.attempts[place]), stream, now.wall_ms)):
                self._replays[origin] = root
                self._replay_roots = None

    def completed(self, roots: U64Array, now: Now) -> None:
        for root in self._of(roots).tolist():
            self._end(root, Outcome.COMPLETED, now)

    def failed(self, roots: U64Array, causes: Sequence[Failure], dead: Sequence[bool], now: Now) -> None:
        """Attempts have failed, or timed out; ``dead`` says which records get no other one."""
        followed = set(self._of(roots).tolist())
        for root, cause, is_dead in zip(roots.tolist(), causes, dead, strict=True):
            if root in followed:
                self._end(root, Outcome.DEAD if is_dead else Outcome.FAILED, now, cause)

    def take(self) -> list[EndedAttempt]:
        ended, self._ended = self._ended, []
        return ended

    def _begin(self, root: int, attempt: _Open) -> bool:
        if len(self._open) >= MAX_OPEN:
            return False
        self._open[root] = attempt
        return True

    def _end(self, root: int, outcome: Outcome, now: Now, cause: Failure | None = None) -> None:
        attempt = self._open.pop(root, None)
        if attempt is None:
            return
        if self._replays.get(attempt.origin) == root:
            del self._replays[attempt.origin]
            self._replay_roots = None
        self._ended.append(
            EndedAttempt(
                attempt.origin,
                root,
                attempt.number,
                attempt.stream,
                attempt.began_ms,
                now.wall_ms,
                outcome,
                cause,
            )
        )

    def _of(self, roots: U64Array) -> U64Array:
        if not self._open:
            return roots[:0]
        mask = self._sampler.mask(roots)
        if self._replays:
            if self._replay_roots is None:
                self._replay_roots = np.fromiter(self._replays.values(), np.uint64, len(self._replays))
            mask |= np.isin(roots, self._replay_roots)
        found: U64Array = roots[mask]
        return found
