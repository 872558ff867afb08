"""RecordIds of some records out of a batch."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.records.ids import tries_or_first
from ftlayer.runtime.handler import RecordIds


def lists_of(lineage: RecordIds) -> list[list[tuple[int, int, int, int]]]:
    origins = lineage.roots if lineage.origins is None else lineage.origins
    tries = tries_or_first(lineage.tries, len(lineage.ids))
    columns = (lineage.roots, lineage.ids, origins, tries)
    entries = list(zip(*(column.tolist() for column in columns), strict=True))
    if lineage.offsets is None:
        return [[triple] for triple in entries]
    bounds = lineage.offsets.tolist()
    return [entries[start:end] for start, end in pairwise(bounds)]


@st.composite
def lineages(draw: st.DrawFn) -> RecordIds:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=8))
    plain = draw(st.booleans())
    total = len(sizes) if plain else sum(sizes)
    roots = np.arange(1, total + 1, dtype=np.uint64)
    offsets = None if plain else np.cumsum([0, *sizes]).astype(np.int32)
    origins = roots + np.uint64(500) if draw(st.booleans()) else None
    tries = roots + np.uint64(900) if draw(st.booleans()) else None
    return RecordIds(roots, roots + np.uint64(100), offsets, origins, tries)


@given(lineages(), st.data())
def test_take_gives_the_record_ids_of_the_records(lineage: RecordIds, data: st.DataObject) -> None:
    records = data.draw(st.lists(st.integers(0, len(lineage) - 1), max_size=10))
    taken = lineage.take(np.array(records, np.int64))
    assert len(taken) == len(records)
    assert lists_of(taken) == [lists_of(lineage)[record] for record in records]


@given(lineages())
def test_record_of_names_the_record_of_each_record_id(lineage: RecordIds) -> None:
    expected = [record for record, ids in enumerate(lists_of(lineage)) for _ in ids]
    assert lineage.record_of.tolist() == expected


def test_a_record_that_is_not_there_is_an_error() -> None:
    lineage = RecordIds(np.array([1], np.uint64), np.array([2], np.uint64))
    with pytest.raises(IndexError):
        lineage.take(np.array([1]))
