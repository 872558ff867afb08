"""Requeued letters: each comes back into the job once, and is lost to neither job nor vertex."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from ftlayer.checkpoint.letters import ChainLetter, LetterKind
from ftlayer.checkpoint.snapshots import Checkpoint, SubtaskSnapshot
from ftlayer.runtime.barrier_mode.driver.letters import (
    ASK_EVERY_MS,
    AskRequeued,
    ConfirmLetters,
    Offered,
    Readmission,
    ReadmissionWork,
    ReturnToDead,
    SendLetters,
    Target,
)

SLOTS = (0, 1)
PAGE = 2


def letter(number: int) -> ChainLetter:
    """Return a letter of this name."""
    name = number.to_bytes(16, "big")
    return ChainLetter(name, 1, "chain", 0, 0, LetterKind.RECORD, "parse", b"", b"", None, (), 1, 2)


def offer(number: int) -> Offered:
    """Return the offer of a letter, which goes to the slot of its number; every seventh cannot go back."""
    slot = number % len(SLOTS)
    target = "the job has no operator 'chain'" if number % 7 == 0 else Target(slot, "chain", slot)
    return Offered(b"key %d" % number, letter(number), target)


def checkpoint(number: int, *names: int, **more: tuple[bytes, ...]) -> Checkpoint:
    """Return a checkpoint whose subtask names these letters."""
    part = SubtaskSnapshot("chain", 0, readmitted=tuple(letter(each).letter for each in names))
    return Checkpoint(number, "job", "run", "checkpoint", 1, 2, 8, (), (part,), **more)


def running() -> Readmission:
    """Return the rules of a job that runs."""
    rules = Readmission(SLOTS)
    rules.up(SLOTS)
    return rules


def ask(rules: Readmission, now_ms: int, *numbers: int, more: bytes = b"") -> list[SendLetters]:
    """Have the vertex offer letters."""
    (work,) = rules.work(now_ms)
    assert isinstance(work, AskRequeued)
    return rules.offered([offer(number) for number in numbers], more, now_ms)


def test_a_letter_is_sent_once_and_confirmed_once_its_checkpoint_is_complete() -> None:
    rules = running()
    assert ask(rules, 0, 1, 2) == [
        SendLetters(1, "chain", 1, (letter(1),)),
        SendLetters(0, "chain", 0, (letter(2),)),
    ]
    assert rules.work(0) == []
    assert ask(rules, ASK_EVERY_MS, 1, 2) == []
    assert rules.on_their_way == 2
    done = checkpoint(1, 1)
    rules.stands(done)
    rules.retained([done])
    assert ask(rules, 2 * ASK_EVERY_MS, 1, 2) == []
    assert rules.work(2 * ASK_EVERY_MS) == [ConfirmLetters((b"key 1",))]
    rules.done()
    assert ask(rules, 2 * ASK_EVERY_MS, 2) == []
    assert rules.to_publish(checkpoint(2)).readmitted == ()


def test_a_letter_that_an_older_checkpoint_lacks_is_named_until_that_one_is_gone() -> None:
    rules = running()
    old, new = checkpoint(1), checkpoint(2, 1)
    rules.stands(old)
    ask(rules, 0, 1)
    rules.stands(new)
    rules.retained([old, new])
    assert ask(rules, ASK_EVERY_MS, 1) == []
    assert rules.work(ASK_EVERY_MS) == []
    third = rules.to_publish(checkpoint(3))
    assert third.readmitted == (letter(1).letter,)
    rules.stands(third)
    rules.retained([new, third])
    ask(rules, 2 * ASK_EVERY_MS, 1)
    assert rules.work(2 * ASK_EVERY_MS) == [ConfirmLetters((b"key 1",))]


def test_what_was_lost_with_a_subtask_is_sent_again_once_its_slot_is_up() -> None:
    rules = running()
    ask(rules, 0, 1, 2)
    rules.down({1})
    assert ask(rules, ASK_EVERY_MS, 1, 2) == []
    rules.up({1})
    assert ask(rules, 2 * ASK_EVERY_MS, 1, 2) == [SendLetters(1, "chain", 1, (letter(1),))]


def test_what_cannot_go_back_is_returned_with_the_reason() -> None:
    rules = running()
    assert ask(rules, 0, 7, 14) == []
    assert rules.work(0) == [ReturnToDead((b"key 7", b"key 14"), "the job has no operator 'chain'")]
    rules.done()


def test_at_its_end_a_job_gets_nothing_and_still_confirms() -> None:
    rules = running()
    done = checkpoint(1, 1)
    rules.stands(done)
    rules.ending()
    assert ask(rules, 0, 1, 2) == []
    assert rules.work(0) == [ConfirmLetters((b"key 1",))]


def test_what_fails_is_asked_again_after_a_pause_from_the_beginning() -> None:
    rules = running()
    ask(rules, 0, 1, 2, more=b"key 2")
    assert rules.work(0) == [AskRequeued(b"key 2")]
    rules.failed(0)
    assert rules.work(ASK_EVERY_MS - 1) == []
    assert rules.work(ASK_EVERY_MS) == [AskRequeued(b"")]
    rules.failed(ASK_EVERY_MS)
    assert rules.work(3 * ASK_EVERY_MS - 1) == []
    assert rules.work(3 * ASK_EVERY_MS) == [AskRequeued(b"")]


def test_answers_that_nobody_waits_for_are_refused() -> None:
    rules = running()
    with pytest.raises(ValueError, match="nothing was asked"):
        rules.offered([], b"", 0)
    with pytest.raises(ValueError, match="has another answer"):
        rules.done()
    with pytest.raises(ValueError, match="nothing was asked"):
        rules.failed(0)


# ---------------------------------------------------------------- whatever crashes


@dataclass
class World:
    """What outlives a driver: the vertex, and checkpoints with what each subtask had taken."""

    requeued: list[int] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    taken: dict[int, dict[int, Counter[int]]] = field(default_factory=dict)


class Walk:
    """One job over several lives of its driver; a damaged checkpoint takes it back to an older one."""

    def __init__(self, seed: int) -> None:
        self.draw = Random(seed)
        self.world = World()
        self.letters = self.number = 0
        self.gone: set[int] = set()
        self.start()

    def start(self) -> None:
        """Start a driver."""
        self.rules = Readmission(SLOTS)
        self.now = 0
        self.doing: list[ReadmissionWork] = []
        self.answers: list[tuple[list[Offered], bytes]] = []
        self.taken = {slot: Counter[int]() for slot in SLOTS}
        self.named: dict[int, list[tuple[int, int]]] = {slot: [] for slot in SLOTS}
        self.control: list[SendLetters] = []
        self.told = 0
        self.restore(SLOTS)

    def restore(self, slots: tuple[int, ...], *, damaged: bool = False) -> None:
        """Have slots begin with the latest checkpoint, or with the one before."""
        self.pending: list[Checkpoint] = []
        checkpoints = self.world.checkpoints
        if damaged and len(checkpoints) > 1:
            slots = SLOTS
            checkpoints.pop()
        self.rules.down(slots)
        latest = checkpoints[-1] if checkpoints else None
        for slot in slots:
            self.named[slot] = []
            self.taken[slot] = (
                Counter() if latest is None else Counter(self.world.taken[latest.checkpoint][slot])
            )
        self.control = [each for each in self.control if each.slot not in slots]
        if latest is not None:
            self.rules.stands(latest)
            self.rules.retained(checkpoints)
        self.rules.up(slots)

    def requeue(self) -> None:
        """A person requeues a letter."""
        self.letters += 1
        self.world.requeued.append(self.letters)

    def snapshot(self) -> None:
        """All subtasks are snapshotted."""
        self.number += 1
        for slot in SLOTS:
            self.named[slot] = [(name, at or self.number) for name, at in self.named[slot]]
        parts = tuple(
            SubtaskSnapshot("chain", slot, readmitted=tuple(letter(n).letter for n, _ in self.named[slot]))
            for slot in SLOTS
        )
        self.world.taken[self.number] = {slot: Counter(self.taken[slot]) for slot in SLOTS}
        self.pending.append(Checkpoint(self.number, "job", "run", "checkpoint", 1, 2, 8, (), parts))

    def end_snapshot(self) -> None:
        """It is given up, or complete."""
        if not self.pending:
            return
        taken = self.pending.pop(0)
        if self.draw.random() < 0.2:
            return
        published = self.rules.to_publish(taken)
        self.world.checkpoints.append(published)
        if self.draw.random() < 0.1:
            self.start()
            return
        self.rules.stands(published)
        del self.world.checkpoints[: -self.draw.randint(1, 3)]
        self.rules.retained(self.world.checkpoints)
        self.told = published.checkpoint

    def tell(self) -> None:
        """The subtasks hear of the latest complete checkpoint."""
        for slot in SLOTS:
            self.named[slot] = [(name, at) for name, at in self.named[slot] if not at or at > self.told]

    def ask(self) -> None:
        """Some time passes."""
        self.now += self.draw.choice([100, ASK_EVERY_MS, 100_000])
        self.doing += self.rules.work(self.now)

    def answer(self) -> None:
        """The vertex does what it was asked for, or not; the answer comes later, or never."""
        if not self.doing:
            return
        work = self.doing.pop()
        how = self.draw.choices(["done", "failed", "crash"], [8, 2, 1])[0]
        offers, more = self.do(work) if how == "done" or self.draw.random() < 0.5 else ([], b"")
        if how == "crash":
            self.start()
        elif how == "failed":
            self.rules.failed(self.now)
        elif isinstance(work, AskRequeued):
            self.answers.append((offers, more))
        else:
            self.rules.done()

    def hear(self) -> None:
        """The answer to a question is heard of."""
        if self.answers:
            self.control += self.rules.offered(*self.answers.pop(), self.now)

    def do(self, work: ReadmissionWork) -> tuple[list[Offered], bytes]:
        """Do it, as the vertex does."""
        match work:
            case AskRequeued(after):
                first = int(after or b"0")
                page = [number for number in self.world.requeued if number > first]
                more = b"%d" % page[PAGE - 1] if len(page) > PAGE else b""
                return [offer(number) for number in page[:PAGE]], more
            case ConfirmLetters(keys):
                self.gone |= self.drop(keys)
            case ReturnToDead(keys, _):
                self.world.dead |= self.drop(keys)
        return [], b""

    def drop(self, keys: tuple[bytes, ...]) -> set[int]:
        """Take letters out of those that are requeued."""
        named = {int(key.split()[1]) for key in keys} & set(self.world.requeued)
        self.world.requeued = [number for number in self.world.requeued if number not in named]
        return named

    def deliver(self) -> None:
        """A subtask gets letters."""
        if self.control:
            sent = self.control.pop(0)
            numbers = [int.from_bytes(each.letter, "big") for each in sent.letters]
            self.taken[sent.slot].update(numbers)
            self.named[sent.slot] += [(number, 0) for number in numbers]

    def lose(self) -> None:
        """A slot is lost, or all."""
        self.restore(self.draw.choice([(0,), (1,), (0, 1)]), damaged=self.draw.random() < 0.3)

    def step(self) -> None:
        """Let something happen."""
        steps = [self.requeue, self.snapshot, self.end_snapshot, self.tell, self.ask, self.answer, self.hear]
        weights = [2, 3, 3, 2, 5, 5, 5, 5, 0.5, 0.3]
        self.draw.choices([*steps, self.deliver, self.lose, self.start], weights)[0]()

    def check(self, seed: int) -> None:
        """No letter is twice in the job's state, and none that the vertex let go of is missing in a checkpoint."""
        for slot in SLOTS:
            assert all(count == 1 for count in self.taken[slot].values()), f"seed {seed}"
        for each in self.world.checkpoints:
            state = set().union(*self.world.taken[each.checkpoint].values())
            assert self.gone <= state, f"seed {seed}"

    def settle(self) -> None:
        """Let everything come to rest."""
        for _ in range(2 * self.letters + 20):
            self.now += 100_000
            self.doing += self.rules.work(self.now)
            for work in self.doing:
                offers, more = self.do(work)
                if isinstance(work, AskRequeued):
                    self.answers.append((offers, more))
                else:
                    self.rules.done()
            self.doing = []
            while self.answers:
                self.hear()
            while self.control:
                self.deliver()
            self.tell()
            self.snapshot()
            published = self.rules.to_publish(self.pending[-1])
            self.pending = []
            self.rules.stands(published)
            self.world.checkpoints = [published]
            self.rules.retained([published])
            self.told = published.checkpoint


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_each_letter_comes_back_once_whatever_crashes(first: int) -> None:
    for seed in range(first, first + 100):
        walk = Walk(seed)
        for _ in range(150):
            walk.step()
            walk.check(seed)
        walk.settle()
        walk.check(seed)
        numbers = set(range(1, walk.letters + 1))
        refused = {number for number in numbers if number % 7 == 0}
        assert walk.world.requeued == [], f"seed {seed}"
        assert walk.world.dead == refused, f"seed {seed}"
        assert set(walk.taken[0]) | set(walk.taken[1]) == numbers - refused, f"seed {seed}"
        assert walk.rules.to_publish(checkpoint(9)).readmitted == (), f"seed {seed}"


def test_a_new_driver_knows_what_every_checkpoint_holds() -> None:
    old, new = checkpoint(1), replace(checkpoint(2), readmitted=(letter(1).letter,))
    rules = running()
    rules.stands(new)
    rules.retained([old, new])
    assert ask(rules, 0, 1) == []
    assert rules.work(0) == []
