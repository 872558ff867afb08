"""Figures of a run while it goes on, from what the driver says; the ledger at the end does not use them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from ftlayer.demo.events import BatchDone, Restarted, Started
from ftlayer.demo.supervisor import BackAgain, Happening, Killed, WentOn


@dataclass(frozen=True)
class Recovery:
    """One kill: seconds until what was killed ran again, and until the first batch was through."""

    victim: str
    batch: int
    back_s: float
    went_on_s: float


@dataclass
class Tally:
    """Counts of lines so far.

    ``done`` are through, ``waiting`` wait for a replay, ``dead`` are dead letters; ``retried`` counts replays.
    """

    batches: int = 0
    done: int = 0
    waiting: int = 0
    dead: int = 0
    retried: int = 0
    query_restarts: int = 0
    batch_seconds: list[float] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    _killed_in: dict[str, int] = field(default_factory=dict)
    _back_after: dict[str, float] = field(default_factory=dict)
    _timed_lines: int = 0
    _first_batch: bool = True

    @property
    def seen(self) -> int:
        """Lines of the input that have been read."""
        return self.done + self.waiting + self.dead

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
        """Take note of what happened."""
        match happening:
            case BatchDone():
                self._count_batch(happening)
            case Started():
                self._first_batch = True
            case Restarted():
                self.query_restarts += 1
            case Killed():
                self._killed_in[happening.victim] = happening.batch
            case BackAgain():
                self._back_after[happening.victim] = happening.seconds
            case WentOn():
                victim = happening.victim
                self.recoveries.append(
                    Recovery(
                        str(victim), self._killed_in[victim], self._back_after[victim], happening.seconds
                    )
                )

    def _count_batch(self, batch: BatchDone) -> None:
        self.batches += 1
        self.done += batch.rows_in - batch.waiting - batch.dead
        self.waiting += batch.waiting - batch.delivered
        self.dead += batch.dead
        self.retried += batch.delivered
        if not self._first_batch:
            self.batch_seconds.append(batch.seconds)
            self._timed_lines += batch.rows_in
        self._first_batch = False
