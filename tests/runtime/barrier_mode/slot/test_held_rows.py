"""Rows of a queue are done with the checkpoint that holds them, and not before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ftlayer.runtime.barrier_mode.slot.rules.slot_half import HeldRows


def test_rows_are_done_when_a_checkpoint_behind_them_is_complete() -> None:
    held = HeldRows()
    held.read(1)
    held.read(2)
    held.snapshot(1)
    held.read(3)
    assert held.completed(1) == [1, 2]
    assert held.completed(1) == []
    held.snapshot(2)
    assert held.completed(2) == [3]


def test_a_checkpoint_that_was_given_up_leaves_its_rows_to_the_next_one() -> None:
    held = HeldRows()
    held.read(1)
    held.snapshot(1)
    held.read(2)
    held.snapshot(2)
    assert held.completed(2) == [1, 2]


def test_checkpoints_under_way_at_once_are_told_apart() -> None:
    held = HeldRows()
    held.read(1)
    held.snapshot(1)
    held.read(2)
    held.snapshot(2)
    assert held.completed(1) == [1]
    assert held.completed(2) == [2]


@given(st.lists(st.sampled_from(["read", "snapshot", "complete", "give up"]), max_size=60))
def test_what_is_done_is_all_that_the_checkpoint_has(steps: list[str]) -> None:
    held, number, checkpoint = HeldRows(), 0, 0
    in_checkpoint: dict[int, int] = {}
    done: list[int] = []
    for step in steps:
        if step == "read":
            number += 1
            held.read(number)
        elif step == "snapshot":
            checkpoint += 1
            held.snapshot(checkpoint)
            in_checkpoint[checkpoint] = number
        elif in_checkpoint:
            first = min(in_checkpoint)
            has = in_checkpoint.pop(first)
            if step == "complete":
                done += held.completed(first)
                assert done == list(range(1, has + 1))
