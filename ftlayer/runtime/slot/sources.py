"""The readers of a slot's sources, and the loop that takes what they have read.

A reader that fails takes nothing with it: it is opened again after a pause, behind the rows that were taken of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ftlayer.common.clock import Now
from ftlayer.common.rules.restart import NoRestart, RestartStrategy, lasting, note_success, pause_after
from ftlayer.errors import SourceError, SourceGivenUpError
from ftlayer.records.beside import MISFITS, misfits
from ftlayer.runtime.connectors.lane import BatchLimits
from ftlayer.runtime.connectors.readers import SourceReader
from ftlayer.runtime.protocol.messages import AssignSplits, SourceFailed, SplitDone
from ftlayer.runtime.slot.rules.core import SlotCore
from ftlayer.runtime.slot.rules.events import RowsRead, SourceEnded
from ftlayer.runtime.task.actions import SourceRows, TakenRows
from ftlayer.runtime.task.contract import TaskKey

EARLY_ROWS = 256
"""Rows wait for others behind a batch of so many, even in a slot that is idle: they come fast, and most of what they
would cost is what a batch costs by itself."""

logger = logging.getLogger(__name__)

STEADY_MS = 30_000
"""A reader that has failed counts as away until it has given rows, or has not failed for so long."""


@dataclass(slots=True)
class Reopening:
    """How a source's subtask is read again when its reader has failed.

    ``open`` makes another reader, which begins at the positions that it is given: ``positions`` are those that the
    first one had. ``strategy`` is this subtask's own.
    """

    open: Callable[[Mapping[str, bytes]], SourceReader]
    positions: Mapping[str, bytes]
    strategy: RestartStrategy


@dataclass(slots=True)
class _Running:
    """A source's subtask; times are monotone, in ms.

    ``trickles``: its last batch had fewer than `EARLY_ROWS`. ``again_ms``: its reader has failed, and is replaced then.
    ``failed_ms``: when it failed last; None: it has given rows since.
    """

    reader: SourceReader
    signal: Signal
    limits: BatchLimits
    reopening: Reopening
    positions: dict[str, bytes]
    ended: bool = False
    finishing: bool = False
    trickles: bool = True
    again_ms: int | None = None
    failed_ms: int | None = None
    restarts: int = 0
    assigned: list[AssignSplits] = field(default_factory=list)
    undone: dict[int, tuple[SourceReader, TakenRows]] = field(default_factory=dict)

    @property
    def due_ms(self) -> int | None:
        """When it has something without telling (monotone, ms); None: that is not foreseen."""
        return self.reader.due_ms if self.again_ms is None else self.again_ms

    def assign(self, splits: AssignSplits) -> None:
        """Note splits for the reader, and its successors until they are done."""
        self.assigned.append(splits)
        self.reader.assign(splits)

    def done(self, done: SplitDone) -> None:
        left = [
            each.without(done.split) if each.range.number == done.range else each for each in self.assigned
        ]
        self.assigned = [each for each in left if each.mine or not each.range.splits]

    def took(self, rows: SourceRows) -> None:
        self.failed_ms = None
        note_success(self.reopening.strategy)
        self.trickles = rows.payload.num_rows < EARLY_ROWS
        if rows.position is not None:
            self.positions[rows.position.partition] = rows.position.end

    def is_away(self, mono_ms: int) -> bool:
        failed_ms = self.failed_ms
        if self.again_ms is not None or self.reader.is_away:
            return True
        return failed_ms is not None and mono_ms - failed_ms < STEADY_MS

    def open_again(self) -> None:
        self.again_ms = None
        self.restarts += 1
        self.reader = self.reopening.open(dict(self.positions))
        self.reader.start()
        for splits in self.assigned:
            self.reader.assign(splits)
        self.signal.is_set = True


@dataclass(slots=True)
class Signal:
    """Set by a reader's threads when it is worth asking it again."""

    wake: Callable[[], None]
    is_set: bool = True

    def __call__(self) -> None:
        """Wake the loop; may be called by any thread."""
        self.is_set = True
        self.wake()


def _never(positions: Mapping[str, bytes]) -> SourceReader:
    raise SourceError("this source cannot be opened again")


ONCE = Reopening(_never, {}, NoRestart())


