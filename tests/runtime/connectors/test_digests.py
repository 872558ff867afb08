"""Digests tell splits apart, in every process the same."""

from __future__ import annotations

import json
from typing import Any

from pyspark.sql.datasource import InputPartition

from ftlayer.runtime.connectors.offset_reader import digest_of


class Slice(InputPartition):
    """Not the class that splits usually have."""


def test_digests_tell_splits_apart_and_know_equal_ones() -> None:
    text = json.loads('"a long text that is not interned"')
    same = json.loads('"a long text that is not interned"')
    assert text is not same
    assert digest_of([InputPartition([text, text])]) == digest_of([InputPartition([text, same])])
    digests = [
        digest_of(splits) for splits in ([], [Slice(1)], [Slice(2)], [Slice(1)] * 2, [InputPartition(0)])
    ]
    assert len(set(digests)) == len(digests)


def test_digests_do_not_change_with_a_main_programs_classes() -> None:
    """A class of ``__main__`` is pickled by value, with a number that is new in each process."""

    def make() -> Any:
        class Mine(InputPartition):
            pass

        Mine.__module__, Mine.__qualname__ = "__main__", "Mine"
        return Mine(7)

    assert digest_of([make()]) == digest_of([make()])


def test_digests_of_what_refers_to_itself() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert len(digest_of([InputPartition(loop)])) == 32
