"""Steps of all parts of an exact job in random order, and what may happen to them."""

from __future__ import annotations

import random

import pytest
from once_outside import Outside
from once_world import World

from ftlayer.checkpoint.barrier import SnapshotKind
from ftlayer.runtime.connectors import sinks


class Walk:
    """Steps of all parts in random order, and what may happen to them. The same for the same seed."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        monkeypatch.setattr(sinks, "MAX_BYTES", self.random.choice([100, 1 << 20]))
        self.outside = Outside(self.random.getrandbits(32))
        self.world = World(self.outside)
        self.world.start_driver(self.random.randint(1, 3))
        # Some walks have a slot that is slow, and others that are ranges ahead of it.
        self.slow = self.random.choice([None, 0, 1])

    def run(self, steps: int) -> None:
        usual = [self.grow, self.plan, self.deliver, self.read, self.read, self.source_hears, self.sink_takes]
        usual += [self.sink_takes, self.sink_writes, self.sink_hears, self.publish, self.commit]
        rare = [self.expires, self.slots_crash, self.driver_crashes, self.reader_is_busy, self.sink_fails]
        for _ in range(steps):
            kind = self.random.random()
            if kind < 0.02:
                self.random.choice(rare)()
            elif kind < 0.06:
                self.trigger()
            elif kind < 0.10:
                self.world.work()
            else:
                self.random.choice(usual)()
        self.world.finish()

    def slot(self) -> int:
        slot = self.random.randrange(self.world.parallelism)
        return self.random.randrange(self.world.parallelism) if slot == self.slow else slot

    def grow(self) -> None:
        self.outside.rows += self.random.randint(1, 6)

    def plan(self) -> None:
        for _ in range(self.random.randint(1, 5)):
            self.world.plan()

    def deliver(self) -> None:
        self.world.deliver()

    def read(self) -> None:
        self.world.sources[self.slot()].read(self.random.randint(1, 8))

    def source_hears(self) -> None:
        self.world.sources[self.slot()].take_control()

    def sink_takes(self) -> None:
        self.world.sink_takes(self.slot(), self.random.randrange(6))

    def sink_writes(self) -> None:
        self.world.sinks[self.slot()].write(self.random.randrange(6))

    def sink_hears(self) -> None:
        self.world.sinks[self.slot()].take_control()

    def publish(self) -> None:
        self.world.publish()

    def commit(self) -> None:
        self.world.commit()

    def trigger(self) -> None:
        if len(self.world.pending) < 3:
            savepoint = self.random.random() < 0.3
            self.world.trigger(SnapshotKind.SAVEPOINT if savepoint else SnapshotKind.CHECKPOINT)

    def expires(self) -> None:
        if self.world.pending:
            self.world.give_up(self.random.choice(sorted(self.world.pending)))

    def slots_crash(self) -> None:
        self.world.restore({slot for slot in range(self.world.parallelism) if self.random.random() < 0.5})

    def driver_crashes(self) -> None:
        self.world.crash_driver(self.random.randint(1, 3))

    def reader_is_busy(self) -> None:
        """The planner's thread is in a method of the reader while the coordinator's restores the job."""
        checkpoints = self.random.random() < 0.5

        def happens() -> None:
            world = self.world
            world.restore(set())
            if checkpoints:
                plan = world.plan
                world.plan = lambda: None  # type: ignore[method-assign]
                world.trigger(SnapshotKind.CHECKPOINT)
                for _ in range(3):
                    world.work()
                world.plan = plan  # type: ignore[method-assign]

        self.outside.during[self.random.choice(["latestOffset", "partitions", "commit"])] = happens

    def sink_fails(self) -> None:
        where = self.random.choice(["write", "before commit", "after commit"])

        def happens() -> None:
            raise OSError(where)

        self.outside.during[where] = happens
