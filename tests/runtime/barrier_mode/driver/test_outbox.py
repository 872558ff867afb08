"""Dead letters on their way out: whatever crashes, those of a checkpoint that stands are among the dead once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from ftlayer.checkpoint.letters import ChainLetter, LetterKind
from ftlayer.checkpoint.snapshots import Checkpoint, SubtaskSnapshot
from ftlayer.runtime.barrier_mode.driver.outbox import (
    FIRST_PAUSE_MS,
    EmptyFile,
    ForgetBatch,
    LetterOutbox,
    OutboxFile,
    OutboxWork,
    RemoveFile,
    SendFile,
    StorageWork,
    VertexWork,
    WriteFile,
    batch_name,
)

SUBTASKS = (0, 1)


def letter(number: int, checkpoint: int = 0, subtask: int = 0) -> ChainLetter:
    """Return a letter of this name."""
    return ChainLetter(
        number.to_bytes(16, "big"),
        checkpoint,
        "chain",
        subtask,
        0,
        LetterKind.RECORD,
        "parse",
        b"",
        b"",
        None,
        (),
        1,
        2,
    )


def checkpoint(number: int, *letters: ChainLetter, run: str = "run", kind: str = "checkpoint") -> Checkpoint:
    """Return a checkpoint with one subtask."""
    return Checkpoint(number, "job", run, kind, 1, 2, 8, (), (SubtaskSnapshot("chain", 0, letters=letters),))


def names(work: list[OutboxWork]) -> list[str]:
    """Return what is to be done, in words."""
    return [
        f"{type(each).__name__} {each.batch.name if isinstance(each, WriteFile) else each.name}"
        for each in work
    ]


def test_a_batch_goes_its_way_to_the_vertex() -> None:
    outbox = LetterOutbox("run", has_vertex=True)
    stands = checkpoint(1, letter(1, 1), letter(2, 1))
    outbox.stands(stands)
    outbox.retained([stands])
    seen = []
    for _ in range(5):
        for work in outbox.work(0):
            seen += names([work])
            outbox.done(work)
    assert seen == ["WriteFile run-1", "SendFile run-1", "EmptyFile run-1", "ForgetBatch run-1"]
    assert outbox.unsent == 0
    outbox.retained([])
    assert names(outbox.work(0)) == ["RemoveFile run-1"]


def test_without_a_vertex_files_are_where_letters_are() -> None:
    outbox = LetterOutbox("run", has_vertex=False)
    outbox.stands(checkpoint(1, letter(1, 1)))
    assert outbox.unsent == 1
    (work,) = outbox.work(0)
    outbox.done(work)
    outbox.retained([])
    assert outbox.work(0) == []
    assert outbox.unsent == 0


def test_what_no_file_holds_travels_in_the_next_checkpoint() -> None:
    outbox = LetterOutbox("run", has_vertex=True)
    outbox.stands(checkpoint(1, letter(1, 1)))
    (write,) = outbox.work(0)
    outbox.failed(write, 0)
    second = outbox.to_publish(checkpoint(2, letter(1, 1), letter(2, 2)))
    assert [(batch.name, len(batch.letters)) for batch in second.letters] == [("run-1", 1)]
    assert second.subtasks[0].letters == (letter(2, 2),)
    outbox.stands(second)
    again = LetterOutbox("later", has_vertex=True)
    again.stands(second)
    assert names(again.work(0)) == ["WriteFile run-1"]


def test_a_savepoint_that_the_job_goes_on_behind_leaves_its_letters_to_the_next_checkpoint() -> None:
    outbox = LetterOutbox("run", has_vertex=True)
    outbox.to_publish(checkpoint(1, letter(1, 1), kind="savepoint"))
    assert outbox.work(0) == []
    second = outbox.to_publish(checkpoint(2, letter(1, 1)))
    assert second.subtasks[0].letters == (letter(1, 1),)


def test_the_empty_file_of_a_savepoint_stays() -> None:
    outbox = LetterOutbox("run", has_vertex=False)
    outbox.stands(checkpoint(1, letter(1, 1), kind="savepoint"))
    (work,) = outbox.work(0)
    outbox.done(work)
    outbox.retained([])
    outbox.found([OutboxFile("old-1", 0, restorable=True), OutboxFile("old-2", 0, restorable=False)])
    assert names(outbox.work(0)) == ["RemoveFile old-2"]


def test_no_file_is_removed_before_it_is_known_what_is_restored() -> None:
    outbox = LetterOutbox("run", has_vertex=False)
    outbox.found([OutboxFile("old-1", 0, restorable=False)])
    assert outbox.work(0) == []
    outbox.stands(checkpoint(1))
    assert names(outbox.work(0)) == ["RemoveFile old-1"]


def carried_by_savepoint(outbox: LetterOutbox) -> Checkpoint:
    """Return the savepoint that a job is stopped with; a letter of the checkpoint before it is in no file yet."""
    outbox.stands(checkpoint(1, letter(1, 1)))
    (write,) = outbox.work(0)
    outbox.failed(write, 0)
    savepoint = outbox.to_publish(checkpoint(2, kind="savepoint"))
    assert [batch.name for batch in savepoint.letters] == ["run-1"]
    return savepoint


def all_done(outbox: LetterOutbox) -> list[str]:
    """Do all there is to do; returns it in words."""
    seen: list[str] = []
    while found := outbox.work(FIRST_PAUSE_MS):
        seen += names(found)
        for work in found:
            outbox.done(work)
    return seen


def test_the_empty_file_of_letters_that_a_savepoint_carries_stays() -> None:
    first = LetterOutbox("run", has_vertex=True)
    savepoint = carried_by_savepoint(first)
    first.stands(savepoint)
    first.retained([])
    assert all_done(first) == ["WriteFile run-1", "SendFile run-1", "EmptyFile run-1", "ForgetBatch run-1"]
    second = LetterOutbox("later", has_vertex=True)
    second.found([OutboxFile("run-1", 0, restorable=False)])
    assert all_done(second) == ["ForgetBatch run-1"]
    second.stands(savepoint)
    assert all_done(second) == []


def test_where_no_file_stays_the_vertex_does_not_forget_what_savepoints_hold() -> None:
    for carried in (False, True):
        first = LetterOutbox("run", has_vertex=True, files_stay=False)
        savepoint = carried_by_savepoint(first) if carried else checkpoint(1, letter(1, 1), kind="savepoint")
        first.stands(savepoint)
        assert all_done(first) == ["WriteFile run-1", "SendFile run-1", "EmptyFile run-1"]
        second = LetterOutbox("later", has_vertex=True, files_stay=False)
        second.stands(savepoint)
        # The vertex knows the name, and takes nothing.
        assert all_done(second) == ["WriteFile run-1", "SendFile run-1", "EmptyFile run-1"]


def test_pauses_grow_and_end_with_the_first_success() -> None:
    outbox = LetterOutbox("run", has_vertex=True)
    outbox.found([OutboxFile("old-1", 1, restorable=True)])
    now = 0
    for number in range(4):
        (work,) = outbox.work(now)
        outbox.failed(work, now)
        now += FIRST_PAUSE_MS << number
        assert outbox.work(now - 1) == []
    (work,) = outbox.work(now)
    outbox.done(work)
    assert outbox.work(now) == [EmptyFile("old-1")]


def test_a_file_that_cannot_be_read_is_left_alone_and_others_are_sent() -> None:
    outbox = LetterOutbox("run", has_vertex=True)
    outbox.found([OutboxFile("old-1", 1, restorable=True), OutboxFile("old-2", 1, restorable=True)])
    (work,) = outbox.work(0)
    outbox.failed(work, 0, damaged=True)
    assert outbox.work(0) == [SendFile("old-2")]


def test_an_answer_that_nobody_waits_for_is_refused() -> None:
    outbox = LetterOutbox("run", has_vertex=True)
    with pytest.raises(ValueError, match="is not being done"):
        outbox.done(SendFile("run-1"))


# ---------------------------------------------------------------- whatever crashes


@dataclass
class World:
    """What outlives a driver: files (empty ones too), the vertex, checkpoints with each subtask's letters then."""

    files: dict[str, set[bytes]] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    dead: Counter[bytes] = field(default_factory=Counter)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    made: dict[int, dict[int, tuple[bytes, ...]]] = field(default_factory=dict)

    def do(self, work: OutboxWork) -> None:
        """Do it, as storage and vertex do."""
        match work:
            case WriteFile(batch):
                self.files.setdefault(batch.name, {each.letter for each in batch.letters})
            case SendFile(name):
                if name not in self.kept:
                    self.kept.add(name)
                    self.dead.update(self.files[name])
            case EmptyFile(name):
                self.files[name] = set()
            case ForgetBatch(name):
                self.kept.discard(name)
            case RemoveFile(name):
                assert not self.files.pop(name, None)

    def all_dead(self) -> Counter[bytes]:
        """Return the letters that people see, and how often."""
        found = Counter(self.dead)
        for name, letters in self.files.items():
            if name not in self.kept:
                found.update(letters)
        return found


