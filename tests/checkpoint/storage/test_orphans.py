"""After any sequence of events only what is referred to is there, and all of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.checkpoint.snapshots import Scope
from ftlayer.checkpoint.storage.files import open_files
from ftlayer.checkpoint.storage.loading import is_bound, is_settled, orphans, sweep_earlier_runs
from ftlayer.errors import CheckpointStorageError

SLOTS = 2
LARGE = b"x" * 21_000


def test_rules_of_orphans() -> None:
    paths = [
        "chk-3/_metadata",
        "chk-3/0-1-a-u",
        "chk-4/_metadata",
        "chk-4/0-1-a-u",
        "chk-4/.half-written",
        "chk-5/0-1-a-u",
        "chk-5/0-1-dead-u",
        "shared/0-1-a-3.3.u",
        "shared/0-1-a-2.9.u",
        "shared/0-1-dead-2.9.u",
        "shared/0-1-a-4.4.used",
        "shared/somebody's",
        "notes.txt",
        "other/notes.txt",
    ]
    used = {"chk-4/0-1-a-u", "shared/0-1-a-4.4.used"}
    assert orphans(paths, used, {4}, 4, lambda instance: instance == "a") == [
        "chk-3/_metadata",
        "chk-3/0-1-a-u",
        "chk-4/.half-written",
        "chk-5/0-1-dead-u",
        "shared/0-1-a-3.3.u",
        "shared/0-1-dead-2.9.u",
    ]


def test_when_shared_files_can_go() -> None:
    assert is_settled("shared/0-1-a-3.9.u", 9)
    assert not is_settled("shared/0-1-a-3.9.u", 8)
    assert not is_settled("shared/notes", 8)
    assert is_bound("shared/0-1-a-b-3.3.u", 3)
    assert not is_bound("shared/0-1-a-3.9.u", 3)
    assert not is_bound("chk-3/0-1-a-u", 3)


class Life:
    """Slots write and die, the driver publishes, gives up, forgets and sweeps. Up to two checkpoints at a time."""

    def __init__(self, kit: Any, made: Any) -> None:
        self.kit = kit
        self.made = made
        self.driver = kit.driver()
        self.number = 0
        self.epoch = 0
        self.names = [""] * SLOTS
        self.slots = [self._start(slot) for slot in range(SLOTS)]
        self.kept: list[Any] = []
        # Of each checkpoint under way: what its slots have written.
        self.parts: dict[int, dict[int, Any]] = {}
        # Of each slot: pieces that the last completed checkpoint holds, and of its log behind them.
        self.base: list[list[Any]] = [[] for _ in range(SLOTS)]
        self.log: list[list[Any]] = [[] for _ in range(SLOTS)]

    def _start(self, slot: int) -> Any:
        self.epoch += 1
        self.names[slot] = f"instance-{self.epoch}"
        return self.kit.slot(slot, self.epoch, self.names[slot])

    def _pick(self, choice: int) -> int:
        """One of the checkpoints under way, or a new one."""
        if len(self.parts) < 2 and choice % 3 >= len(self.parts):
            self.number += 1
            self.parts[self.number] = {}
        return sorted(self.parts)[choice % len(self.parts)]

    def write(self, slot: int, choice: int) -> None:
        number = self._pick(choice)
        if slot not in self.parts[number]:
            self._write(number, slot, choice, sync=choice % 4 > 0)

    def _write(self, number: int, slot: int, choice: int, *, sync: bool) -> None:
        """A slot's part: pieces of the last complete checkpoint, new ones, and the log so far."""
        writer = self.slots[slot].writer(self.made.barrier(number))
        kept = self.base[slot] if choice & 1 else []
        scopes: list[list[Scope]] = [[], [Scope.SHARED], [Scope.EXCLUSIVE], list(Scope)]
        new = [writer.write([LARGE], scope) for scope in scopes[choice // 2 % 4]]
        if sync:
            writer.sync()
            self.parts[number][slot] = self.made.subtask([*kept, *new, *self.log[slot]], slot)

    def write_log(self, slot: int, choice: int) -> None:
        log = self.slots[slot].log_writer()
        self.log[slot].append(log.write([LARGE], Scope.SHARED))
        log.sync()

    def materialize(self, slot: int, choice: int) -> None:
        """Checkpoints that begin from now on need nothing of the log so far."""
        self.log[slot] = []

    def complete(self, slot: int, choice: int) -> None:
        number = self._pick(choice)
        for other in range(SLOTS):
            if other not in self.parts[number]:
                self._write(number, other, choice, sync=True)
        parts = self.parts.pop(number)
        self.kept.append(self.driver.publish(self.made.checkpoint(number, *parts.values())))
        for other, part in parts.items():
            pieces = [p for p in part.pieces() if p.scope is Scope.SHARED]
            self.base[other] = [p for p in pieces if p not in self.log[other]]
        for older in [other for other in self.parts if other < number]:
            self._forget(older, self.parts.pop(older))
        for storage in self.slots:
            storage.completed(number)

    def give_up(self, slot: int, choice: int) -> None:
        number = self._pick(choice)
        self._forget(number, self.parts.pop(number))

    def _forget(self, number: int, parts: dict[int, Any]) -> None:
        for storage in self.slots:
            storage.aborted(number)
        self.driver.discard_parts(number, parts.values(), self.kept)

    def discard(self, slot: int, choice: int) -> None:
        if len(self.kept) > 1:
            old = self.kept.pop(choice % (len(self.kept) - 1))
            self.driver.discard(old, self.kept)

    def die(self, slot: int, choice: int) -> None:
        """All fall back to the last checkpoint; what the dead one still writes is unreferenced."""
        zombie = self.slots[slot]
        for number in sorted(self.parts):
            zombie.writer(self.made.barrier(number)).write([LARGE])
        for number, parts in list(self.parts.items()):
            del self.parts[number]
            for other, storage in enumerate(self.slots):
                if other != slot:
                    storage.aborted(number)
            self.driver.discard_parts(number, parts.values(), self.kept)
        self.slots[slot] = self._start(slot)
        late = zombie.writer(self.made.barrier(self.number + 1))
        late.write([LARGE])
        late.sync()
        last = self.kept[-1].subtasks if self.kept else ()
        for other in range(SLOTS):
            pieces = [p for part in last if part.subtask == other for p in part.pieces()]
            self.base[other] = [piece for piece in pieces if piece.scope is Scope.SHARED]
            self.log[other] = []

    def sweep(self, slot: int, choice: int) -> None:
        list(self.driver.sweep(self.kept, lambda instance: instance in self.names))

    def check(self) -> None:
        for checkpoint in self.kept:
            self.driver.verify(checkpoint)

    def end(self) -> None:
        for number, parts in list(self.parts.items()):
            self._forget(number, parts)
        for storage in self.kit.opened:
            storage.close()
        # While it runs, too much is kept where it cannot be known; a sweep of an ended job finds it all.
        list(self.driver.sweep(self.kept, lambda instance: False))
        used = {f"chk-{one.checkpoint}/_metadata" for one in self.kept}
        for one in self.kept:
            self.driver.verify(one)
            used |= {p.path for part in one.subtasks for p in part.pieces()}
        assert self.kit.paths() == used
        self.driver.close(self.kept)
        self.driver = self.kit.driver()
        assert self.kit.paths() == used
        self.driver.close([])
        assert self.kit.paths() == set()


EVENTS = [Life.write, Life.write_log, Life.materialize, Life.complete, Life.complete, Life.give_up]
EVENTS += [Life.discard, Life.die, Life.sweep]


@pytest.mark.parametrize(
    ("kind", "across"),
    [("local", False), ("local", True), ("remote", False)],
    ids=["local", "across", "remote"],
)
def test_only_what_is_referred_to_is_there(make_kit: Any, made: Any, kind: str, across: bool) -> None:
    event = st.tuples(st.sampled_from(EVENTS), st.integers(0, SLOTS - 1), st.integers(0, 23))

    @settings(max_examples=40, deadline=None, database=None)
    @given(st.lists(event, min_size=8, max_size=40))
    def live(events: list[Any]) -> None:
        kit = make_kit(kind, file_merging_across=across, max_concurrent=2, max_file_size=80_000)
        shutil.rmtree(kit.directory.url, ignore_errors=True)
        life = Life(kit, made)
        for happen, slot, choice in events:
            happen(life, slot, choice)
            life.check()
        life.end()

    # What is lost with the machine's memory is not what is tested here.
    with mock.patch.object(os, "fsync"), mock.patch.object(os, "fdatasync"):
        live()


def test_an_alive_slots_open_log_is_kept(make_kit: Any, made: Any) -> None:
    """A checkpoint without the log does not take the log's file from under the next one."""
    kit = make_kit("local")
    slot, driver = kit.slot(), kit.driver()
    log = slot.log_writer()
    first = log.write([LARGE], Scope.SHARED)
    log.sync()
    one = driver.publish(made.checkpoint(1, made.subtask([first])))
    two = driver.publish(made.checkpoint(2, made.subtask([])))
    driver.discard(one, [two])
    second = log.write([LARGE], Scope.SHARED)
    log.sync()
    assert second.path == first.path
    three = driver.publish(made.checkpoint(3, made.subtask([second])))
    driver.discard(two, [three])
    driver.verify(three)


def test_an_instance_that_has_heard_of_no_checkpoint_yet(make_kit: Any, made: Any) -> None:
    """The numbers of checkpoints go on over restarts, and a new instance does not know how far they are."""
    kit = make_kit("local")
    slot, driver = kit.slot(epoch=9), kit.driver()
    log = slot.log_writer()
    first = log.write([LARGE], Scope.SHARED)
    log.sync()
    one = driver.publish(made.checkpoint(500, made.subtask([first])))
    two = driver.publish(made.checkpoint(501, made.subtask([])))
    driver.discard(one, [two])
    assert list(driver.sweep([two], lambda _: True)) == []
    second = log.write([LARGE], Scope.SHARED)
    log.sync()
    slot.writer(made.barrier(502))
    third = log.write([LARGE], Scope.SHARED)
    log.sync()
    assert first.path == second.path != third.path
    three = driver.publish(made.checkpoint(502, made.subtask([second, third])))
    driver.verify(three)
    four = driver.publish(made.checkpoint(570, made.subtask([])))
    driver.discard(three, [four])
    assert third.path not in kit.paths()
    assert second.path in kit.paths()
    assert second.path in set(driver.sweep([two, four], lambda _: False))


@pytest.mark.parametrize("across", [False, True])
def test_a_checkpoint_that_is_given_up_takes_nothing_from_the_next(
    make_kit: Any, made: Any, across: bool
) -> None:
    kit = make_kit("local", file_merging_across=across)
    slot, driver = kit.slot(), kit.driver()
    base = slot.writer(made.barrier(1)).write([LARGE], Scope.SHARED)
    slot.writer(made.barrier(1)).sync()
    one = driver.publish(made.checkpoint(1, made.subtask([base])))
    slot.completed(1)
    log = slot.log_writer()
    logged = log.write([LARGE], Scope.SHARED)
    log.sync()
    writer = slot.writer(made.barrier(2))
    new = writer.write([LARGE], Scope.SHARED)
    assert (new.path == base.path) == across
    writer.sync()
    slot.aborted(2)
    driver.discard_parts(2, [made.subtask([base, logged, new])], [one])
    assert (new.path in kit.paths()) == across
    driver.verify(one)
    driver.verify(driver.publish(made.checkpoint(3, made.subtask([base, logged]))))


def test_a_checkpoint_whose_files_are_gone_is_not_published(files_kit: Any, made: Any) -> None:
    slot, driver = files_kit.slot(), files_kit.driver()
    writer = slot.writer(made.barrier(1))
    piece = writer.write([LARGE])
    writer.close()
    files_kit.directory.delete(piece.path)
    with pytest.raises(CheckpointStorageError, match="not there any more"):
        driver.publish(made.checkpoint(1, made.subtask([piece])))
    assert driver.completed(files_kit.job) == []


def test_files_of_others_are_left_alone() -> None:
    with tempfile.TemporaryDirectory() as directory:
        files = open_files(directory)
        files.publish("shared/notes.txt", b"mine")
        assert [entry.path for entry in files.walk()] == ["shared/notes.txt"]
        assert orphans(["shared/notes.txt"], set(), set(), 9, lambda _: False) == []


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_what_killed_drivers_have_left_goes_wherever_a_sweep_ends(
    make_kit: Any, made: Any, kind: str
) -> None:
    """A run with a retained checkpoint and one that was written and not published; a sweep dies at each deletion."""
    kit = make_kit(kind)
    slot, driver = kit.slot(), kit.driver()
    kept, lost = [], []
    for number in range(1, 4):
        writer = slot.writer(made.barrier(number))
        pieces = [writer.write([LARGE]), writer.write([LARGE], Scope.SHARED)]
        writer.close()
        if number < 3:
            kept.append(
                driver.publish(
                    made.checkpoint(number, made.subtask([pieces[0], *kept_pieces(kept), pieces[1]]))
                )
            )
        else:
            lost += [piece.path for piece in pieces]
    log = slot.log_writer()
    lost.append(log.write([LARGE], Scope.SHARED).path)
    log.sync()
    slot.close()
    directory, job, before = kit.config.directory, kit.job, kit.paths()

    def swept(run: str) -> list[str]:
        return list(sweep_earlier_runs(directory, job, run))

    # The run's own files are its own sweep's, and those of other jobs nobody's here.
    assert swept(kit.run) == []
    assert list(sweep_earlier_runs(directory, "another", "run-9")) == []
    for _ in lost[1:]:
        left = sweep_earlier_runs(directory, job, "run-9")
        next(left)
        left.close()
    swept("run-9")
    assert before - kit.paths() == set(lost)
    for one in kept:
        kit.driver().verify(kit.driver().load(one.location))
    # What a checkpoint needs that cannot be read is not known.
    kit.slot(instance="z").writer(made.barrier(9)).write([LARGE], Scope.SHARED)
    for storage in kit.opened:
        storage.close()
    whole = kit.paths()
    kit.directory.publish("chk-1/_metadata", b"damaged")
    assert swept("run-9") == []
    assert kit.paths() == whole


def kept_pieces(kept: list[Any]) -> list[Any]:
    """The shared pieces of the checkpoint before."""
    return [p for one in kept[-1:] for part in one.subtasks for p in part.pieces() if p.scope is Scope.SHARED]
