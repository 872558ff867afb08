"""A job in barrier mode in one thread, on a manual clock: the real driver's and slots' code, joined by queues.

Whatever can happen next (a message arrives, a slot takes a turn, a piece of a snapshot is written, time passes, a
process dies) is one of a list of moves, and a seeded `Random` picks among them.
"""

from __future__ import annotations

import math
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from barrier_outside import Dies
from barrier_parts import (
    Channels,
    Control,
    ControlServer,
    FaultyFiles,
    FaultySlotStorage,
    IdleThread,
    InlineExecutor,
    Link,
    StepExecutor,
    StepMailbox,
    StepPulse,
    StepQueue,
    StepReader,
    StepWorker,
    Submitter,
    threads_of,
)
from barrier_topologies import Case
from pyspark import cloudpickle

from ftlayer.checkpoint.barrier import SnapshotKind
from ftlayer.checkpoint.coordinator import decisions
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Checkpoint
from ftlayer.checkpoint.storage import deleting
from ftlayer.checkpoint.storage import driver as storage_driver
from ftlayer.checkpoint.storage import slot as storage_slot
from ftlayer.checkpoint.storage.opening import driver_storage, storage_key
from ftlayer.config import TopologyOptions
from ftlayer.layer.calls import Now
from ftlayer.restart import FixedDelay
from ftlayer.runtime.coordinator import checkpointing, job_thread
from ftlayer.runtime.coordinator.events import DrainRequested, JobState, Over, SparkJobEnded
from ftlayer.runtime.coordinator.job import Job
from ftlayer.runtime.coordinator.opening import open_checkpoints
from ftlayer.runtime.coordinator.planners import Planners
from ftlayer.runtime.messages import Cancel, Deploy, Hello, SlotEnded
from ftlayer.runtime.order import Door, SlotOrder
from ftlayer.runtime.sealed import unseal
from ftlayer.runtime.slot import links, loop, main, pulse, snapshotting
from ftlayer.runtime.slot.events import CoordinatorLost, CoordinatorSaid
from ftlayer.runtime.slot.links import SlotLinks, receivers_of
from ftlayer.runtime.slot.loop import SlotLoop
from ftlayer.state import lmdb
from ftlayer.stream.job_graph_generator import job_graph

TICK_MS = 50
"""The driver looks at the time this often, when nothing else happens."""

SHORT_LIVED = 4
"""So many entries the LMDB backend keeps in memory, so that it is used."""

Move = Callable[[], None]


@dataclass(frozen=True)
class Setting:
    """How a world moves. ``pace_ms``: sources wait up to so long between two batches."""

    options: TopologyOptions
    config: CheckpointConfig
    parallelism: int = 2
    pace_ms: int = 8


