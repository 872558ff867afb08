"""What takes the place of threads, sockets, queues and clocks while a world moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from barrier_letters import FaultyLetterFiles, StepEvent
from barrier_parts import (
    Channels,
    Control,
    IdleThread,
    InlineExecutor,
    Link,
    StepCondition,
    StepExecutor,
    StepMailbox,
    StepPulse,
    StepQueue,
    StepWorker,
    ThreadInSteps,
    threads_of,
)
from barrier_process import Runner
from barrier_sources import step_reader
from barrier_storage import FaultyFiles, FaultySlotStorage

from ftlayer.checkpoint.storage import dead_letters
from ftlayer.checkpoint.storage import files as deleting
from ftlayer.checkpoint.storage import opening as storage_driver
from ftlayer.checkpoint.storage import opening as storage_slot
from ftlayer.runtime.barrier_mode.driver import checkpointing, letters
from ftlayer.runtime.barrier_mode.driver import checkpointing as checkpoint_io
from ftlayer.runtime.barrier_mode.driver import letters as readmission
from ftlayer.runtime.barrier_mode.slot import shell
from ftlayer.runtime.barrier_mode.slot import shell as snapshotting
from ftlayer.runtime.barrier_mode.task.failing import attempts
from ftlayer.runtime.barrier_mode.task.failing import attempts as keys
from ftlayer.runtime.driver import job_thread, planners
from ftlayer.runtime.driver import job_thread as job_report
from ftlayer.runtime.driver import planners as reader_planner
from ftlayer.runtime.slot import black_box, links, main, pulse
from ftlayer.runtime.slot import main as loop
from ftlayer.state.snapshots import changelog
from ftlayer.state.tables import layers as memory

SHORT_LIVED = 4
"""So many entries the LMDB backend keeps in memory, so that it is used."""


class StandIns:
    """Those of one world: what they make belongs to the process that runs."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._names = Random(world.setting.parallelism)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have them where the real code looks."""
        told: list[tuple[Any, str, Any]] = [
            (job_thread, "mono_ms", lambda: self._world.mono),
            (job_report, "mono_ms", lambda: self._world.mono),
            (job_thread, "threading", threads_of(IdleThread)),
            (checkpointing, "system_now", lambda: self._world.now),
            (checkpoint_io, "system_now", lambda: self._world.now),
            (checkpoint_io, "Worker", self._worker),
            (letters, "system_now", lambda: self._world.now),
            (letters, "time", SimpleNamespace(monotonic=lambda: self._world.mono / 1_000)),
            (letters, "threading", SimpleNamespace(Event=partial(StepEvent, self._world))),
            (letters, "Worker", self._worker),
            (readmission, "ASK_EVERY_MS", 20),
            (dead_letters, "open_files", self._letter_files(dead_letters.open_files)),
            (loop, "system_now", lambda: self._world.now),
            (pulse, "mono_ms", lambda: self._world.mono),
            (main, "ControlClient", self._control),
            (main, "ListeningPlaces", lambda *_: SimpleNamespace(address="", socket="", close=lambda: None)),
            (main, "ChannelServer", self._server),
            (main, "Mailbox", partial(StepMailbox, Random(self._world.setting.parallelism))),
            (main, "Pulse", StepPulse),
            (shell, "SnapshotRunner", self._runner),
            (shell, "system_now", lambda: self._world.now),
            (black_box, "BlackBox", self._world.boxes.open),
            (black_box, "box_directory", lambda parent, job: Path(parent)),
            (black_box, "deaths_of", self._world.boxes.deaths),
            (main, "open_reader", partial(step_reader, self._world)),
            (shell, "slot_storage", self._slot_storage(shell.slot_storage)),
            (links, "PeerLink", self._link),
            (snapshotting, "threading", threads_of(IdleThread)),
            (snapshotting, "queue", SimpleNamespace(SimpleQueue=StepQueue)),
            (storage_slot, "ThreadPoolExecutor", self._executor),
            (storage_slot, "LocalCopies", self._copies(storage_slot.LocalCopies)),
            (deleting, "ThreadPoolExecutor", InlineExecutor),
            (storage_driver, "open_files", self._files(storage_driver.open_files)),
            # Names of letters decide about pauses: a seed's run is the same each time.
            (attempts, "secrets", SimpleNamespace(token_bytes=self._names.randbytes)),
            (keys, "secrets", SimpleNamespace(token_bytes=self._names.randbytes)),
            (changelog, "Thread", self._log),
            (changelog, "Condition", StepCondition),
            (planners, "threading", threads_of(IdleThread)),
            (reader_planner, "threading", threads_of(IdleThread)),
            (memory, "MAX_BYTES", 200 * SHORT_LIVED),
        ]
        before = [(module, name, getattr(module, name)) for module, name, _ in told]
        for module, name, value in told:
            setattr(module, name, value)
        try:
            yield
        finally:
            for module, name, value in before:
                setattr(module, name, value)

    def _worker(self, name: str, on_error: Callable[[Exception], None]) -> StepWorker:
        worker = StepWorker(self._world, on_error)
        self._world.workers.append(worker)
        return worker

    def _control(self, endpoint: Any, *, job: str, slot: int, instance: str) -> Control:
        control = Control(slot, instance, process=self._world.current)
        self._world.controls.append(control)
        self._world.driver.server.streams[instance] = control
        return control

    def _server(self, host: str, **options: Any) -> Channels:
        return Channels(host, **options)

    def _link(self, *args: Any) -> Link:
        assert self._world.current is not None
        link = Link(*args)
        self._world.links.append(link)
        self._world.current.links.append(link)
        return link

    def _runner(self, *args: Any) -> Runner:
        assert self._world.current is not None
        runner = Runner(*args)
        self._world.current.runners.append(runner)
        return runner

    def _log(self, target: Callable[[], None], **_: Any) -> ThreadInSteps:
        assert self._world.current is not None
        thread = ThreadInSteps(target)
        self._world.current.logs.append(thread)
        return thread

    def _copies(self, opened: Callable[..., Any]) -> Callable[..., Any]:
        def open_copies(*args: Any) -> Any:
            copies = opened(*args)
            if self._world.current is not None:
                self._world.current.copies.append(copies)
            return copies

        return open_copies

    def _slot_storage(self, opened: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: FaultySlotStorage(self._world.outside, opened(*args, **options))

    def _files(self, opened: Callable[[str], Any]) -> Callable[[str], FaultyFiles]:
        return lambda url: FaultyFiles(self._world.outside, opened(url))

    def _letter_files(self, opened: Callable[[str], Any]) -> Callable[[str], FaultyLetterFiles]:
        return lambda url: FaultyLetterFiles(self._world.outside, opened(url))

    def _executor(self, *_: Any) -> StepExecutor:
        executor = StepExecutor()
        if self._world.current is not None:
            self._world.current.executors.append(executor)
        return executor
