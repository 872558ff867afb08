"""Timers whose changes go into an undo log."""

from __future__ import annotations

from ftlayer.functions.keyed import Key, Timers
from ftlayer.functions.undo.log import UndoLog


class UndoTimers:
    """The timers of one operator: `ftlayer.functions.keyed.Timers`.

    A timer that was deleted, and is set again by the log, fires behind the others of its time. One that fires alone is
    gone, also if it fails: what fired it has it.
    """

    def __init__(self, timers: Timers, log: UndoLog) -> None:
        self._timers = timers
        self._log = log

    def add_event(self, key: Key, time_ms: int) -> bool:
        added = self._timers.add_event(key, time_ms)
        if added:
            self._log.add((self._timers.delete_event, key, time_ms))
        return added

    def add_processing(self, key: Key, time_ms: int) -> bool:
        added = self._timers.add_processing(key, time_ms)
        if added:
            self._log.add((self._timers.delete_processing, key, time_ms))
        return added

    def delete_event(self, key: Key, time_ms: int) -> bool:
        deleted = self._timers.delete_event(key, time_ms)
        if deleted:
            self._log.add((self._timers.add_event, key, time_ms))
        return deleted

    def delete_processing(self, key: Key, time_ms: int) -> bool:
        deleted = self._timers.delete_processing(key, time_ms)
        if deleted:
            self._log.add((self._timers.add_processing, key, time_ms))
        return deleted

    def due_event(self, watermark_ms: int) -> tuple[int, list[Key]] | None:
        due = self._timers.due_event(watermark_ms)
        if due is not None and not self._log.alone:
            self._log.add((self._set_event, *due))
        return due

    def due_processing(self, now_ms: int) -> tuple[int, list[Key]] | None:
        due = self._timers.due_processing(now_ms)
        if due is not None and not self._log.alone:
            self._log.add((self._set_processing, *due))
        return due

    @property
    def next_event_ms(self) -> int | None:
        return self._timers.next_event_ms

    @property
    def next_processing_ms(self) -> int | None:
        return self._timers.next_processing_ms

    @property
    def event_count(self) -> int:
        return self._timers.event_count

    @property
    def processing_count(self) -> int:
        return self._timers.processing_count

    def _set_event(self, time_ms: int, keys: list[Key]) -> None:
        for key in keys:
            self._timers.add_event(key, time_ms)

    def _set_processing(self, time_ms: int, keys: list[Key]) -> None:
        for key in keys:
            self._timers.add_processing(key, time_ms)
