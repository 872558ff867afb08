"""A process of a slot, and the instances of the slot that follow each other in it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from barrier_parts import Link, StepExecutor, StepMailbox, ThreadInSteps
from pyspark import cloudpickle

from ftlayer.checkpoint.storage.opening import LocalCopies
from ftlayer.runtime.barrier_mode.slot import shell as snapshotting
from ftlayer.runtime.barrier_mode.slot.shell import BarrierSlotShell
from ftlayer.runtime.protocol.messages import Cancel, Deploy, Hello, SlotEnded
from ftlayer.runtime.slot import main
from ftlayer.runtime.slot.links import SlotLinks, receivers_of
from ftlayer.runtime.slot.main import SlotLoop
from ftlayer.runtime.slot.rules.events import CoordinatorLost, CoordinatorSaid
from ftlayer.runtime.slot.rules.mode import Order


class Instance(main._Slot):
    """One instance of a slot, whose loop takes a turn when it is told to. What threads do is done by moves."""

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self.loop: SlotLoop | None = None
        self.is_over = False
        self.again = False

    @property
    def name(self) -> str:
        return self._instance

    @property
    def control(self) -> Any:
        return self._control

    @property
    def server(self) -> Any:
        return self._server

    @property
    def core(self) -> Any:
        return self._core

    @property
    def snapshots(self) -> Runner | None:
        assert isinstance(self._mode, BarrierSlotShell)
        return self._mode.snapshots  # type: ignore[return-value]

    @property
    def mailbox(self) -> StepMailbox:
        return self._mailbox

    def register(self) -> None:
        """What `_Slot.run` does up to its wait for `Deploy`."""
        order = self._order
        self._control.start(lambda message: self._mailbox.put(CoordinatorSaid(message)), self._lost)
        server = self._listen()
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
        address = f"grpc://slot{order.slot}:1"
        self._control.send(Hello(order.slot, self._instance, address, "simulated", 1, self._mode.deaths()))
        self.mailbox.resting = True

    def turn(self) -> None:
        """Take a turn; closes the instance when it has come to its end."""
        try:
            if self.loop is not None:
                self.is_over = not self.loop.turn()
                assert self._core is not None
                self._core.validate()
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
                self._begin(deploy)
            case CoordinatorSaid(Cancel()):
                self._control.send(SlotEnded())
                self.is_over = True
            case CoordinatorLost():
                self.is_over = True
            case event:
                raise AssertionError(f"the coordinator began with {event}")

    def _begin(self, deploy: Deploy) -> None:
        assert self._pulse is not None
        assert self._links is not None
        self.loop = self._deploy(deploy, self._pulse, self._links)
        self.loop.begin(deploy)

    def beat(self) -> None:
        if not self.is_over:
            self._control.send(self._pulse.heartbeat())


class Runner(snapshotting.SnapshotRunner):
    """`SnapshotRunner` whose thread is the world's. ``at_work``: between two steps of one piece of work."""

    at_work = False

    @property
    def has_work(self) -> bool:
        return not self.at_work and not self._jobs.empty()

    def work(self) -> bool:
        """Do one piece of work; return False if that was the end of the thread, which is not waited for."""
        self.at_work = True
        try:
            job = self._jobs.get()
            if job is not None:
                self._do(job)
                return True
            self._jobs.put(None)
            self._run()
            return False
        finally:
            self.at_work = False


class Process:
    """A process that Spark has started for a slot; instances of it follow each other."""

    def __init__(self, world: Any, slot: int, attempt: int) -> None:
        self.world, self.slot, self.attempt = world, slot, attempt
        self.name = f"{world.lives}.{slot}.{attempt}"
        self.executors: list[StepExecutor] = []
        self.links: list[Link] = []
        self.runners: list[Runner] = []  # threads of snapshots
        self.logs: list[ThreadInSteps] = []  # threads of changelogs
        self.copies: list[LocalCopies] = []
        self.frozen_until_ms = 0
        self.alive = True
        self.instance: Instance
        self.begin()

    def begin(self) -> None:
        self.copies = []
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
        if self.instance.loop is None or any(runner.at_work for runner in self.runners):
            # It had nothing open yet, or its thread comes too late to remove its copies.
            self.world.leaves_copies.add(self.world.lives)
        self.let_go_of_local_copies()
        self.world.processes.remove(self)
        self.world.spark_ended.append((self.slot, self.attempt, error))

    def let_go_of_local_copies(self) -> None:
        """What the system does when a process is gone: its locks are free."""
        for copies in self.copies:
            copies.close(over=False)

    @property
    def is_frozen(self) -> bool:
        return self.world.mono < self.frozen_until_ms

    def due_ms(self) -> float:
        box = self.instance.mailbox
        if not box.resting:
            return self.world.mono
        return math.inf if box.timeout_s is None else self.rested_ms + math.ceil(box.timeout_s * 1_000)

    rested_ms = 0