class Walk:
    """One job over several lives of its driver, which always goes on from its latest checkpoint."""

    def __init__(self, seed: int) -> None:
        self.draw = Random(seed)
        # Seldom the job is started with a vertex at one time, and without one at another.
        self.with_vertex = self.draw.choice([1.0, 1.0, 0.0, 0.7])
        self.world = World()
        self.letters = self.number = self.run_number = 0
        self.start()

    def start(self) -> None:
        """Start a driver."""
        self.has_vertex = self.draw.random() < self.with_vertex
        self.run_number += 1
        self.run_name = f"run{self.run_number}"
        self.now = 0
        self.outbox = LetterOutbox(self.run_name, has_vertex=self.has_vertex)
        runs = {each.run for each in self.world.checkpoints}
        self.outbox.found(
            OutboxFile(name, len(letters), restorable=name.partition("-")[0] in runs)
            for name, letters in self.world.files.items()
        )
        self.doing: list[OutboxWork] = []
        self.chains: dict[int, list[ChainLetter]] = {each: [] for each in SUBTASKS}
        self.made: dict[int, list[bytes]] = {each: [] for each in SUBTASKS}
        self.told = 0
        self.restore(SUBTASKS)

    def restore(self, subtasks: Sequence[int]) -> None:
        """Have subtasks begin with the latest checkpoint; what is under way is given up."""
        self.pending: list[Checkpoint] = []
        latest = self.world.checkpoints[-1] if self.world.checkpoints else None
        for each in subtasks:
            self.chains[each] = []
            self.made[each] = [] if latest is None else list(self.world.made[latest.checkpoint][each])
        if latest is not None:
            self.outbox.stands(latest)

    def die(self) -> None:
        """A record is given up."""
        self.letters += 1
        subtask = self.draw.choice(SUBTASKS)
        new = letter(self.letters, subtask=subtask)
        self.chains[subtask].append(new)
        self.made[subtask].append(new.letter)

    def snapshot(self) -> None:
        """A checkpoint or savepoint begins, and both subtasks are snapshotted."""
        self.number += 1
        for each in SUBTASKS:
            self.chains[each] = [
                known if known.checkpoint else replace(known, checkpoint=self.number)
                for known in self.chains[each]
            ]
        parts = tuple(SubtaskSnapshot("chain", each, letters=tuple(self.chains[each])) for each in SUBTASKS)
        kind = "savepoint" if self.draw.random() < 0.2 else "checkpoint"
        self.world.made[self.number] = {each: tuple(self.made[each]) for each in SUBTASKS}
        self.pending.append(Checkpoint(self.number, "job", self.run_name, kind, 1, 2, 8, (), parts))

    def end_snapshot(self) -> None:
        """It is given up, or published; the driver may crash behind that."""
        if not self.pending:
            return
        taken = self.pending.pop(0)
        if self.draw.random() < 0.2:
            return
        published = self.outbox.to_publish(taken)
        if published.kind == "savepoint":
            return
        self.world.checkpoints.append(published)
        if self.draw.random() < 0.1:
            self.start()
            return
        self.outbox.stands(published)
        del self.world.checkpoints[: -self.draw.randint(1, 3)]
        self.outbox.retained(self.world.checkpoints)
        self.told = published.checkpoint

    def tell(self) -> None:
        """The subtasks hear of the latest checkpoint."""
        for each in SUBTASKS:
            self.chains[each] = [
                known for known in self.chains[each] if not known.checkpoint or known.checkpoint > self.told
            ]

    def lose_subtasks(self) -> None:
        """Subtasks are lost, and begin again."""
        self.restore(self.draw.choice([(0,), (1,), (0, 1)]))

    def ask(self) -> None:
        """Some time passes."""
        self.now += self.draw.choice([100, 1_000, 100_000])
        self.doing += self.outbox.work(self.now)

    def answer(self) -> None:
        """A piece of work ends: well, badly (with its effect or without), or with the driver."""
        if not self.doing:
            return
        work = self.doing.pop(self.draw.randrange(len(self.doing)))
        how = self.draw.choices(["done", "failed", "crash"], [6, 2, 1])[0]
        if how == "done" or self.draw.random() < 0.5:
            self.world.do(work)
        if how == "done":
            self.outbox.done(work)
        elif how == "failed":
            self.outbox.failed(work, self.now)
        else:
            self.start()

    def settle(self) -> None:
        """Do all work there is."""
        for _ in range(4 * len(self.world.files) + 20):
            self.now += 100_000
            self.doing += self.outbox.work(self.now)
            for work in self.doing:
                self.world.do(work)
                self.outbox.done(work)
            self.doing = []

    def standing(self) -> list[bytes]:
        """Return the letters of the latest checkpoint."""
        if not self.world.checkpoints:
            return []
        made = self.world.made[self.world.checkpoints[-1].checkpoint]
        return [each for subtask in SUBTASKS for each in made[subtask]]

    def step(self) -> None:
        """Let something happen."""
        steps = [self.die, self.snapshot, self.end_snapshot, self.tell, self.ask, self.answer]
        rare = [self.lose_subtasks, self.start]
        self.draw.choices([*steps, *rare], [3, 3, 3, 2, 4, 4, 0.4, 0.4])[0]()


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_letters_of_a_checkpoint_that_stands_are_dead_once_whatever_crashes(first: int) -> None:
    for seed in range(first, first + 100):
        walk = Walk(seed)
        for _ in range(120):
            walk.step()
            walk.outbox.validate()
            assert walk.world.all_dead() <= Counter(walk.standing()), f"seed {seed}"
            for kind in (StorageWork, VertexWork):
                assert sum(isinstance(work, kind) for work in walk.doing) <= 1, f"seed {seed}"
        walk.settle()
        assert walk.outbox.unsent == 0, f"seed {seed}"
        found = walk.world.all_dead()
        assert found == Counter(walk.standing()), f"seed {seed}"
        if walk.has_vertex:
            assert walk.world.dead == found, f"seed {seed}"
            assert walk.with_vertex < 1 or not walk.world.kept, f"seed {seed}"