class Instance(main._Slot):
    """One instance of a slot, whose loop takes a turn when it is told to. What threads do is done by moves."""

    def __init__(self, order: SlotOrder) -> None:
        super().__init__(order)
        self.loop: SlotLoop | None = None
        self.is_over = False
        self.again = False

    @property
    def name(self) -> str:
        return self._instance

    @property
    def mailbox(self) -> StepMailbox:
        return self._mailbox

    def register(self) -> None:
        """What `_Slot.run` does up to its wait for `Deploy`."""
        order = self._order
        self._control.start(lambda message: self._mailbox.put(CoordinatorSaid(message)), self._lost)
        server, _ = self._listen()
        self._links = SlotLinks(
            order.job,
            order.slot,
            self._instance,
            order.coordinator,
            server,
            self._roster,
            receivers_of(order.graph, order.slot),
            self._mailbox.put,
        )
        self._pulse = self._make_pulse()
        self._control.send(Hello(order.slot, self._instance, f"grpc://slot{order.slot}:1", "simulated", 1))
        self.mailbox.resting = True

    def turn(self) -> None:
        """Take a turn; closes the instance when it has come to its end."""
        try:
            if self.loop is not None:
                self.is_over = not self.loop.turn()
            else:
                self._look_for_deploy()
        except (Exception, MemoryError) as error:  # noqa: BLE001 - as in `run_slot`
            self.fail(error)
            self.is_over, self.again = True, self.outlives(error)
        else:
            if self.is_over and self.loop is not None and self.loop.reset is not None:
                self._stands = self.loop.reset.stands
                self.again = True
            self._is_over = self.is_over and self.loop is not None and not self.again
        if self.is_over:
            self.close()

    def _look_for_deploy(self) -> None:
        match self._mailbox.take():
            case None:
                self.mailbox.wait(None)
            case CoordinatorSaid(Deploy() as deploy):
                self._deploy(deploy)
            case CoordinatorSaid(Cancel()):
                self._control.send(SlotEnded())
                self.is_over = True
            case CoordinatorLost():
                self.is_over = True
            case event:
                raise AssertionError(f"the coordinator began with {event}")

    def _deploy(self, deploy: Deploy) -> None:
        """What `_Slot._run_tasks` does up to the first turn of the loop."""
        self._core = self._build_core(deploy, self._links, {})
        self._sources = self._open_sources(self._core, {}, deploy.restore)
        self._pulse.watch(self._core)
        self.loop = SlotLoop(
            self._core,
            self._sources,
            self._mailbox,
            self._links,
            self._pulse,
            self._control.send,
            self._order.options.heartbeat_timeout_ms,
            self._snapshots,
        )
        self.loop.begin(deploy)

    def beat(self) -> None:
        if not self.is_over:
            self._control.send(self._pulse.heartbeat())

    @property
    def outgoing(self) -> list[Link]:
        return [] if self._links is None else list(self._links._links.values())


class Runner(snapshotting.SnapshotRunner):
    """`SnapshotRunner` whose thread is the world's. ``at_work``: between two steps of one piece of work."""

    at_work = False


class Process:
    """A process that Spark has started for a slot; instances of it follow each other."""

    def __init__(self, world: World, slot: int, attempt: int) -> None:
        self.world, self.slot, self.attempt = world, slot, attempt
        self.name = f"{world.lives}.{slot}.{attempt}"
        self.executors: list[StepExecutor] = []
        self.links: list[Link] = []
        self.runners: list[Runner] = []  # threads of snapshots
        self.frozen_until_ms = 0
        self.alive = True
        self.instance: Instance
        self.begin()

    def begin(self) -> None:
        with self.world.running(self):
            self.instance = Instance(replace(cloudpickle.loads(self.world.driver.order), slot=self.slot))
            self.instance.register()

    def turn(self) -> None:
        with self.world.running(self):
            self.instance.turn()
        if not self.instance.is_over:
            return
        self.world.servers.pop(self.instance.name, None)
        if self.instance.again:
            self.begin()
        else:
            self.end(None)

    def end(self, error: str | None) -> None:
        self.alive = False
        self.world.processes.remove(self)
        self.world.spark_ended.append((self.slot, self.attempt, error))

    @property
    def is_frozen(self) -> bool:
        return self.world.mono < self.frozen_until_ms

    def due_ms(self) -> float:
        box = self.instance.mailbox
        if not box.resting:
            return self.world.mono
        return math.inf if box.timeout_s is None else self.rested_ms + math.ceil(box.timeout_s * 1_000)

    rested_ms = 0


