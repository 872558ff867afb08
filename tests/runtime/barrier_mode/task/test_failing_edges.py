"""Chains of barrier mode whose records fail alone, at the edges: ends, pauses, full tables, keys, what comes back."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from chain_shell import IN, ROW, FailingChain, ModelBackend, sent

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.letters import LetterKind
from ftlayer.checkpoint.options import CheckpointConfig, FailurePolicy
from ftlayer.checkpoint.snapshots import KeyedSnapshot, SubtaskRestore, TableInfo
from ftlayer.checkpoint.storage.opening import slot_storage
from ftlayer.common.failures import PermanentFailure, RetryLater
from ftlayer.errors import IncompatibleCheckpointError
from ftlayer.functions.current import current_record
from ftlayer.functions.process import ProcessFunction
from ftlayer.functions.steps import Map, Process
from ftlayer.runtime.barrier_mode.task.failing.alone import LAST_PAUSE_MS, LOOK_MS
from ftlayer.runtime.barrier_mode.task.failing.attempts import WAITING_TABLE, RowPacker
from ftlayer.runtime.protocol.messages import MAX_TIME_MS, DataEnded, EndOfStream, Watermark
from ftlayer.runtime.task.actions import ElementCame, HoldInput, Send
from ftlayer.state.contract import BackendSpec
from ftlayer.state.opening import open_backend
from ftlayer.topology.operators import AssignWatermarks

LAST = Watermark(MAX_TIME_MS)
HOUR = 3_600_000


def marks(actions: list[Any]) -> list[Any]:
    return [
        action.element
        for action in actions
        if isinstance(action, Send) and isinstance(action.element, Watermark)
    ]


def says_end(actions: list[Any]) -> bool:
    return any(isinstance(action, DataEnded) for action in actions)


def reasons(part: Any) -> list[str]:
    return [letter.attempts[-1].reason for letter in part.letters]


class Raising(ProcessFunction):
    """Counts a key's records; raises what it has."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.calls = 0

    def open(self, ctx: Any) -> None:
        self.count = ctx.value("count", 0)

    def process(self, record: Any, ctx: Any) -> Any:
        self.calls += 1
        self.count.set(self.count.get() + 1)
        yield record[0], self.count.get()
        if self.error is not None:
            raise self.error


class AtTheEnd(ProcessFunction):
    """Puts something out when event time has come to its end, in the attempt that the function is asked for."""

    def __init__(self, fails: int) -> None:
        self.fails = fails

    def process(self, record: Any, ctx: Any) -> Any:
        ctx.timers.event(MAX_TIME_MS)
        return []

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        self.fails -= 1
        if self.fails >= 0:
            raise ValueError("not now")
        yield ctx.key, 1


# ---------------------------------------------------------------- the end


def test_a_timer_that_fails_at_the_last_watermark_holds_it_and_its_pause_is_short() -> None:
    """What it puts out would be late behind the watermark; and the job waits for it."""
    chain = FailingChain(AtTheEnd(1), FailurePolicy(max_attempts=3, backoff="1h"))
    chain.give(("a", 1))
    actions = chain.watermark()
    assert marks(actions) == []
    assert not says_end(actions)
    actions = chain.after(LAST_PAUSE_MS)
    assert sent(actions) == [("a", 1)]
    assert marks(actions) == [LAST]
    assert says_end(actions)


