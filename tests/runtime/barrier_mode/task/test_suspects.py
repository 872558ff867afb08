"""Records and timers that end their process: what a chain notes of them, and what becomes of convicts."""

from __future__ import annotations

from typing import Any

from chain_shell import FailingChain, batch, sent

from ftlayer.checkpoint.letters import LetterKind
from ftlayer.functions.process import ProcessFunction
from ftlayer.runtime.barrier_mode.task.chain_suspects import ChainSuspects, row_digests, timer_digest
from ftlayer.runtime.protocol.messages import Conviction


class InHand:
    """What the process notes of what it has in hand."""

    def __init__(self) -> None:
        self.now: bytes | None = None

    def about_to(self, chain: str, digest: bytes) -> None:
        assert chain == "p"
        self.now = digest

    def over(self) -> None:
        self.now = None


class Noting(ProcessFunction):
    """Sets a timer for each record, and notes what is in hand in each call."""

    def __init__(self, hand: InHand) -> None:
        self.hand = hand
        self.found: list[bytes | None] = []

    def process(self, record: Any, ctx: Any) -> Any:
        self.found.append(self.hand.now)
        ctx.timers.processing(record[1])
        return []

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        self.found.append(self.hand.now)
        yield ctx.key, 1


def suspects(hand: InHand, *digests: bytes, armed: bool = False) -> ChainSuspects:
    convictions = [Conviction("p", digest, "it kills", "in p", "slot 1") for digest in digests]
    return ChainSuspects("p", armed=armed, convictions=convictions, notes=hand)


def test_armed_chains_note_each_record_and_each_timer_while_functions_have_it() -> None:
    hand = InHand()
    function = Noting(hand)
    task = FailingChain(function, suspects=suspects(hand, armed=True))
    rows = batch(("a", 10), ("b", 10), ("a", 10)).payload
    task.give(("a", 10), ("b", 10), ("a", 10))
    assert function.found == row_digests(rows, 0)
    assert hand.now is None
    function.found.clear()
    assert sent(task.after(10)) == [("a", 1), ("b", 1)]
    assert function.found == [timer_digest("p", "processing", key, 10) for key in "ab"]
    assert hand.now is None


def test_convicted_records_and_timers_are_letters_that_no_function_has_seen() -> None:
    hand = InHand()
    function = Noting(hand)
    record = row_digests(batch(("b", 5)).payload, 0)[0]
    timer = timer_digest("p", "processing", "a", 10)
    task = FailingChain(function, suspects=suspects(hand, record, timer))
    task.give(("a", 10), ("b", 5), ("c", 10))
    assert sent(task.after(10)) == [("c", 1)]
    # What is convicted is all that is looked for.
    assert function.found == [None, None, None]
    part = task.snapshot(1)
    assert [(letter.kind, letter.attempts[-1].reason) for letter in part.letters] == [
        (LetterKind.RECORD, "it kills"),
        (LetterKind.TIMER, "it kills"),
    ]
    assert all("in p" in letter.attempts[-1].traceback for letter in part.letters)
    assert set(part.condemned) == {record, timer}
    task.checkpoints.completed(1)
    assert task.snapshot(2).condemned == ()
    # Who is like them has its chance again.
    task.give(("b", 5))
    assert len(function.found) == 4