class Driver:
    """One life of the driver: a real `Job`, whose thread's work is done by moves."""

    def __init__(self, world: World, setting: Setting, case: Case, restore_from: str | None) -> None:
        self.world = world
        self.graph = job_graph(
            case.build(setting.parallelism).build(), max_parallelism=setting.config.max_parallelism
        )
        self.events = StepQueue()
        self.job = Job(f"run-{world.lives}")
        self.job._events = self.events
        self.server, self.submitter = ControlServer(), Submitter()
        self.workers: list[StepWorker] = []
        self.answers: list[Future[Any]] = []
        self.ends: Counter[int] = Counter()
        self.triggered: list[int] = []
        parts, plan = open_checkpoints(self.graph, setting.config, self.job.job, restore_from)
        order = SlotOrder(
            job=self.job.job,
            slot=0,
            coordinator=Door("grpc://driver:1", "t" * 32),
            graph=self.graph,
            options=setting.options,
            vertex=None,
            listen_on="127.0.0.1",
            tls_cert=None,
            tls_key=None,
            key=b"k" * 32,
            checkpoints=plan,
        )
        self.key = plan.key
        self.order = cloudpickle.dumps(order)
        self.storage = parts.storage
        restart = FixedDelay(attempts=10_000, delay="10ms")
        planners = Planners(
            self.graph, None, plan.key, restart, send=self.job.send_splits, failed=self.job.broken
        )
        self.job.start(
            job_thread.JobParts(
                self.graph,
                setting.options,
                restart,
                self.server,
                self.submitter,
                None,
                planners,
                on_over=lambda: None,
                checkpoints=parts,
            )
        )
        self._watch()
        self.job._do_all(self.job._core.start(self.job._started_ms))
        planners.start()
        self.ticked_ms = world.mono

    def _watch(self) -> None:
        """Note how each checkpoint ends, before it is carried out."""
        carry_out = self.job._checkpoints._do_one

        def noted(decision: Any) -> None:
            match decision:
                case decisions.Trigger(barrier):
                    self.triggered.append(barrier.checkpoint)
                case decisions.NotifyAborted(checkpoint, _):
                    self.ends[checkpoint] += 1
                case decisions.Answer(_, Checkpoint(kind=SnapshotKind.SAVEPOINT) as savepoint):
                    self.world.note_savepoint(savepoint, self.key)
            carry_out(decision)

        self.job._checkpoints._do_one = noted

    @property
    def verdict(self) -> Over | None:
        return self.job._verdict

    @property
    def state(self) -> JobState:
        return self.job.state

    def step(self) -> None:
        self.job._step()
        self.ticked_ms = self.world.mono

    def request(self, ask: Callable[..., Any]) -> Future[Any]:
        """Have a user's request carried out, as `Job._requested` does."""
        answer: Future[Any] = Future()
        checkpoints = self.job._checkpoints
        self.events.put(job_thread.Later(lambda: checkpoints.request(ask, answer)))
        self.answers.append(answer)
        return answer