def test_a_record_that_always_fails_is_tried_without_end_and_with_pauses() -> None:
    function = Raising(ValueError("always"))
    chain = FailingChain(function, FailurePolicy(max_attempts=None, backoff="1h"))
    chain.give(("a", 1))
    actions = chain.watermark()
    for _ in range(100):
        actions += chain.after(LAST_PAUSE_MS // 10)
    assert not says_end(actions)
    assert marks(actions) == []
    assert 9 <= function.calls <= 12
    function.error = None
    actions = chain.after(LAST_PAUSE_MS)
    assert says_end(actions)
    assert marks(actions) == [LAST]


def test_letters_that_come_back_to_a_chain_that_is_done_are_left_where_they_are() -> None:
    function = Raising(PermanentFailure("bad"))
    chain = FailingChain(function)
    chain.give(("a", 1))
    (letter,) = chain.snapshot(1).letters
    chain.watermark()
    chain.readmit(letter)
    assert chain.snapshot(2).readmitted == ()
    chain.task.handle(ElementCame(IN, EndOfStream()), chain.now)
    assert chain.task.is_over
    assert chain.readmit(letter) == []


def test_letters_that_come_back_to_a_chain_that_was_stopped_are_left_where_they_are() -> None:
    """With a savepoint a job stops whatever waits."""
    function = Raising(PermanentFailure("bad"))
    chain = FailingChain(function)
    chain.give(("a", 1))
    (letter,) = chain.snapshot(1).letters
    chain.task.handle(ElementCame(IN, EndOfStream()), chain.now)
    assert chain.task.is_over
    assert chain.readmit(letter) == []
    assert chain.task.failures.waiting == 0


# ---------------------------------------------------------------- pauses


def test_beyond_its_bytes_a_chain_takes_nothing_and_does_not_wait_for_the_backoff() -> None:
    function = Raising(ValueError("not now"))
    chain = FailingChain(function, FailurePolicy(max_attempts=None, backoff="1h", max_waiting=1))
    assert HoldInput(LOOK_MS) in chain.give(("a", 1))
    for look in range(1, 4):
        actions = chain.after(LOOK_MS)
        assert function.calls == 1 + look
        assert any(isinstance(action, HoldInput) for action in actions)
    function.error = None
    assert not any(isinstance(action, HoldInput) for action in chain.after(LOOK_MS))
    assert chain.task.failures.waiting == 0


def test_a_pause_that_a_function_asks_for_is_kept_and_may_use_no_attempt() -> None:
    function = Raising(RetryLater("busy", after="7s", uses_attempt=False))
    chain = FailingChain(function, FailurePolicy(max_attempts=1, backoff="1ms", jitter=0))
    chain.give(("a", 1))
    for attempt in range(2, 30):
        chain.after(6_999)
        assert function.calls == attempt - 1
        chain.after(1)
        assert function.calls == attempt
    assert chain.snapshot(1).letters == ()
    function.error = RetryLater("busy", after="7s")
    chain.after(7_000)
    (letter,) = chain.snapshot(2).letters
    assert letter.attempts[-1].number == 30
    assert len(letter.attempts) <= 17


def test_a_letter_that_came_back_is_counted_anew() -> None:
    chain = FailingChain(Raising(ValueError("bad")), FailurePolicy(max_attempts=2, backoff="1s", jitter=0))
    chain.give(("a", 1))
    chain.after(1_000)
    (letter,) = chain.snapshot(1).letters
    chain.after(1)
    chain.readmit(letter)
    chain.after(1_000)
    chain.after(1_000)
    (again,) = (each for each in chain.snapshot(2).letters if each.letter != letter.letter)
    assert [attempt.number for attempt in again.attempts] == [1, 2, 1, 2]


def test_a_restored_pause_is_no_longer_than_the_policys() -> None:
    chain = FailingChain(Raising(RetryLater("busy", after=HOUR)))
    chain.give(("a", 1))
    chain.snapshot(1)
    again = FailingChain(Raising(None), backend=ModelBackend(chain.backend.written[1]))
    assert sent(again.after(5_000)) == [("a", 1)]


def test_what_is_dead_at_once_has_its_traceback() -> None:
    chain = FailingChain(Raising(PermanentFailure("bad")))
    chain.give(("a", 1))
    (letter,) = chain.snapshot(1).letters
    (attempt,) = letter.attempts
    assert attempt.number == 1
    assert "in process" in attempt.traceback


# ---------------------------------------------------------------- event time


def test_a_held_watermark_is_held_where_the_chain_makes_it_too() -> None:
    schema = pa.schema([("key", pa.string()), ("n", pa.int64())])
    fails = [True]

    def one(record: Any) -> Any:
        if fails and record[1] == 5:
            raise ValueError("not now")
        return record

    for holds in (False, True):
        fails[:] = [True]
        operators = Map("p", one, schema), AssignWatermarks("times", "n", 0, None, schema)
        policy = FailurePolicy(max_attempts=3, backoff="1s", jitter=0, hold_watermark=holds)
        chain = FailingChain(operators, policy)
        actions = chain.give(("a", 5), ("a", 900)) + chain.after(500)
        assert sent(actions) == [("a", 900)]
        assert bool(marks(actions)) is not holds
        fails.clear()
        actions = chain.after(600)
        assert sent(actions) == [("a", 5)]
        assert bool(marks(actions)) is holds


# ---------------------------------------------------------------- letters that come back


def dead(function: Raising, *rows: tuple[Any, ...]) -> tuple[FailingChain, Any]:
    chain = FailingChain(function)
    function.error = PermanentFailure("bad")
    chain.give(*rows)
    letters = chain.snapshot(1).letters
    chain.checkpoints.completed(1)
    function.error = None
    return chain, letters


@pytest.mark.parametrize("is_named", [True, False])
def test_an_edited_letter_waits_under_the_key_of_its_record(is_named: bool) -> None:
    chain, (letter,) = dead(Raising(None), ("a", 1))
    row = pa.record_batch([["b"], [7]], schema=ROW)
    chain.readmit(replace(letter, payload=RowPacker().pack(row), key=letter.key if is_named else b""))
    assert list(chain.backend.state("p").maps(WAITING_TABLE).keys()) == ["b"]
    assert sent(chain.after(0)) == [("b", 1)]


def test_a_row_that_a_sink_refused_comes_back_as_a_record() -> None:
    chain, (letter,) = dead(Raising(None), ("a", 1))
    chain.readmit(replace(letter, kind=LetterKind.ROW))
    assert sent(chain.after(0)) == [("a", 1)]
    assert chain.task.failures.waiting == 0


def test_a_letter_that_the_chain_cannot_take_is_dead_again_and_says_why() -> None:
    chain, (letter,) = dead(Raising(None), ("a", 1))
    other = pa.record_batch([["b"], ["x"]], names=["key", "n"])
    chain.readmit(
        replace(letter, payload=RowPacker().pack(other)),
        replace(letter, letter=b"i" * 16, input=3),
        replace(letter, letter=b"p" * 16, payload=b"nonsense"),
    )
    chain.after(0)
    part = chain.snapshot(2)
    assert set(part.readmitted) == {letter.letter, b"i" * 16, b"p" * 16}
    assert len(part.letters) == 3
    assert len({again.letter for again in part.letters} | set(part.readmitted)) == 6
    assert all(len(again.attempts) == 2 for again in part.letters)
    first, second, third = reasons(part)
    assert "other columns" in first
    assert "input" in second
    assert "cannot be read" in third
    assert chain.task.failures.waiting == 0


def test_records_that_waited_with_other_columns_are_refused_at_a_restore() -> None:
    chain = FailingChain(Raising(ValueError("not now")))
    chain.give(("a", 1))
    chain.snapshot(1)
    wider = pa.schema([*ROW, ("more", pa.int64())])
    again = FailingChain(Raising(None), backend=ModelBackend(chain.backend.written[1]), schema=wider)
    with pytest.raises(IncompatibleCheckpointError, match="other columns"):
        again.after(5_000)


# ---------------------------------------------------------------- keys


NESTED = pa.struct([("x", pa.int64()), ("y", pa.string())])


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (pa.float64(), [float("nan"), None, 1.5, -0.0]),
        (pa.string(), [None, "", "a"]),
        (NESTED, [None, {"x": 1, "y": None}, {"x": 2, "y": "b"}]),
        (pa.list_(pa.int64()), [None, [], [1, None]]),
    ],
)
def test_records_of_any_key_wait_and_come_again(kind: pa.DataType, keys: list[Any]) -> None:
    schema = pa.schema([("key", kind), ("n", pa.int64())])

    def chain(function: Any, backend: Any = None) -> FailingChain:
        operator = Process("p", function, ROW, ("key",))
        return FailingChain((operator,), backend=backend, schema=schema)

    class Numbers(Raising):
        def process(self, record: Any, ctx: Any) -> Any:
            for _, number in super().process(record, ctx):
                yield "k", number

    first = chain(Numbers(ValueError("not now")))
    first.give(*[(key, 1) for key in keys for _ in range(2)])
    part = first.snapshot(1)
    if part.letters:
        # What cannot be a key is dead at once.
        assert pa.types.is_nested(kind)
        assert part.waiting + len(part.letters) == 2 * len(keys)
        return
    assert part.waiting == 2 * len(keys)
    again = chain(Numbers(None), ModelBackend(first.backend.written[1]))
    assert sorted(sent(again.after(5_000))) == sorted([("k", 1), ("k", 2)] * len(keys))


