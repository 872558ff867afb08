"""When the next periodic checkpoint is due."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from ftlayer.checkpoint.options import CheckpointConfig


class Schedule:
    """The interval from trigger to trigger, and the pause from a completion to the next trigger.

    While a source works off a backlog another interval holds: a longer one takes effect with the next trigger, a
    shorter one at once, 0 suspends. Times are of one monotone clock, ms.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._interval = config.interval_ms
        self._backlog_interval = config.interval_during_backlog_ms
        self._pause = config.min_pause_ms
        self._backlogs: set[Hashable] = set()
        self._next: int | None = None
        self._not_before: int | None = None
        self._on = False

    def start(self, now_ms: int) -> None:
        """The job runs: the first one is due after an interval."""
        self._on = True
        self._next = None
        self._plan(now_ms)

    def stop(self) -> None:
        """Nothing is due until `start`."""
        self._on = False

    def backlog(self, source: Hashable, working_off: bool, now_ms: int) -> None:
        """A subtask of a source begins, or ceases, to work off a backlog."""
        if working_off:
            self._backlogs.add(source)
        else:
            self._backlogs.discard(source)
        if self._on:
            self._plan(now_ms)

    def forget_backlogs(self, sources: Iterable[Hashable]) -> None:
        """These begin again: they will say so anew."""
        self._backlogs.difference_update(sources)

    def triggered(self, now_ms: int) -> None:
        self._next = None
        self._plan(now_ms)

    def completed(self, now_ms: int) -> None:
        """A checkpoint or savepoint was completed: the pause begins."""
        self._not_before = now_ms + self._pause

    @property
    def due_ms(self) -> int | None:
        """When the next periodic checkpoint may be triggered; None: nothing is planned."""
        if not self._on or self._next is None:
            return None
        return self._next if self._not_before is None else max(self._next, self._not_before)

    def _plan(self, now_ms: int) -> None:
        interval = self._interval
        if self._backlogs and self._backlog_interval is not None:
            interval = self._backlog_interval
        if not interval:
            self._next = None
        elif self._next is None or now_ms + interval < self._next:
            self._next = now_ms + interval
