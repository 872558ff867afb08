"""Letters that come back reach the task of their subtask."""

from __future__ import annotations

from ftlayer.checkpoint.letters import ChainLetter, LetterKind
from ftlayer.common.clock import Now
from ftlayer.runtime.barrier_mode.slot.rules.slot_half import BarrierSlot
from ftlayer.runtime.protocol.messages import Readmit
from ftlayer.runtime.slot.rules.events import RunTask


def test_letters_that_come_back_are_given_to_their_subtask() -> None:
    letter = ChainLetter(bytes(16), 1, "parse", 1, 0, LetterKind.RECORD, "parse", b"", b"", None, (), 1, 2)
    rules = BarrierSlot.__new__(BarrierSlot)
    rules.activity = 0
    told = Readmit("parse", 1, (letter,))
    assert rules.handle(told, Now(0, 0)) == [RunTask(("parse", 1), told)]
    assert rules.activity == 1
