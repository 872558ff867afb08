"""Runs the demo's driver, kills it and the vertex, starts the driver again, and says what happens."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ftlayer.cli.demo import driver as events
from ftlayer.cli.demo.choices import Kind, Victim
from ftlayer.cli.demo.driver import BatchDone, Event, KillPlan, Progress, RunDirectory
from ftlayer.errors import QueryError
from ftlayer.vertex.store.directory import holder_of

POLL_S = 0.02
SILENCE_S = 180.0
"""A driver that says nothing for so long hangs."""

LOG_LINES = 15


@dataclass(frozen=True)
class Killed:
    """Something was killed with SIGKILL; ``when`` says at which moment of the run."""

    victim: Victim
    when: str


@dataclass(frozen=True)
class BackAgain:
    """The process that was killed runs again, ``seconds`` after the kill."""

    victim: Victim
    seconds: float


@dataclass(frozen=True)
class WentOn:
    """The first output after a kill is committed, ``seconds`` after it."""

    victim: Victim
    seconds: float


Happening = Event | Killed | BackAgain | WentOn


@dataclass
class _Outage:
    """A missing process. ``slot`` is its number if it is one; ``files`` were committed by the time it was back."""

    victim: Victim
    pid: int
    slot: int
    since: float
    back: bool = False
    files: int = 0


class Supervisor:
    """One run of the demo. Use it as a context: on leaving, no process of it is left."""

    def __init__(self, directory: RunDirectory, kind: Kind, kills: KillPlan) -> None:
        self._directory = directory
        self._kind = kind
        self._kills = kills
        self._driver: subprocess.Popen[str] | None = None
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._outages: list[_Outage] = []
        self._latest: Progress | None = None

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *error: object) -> None:
        if self._driver is not None:
            self._kill_driver()

    @property
    def driver_pid(self) -> int:
        """The driver that runs, or ran last; 0 before the first."""
        return 0 if self._driver is None else self._driver.pid

    def happenings(self) -> Iterator[Happening | None]:
        """Run to the end, yielding what happens (None: nothing for a moment).

        Raises `QueryError` when the driver ends without having been killed, or hangs.
        """
        self._start_driver()
        heard = time.monotonic()
        while True:
            try:
                event = self._events.get(timeout=POLL_S)
            except queue.Empty:
                if time.monotonic() - heard > SILENCE_S:
                    raise QueryError(self._last_words(f"said nothing for {SILENCE_S:.0f} s")) from None
                yield from self._vertex_back()
                yield None
                continue
            heard = time.monotonic()
            if event is None:
                raise QueryError(self._last_words(f"ended with code {self._end_of_driver()}"))
            yield event
            if isinstance(event, events.Finished):
                self._end_of_driver()
                return
            yield from self._react(event)

    def _react(self, event: Event) -> Iterator[Happening]:
        match event:
            case events.Started():
                yield from self._back(Victim.DRIVER)
            case events.Writing(batch):
                yield from self._kill_if_due(batch, f"while batch {batch} was written")
            case BatchDone():
                for outage in self._outages:
                    yield from self._back(outage.victim)
                yield from self._went_on()
            case Progress():
                yield from self._progress(event)

    def _progress(self, progress: Progress) -> Iterator[Happening]:
        """Where a topology is; it is killed only once its driver has seen it at work, and well again."""
        self._latest = progress
        for outage in self._outages:
            if outage.victim is Victim.SLOT and progress.pids[outage.slot] not in (0, outage.pid):
                yield from self._back(Victim.SLOT)
        if all(outage.back and progress.files > outage.files for outage in self._outages):
            yield from self._went_on()
        if progress.files and not self._outages:
            yield from self._kill_if_due(progress.lines, f"when {progress.lines:,} lines had been read")

    def _kill_if_due(self, progress: int, when: str) -> Iterator[Happening]:
        if (victim := self._kills.due(progress)) is None:
            return
        slot = -1
        if victim is Victim.SLOT:
            slot, pid = self._kill_slot()
        else:
            pid = self._kill_vertex() if victim is Victim.VERTEX else self._kill_driver()
        self._outages.append(_Outage(victim, pid, slot, time.monotonic()))
        yield Killed(victim, when)
        if victim is Victim.DRIVER:
            self._start_driver()

    def _back(self, victim: Victim) -> Iterator[Happening]:
        for outage in self._outages:
            if outage.victim is victim and not outage.back:
                outage.back = True
                # Another driver has committed nothing so far.
                outage.files = 0 if victim is Victim.DRIVER or self._latest is None else self._latest.files
                yield BackAgain(victim, time.monotonic() - outage.since)

    def _went_on(self) -> Iterator[Happening]:
        for outage in self._outages:
            yield WentOn(outage.victim, time.monotonic() - outage.since)
        self._outages.clear()

    def _vertex_back(self) -> Iterator[Happening]:
        for outage in self._outages:
            if outage.victim is Victim.VERTEX and self._vertex_pid() not in (None, 0, outage.pid):
                yield from self._back(Victim.VERTEX)

    # ------------------------------------------------------------ processes

    def _start_driver(self) -> None:
        with self._directory.log.open("ab") as log:
            self._driver = subprocess.Popen(
                [sys.executable, "-m", "ftlayer.cli.demo.driver", str(self._directory.root), self._kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # A group of its own, with Spark's JVM in it, that is killed as a whole; Ctrl-C is for the screen.
                start_new_session=True,
                # In a clone of ftlayer the package in the working directory is the one without its extension.
                env={**os.environ, "PYTHONSAFEPATH": "1"},
            )
        self._events = queue.SimpleQueue()
        given = self._driver, self._events
        threading.Thread(target=_read_events, args=given, name="demo-events", daemon=True).start()

    def _kill_slot(self) -> tuple[int, int]:
        assert self._latest is not None
        slots = [(number, pid) for number, pid in enumerate(self._latest.pids) if pid]
        if not slots:
            raise QueryError("no slot runs, so none can be killed")
        slot, pid = random.choice(slots)
        # It may have ended by itself since the driver told of it.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return slot, pid

    def _kill_vertex(self) -> int:
        pid = self._vertex_pid()
        if not pid:
            raise QueryError("no vertex holds the store, so none can be killed")
        os.kill(pid, signal.SIGKILL)
        return pid

    def _vertex_pid(self) -> int | None:
        return holder_of(self._directory.store / "shard-000")

    def _kill_driver(self) -> int:
        driver = self._driver
        assert driver is not None
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
        assert driver.stdin is not None
        driver.stdin.close()
        return driver.pid

    def _end_of_driver(self) -> int:
        assert self._driver is not None
        return self._driver.wait()

    def _last_words(self, what: str) -> str:
        lines = self._directory.log.read_text("utf-8", "replace").splitlines()[-LOG_LINES:]
        return "\n".join([f"the demo's driver {what}; its log {self._directory.log} ends:", *lines])


def _read_events(driver: subprocess.Popen[str], heard: queue.SimpleQueue[Event | None]) -> None:
    assert driver.stdout is not None
    with driver.stdout as lines:
        for line in lines:
            if (event := events.from_line(line)) is not None:
                heard.put(event)
    heard.put(None)
