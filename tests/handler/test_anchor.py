"""Ids of children, of pairs and of roots; what their anchors owe."""

from __future__ import annotations

from functools import reduce
from operator import xor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.records.ids import child_ids, operator_key, random_root_ids
from ftlayer.runtime.handler import (
    Children,
    Events,
    FTAnchorHandler,
    FTHandler,
    NonFTAnchorHandler,
    RecordIds,
)


def lineage_of(*records: list[int]) -> RecordIds:
    """Records with these roots each, and ids of their own."""
    roots = np.array([root for record in records for root in record], np.uint64)
    offsets = np.cumsum([0, *(len(record) for record in records)]).astype(np.int32)
    plain = all(len(record) == 1 for record in records)
    return RecordIds(roots, random_root_ids(len(roots)), None if plain else offsets)


def copies(children: Children, edge: int = 0, channel: int = 0) -> RecordIds:
    lineage = children.copies(edge, "next", channel)
    assert lineage is not None
    return lineage


def deltas(events: Events) -> list[int]:
    values: list[int] = (events.roots if events.values is None else events.values).tolist()
    return values


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def records_of(lineage: RecordIds) -> list[dict[int, int]]:
    """The ids of each record by root."""
    records: list[dict[int, int]] = [{} for _ in range(len(lineage))]
    for record, root, record_id in zip(
        lineage.record_of.tolist(), lineage.roots.tolist(), lineage.ids.tolist(), strict=True
    ):
        assert root not in records[record], "a record has one RecordId for each distinct root"
        records[record][root] = record_id
    return records


def test_a_childs_id_is_derived_from_its_place_among_its_parents_children() -> None:
    anchors = lineage_of([1], [2])
    handler = FTAnchorHandler("op", None)
    first = copies(handler.derive(anchors, rows(1, 0, 1)))
    more = copies(handler.derive(anchors, rows(1)))
    expected = child_ids(
        anchors.ids[[1, 0, 1, 1]],
        operator=operator_key("op"),
        edge=0,
        ordinals=np.array([0, 0, 1, 2], np.uint64),
        channel=0,
    )
    assert [*first.ids.tolist(), *more.ids.tolist()] == expected.tolist()
    assert first.roots.tolist() == [2, 1, 2]


def test_another_batch_and_another_output_begin_at_the_first_child() -> None:
    anchors = lineage_of([1], [2])
    again = RecordIds(anchors.roots, anchors.ids)
    handler = FTAnchorHandler("op", None)
    first = copies(handler.derive(anchors, rows(0)))
    side = copies(handler.derive(anchors, rows(0), "late"))
    other_batch = copies(handler.derive(again, rows(0)))
    assert first.ids.tolist() == side.ids.tolist() == other_batch.ids.tolist()


def test_a_record_of_several_roots_has_a_child_of_the_same_roots() -> None:
    anchors = lineage_of([1, 2], [3], [2, 4, 5])
    children = FTAnchorHandler("op", None).derive(anchors, rows(2, 0, 2))
    out = copies(children)
    assert [sorted(record) for record in records_of(out)] == [[2, 4, 5], [1, 2], [2, 4, 5]]
    owed = [0] * 6
    for record, parent in zip(records_of(out), (2, 0, 2), strict=True):
        for root, record_id in record.items():
            place = next(
                place
                for place in range(6)
                if anchors.record_of[place] == parent and int(anchors.roots[place]) == root
            )
            owed[place] ^= record_id
    assert children.owed.tolist() == owed
    assert len({*out.ids.tolist()}) == len(out.ids)


def test_each_copy_of_a_record_has_an_id_of_its_own_and_all_are_owed() -> None:
    anchors = lineage_of([1])
    children = FTAnchorHandler("op", None).derive(anchors, rows(0))
    ids = [int(copies(children, edge, channel).ids[0]) for edge in (0, 1) for channel in (0, 1, 2)]
    assert len(set(ids)) == 6
    assert children.owed.tolist() == [reduce(xor, ids)]
    assert int(children.names(0)[0]) not in ids


