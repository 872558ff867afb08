"""Chains of barrier mode whose records fail alone: the task, its state and its letters, event by event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from chain_shell import ROW, ModelBackend, sent
from chain_shell import FailingChain as Task

from ftlayer.checkpoint.letters import ChainLetter, LetterKind
from ftlayer.checkpoint.options import FailurePolicy
from ftlayer.common.failures import PermanentFailure
from ftlayer.common.rules.circuit import CircuitState, CircuitStatus
from ftlayer.functions.current import current_record
from ftlayer.functions.process import ProcessFunction
from ftlayer.records.ipc import as_stream
from ftlayer.runtime.barrier_mode.task.failing.alone import LAST_PAUSE_MS, LOOK_MS
from ftlayer.runtime.protocol.messages import MAX_TIME_MS, DataEnded, Readmit, Watermark
from ftlayer.runtime.task.actions import HoldInput, Send


class Scripted(ProcessFunction):
    """Counts a key's records, then raises for those that the script names, in their first attempts."""

    def __init__(self, fails: Mapping[int, int]) -> None:
        self.fails = fails

    def open(self, ctx: Any) -> None:
        self.count = ctx.value("count", 0)
        self.seen = ctx.list("seen")

    def process(self, record: Any, ctx: Any) -> Any:
        key, number = record
        self.count.set(self.count.get() + 1)
        self.seen.append(number)
        yield key, self.count.get()
        if number < 0:
            raise PermanentFailure("negative")
        if current_record().attempt <= self.fails.get(number, 0):
            raise ValueError(f"no {number}")


def reasons(letters: tuple[ChainLetter, ...]) -> list[str]:
    return [letter.attempts[-1].reason for letter in letters]


def told_end(actions: list[Any]) -> bool:
    return any(isinstance(action, DataEnded) for action in actions)


def test_a_record_that_fails_changes_nothing_and_comes_again_when_its_pause_is_over() -> None:
    task = Task(Scripted({2: 1}))
    assert sent(task.give(("a", 1), ("a", 2), ("a", 3))) == [("a", 1), ("a", 2)]
    assert task.task.failures.waiting == 1
    assert sent(task.after(999)) == []
    assert sent(task.after(1)) == [("a", 3)]
    assert task.task.failures.waiting == 0
    assert task.backend.state("p").lists("seen").get("a") == [1, 3, 2]


def test_a_record_without_an_attempt_left_is_a_letter_of_every_checkpoint_until_one_is_complete() -> None:
    task = Task(Scripted({2: 9}))
    task.give(("a", 2))
    assert task.snapshot(1).letters == ()
    task.after(1_000)
    task.after(5_000)
    (letter,) = task.snapshot(2).letters
    assert (letter.chain, letter.operator, letter.kind, letter.checkpoint) == ("p", "p", LetterKind.RECORD, 2)
    assert [attempt.number for attempt in letter.attempts] == [1, 2, 3]
    assert {attempt.place for attempt in letter.attempts} == {"here"}
    assert pa.ipc.open_stream(letter.payload).read_all().to_pylist() == [{"key": "a", "n": 2}]
    assert task.snapshot(3).letters == (letter,)
    task.checkpoints.completed(2)
    assert task.snapshot(4).letters == ()


def test_a_failure_that_says_so_has_no_further_attempt() -> None:
    task = Task(Scripted({}))
    task.give(("a", -1), ("b", -2), ("a", 1))
    assert reasons(task.snapshot(1).letters) == ["negative", "negative"]
    assert task.backend.state("p").lists("seen").get("a") == [1]


def test_records_that_wait_are_in_the_checkpoint_and_wait_no_longer_behind_a_restore() -> None:
    task = Task(Scripted({2: 1}))
    task.give(("a", 1), ("a", 2))
    part = task.snapshot(1)
    assert part.waiting == 1
    again = Task(Scripted({2: 1}), backend=ModelBackend(task.backend.written[1]), at_ms=100)
    assert again.task.failures.waiting == 1
    assert sent(again.after(900)) == [("a", 2)]


def test_a_chain_keeps_the_last_watermark_until_nothing_waits_and_says_then_that_it_is_done() -> None:
    task = Task(Scripted({2: 1}), FailurePolicy(max_attempts=3, backoff="1h"))
    task.give(("a", 2))
    actions = task.watermark()
    assert not any(isinstance(action, Send) for action in actions)
    assert not told_end(actions)
    actions = task.after(LAST_PAUSE_MS)
    assert sent(actions) == [("a", 1)]
    marks = [action.element for action in actions if isinstance(action, Send)][1:]
    assert marks == [Watermark(MAX_TIME_MS)]
    assert told_end(actions)


def test_a_chain_in_which_nothing_waits_passes_the_last_watermark_on_at_once() -> None:
    task = Task(Scripted({}))
    task.give(("a", 1))
    assert told_end(task.watermark())
    assert not told_end(task.after(1))