class Sources:
    """Takes rows while there is room for them, and tells readers and coordinator what was accepted.

    Attributes:
        asked: uid of the source whose reader was asked last, "" for none yet.
    """

    def __init__(self, core: SlotCore, report: Callable[[SplitDone | SourceFailed], None]) -> None:
        self._core = core
        self._report = report
        self._running: dict[TaskKey, _Running] = {}
        self._numbers = 0
        self._away_since_ms: dict[TaskKey, int] = {}
        self._misfits = misfits()  # before, in this process
        self.asked = ""

    def add(
        self,
        key: TaskKey,
        reader: SourceReader,
        signal: Signal,
        limits: BatchLimits,
        reopening: Reopening = ONCE,
    ) -> None:
        """Add the reader of a source's subtask; ``signal`` and ``limits`` are what it was given.

        Its batches are as large as `SlotCore.rows_wanted` says.
        """
        self._running[key] = _Running(reader, signal, limits, reopening, dict(reopening.positions))

    def start(self) -> None:
        for running in self._running.values():
            running.reader.start()

    def assign(self, splits: AssignSplits) -> None:
        running = self._running[splits.source, splits.subtask]
        running.assign(splits)
        running.signal.is_set = True

    def finish(self) -> None:
        for running in self._running.values():
            running.finishing = True
            running.reader.finish()
            running.signal.is_set = True

    def stop(self) -> None:
        for running in self._running.values():
            running.reader.stop()

    def read(
        self, now: Now, tell: Callable[[RowsRead | SourceEnded, Now], None], *, idle: bool = False
    ) -> bool:
        """Take one batch of every source that has one and room for it, and tell the rules; whether there was any.

        In an ``idle`` slot rows of a source that trickles need not be old, if `SlotCore.reads_early`.

        Raises `SourceError` for a source that reading again cannot mend, or whose strategy has given up.
        """
        found = False
        for key, running in self._running.items():
            if running.ended or (not running.signal.is_set and running.due_ms is None):
                continue
            if not self._core.may_read(key):
                continue
            early = idle and running.trickles and self._core.reads_early(key)
            if not self._is_worth_asking(running, now, early=early):
                continue
            # Before asking: what wakes us from here on has something newer.
            running.signal.is_set = False
            running.limits.rows = self._core.rows_wanted(key)
            running.limits.waits = not early
            self.asked = key[0]
            if running.again_ms is not None and not running.finishing:
                running.open_again()
            try:
                rows = running.reader.take(now.mono_ms)
            except SourceError as error:
                self._pause(key, running, error, now)
                found = True
                continue
            if rows is not None:
                running.signal.is_set = found = True
                tell(self._read(key, running, rows), now)
            elif running.reader.ended:
                running.ended = found = True
                tell(SourceEnded(key), now)
        return found

    def counters(self, mono_ms: int) -> dict[str, int]:
        """Return what heartbeats say of sources that have not ended. One thread calls this, again and again.

        ``lag/<uid>`` is how many records of a source's system were not read lately, of those that know it, and
        ``away/<uid>`` for how long, in ms, the system cannot be read, as calls of this have seen it; 0 while it can.
        ``misfits`` is how often what a system says beside a payload did not fit, if it ever did.
        """
        found: dict[str, int] = {MISFITS: count} if (count := misfits() - self._misfits) else {}
        for key, running in self._running.items():
            if running.ended or running.finishing:
                continue
            away_ms = 0
            if running.is_away(mono_ms):
                away_ms = mono_ms - self._away_since_ms.setdefault(key, mono_ms)
            else:
                self._away_since_ms.pop(key, None)
            found[f"away/{key[0]}"] = max(away_ms, found.get(f"away/{key[0]}", 0))
            if (lag := running.reader.lag) is not None:
                found[f"lag/{key[0]}"] = lag
        return found

    def done(self, key: TaskKey, number: int) -> None:
        running = self._running[key]
        reader, rows = running.undone.pop(number)
        done = reader.accepted(rows)
        if done is not None:
            running.done(done)
            self._report(done)

    @property
    def due_ms(self) -> int | None:
        """When a reader has something without telling (monotone, ms); None: not foreseen."""
        dues = [
            due
            for key, running in self._running.items()
            if not running.ended and (due := running.due_ms) is not None and self._core.may_read(key)
        ]
        return min(dues, default=None)

    def _is_worth_asking(self, running: _Running, now: Now, *, early: bool) -> bool:
        if running.signal.is_set and (running.again_ms is None or running.finishing):
            return True
        if early and running.again_ms is None and running.reader.due_ms is not None:
            return True
        due = running.due_ms
        return due is not None and due <= now.mono_ms

    def _pause(self, key: TaskKey, running: _Running, error: SourceError, now: Now) -> None:
        """Let a reader that has failed rest until its strategy says, or raise what it failed with."""
        if running.finishing:
            # No more of it is wanted.
            logger.warning("%s; it was told to end", error)
            running.reader.abandon()
            running.signal.is_set = True
            return
        if lasting(error) is not None:
            raise error
        strategy = running.reopening.strategy
        pause_ms = pause_after(strategy, now.mono_ms)
        if pause_ms is None:
            again = f"it was started again {running.restarts} times, and " if running.restarts else ""
            raise SourceGivenUpError(f"{error} ({again}{strategy!r} gives up)") from error
        # The driver logs it.
        self._report(SourceFailed(*key, str(error), pause_ms))
        running.reader.abandon()
        running.failed_ms = now.mono_ms
        running.again_ms = now.mono_ms + pause_ms

    def _read(self, key: TaskKey, running: _Running, rows: SourceRows) -> RowsRead:
        running.took(rows)
        self._numbers += 1
        running.undone[self._numbers] = running.reader, rows.taken
        return RowsRead(key, self._numbers, rows)