def test_origins_go_on_to_children() -> None:
    plain = lineage_of([1], [2])
    replayed = RecordIds(plain.roots, plain.ids, None, np.array([9, 2], np.uint64))
    handler = FTAnchorHandler("op", None)
    origins = copies(handler.derive(replayed, rows(1, 0, 0))).origins
    assert origins is not None
    assert origins.tolist() == [2, 9, 9]
    assert copies(handler.derive(plain, rows(1))).origins is None
    # In a pair, an anchor that is no replay has its root for an origin.
    pairs = copies(handler.pair(replayed, rows(0), lineage_of([3]), rows(0)))
    assert pairs.origins is not None
    assert dict(zip(pairs.roots.tolist(), pairs.origins.tolist(), strict=True)) == {1: 9, 3: 3}


@given(st.data())
def test_pairs_have_each_root_once_and_both_sides_owe_every_id_once(data: st.DataObject) -> None:
    record = st.lists(st.integers(1, 5), min_size=1, max_size=3, unique=True)
    left = lineage_of(*data.draw(st.lists(record, min_size=1, max_size=4)))
    right = lineage_of(*data.draw(st.lists(record, min_size=1, max_size=4)))
    pairs = data.draw(
        st.lists(st.tuples(st.integers(0, len(left) - 1), st.integers(0, len(right) - 1)), max_size=8)
    )
    handler = FTAnchorHandler("join", None)
    children = handler.pair(left, rows(*(row for row, _ in pairs)), right, rows(*(row for _, row in pairs)))
    outs = [copies(children, edge, channel) for edge in (0, 1) for channel in (0, 1)]

    ids = [record_id for out in outs for record_id in out.ids.tolist()]
    assert len(set(ids)) == len(ids)
    left_roots, right_roots = records_of(left), records_of(right)
    by_root: dict[int, int] = {}
    for out in outs:
        assert len(out) == len(pairs)
        for (left_row, right_row), got in zip(pairs, records_of(out), strict=True):
            assert set(got) == set(left_roots[left_row]) | set(right_roots[right_row])
            for root, record_id in got.items():
                by_root[root] = by_root.get(root, 0) ^ record_id
    owed: dict[int, int] = dict.fromkeys(by_root, 0)
    for side, values in ((left, children.owed_left), (right, children.owed_right)):
        for root, value in zip(side.roots.tolist(), values.tolist(), strict=True):
            owed[root] = owed.get(root, 0) ^ value
    assert {root: value for root, value in owed.items() if value} == by_root


def test_the_same_two_records_may_be_paired_again() -> None:
    left, right = lineage_of([1]), lineage_of([2])
    handler = FTAnchorHandler("join", None)
    together = copies(handler.pair(left, rows(0, 0), right, rows(0, 0)))
    later = copies(handler.pair(left, rows(0), right, rows(0)))
    assert len({*together.ids.tolist(), *later.ids.tolist()}) == 6


def test_a_record_joined_with_another_of_its_root_has_one_record_id() -> None:
    left, right = lineage_of([1], [1]), lineage_of([1], [1])
    children = FTAnchorHandler("join", None).pair(left, rows(0, 1), right, rows(1, 1))
    out = copies(children)
    assert out.offsets is None
    assert out.roots.tolist() == [1, 1]
    assert children.owed_left.tolist() == out.ids.tolist()
    assert children.owed_right.tolist() == [0, 0]


def test_new_roots_are_their_own_first_ids() -> None:
    roots = random_root_ids(3)
    out = copies(FTAnchorHandler("op", None).of_roots(roots, 3), edge=2, channel=1)
    expected = child_ids(
        roots, operator=operator_key("op"), edge=2, ordinals=np.zeros(3, np.uint64), channel=1
    )
    assert out.ids.tolist() == expected.tolist()


def test_a_new_root_that_is_sent_once_keeps_its_id() -> None:
    roots = random_root_ids(3)
    children = FTAnchorHandler("op", None).of_roots(roots, 3, once=True)
    assert children.owed is roots
    lineage = copies(children)
    assert lineage.roots is lineage.ids is roots
    assert len(set(children.names(0).tolist()) | set(roots.tolist())) == 6


