"""Everything that can happen next in a world, one thing at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from barrier_faults import kill
from barrier_outside import Dies
from barrier_parts import Control, ThreadInSteps
from barrier_process import Process, Runner

from ftlayer.runtime.driver.planners import ReaderPlanner
from ftlayer.runtime.driver.rules.events import SparkJobEnded

TICK_MS = 50
"""The driver looks at the time this often, when nothing else happens."""

Move = Callable[[], None]


class Moves:
    """See the module."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._is_paused = False
        world.outside.pause = self._pause

    def moves(self) -> Iterator[tuple[str, Move]]:
        """Everything that can happen now."""
        driver = self._world.driver
        if not driver.events.empty() or self._world.mono - driver.ticked_ms >= TICK_MS:
            yield "driver", driver.step
        for planner in driver.planners:
            if planner.wait_ms == 0:
                yield "plan", lambda planner=planner: self._plan(planner)
        for worker in self._world.workers:
            if worker.todo:
                yield "worker", worker.step
        ending: set[Process] = set()
        for control in self._world.controls:
            # An instance has closed its stream, and the driver seen that, before the next one in its process begins.
            if control.up and control.process not in ending:
                yield "up", lambda control=control: self._up(control)
            ending.add(control.process)
            if control.down:
                yield "down", control.deliver_down
        for slot, attempt in driver.submitter.submitted:
            yield "submit", lambda slot=slot, attempt=attempt: self._submit(slot, attempt)
        if self._world.spark_ended:
            yield "spark", self._spark_ended
        self._name_servers()
        for link in self._world.links:
            if link.can_deliver(self._world.servers):
                yield "frame", link.deliver
            if link.tells:
                yield "broken", link.tell_broken
            if link.back:
                yield "credit", link.give_back
        for process in self._world.processes:
            if (process.slot, process.attempt) in driver.submitter.unwanted:
                yield "cancel", lambda process=process: kill(self._world, process)
            if process.is_frozen:
                continue
            if process.due_ms() <= self._world.mono:
                yield "turn", lambda process=process: self._turn(process)
            for runner in process.runners:
                if runner.has_work:
                    yield "write", lambda process=process, runner=runner: self._write(process, runner)
            for log in process.logs:
                if log.has_work:
                    yield "log", lambda process=process, log=log: self._log(process, log)
            for executor in process.executors:
                if executor.todo:
                    yield "upkeep", executor.step

    def step(self) -> None:
        """Let one thing happen, or time pass."""
        found = list(self.moves())
        if not found:
            self.pass_time(self._until_next())
            return
        if self._world.random.random() < 0.15:
            self.pass_time(self._world.random.choice((1, 1, 2, 5)))
            return
        kind, move = self._world.random.choice(found)
        self._world.moves_made[kind] += 1
        try:
            move()
        except Dies as fault:
            # In the middle of what it did.
            if not fault.writer:
                raise
            for process in self._world.processes:
                if process.name == fault.writer:
                    if fault.itself:
                        self._world.boxes.ended(process, str(fault))
                    kill(self._world, process)
                    break

    def pass_time(self, ms: int) -> None:
        before, self._world.mono, self._world.wall = (
            self._world.mono,
            self._world.mono + ms,
            self._world.wall + ms,
        )
        beat_ms = self._world.setting.options.heartbeat_ms
        if before // beat_ms != self._world.mono // beat_ms:
            for process in self._world.processes:
                if not process.is_frozen:
                    process.instance.beat()

    def _until_next(self) -> int:
        dues = [process.due_ms() for process in self._world.processes if not process.is_frozen]
        due = min([*dues, self._world.mono + TICK_MS])
        return max(1, int(due - self._world.mono))

    def _turn(self, process: Process) -> None:
        process.turn()
        if process.alive and process.instance.mailbox.resting:
            process.rested_ms = self._world.mono
        box = process.instance.mailbox
        if process.alive and box.resting and box.timeout_s == 0:
            box.resting = False

    def _plan(self, planner: ReaderPlanner) -> None:
        planner.work()
        planner.rules.validate()

    def _log(self, process: Process, log: ThreadInSteps) -> None:
        with self._world.running(process):
            log.step()

    def _write(self, process: Process, runner: Runner) -> None:
        """Let a snapshot's thread do one piece of work; other things happen meanwhile."""
        with self._world.running(process):
            if not runner.work():
                process.runners.remove(runner)

    def _pause(self) -> None:
        """Let others have their turn while a snapshot's thread is at work."""
        process = self._world.current
        if self._is_paused or process is None or not any(runner.at_work for runner in process.runners):
            return
        if self._world.random.random() < 0.5:
            return
        self._is_paused = True
        writer = self._world.outside.writer
        # What happens meanwhile is none of this process's doing.
        self._world.current, self._world.outside.writer = None, ""
        try:
            for _ in range(self._world.random.randint(1, 8)):
                self.step()
        finally:
            self._is_paused = False
            self._world.current, self._world.outside.writer = process, writer
        if not process.alive:
            raise Dies("its process was killed", process.name)

    def _up(self, control: Control) -> None:
        frame = control.up.popleft()
        job = self._world.driver.job
        if frame is not None:
            job.slot_said(control.slot, control.instance, Control.decoded(frame))
            return
        self._world.controls.remove(control)
        self._world.driver.server.streams.pop(control.instance, None)
        job.slot_lost(control.slot, control.instance, control.reason)

    def _submit(self, slot: int, attempt: int) -> None:
        self._world.driver.submitter.submitted.remove((slot, attempt))
        if (slot, attempt) in self._world.driver.submitter.unwanted:
            self._world.spark_ended.append((slot, attempt, None))
            return
        process = Process.__new__(Process)
        self._world.processes.append(process)
        process.__init__(self._world, slot, attempt)  # type: ignore[misc]

    def _spark_ended(self) -> None:
        self._world.driver.events.put(SparkJobEnded(*self._world.spark_ended.pop(0)))

    def _name_servers(self) -> None:
        self._world.servers = {
            process.instance.name: process.instance.server
            for process in self._world.processes
            if process.instance.server is not None
        }
