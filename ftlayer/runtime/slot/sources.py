"""The readers of a slot's sources, and the loop that takes what they have read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ftlayer.layer.calls import Now
from ftlayer.runtime.connectors.lane import BatchLimits
from ftlayer.runtime.connectors.readers import SourceReader
from ftlayer.runtime.messages import AssignSplits, DataEnded, SplitDone
from ftlayer.runtime.slot.core import SlotCore
from ftlayer.runtime.slot.seat import TaskKey
from ftlayer.runtime.task.contract import SourceRows


@dataclass(slots=True)
class _Running:
    reader: SourceReader
    signal: Signal
    limits: BatchLimits
    ended: bool = False
    unaccepted: dict[int, SourceRows] = field(default_factory=dict)


@dataclass(slots=True)
class Signal:
    """Set by a reader's threads when it is worth asking it again."""

    wake: Callable[[], None]
    is_set: bool = True

    def __call__(self) -> None:
        """Wake the loop; may be called by any thread."""
        self.is_set = True
        self.wake()


class Sources:
    """Takes rows while there is room for them, and tells readers and coordinator what was accepted.

    Attributes:
        asked: uid of the source whose reader was asked last, "" for none yet.
    """

    def __init__(
        self, core: SlotCore, report: Callable[[SplitDone | DataEnded], None], *, checkpointed: bool = False
    ) -> None:
        """``report`` sends to the coordinator; with checkpoints it is told of a source's end too."""
        self._core = core
        self._report = report
        self._checkpointed = checkpointed
        self._running: dict[TaskKey, _Running] = {}
        self.asked = ""

    def add(self, key: TaskKey, reader: SourceReader, signal: Signal, limits: BatchLimits) -> None:
        """Add the reader of a source's subtask; ``signal`` and ``limits`` are what it was given.

        With checkpoints its batches become smaller where receivers are slow (see `SlotCore.rows_wanted`).
        """
        self._running[key] = _Running(reader, signal, limits)

    def start(self) -> None:
        """Begin to read."""
        for running in self._running.values():
            running.reader.start()

    def assign(self, splits: AssignSplits) -> None:
        """Let a reader read these splits; KeyError if it is none of this slot's."""
        running = self._running[splits.source, splits.subtask]
        running.reader.assign(splits)
        running.signal.is_set = True

    def finish(self) -> None:
        """Read no further; what is read is taken."""
        for running in self._running.values():
            running.reader.finish()
            running.signal.is_set = True

    def stop(self) -> None:
        """End all readers now."""
        for running in self._running.values():
            running.reader.stop()

    def read(self, now: Now) -> bool:
        """Take one batch of every source that has one and room for it; whether there was any.

        The coordinator is told of iterations that have come to their end as it is of sources.
        Raises `SourceError` for a source that cannot be read on.
        """
        found = False
        while self._core.data_ended:
            self._report(self._core.data_ended.pop())
        for key, running in self._running.items():
            if running.ended or not self._core.may_read(key) or not self._is_worth_asking(running, now):
                continue
            # Before asking: what wakes us from here on has something newer.
            running.signal.is_set = False
            if self._checkpointed:
                running.limits.rows = self._core.rows_wanted(key)
            self.asked = key[0]
            rows = running.reader.take(now.mono_ms)
            if rows is not None:
                running.signal.is_set = found = True
                self._take(key, running, rows, now)
            elif running.reader.ended:
                running.ended = found = True
                self._core.source_ended(key, now)
                if self._checkpointed:
                    self._report(DataEnded(*key))
        return found

    def accepted(self, key: TaskKey, ticket: int) -> None:
        """The vertex has persisted what came of rows."""
        running = self._running.get(key)
        rows = None if running is None else running.unaccepted.pop(ticket, None)
        if running is not None and rows is not None:
            self._tell(running, rows)

    @property
    def due_ms(self) -> int | None:
        """When a reader has something without telling (monotone, ms); None: not foreseen."""
        dues = [
            due
            for key, running in self._running.items()
            if not running.ended and (due := running.reader.due_ms) is not None and self._core.may_read(key)
        ]
        return min(dues, default=None)

    def _is_worth_asking(self, running: _Running, now: Now) -> bool:
        if running.signal.is_set:
            return True
        due = running.reader.due_ms
        return due is not None and due <= now.mono_ms

    def _take(self, key: TaskKey, running: _Running, rows: SourceRows, now: Now) -> None:
        tickets = self._core.rows(key, rows, now)
        if tickets:
            running.unaccepted[tickets[-1]] = rows
        else:
            self._tell(running, rows)

    def _tell(self, running: _Running, rows: SourceRows) -> None:
        done = running.reader.accepted(rows)
        if done is not None:
            self._report(done)