@given(st.data())
def test_what_is_acknowledged_is_the_same_whether_only_copies_keep_their_ids_or_not(
    data: st.DataObject,
) -> None:
    """As the vertex sees it: what is left of each root once all that was sent is acknowledged is 0."""
    number = st.integers(1, 2**64 - 1)
    anchors = lineage_of(
        *data.draw(st.lists(st.lists(number, min_size=1, max_size=3, unique=True), max_size=6))
    )
    parents = rows(*data.draw(st.lists(st.integers(0, max(len(anchors) - 1, 0)), max_size=8 * len(anchors))))
    if data.draw(st.booleans()):
        parents = np.unique(parents)
    handler = FTHandler("op", job="job", run="run")
    children = handler.anchor.derive(anchors, parents, once=True)
    assert len(children) == len(parents)
    out = copies(children, channel=1)
    assert [list(each) for each in records_of(out)] == [list(records_of(anchors)[row]) for row in parents]
    for each in (out, anchors):
        pairs = list(zip(each.roots.tolist(), each.ids.tolist(), strict=True))
        assert each is anchors or len(set(pairs)) == len(pairs), "two copies under one root have one id"
    left: dict[int, int] = dict.fromkeys(anchors.roots.tolist(), 0)
    handler.xor.settle(anchors, children.owed)
    events = handler.xor.events()
    told = [] if events is None else zip(events.roots.tolist(), deltas(events), strict=True)
    owned = zip(anchors.roots.tolist(), anchors.ids.tolist(), strict=True)
    for root, value in [*owned, *told, *zip(out.roots.tolist(), out.ids.tolist(), strict=True)]:
        left[root] ^= value
    assert not any(left.values())


def test_a_record_whose_only_copy_has_its_id_is_not_told_of() -> None:
    anchors = RecordIds(u := random_root_ids(3), u)
    handler = FTHandler("op", job="job", run="run")
    handler.xor.settle(anchors, handler.anchor.derive(anchors, rows(0, 1, 2), once=True).owed)
    assert handler.xor.events() is None
    handler.xor.settle(anchors, handler.anchor.derive(anchors, rows(0, 2), once=True).owed)
    events = handler.xor.events()
    assert events is not None
    assert (events.roots.tolist(), events.values) == ([u[1]], None)


def test_the_exact_tracker_knows_each_operator_that_has_a_record() -> None:
    roots = random_root_ids(2)
    handler = FTHandler("op", job="job", run="run", exact=True)
    children = handler.anchor.of_roots(roots, 2, once=True)
    assert not set(copies(children).ids.tolist()) & set(roots.tolist())


def test_with_fault_tolerance_on_anchors_are_needed() -> None:
    handler = FTAnchorHandler("op", None)
    with pytest.raises(ValueError, match="every record has RecordIds"):
        handler.derive(None, rows(0))
    with pytest.raises(ValueError, match="every new record has a root"):
        handler.of_roots(None, 1)


def test_a_parent_that_is_no_record_of_the_batch_is_an_error() -> None:
    with pytest.raises(IndexError, match="there are 1 records"):
        FTAnchorHandler("op", None).derive(lineage_of([1]), rows(1))


def test_with_fault_tolerance_off_there_is_nothing_but_names() -> None:
    handler = NonFTAnchorHandler()
    first, second = handler.derive(None, rows(0, 0)), handler.of_roots(None, 1)
    pairs = handler.pair(None, rows(0), None, rows(0))
    assert first.copies(0, "next", 0) is second.copies(0, "next", 0) is pairs.copies(0, "next", 0) is None
    assert [*first.names(0), *second.names(0), *pairs.names(0)] == [0, 1, 2, 3]
    assert len(first.owed) == len(second.owed) == len(pairs.owed_left) == len(pairs.owed_right) == 0
    assert handler.event_ids(None) is None
