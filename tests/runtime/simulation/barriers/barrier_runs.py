"""Runs of a world from a seed: what goes wrong, when, and what has to hold in the end."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from random import Random
from typing import Any

from barrier_driver import Setting
from barrier_faults import cut, cut_control, damage_copies, kill
from barrier_letters import LETTER_FAULTS
from barrier_outside import Dies, Outside, Rows
from barrier_plans import ACTS as ACTS
from barrier_plans import ARMED, Plan
from barrier_plans import MODES as MODES
from barrier_plans import drawn as drawn
from barrier_standins import StandIns
from barrier_topologies import Case, Extent
from barrier_world import World

from ftlayer.checkpoint.barrier import SnapshotKind
from ftlayer.checkpoint.coordinator.events import CheckpointRequested, SavepointRequested, StopRequested
from ftlayer.checkpoint.coordinator.in_flight import CheckpointState
from ftlayer.checkpoint.options import CheckpointConfig, Retention
from ftlayer.config import TopologyOptions
from ftlayer.errors import CheckpointError, CommitFailedError, IncompatibleCheckpointError, JobError
from ftlayer.runtime.driver.rules.events import Broken, CancelRequested, DrainRequested, JobState
from ftlayer.runtime.environment import LATEST

MOST_MOVES = 40_000
"""A job that has not come to its end by then is taken for stuck; a usual one takes about a thousand."""

FROZEN_MS = 3_000


class Run:
    """One world, with its directory."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.directory = Path(tempfile.mkdtemp(prefix="barriers-", dir=root))
        config: dict[str, Any] = {
            "interval": "30ms",
            "timeout": "2s",
            "tolerable_failures": 1_000,
            "directory": str(self.directory / "checkpoints"),
            "memory_threshold": 64,
            "max_parallelism": 8,
            "state_directory": str(self.directory),
            **plan.config,
        }
        copies = str(self.directory / "local")
        config["local_recovery"] = copies if config.get("local_recovery") else None
        options: dict[str, Any] = {
            "batch_rows": 4,
            "batch_age_ms": 3,
            "channel_bytes": 1 << 10,
            "heartbeat_ms": 100,
            "heartbeat_timeout_ms": 2_000,
            **plan.options,
        }
        exact = config.get("mode") != "at-least-once"
        outside = Outside(plan.seed + 2, plan.deadly)
        self.case = Case(plan.name, outside, exact=exact, count=plan.count, parts=plan.parts)
        setting = Setting(TopologyOptions(**options), CheckpointConfig(**config), plan.parallelism)
        self.world = World(self.case, setting, plan.seed, self.directory, has_vertex=plan.vertex)
        self.random = Random(plan.seed + 1)
        self.moves = 0
        self.happened: list[str] = []
        self.stopping: tuple[str, Future[Any]] | None = None
        self.stops: list[tuple[str, Future[Any]]] = []
        self.base: str | None = None  # the savepoint that the job goes on behind
        self.expected = {JobState.ENDED}
        self.extent = Extent.WHOLE
        self.went_back = False

    def run(self) -> Run:
        """Run to the end, and check everything; the directory is removed."""
        return self._with_everything(self._to_the_end)

    def run_and_go_back(self) -> Run:
        """Run to the end, and again from the last savepoint that the job went on behind."""
        return self._with_everything(self._there_and_back)

    def _with_everything(self, work: Callable[[], None]) -> Run:
        try:
            with StandIns(self.world).installed():
                self.world.begin()
                work()
        except BaseException as error:
            error.add_note(f"{self.plan}\nhappened: {self.happened}\nwrong: {self.outside.wrong}")
            raise
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)
            del Outside.worlds[self.outside.number]
        return self

    @property
    def outside(self) -> Outside:
        return self.case.outside

    # ------------------------------------------------------------ running

    def _to_the_end(self) -> None:
        events = sorted(self.plan.events)
        while True:
            self._live(events)
            is_finished = self._finish()
            verdict = self.world.driver.verdict
            assert verdict is not None
            if verdict.state is not JobState.ENDED:
                self.world.killed.add(f"{self.world.lives}.")
                if not self._is_retained(verdict.state):
                    self.extent = Extent.CUT
                    break
                self._go_on()
                continue
            if self.stopping is None:
                if is_finished or self.world.driver.checkpoints.result is not None:
                    break
                self._go_on()
                continue
            location, answer = self.stopping
            self.stopping = None
            if not answer.done() or answer.exception() is not None:
                break
            # It was stopped with a savepoint, which the next life begins with.
            self.base = location
            self._begin(location)
        self._check_end()

    def _finish(self) -> bool:
        """Let the driver do what is left at the job's end; whether it lived to see it done."""
        try:
            self.world.finish()
        except Dies as fault:
            self.happened.append(f"{self.moves}: driver, {fault}, at the end")
            self.world.kill_driver()
            return False
        self._check_life()
        return True

    def _there_and_back(self) -> None:
        self._live(sorted(self.plan.events))
        self.world.finish()
        self._check_life()
        self._check_end()
        answers = [answer.result() for answer in self.world.driver.answers if answer.exception() is None]
        if not answers:
            return
        savepoint = answers[-1]
        held = self.world.in_savepoint(savepoint, self.world.driver.key)
        self._begin(savepoint.location)
        life = f"{self.world.lives}."
        self._live([])
        self.world.finish()
        self._check_life()
        assert not self.outside.wrong, self.outside.wrong

        def counts(name: int, rows: Rows) -> bool:
            """What was there at the savepoint, what it holds, and what came of it. The rest is of another future."""
            was_there = bool(rows.ids) and rows.ids[0] < savepoint.checkpoint
            return was_there or name in held or rows.writer.startswith(life)

        self.went_back = True
        self.case.check(Extent.WHOLE, counts)

    def _live(self, events: list[tuple[int, str]]) -> None:
        """Go on until the job is over; drivers may die meanwhile."""
        world = self.world
        while world.driver.verdict is None:
            self.moves += 1
            assert self.moves < MOST_MOVES, f"the job does not end:\n{world.report()}"
            while events and events[0][0] <= self.moves:
                self._happen(events.pop(0)[1])
            try:
                world.step()
            except Dies as fault:
                self.happened.append(f"{self.moves}: driver, {fault}")
                self._next_driver()
        assert world.driver.verdict.state in self.expected, world.driver.verdict

    def _happen(self, what: str) -> None:
        self.happened.append(f"{self.moves}: {what}")
        world = self.world
        match what:
            case "kill" | "kill-two" | "kill-all":
                number = {"kill": 1, "kill-two": 2, "kill-all": len(world.processes)}[what]
                for process in self.random.sample(world.processes, min(number, len(world.processes))):
                    kill(world, process)
            case "freeze":
                if world.processes:
                    self.random.choice(world.processes).frozen_until_ms = world.mono + FROZEN_MS
            case "cancel-slot":
                if world.processes:
                    process = self.random.choice(world.processes)
                    world.driver.submitter.unwanted.add((process.slot, process.attempt))
            case "cut-link":
                open_links = [link for link in world.links if not link.silent and not link.broken]
                if open_links:
                    cut(world, self.random.choice(open_links))
            case "cut-control":
                if world.processes:
                    cut_control(world, self.random.choice(world.processes))
            case "driver":
                self._next_driver()
            case "savepoint":
                where = world.savepoint()
                world.driver.request(lambda number: SavepointRequested(number, where))
            case "damage-copies":
                damage_copies(world)
            case "drain":
                world.driver.events.put(DrainRequested())
                self.extent = Extent.DRAINED
            case "cancel":
                world.driver.events.put(CancelRequested("a user wants it"))
                self.expected.add(JobState.CANCELLED)
            case "fail":
                world.driver.events.put(Broken(JobError("meant to fail for good")))
                self.expected.add(JobState.FAILED)
            case "requeue":
                world.requeue()
            case "checkpoint":
                world.driver.request(CheckpointRequested)
            case "stop":
                where = world.savepoint()
                answer = world.driver.request(lambda number: StopRequested(number, where))
                self.stops.append((where, answer))
                before = None if self.stopping is None else self.stopping[1]
                # One that has succeeded is what the next life begins with, whatever is asked for behind it.
                if before is None or (before.done() and before.exception() is not None):
                    self.stopping = where, answer
            case _:
                assert what in {*ARMED, *LETTER_FAULTS, "publish-odd"}, what
                self.outside.armed[what] += 1

    def _next_driver(self) -> None:
        """The driver dies, and another one goes on from the latest checkpoint."""
        self.world.kill_driver()
        self._go_on()

    def _go_on(self) -> None:
        self.stopping = None
        latest = self.world.latest()
        since = 0 if latest is None else latest.completed_ms
        for location, answer in self.stops:
            if answer.done() and isinstance(answer.exception(), CommitFailedError):
                savepoint = self.world.load(location)
                if savepoint.completed_ms >= since:
                    # It was said that the job is to go on from there.
                    self.base, latest, since = location, None, savepoint.completed_ms
        self._begin(LATEST if latest is not None or self.base is None else self.base)

    def _is_retained(self, state: JobState) -> bool:
        retention = self.world.setting.config.effective_retention
        if state is JobState.CANCELLED:
            return retention is Retention.RETAIN_ON_CANCELLATION
        return retention is not Retention.NO_EXTERNALIZED_CHECKPOINTS

    def _failed_without_own(self) -> bool:
        driver = self.world.driver
        own = any(
            stats.kind == SnapshotKind.CHECKPOINT and stats.state == CheckpointState.COMPLETED
            for stats in driver.checkpoints.history()
        )
        return driver.verdict is not None and driver.verdict.state is JobState.FAILED and not own

    def _begin(self, restore_from: str) -> None:
        self.expected, self.extent = {JobState.ENDED}, Extent.WHOLE
        before = self.world.setting.parallelism
        restored = self.world.latest() if restore_from == LATEST else self.world.load(restore_from)
        if restored is not None:
            # It may have been complete in the storage alone.
            self.world.note_complete(restored, self.world.driver.key)
        try:
            self.world.begin(restore_from, self.random.randint(1, 3))
        except IncompatibleCheckpointError:
            # Records in flight that cannot be dealt out anew.
            self.world.begin(restore_from, before)

    # ------------------------------------------------------------ what has to hold

    def _check_life(self) -> None:
        """Of a driver that has come to its end well."""
        world, driver = self.world, self.world.driver
        counts = driver.checkpoints.checkpoint_counts
        assert counts.in_progress == 0
        assert counts.triggered == counts.completed + counts.failed == len(driver.triggered), counts
        assert driver.triggered == sorted(set(driver.triggered))
        assert all(times == 1 for times in driver.ends.values()), driver.ends
        assert len(driver.ends) == counts.failed
        for answer in driver.answers:
            assert answer.done()
            error = answer.exception()
            assert error is None or isinstance(error, CheckpointError), error
        assert not world.processes
        assert driver.verdict is not None
        left = {path for path in world.files() if path.split("/")[1] == driver.job.job}
        if driver.verdict.state is not JobState.ENDED:
            kept = driver.rules.completed
            if not self._is_retained(driver.verdict.state):
                # One that fails before its own first checkpoint leaves what it was restored from in any case.
                assert not kept or self._failed_without_own(), kept
            left -= world.referred_to(kept)
        assert not left, f"orphans: {left}"
        may_leave = any(writer.startswith(f"{world.lives}.") for writer in world.killed)
        if not may_leave and world.lives not in world.leaves_copies:
            copies = [path for path in world.copies() if path.split("/")[1] == driver.job.job]
            assert not copies, f"orphans: {copies}"

    def _check_end(self) -> None:
        outside = self.outside
        assert not outside.wrong, outside.wrong
        self.case.check(self.extent)
        self.world.check_letters(self.extent)
        first = list(dict.fromkeys(outside.log))
        assert first == sorted(first), f"commits out of order: {outside.log}"
        for name, rows in outside.staged.items():
            assert len(set(rows.ids)) <= 1, f"message {name} was committed with {rows.ids}"
            is_settled = rows.visible or rows.aborted or name in self.world.in_savepoints
            assert is_settled or self._may_leave(rows.writer), f"message {name} of {rows.writer} is left"

    def _may_leave(self, writer: str) -> bool:
        life = writer.partition(".")[0]
        # What metadata names that may stand is left alone.
        return writer in self.world.killed or f"{life}." in self.world.killed or self.world.was_undecided