def once(record: Any) -> Any:
    if current_record().attempt < 2:
        raise ValueError("not yet")
    return record[0], record[1] + 1


@pytest.mark.parametrize("before", [1, 2])
def test_a_record_that_waits_enters_at_its_operator_though_others_stand_before_it_now(before: int) -> None:
    calls: list[int] = []

    def counted(record: Any) -> Any:
        calls.append(record[1])
        return record

    once_more = Map("b", once, ROW)
    old = FailingChain((once_more,))
    old.give(("a", 1))
    assert old.snapshot(1).waiting == 1
    new = [Map(f"a{place}", counted, ROW) for place in range(before)]
    table = TableInfo(0, "b", WAITING_TABLE, "map", "msgpack", 1)
    chain = FailingChain(
        (
            *new,
            AssignWatermarks("times", "n", 0, 1_000, ROW),
            once_more,
            Map("c", lambda r: (r[0], r[1] * 10), ROW),
        ),
        backend=ModelBackend(old.backend.written[1]),
        restored=SubtaskRestore("a0", 0, keyed=(KeyedSnapshot(0, 8, (table,), ()),)),
    )
    assert chain.task.failures.waiting == 1
    assert sent(chain.after(1_000)) == [("a", 20)]
    assert calls == []
    assert chain.task.failures.waiting == 0
    # One that fails from now on enters at the new head.
    assert sent(chain.give(("a", 5))) == []
    assert sent(chain.after(1_000)) == [("a", 60)]
    assert calls == [5, 5] * before