def test_other_watermarks_go_by_unless_the_policy_holds_them() -> None:
    for holds in (False, True):
        policy = FailurePolicy(max_attempts=3, backoff="1s", jitter=0, hold_watermark=holds)
        task = Task(Scripted({2: 1}), policy)
        task.give(("a", 2))
        marks = [action.element for action in task.watermark(7) if isinstance(action, Send)]
        assert marks == ([] if holds else [Watermark(7)])
        later = [action.element for action in task.after(1_000) if isinstance(action, Send)]
        assert later[1:] == ([Watermark(7)] if holds else [])


def test_a_chain_that_holds_too_much_takes_nothing_until_there_is_room() -> None:
    task = Task(Scripted({2: 1}), FailurePolicy(max_attempts=3, backoff="1s", jitter=0, max_waiting=1))
    assert not task.task.failures.paused
    assert HoldInput(LOOK_MS) in task.give(("a", 2))
    assert task.task.failures.paused
    assert not any(isinstance(action, HoldInput) for action in task.after(1_000))
    assert not task.task.failures.paused


def test_a_breaker_that_opens_makes_pauses_and_uses_up_no_attempt() -> None:
    task = Task(Scripted({1: 1}), FailurePolicy(max_attempts=1, backoff="1ms", jitter=0, max_failing=0))
    assert any(isinstance(action, HoldInput) for action in task.give(("a", 1), ("a", 2)))
    assert task.task.failures.waiting == 1
    assert task.task.failures.paused
    assert task.task.circuits(task.time + 300) == {"p": CircuitStatus(CircuitState.OPEN, 1, 2, 1, 700)}
    assert task.snapshot(1).letters == ()
    assert sent(task.after(10)) == []
    # The trial fails and counts for nothing: the breaker is open again.
    task.after(1_000)
    assert task.task.failures.waiting == 1


def test_a_letter_that_comes_back_is_a_record_with_all_its_attempts_and_named_until_complete() -> None:
    function = Scripted({2: 9})
    task = Task(function)
    task.give(("a", 2))
    task.after(1_000)
    task.after(5_000)
    (letter,) = task.snapshot(1).letters
    task.checkpoints.completed(1)
    function.fails = {}
    for _ in range(2):
        task.task.handle(Readmit("p", 0, (letter,)), task.now)
    assert sent(task.after(0)) == [("a", 1)]
    assert task.snapshot(2).readmitted == (letter.letter,)
    task.checkpoints.completed(2)
    assert task.snapshot(3).readmitted == ()


def test_a_letter_that_was_edited_comes_back_under_the_key_of_its_new_record() -> None:
    function = Scripted({2: 9})
    task = Task(function)
    task.give(("b", 1), ("a", 2))
    task.after(1_000)
    task.after(5_000)
    (letter,) = task.snapshot(1).letters
    edited = pa.RecordBatch.from_arrays([pa.array(["b"]), pa.array([3])], schema=ROW)
    task.task.handle(
        Readmit("p", 0, (replace(letter, key=b"", payload=as_stream(edited).to_pybytes()),)), task.now
    )
    assert sent(task.after(0)) == [("b", 2)]


class Alarmed(ProcessFunction):
    """Sets a timer for each record, and counts in it before it raises."""

    def __init__(self, fails: int) -> None:
        self.fails = fails

    def open(self, ctx: Any) -> None:
        self.fired = ctx.value("fired", 0)

    def process(self, record: Any, ctx: Any) -> Any:
        ctx.timers.processing(record[1])
        return []

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        self.fired.set(self.fired.get() + 1)
        yield ctx.key, self.fired.get()
        if ctx.key == "bad" and self.fails:
            self.fails -= 1
            raise ValueError("not now")


@pytest.mark.parametrize("fails", [1, 3])
def test_a_timer_that_fails_fires_again_or_is_a_letter(fails: int) -> None:
    task = Task(Alarmed(fails))
    task.give(("bad", 10), ("good", 10))
    assert sent(task.after(10)) == [("good", 1)]
    again = [*sent(task.after(1_000)), *sent(task.after(5_000))]
    letters = task.snapshot(1).letters
    if fails == 1:
        assert again == [("bad", 1)]
        assert letters == ()
    else:
        assert again == []
        assert [(letter.kind, letter.event_time_ms) for letter in letters] == [(LetterKind.TIMER, 10)]
        assert task.backend.state("p").values("fired").get("bad") is None


def test_a_timer_that_waits_and_is_set_again_fires_as_often_as_it_was_set() -> None:
    task = Task(Alarmed(2))
    task.give(("bad", 10))
    assert sent(task.after(10)) == []
    task.give(("bad", 10))
    assert sent(task.after(0)) == []
    assert task.task.failures.waiting == 2
    assert sent(task.after(1_000)) == [("bad", 1), ("bad", 2)]
    assert task.task.failures.waiting == 0


class SetsOne(ProcessFunction):
    """Sets a timer of event time in its second attempt, and puts nothing out before it fires."""

    def process(self, record: Any, ctx: Any) -> Any:
        if current_record().attempt == 1:
            raise ValueError("not yet")
        ctx.timers.event(record[1])
        return []

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        yield ctx.key, time_ms


def test_a_timer_that_a_retry_sets_behind_the_watermark_fires_at_once() -> None:
    task = Task(SetsOne())
    task.give(("a", 3))
    task.watermark(7)
    assert sent(task.after(1_000)) == [("a", 3)]
