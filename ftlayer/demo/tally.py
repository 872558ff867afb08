"""Figures of a run while it goes on, from what the driver says; the ledger at the end does not use them."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from ftlayer.demo.events import BatchDone, Progress, Restarted, Started
from ftlayer.demo.supervisor import BackAgain, Happening, Killed, WentOn

TOTALS = ("slot restarts", "checkpoints", "failed", "restores")
"""Figures that each driver of a topology counts from 0."""


@dataclass(frozen=True)
class Recovery:
    """One kill: seconds until what was killed ran again, and until the first output behind it was committed."""

    victim: str
    when: str
    back_s: float
    went_on_s: float


@dataclass
class Tally(ABC):
    """The screen's figures, and the kills. ``seen`` lines have been read, ``waiting`` of them wait for a replay."""

    seen: int = 0
    waiting: int = 0
    recoveries: list[Recovery] = field(default_factory=list)
    _killed: str = ""
    _back_s: float = 0.0

    def count(self, happening: Happening) -> None:
        match happening:
            case Killed():
                self._killed = happening.when
            case BackAgain():
                self._back_s = happening.seconds
            case WentOn():
                self.recoveries.append(
                    Recovery(str(happening.victim), self._killed, self._back_s, happening.seconds)
                )

    @abstractmethod
    def figures(self) -> dict[str, str]:
        """Return what is shown, by its heading."""

    @abstractmethod
    def sentence(self) -> str:
        """Return the same in a sentence, for a screen that is no terminal."""

    @abstractmethod
    def summary(self) -> str:
        """Return what it took, in a few words."""

    @abstractmethod
    def values(self) -> dict[str, Any]:
        """Return what it took, as plain values."""


@dataclass
class BatchTally(Tally):
    """Counts of lines of a query so far.

    ``done`` are through, ``dead`` are dead letters; ``retried`` counts replays.
    """

    batches: int = 0
    done: int = 0
    dead: int = 0
    retried: int = 0
    query_restarts: int = 0
    batch_seconds: list[float] = field(default_factory=list)
    _last: int = 0
    _timed_lines: int = 0
    _first_batch: bool = True

    @property
    def lines_per_second(self) -> float:
        """Lines through a second, the first batch of each driver left out (Spark warms up in it)."""
        seconds = sum(self.batch_seconds)
        return self._timed_lines / seconds if seconds else 0.0

    @property
    def p50_batch_s(self) -> float:
        """The median of what a batch takes."""
        return statistics.median(self.batch_seconds) if self.batch_seconds else 0.0

    def count(self, happening: Happening) -> None:
        super().count(happening)
        match happening:
            case BatchDone():
                self._count_batch(happening)
            case Started():
                self._first_batch = True
            case Restarted():
                self.query_restarts += 1

    def _count_batch(self, batch: BatchDone) -> None:
        self.batches += 1
        self._last = batch.batch
        self.done += batch.rows_in - batch.waiting - batch.dead
        self.waiting += batch.waiting - batch.delivered
        self.dead += batch.dead
        self.retried += batch.delivered
        self.seen = self.done + self.waiting + self.dead
        if not self._first_batch:
            self.batch_seconds.append(batch.seconds)
            self._timed_lines += batch.rows_in
        self._first_batch = False

    def figures(self) -> dict[str, str]:
        return {
            "batches": str(self.batches),
            "lines/s": f"{self.lines_per_second:,.0f}",
            "read": f"{self.seen:,}",
            "done": f"{self.done:,}",
            "retried": f"{self.retried:,}",
            "waiting": f"{self.waiting:,}",
            "dead letters": f"{self.dead:,}",
        }

    def sentence(self) -> str:
        return (
            f"batch {self._last}: {self.seen:,} lines read, {self.done:,} done, {self.retried:,} retried, "
            f"{self.waiting:,} waiting, {self.dead:,} dead letters"
        )

    def summary(self) -> str:
        return f"{self.lines_per_second:,.0f} lines/s, {self.p50_batch_s:.2f} s a batch (median)"

    def values(self) -> dict[str, Any]:
        return {
            "lines_per_s": round(self.lines_per_second, 1),
            "p50_batch_s": round(self.p50_batch_s, 3),
            "batches": self.batches,
        }


@dataclass
class TopologyTally(Tally):
    """The figures of a topology: of some the latest value, of `TOTALS` the sum over all drivers."""

    _latest: dict[str, int] = field(default_factory=dict)
    _earlier: dict[str, int] = field(default_factory=dict)

    def count(self, happening: Happening) -> None:
        super().count(happening)
        match happening:
            case Progress():
                self.seen = happening.lines
                self._latest = happening.figures
                self.waiting = self.figure("waiting")
            case Started():
                self._earlier = {name: self.figure(name) for name in TOTALS}
                self._latest = {}

    def figure(self, name: str) -> int:
        """Return a figure; 0 if there is none yet."""
        return self._latest.get(name, 0) + self._earlier.get(name, 0)

    def figures(self) -> dict[str, str]:
        return {"read": f"{self.seen:,}"} | {name: f"{self.figure(name):,}" for name in self._latest}

    def sentence(self) -> str:
        others = [f"{self.figure(name):,} {name}" for name in self._latest]
        return ", ".join([f"{self.seen:,} lines read", *others])

    def summary(self) -> str:
        return f"slots restarted: {self.figure('slot restarts')}"

    def values(self) -> dict[str, Any]:
        return {name.replace(" ", "_"): self.figure(name) for name in TOTALS if name in self._latest}