def test_a_crash_between_any_two_steps_repeats_nothing() -> None:
    """One batch, and a driver that dies before or behind the effect of each step."""
    for steps in range(8):
        for takes_effect in (False, True):
            world, stands = World(), checkpoint(1, letter(1, 1), letter(2, 1))
            world.checkpoints = [stands]
            for life in range(2):
                outbox = LetterOutbox(f"life{life}", has_vertex=True)
                found = [OutboxFile(name, len(each), restorable=True) for name, each in world.files.items()]
                outbox.found(found)
                outbox.stands(stands)
                for _ in range(steps if life == 0 else 10):
                    for work in outbox.work(0):
                        world.do(work)
                        outbox.done(work)
                if life == 0 and takes_effect:
                    for work in outbox.work(0):
                        world.do(work)
            assert world.dead == Counter({letter(1).letter: 1, letter(2).letter: 1})
            assert world.files == {"run-1": set()}
            assert not world.kept


def test_names_are_of_the_checkpoint_itself() -> None:
    assert batch_name(checkpoint(7, run="a")) == "a-7"


def test_the_empty_file_of_a_batch_that_a_checkpoint_carries_stays() -> None:
    outbox = LetterOutbox("run", has_vertex=False)
    outbox.stands(checkpoint(1, letter(1, 1)))
    (write,) = outbox.work(0)
    carrying = outbox.to_publish(checkpoint(2))
    outbox.stands(carrying)
    outbox.done(write)
    later = LetterOutbox("run", has_vertex=True)
    later.stands(carrying)
    later.retained([carrying])
    for _ in range(6):
        for work in later.work(0):
            assert not isinstance(work, RemoveFile)
            later.done(work)
    later.retained([])
    assert later.work(0) == [RemoveFile("run-1")]