class World:
    """All processes of a job, and what is on its way between them."""

    def __init__(self, case: Case, setting: Setting, seed: int, directory: Path) -> None:
        self.case, self.setting = case, setting
        self.outside = case.outside
        self.random = Random(seed)
        self.directory = directory
        self.pace_ms = setting.pace_ms
        self.mono, self.wall = 1_000_000, 1_700_000_000_000
        self.lives = 0
        self.closing = False
        self.current: Process | None = None
        self.processes: list[Process] = []
        self.servers: dict[str, Channels] = {}
        self.controls: list[Control] = []
        self.links: list[Link] = []
        self.leavers: list[StepExecutor] = []
        self.spark_ended: list[tuple[int, int, str | None]] = []
        self.killed: set[str] = set()  # processes, and "<life>." for a driver with all that it had
        self.in_savepoints: set[int] = set()  # messages that a user's savepoint holds
        self.moves_made: Counter[str] = Counter()
        self._is_paused = False
        self.outside.pause = self._pause
        self.driver: Driver

    @property
    def now(self) -> Now:
        return Now(self.mono, self.wall)

    # ------------------------------------------------------------ in place of threads and clocks

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put stand-ins in place of what the real code starts and asks."""
        told: list[tuple[Any, str, Any]] = [
            (job_thread, "now_ms", lambda: self.mono),
            (job_thread, "threading", threads_of(IdleThread)),
            (checkpointing, "_now", lambda: self.now),
            (checkpointing, "Worker", self._worker),
            (loop, "_now", lambda: self.now),
            (pulse, "_mono_ms", lambda: self.mono),
            (main, "ControlClient", self._control),
            (main, "ChannelServer", self._server),
            (main, "Mailbox", StepMailbox),
            (main, "Pulse", StepPulse),
            (main, "SnapshotRunner", self._runner),
            (main, "open_reader", self._reader),
            (main, "slot_storage", self._slot_storage(main.slot_storage)),
            (links, "PeerLink", self._link),
            (snapshotting, "threading", threads_of(IdleThread)),
            (snapshotting, "queue", _queues()),
            (storage_slot, "ThreadPoolExecutor", self._executor),
            (deleting, "ThreadPoolExecutor", InlineExecutor),
            (storage_driver, "open_files", self._files(storage_driver.open_files)),
            (lmdb, "MAX_ENTRIES", SHORT_LIVED),
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
        worker = StepWorker(self, on_error)
        self._workers.append(worker)
        return worker

    def _control(self, door: Any, *, job: str, slot: int, instance: str) -> Control:
        control = Control(slot, instance, process=self.current)
        self.controls.append(control)
        self.driver.server.streams[instance] = control
        return control

    def _server(self, host: str, **options: Any) -> Channels:
        return Channels(host, **options)

    def _link(self, *args: Any) -> Link:
        assert self.current is not None
        link = Link(*args)
        self.links.append(link)
        self.current.links.append(link)
        return link

    def _runner(self, *args: Any) -> Runner:
        assert self.current is not None
        runner = Runner(*args)
        self.current.runners.append(runner)
        return runner

    def _reader(self, source: Any, subtask: int, parallelism: int, **options: Any) -> StepReader:
        return StepReader(self, source, subtask, parallelism, options["positions"], options["limits"])

    def _slot_storage(self, opened: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: FaultySlotStorage(self.outside, opened(*args, **options))

    def _files(self, opened: Callable[[str], Any]) -> Callable[[str], FaultyFiles]:
        return lambda url: FaultyFiles(self.outside, opened(url))

    def _executor(self, *_: Any) -> StepExecutor:
        executor = StepExecutor()
        if self.current is not None:
            self.current.executors.append(executor)
        return executor

    @contextmanager
    def running(self, process: Process) -> Iterator[None]:
        """All that happens meanwhile happens in this process."""
        self.current, before = process, self.current
        self.outside.writer, writer = process.name, self.outside.writer
        try:
            yield
        finally:
            self.current, self.outside.writer = before, writer

    # ------------------------------------------------------------ lives

    def begin(self, restore_from: str | None = None, parallelism: int | None = None) -> None:
        """Start a driver."""
        if parallelism is not None:
            self.setting = replace(self.setting, parallelism=parallelism)
        self.lives += 1
        self._workers: list[StepWorker] = []
        self.closing = False
        self.driver = Driver(self, self.setting, self.case, restore_from)

    def kill_driver(self) -> None:
        """The driver dies, and with it all processes: nothing is left but the storage, and what is outside."""
        self.closing = False
        self.outside.stuck.clear()
        self.killed.add(f"{self.lives}.")
        self._workers = []
        for process in list(self.processes):
            process.alive = False
        self.processes.clear()
        self.controls.clear()
        self.links.clear()
        self.spark_ended.clear()

    def kill(self, process: Process) -> None:
        """A process dies; of what it has sent some arrives."""
        instance = process.instance
        control = instance._control
        if not control.closed:
            kept = self.random.randint(0, len(control.up))
            while len(control.up) > kept:
                control.up.pop()
            control.reason = "its control stream broke: the process was killed"
            control.close()
        for link in process.links:
            kept = self.random.randint(0, len(link.frames))
            while len(link.frames) > kept:
                link.frames.pop()
            link.silent = True
        if instance._server is not None:
            instance._server.close()
        self.killed.add(process.name)
        process.end("the process was killed")

    def kill_others(self) -> None:
        """A process but the one that runs dies."""
        others = [process for process in self.processes if process is not self.current]
        if others:
            self.kill(self.random.choice(others))

    def cut(self, link: Link) -> None:
        """A stream between two slots breaks, and nothing else."""
        kept = self.random.randint(0, len(link.frames))
        while len(link.frames) > kept:
            link.frames.pop()
        link.back.clear()
        link.broken = "the network broke it"
        if link.receiver is not None:
            link.receiver.streams.pop(link.header.sender, None)

    def cut_control(self, process: Process) -> None:
        """Driver and slot lose each other."""
        instance = process.instance
        if not instance._control.closed:
            self.killed.add(process.name)  # as far as anybody knows
            instance._control.close()
            instance.mailbox.put(CoordinatorLost("the network broke the control stream"))

    def finish(self) -> None:
        """The job has come to its verdict: what `Job._run` does then."""
        self.outside.stuck.clear()
        self.closing = True
        self.driver.job._finish()
        self.closing = False
        self.controls.clear()
        self.links.clear()

    # ------------------------------------------------------------ moves

    def moves(self) -> Iterator[tuple[str, Move]]:
        """Everything that can happen now."""
        driver = self.driver
        if not driver.events.empty() or self.mono - driver.ticked_ms >= TICK_MS:
            yield "driver", driver.step
        for worker in self._workers:
            if worker.todo:
                yield "worker", worker.step
        ending: set[Process] = set()
        for control in self.controls:
            # An instance has closed its stream, and the driver seen that, before the next one in its process begins.
            if control.up and control.process not in ending:
                yield "up", lambda control=control: self._up(control)
            ending.add(control.process)
            if control.down:
                yield "down", control.deliver_down
        for slot, attempt in driver.submitter.submitted:
            yield "submit", lambda slot=slot, attempt=attempt: self._submit(slot, attempt)
        if self.spark_ended:
            yield "spark", self._spark_ended
        self._name_servers()
        for link in self.links:
            if link.can_deliver(self.servers):
                yield "frame", link.deliver
            if link.tells:
                yield "broken", link.tell_broken
            if link.back:
                yield "credit", link.give_back
        for process in self.processes:
            if (process.slot, process.attempt) in driver.submitter.unwanted:
                yield "cancel", lambda process=process: self.kill(process)
            if process.is_frozen:
                continue
            if process.due_ms() <= self.mono:
                yield "turn", lambda process=process: self._turn(process)
            for runner in process.runners:
                if not runner.at_work and not runner._jobs.empty():
                    yield "write", lambda process=process, runner=runner: self._write(process, runner)
            for executor in process.executors:
                if executor.todo:
                    yield "upkeep", executor.step

    def step(self) -> None:
        """Let one thing happen, or time pass."""
        found = list(self.moves())
        if not found:
            self.pass_time(self._until_next())
            return
        if self.random.random() < 0.15:
            self.pass_time(self.random.choice((1, 1, 2, 5)))
            return
        kind, move = self.random.choice(found)
        self.moves_made[kind] += 1
        try:
            move()
        except Dies as fault:
            # In the middle of what it did.
            if not fault.writer:
                raise
            for process in self.processes:
                if process.name == fault.writer:
                    self.kill(process)
                    break

    def pass_time(self, ms: int) -> None:
        before, self.mono, self.wall = self.mono, self.mono + ms, self.wall + ms
        beat_ms = self.setting.options.heartbeat_ms
        if before // beat_ms != self.mono // beat_ms:
            for process in self.processes:
                if not process.is_frozen:
                    process.instance.beat()

    def _until_next(self) -> int:
        dues = [process.due_ms() for process in self.processes if not process.is_frozen]
        due = min([*dues, self.mono + TICK_MS])
        return max(1, int(due - self.mono))

    def _turn(self, process: Process) -> None:
        process.turn()
        if process.alive and process.instance.mailbox.resting:
            process.rested_ms = self.mono
        box = process.instance.mailbox
        if process.alive and box.resting and box.timeout_s == 0:
            box.resting = False

    def _write(self, process: Process, runner: Runner) -> None:
        """Let a snapshot's thread do one piece of work; other things happen meanwhile."""
        with self.running(process):
            runner.at_work = True
            try:
                job = runner._jobs.get()
                if job is None:
                    # Nobody waited for its end.
                    runner._jobs.put(None)
                    runner._run()
                    process.runners.remove(runner)
                else:
                    runner._do(job)
            finally:
                runner.at_work = False

    def _pause(self) -> None:
        """Let others have their turn while a snapshot's thread is at work."""
        process = self.current
        if self._is_paused or process is None or not any(runner.at_work for runner in process.runners):
            return
        if self.random.random() < 0.5:
            return
        self._is_paused = True
        writer = self.outside.writer
        # What happens meanwhile is none of this process's doing.
        self.current, self.outside.writer = None, ""
        try:
            for _ in range(self.random.randint(1, 8)):
                self.step()
        finally:
            self._is_paused = False
            self.current, self.outside.writer = process, writer
        if not process.alive:
            raise Dies("its process was killed", process.name)

    def _up(self, control: Control) -> None:
        frame = control.up.popleft()
        job = self.driver.job
        if frame is not None:
            job.slot_said(control.slot, control.instance, Control.decoded(frame))
            return
        self.controls.remove(control)
        self.driver.server.streams.pop(control.instance, None)
        job.slot_lost(control.slot, control.instance, control.reason)

    def _submit(self, slot: int, attempt: int) -> None:
        self.driver.submitter.submitted.remove((slot, attempt))
        if (slot, attempt) in self.driver.submitter.unwanted:
            self.spark_ended.append((slot, attempt, None))
            return
        process = Process.__new__(Process)
        self.processes.append(process)
        process.__init__(self, slot, attempt)  # type: ignore[misc]

    def _spark_ended(self) -> None:
        self.driver.events.put(SparkJobEnded(*self.spark_ended.pop(0)))

    def _name_servers(self) -> None:
        self.servers = {
            process.instance.name: process.instance._server
            for process in self.processes
            if process.instance._server is not None
        }

    # ------------------------------------------------------------ what is looked at

    def savepoint(self) -> str:
        return f"{self.directory}/savepoints/savepoint-{secrets.token_hex(6)}"

    def note_savepoint(self, savepoint: Checkpoint, key: bytes) -> None:
        self.in_savepoints |= {
            unseal(committable.message, key).name
            for part in savepoint.subtasks
            for committable in part.committables
        }

    def drain(self) -> None:
        self.driver.events.put(DrainRequested())

    def files(self) -> list[str]:
        """Return the files of checkpoints, relative to their directory."""
        root = self.setting.config.directory
        assert root is not None
        return [
            os.path.relpath(os.path.join(directory, name), root)
            for directory, _, names in os.walk(root)
            for name in names
        ]

    def latest(self) -> Any:
        """Return the latest checkpoint in the storage, everything that it refers to read; None without one."""
        config = self.setting.config
        storage = driver_storage(config, self.driver.graph.name, "look", storage_key(config, "simulated"))
        found = storage.completed(self.driver.graph.name)
        if not found:
            return None
        checkpoint = storage.load(found[0])
        storage.verify(checkpoint)
        return checkpoint

    def report(self) -> str:
        """Say where everything is, for a run that does not end."""
        job = self.driver.job
        lines = [
            f"seed's moves {dict(self.moves_made)}",
            f"job {job.state}, last failure {job._core.last_failure!r}, restarts {job._core.restarts}",
            f"checkpoints {job._checkpoints.counts}, under way {job._checkpoints._rules.in_progress}",
        ]
        for process in self.processes:
            core = process.instance._core
            seats = [] if core is None else core._seats
            waiting = {seat.key: not seat.inbox.is_empty for seat in seats}
            room = {seat.key: seat.has_room for seat in seats}
            lines.append(f"{process.name}: deployed {core is not None}, waiting {waiting}, room {room}")
        return "\n".join(lines)


def _queues() -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(SimpleQueue=StepQueue)
