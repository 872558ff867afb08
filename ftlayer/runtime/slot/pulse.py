"""What goes on while the loop is busy with a slow function: heartbeats, and touching what the slot holds."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

import ftlayer
from ftlayer.common.clock import mono_ms
from ftlayer.records.ids import U64Array
from ftlayer.runtime.protocol.messages import FromSlot, Heartbeat
from ftlayer.runtime.slot.rules.core import SlotCore, Working
from ftlayer.runtime.slot.rules.load import BusyTimes, LoadMeter, edge_loads
from ftlayer.runtime.slot.rules.subtask import circuits_of
from ftlayer.vertex.calls.jobs import SubtaskDetails
from ftlayer.vertex.service.heap import give_back_freed_memory

PATIENCE = 10
"""A call that works on a whole batch may take the timeouts of all its records, but no more than so many."""

SLOW_MS = 1_000
"""A chain that has run for so long without a break has its function named."""

SAMPLE_MS = 100
"""So often is looked who cannot send what they have."""

_OURS = str(Path(ftlayer.__file__).parent) + os.sep


class Pulse:
    """A thread that reports every ``heartbeat_ms``, looks ten times a second who is held up, and touches roots.

    It touches them every third of the shortest timeout.

    What a function has been working on for a whole timeout is not touched any more: one that hangs must not keep
    its record without end. The other records of its batch only wait for it, and are touched; save within a function a
    batch at a time or a sink, which work on all of them, and have a timeout for each up to `PATIENCE` in all.

    Attributes:
        quiet: what a heartbeat says of it.
        busy: how long each task has run; the loop tells it.
    """

    def __init__(
        self,
        send: Callable[[FromSlot], None],
        heartbeat_ms: int,
        *,
        timeout_ms: int | None = None,
        touch: Callable[[list[U64Array]], None] | None = None,
        held: Callable[[], Iterable[U64Array]] = tuple,
        of_sources: Callable[[int], dict[str, int]] = lambda mono_ms: {},
        transports: Callable[[], dict[str, str]] = dict,
        on_error: Callable[[Exception], None],
    ) -> None:
        """``held`` returns the roots of everything that waits in the slot outside of its core,
        ``of_sources`` what `Sources.counters` does, ``transports`` what `SlotLinks.transports` does.

        ``on_error`` is told, by the thread, what has ended it.
        """
        self._send = send
        self._heartbeat_ms = heartbeat_ms
        self._touch_ms = None if timeout_ms is None else max(1, timeout_ms // 3)
        self._timeout_ms = timeout_ms
        self._touch = touch
        self._held = held
        self._of_sources = of_sources
        self._transports = transports
        self._on_error = on_error
        self._core: SlotCore | None = None
        self._loop_thread = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ftlayer-pulse", daemon=True)
        self._seen: tuple[Working, int] | None = None
        self._seen_since_ms = 0
        self._meter: LoadMeter | None = None
        self._subtasks: tuple[SubtaskDetails, ...] = ()
        self.quiet = False
        self.busy = BusyTimes()

    def start(self) -> None:
        self._thread.start()

    def watch(self, core: SlotCore) -> None:
        """Report of the tasks from now on. Called by the thread of the loop."""
        self._loop_thread = threading.get_ident()
        self._meter = LoadMeter(core, self.busy, time.monotonic_ns())
        self._core = core

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def heartbeat(self, probe: int = 0) -> Heartbeat:
        core = self._core
        if core is None:
            return Heartbeat(probe, 0, False)
        working = core.working
        uid, since = ("", 0) if working is None else (working.uid, mono_ms() - working.since_ms)
        function = function_under_way(self._loop_thread) if since >= SLOW_MS else ""
        if function and working is not None:
            function += _record_of(working)
        return Heartbeat(
            probe,
            core.activity,
            self.quiet,
            core.counters() | self._of_sources(mono_ms()),
            uid,
            max(0, since),
            function,
            self._subtasks,
            edge_loads(core),
            core.exemplars(),
            circuits_of(core.seats, mono_ms()),
            self._transports(),
        )

    def held_roots(self) -> list[U64Array]:
        core = self._core
        if core is None:
            # The others send already, and making a task ready may take long.
            return [roots for roots in self._held() if len(roots)]
        held = [*core.held_roots(), *self._held()]
        working = core.working
        if working is not None:
            held += working.roots if self._still_counts(working) else _waiting_behind(working)
        return [roots for roots in held if len(roots)]

    def _still_counts(self, working: Working) -> bool:
        progress = getattr(working.task, "progress", 0)
        seen, self._seen = self._seen, (working, progress)
        if seen is None or seen[0] is not working:
            self._seen_since_ms = working.since_ms
        elif seen[1] != progress:
            self._seen_since_ms = mono_ms()
        if self._timeout_ms is None:
            return True
        patience = 1 if _row_of(working) is not None else min(_rows_of(working), PATIENCE)
        return mono_ms() - self._seen_since_ms < self._timeout_ms * patience

    def _run(self) -> None:
        try:
            self._beat()
        except Exception as error:  # noqa: BLE001 - the loop raises it; a thread would end unseen
            self._on_error(error)

    def _beat(self) -> None:
        beat_ms = touch_ms = sample_ms = mono_ms()
        while True:
            now_ms = mono_ms()
            meter = self._meter
            if meter is not None and now_ms >= sample_ms:
                meter.sample()
                sample_ms = now_ms + min(SAMPLE_MS, self._heartbeat_ms)
            if now_ms >= beat_ms:
                if meter is not None:
                    self._subtasks = meter.measure(time.monotonic_ns())
                self._send(self.heartbeat())
                give_back_freed_memory()
                beat_ms = now_ms + self._heartbeat_ms
            next_ms = beat_ms if meter is None else min(beat_ms, sample_ms)
            if self._touch is not None and self._touch_ms is not None:
                if now_ms >= touch_ms:
                    self._touch(self.held_roots())
                    touch_ms = now_ms + self._touch_ms
                next_ms = min(next_ms, touch_ms)
            if self._stop.wait(max(0, next_ms - mono_ms()) / 1_000):
                return


def function_under_way(thread: int) -> str:
    """Return the function that ftlayer has called in ``thread`` and that has not returned, with its file and line.

    The line is where it is now. "" if the thread runs ftlayer's own code, or has ended.
    """
    frame, called = sys._current_frames().get(thread), None
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        frame, called = frame.f_back, frame
    if frame is None or called is None:
        return ""
    return f"{called.f_code.co_qualname} ({called.f_code.co_filename}:{called.f_lineno})"


def _waiting_behind(working: Working) -> list[U64Array]:
    """Return the roots of a batch without those of the record that a function works on; none if that is unknown."""
    row = _row_of(working)
    if row is None or working.lineage is None:
        return []
    stuck = working.lineage.take(np.array([row], np.int64)).roots
    return [roots[~np.isin(roots, stuck)] for roots in working.roots]


def _record_of(working: Working) -> str:
    """Return which record a function works on, in words: its root where it is tracked; "" if that is unknown."""
    row = _row_of(working)
    if row is None:
        return ""
    place = f"record {row + 1} of its batch"
    if working.lineage is None or row >= len(working.lineage):
        return f", {place}"
    (root, *_) = working.lineage.take(np.array([row], np.int64)).roots.tolist()
    return f", {place}, root {root:016x}"


def _row_of(working: Working) -> int | None:
    row: int | None = getattr(working.task, "row", None)
    return row


def _rows_of(working: Working) -> int:
    """Return the records of the batch that a task works on, 1 if there is none."""
    if working.lineage is not None:
        return max(1, len(working.lineage))
    return max(1, sum(len(roots) for roots in working.roots))