def rechained(before: Any = None, **more: Any) -> FailingChain:
    """`once` at b, with others around it."""
    return FailingChain(
        (
            Map("a", before or (lambda r: r), ROW),
            Map("b", once, ROW),
            Map("c", lambda r: (r[0], r[1] * 10), ROW),
        ),
        **more,
    )


def letter_of_b() -> Any:
    """Return a letter that `once` made when it was the head of its chain."""
    old = FailingChain((Map("b", once, ROW),), FailurePolicy(max_attempts=1))
    old.give(("a", 1))
    (letter,) = old.snapshot(1).letters
    assert letter.chain == "b"
    return letter


def test_a_letter_that_comes_back_enters_at_its_operator_though_others_stand_before_it_now() -> None:
    def never(record: Any) -> Any:
        raise AssertionError("it is behind this one")

    chain = rechained(never)
    chain.readmit(letter_of_b())
    assert chain.task.failures.waiting == 1
    assert sent(chain.after(0)) == []  # its first attempt
    assert sent(chain.after(1_000)) == [("a", 20)]
    assert chain.task.failures.waiting == 0


def test_a_record_that_dies_where_it_entered_is_a_letter_of_that_operator_and_comes_back_there() -> None:
    chain = rechained(policy=FailurePolicy(max_attempts=1))
    letter = letter_of_b()
    chain.readmit(letter)
    assert sent(chain.after(0)) == []
    (again,) = chain.snapshot(1).letters
    assert (again.chain, again.operator, again.key, again.payload) == ("b", "b", b"", letter.payload)
    chain.give(("a", 1))
    chain.checkpoints.completed(1)
    (fresh,) = chain.snapshot(2).letters
    assert (fresh.chain, fresh.operator) == ("a", "b")


def test_an_edited_letter_that_the_operator_inside_cannot_take_is_dead_again() -> None:
    chain = rechained()
    other = pa.record_batch([["b"], ["x"]], names=["key", "n"])
    chain.readmit(replace(letter_of_b(), payload=RowPacker().pack(other)))
    chain.readmit(replace(letter_of_b(), input=1, letter=b"2" * 16))
    reasons = [letter.attempts[-1].reason for letter in chain.snapshot(1).letters]
    assert "other columns" in reasons[0]
    assert "no input 1" in reasons[1]


@pytest.mark.parametrize(
    "options", [{}, {"incremental": True}, {"changelog": True}, {"backend": "lmdb"}], ids=str
)
def test_letters_that_came_back_inside_are_in_the_next_checkpoint_and_restored_there(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    config = CheckpointConfig(directory=str(tmp_path / "chk"), state_directory=str(state), **options)
    with closing(slot_storage(config, "job", "run", 0, 0, "life", b"k" * 32)) as storage:

        def start(restored: SubtaskRestore | None = None) -> FailingChain:
            def opens(keys: Mapping[str, pa.Schema]) -> Any:
                return open_backend(config, BackendSpec(0, 8, 8, keys), restored, storage, storage.location)

            return rechained(restored=restored, opens=opens)

        def ends_with(chain: FailingChain, number: int) -> SubtaskRestore:
            barrier = Barrier(number, 0)
            frozen = chain.backend.freeze(barrier)
            writer = storage.writer(barrier)
            keyed = frozen.write(writer, lambda: False).keyed
            writer.close()
            frozen.release()
            chain.backend.close()
            assert keyed is not None
            return SubtaskRestore("a", 0, keyed=(keyed,))

        chain = start(ends_with(start(), 1))
        chain.readmit(letter_of_b())
        chain = start(ends_with(chain, 2))
        assert chain.task.failures.waiting == 1
        chain = start(ends_with(chain, 3))  # nothing entered there in that life
        assert sent([*chain.after(0), *chain.after(1_000)]) == [("a", 20)]
        chain = start(ends_with(chain, 4))
        assert chain.task.failures.waiting == 0
        chain.backend.close()
