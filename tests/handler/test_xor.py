"""What a task acknowledges, and what it fails."""

from __future__ import annotations

import numpy as np
import pytest

from ftlayer.errors import JobError
from ftlayer.records.failures import RowFailure
from ftlayer.records.ids import shard_of
from ftlayer.runtime.handler import FTHandler, Handler, NonFTHandler, RecordIds
from ftlayer.vertex.calls.common import check_event_ids


def u64(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64)


@pytest.fixture
def handler() -> FTHandler:
    return FTHandler("op", job="job", run="run")


@pytest.fixture
def exact() -> FTHandler:
    return FTHandler("op", job="job", run="run", exact=True)


TWO_ROOTS = RecordIds(u64(1, 2, 1), u64(16, 32, 64), np.array([0, 2, 3], np.int32))
"""Record 0 of roots 1 and 2, record 1 of root 1."""


def test_a_record_acknowledges_its_id_xor_what_it_owes_folded_by_root(handler: FTHandler) -> None:
    handler.xor.settle(TWO_ROOTS, u64(3, 5, 9))
    handler.xor.settle(RecordIds(u64(2), u64(256)), u64(0))
    events = handler.xor.events()
    assert events is not None
    assert dict(zip(events.roots.tolist(), events.values.tolist(), strict=True)) == {
        1: 16 ^ 3 ^ 64 ^ 9,
        2: 32 ^ 5 ^ 256,
    }
    assert events.ids is None
    assert handler.xor.events() is None


def test_some_records_of_a_batch_can_be_settled_alone(handler: FTHandler) -> None:
    handler.xor.settle(TWO_ROOTS, u64(3, 5, 9), np.array([1]))
    events = handler.xor.events()
    assert events is not None
    assert (events.roots.tolist(), events.values.tolist()) == ([1], [64 ^ 9])
    handler.xor.settle(TWO_ROOTS, u64(3, 5, 9), np.zeros(0, np.int64))
    assert handler.xor.events() is None


def test_all_roots_of_a_record_fail_each_with_its_first_failure(handler: FTHandler) -> None:
    failures = [RowFailure(1, "f", "first", "trace", fatal=True), RowFailure(0, "g", "second", "")]
    handler.xor.fail(TWO_ROOTS, failures)
    failed = {failure.root: (failure.reason, failure.operator) for failure in handler.xor.failures()}
    assert failed == {1: ("first", "f"), 2: ("second", "g")}
    assert handler.xor.failures() == ()


def test_the_exact_tracker_is_told_whose_ids_a_value_stands_for(exact: FTHandler) -> None:
    children = exact.anchor.derive(TWO_ROOTS, np.array([0, 0, 1]))
    a, b = children.copies(0, "map", 0), children.copies(1, "sink", 1)
    assert a is not None
    assert b is not None
    exact.xor.settle(TWO_ROOTS, children.owed)
    events = exact.xor.events()
    assert events is not None
    assert events.ids is not None
    check_event_ids(events.ids, events.values, "Xor")
    owners = {}
    for place, root in enumerate(events.roots.tolist()):
        part = slice(events.ids.offsets[place], events.ids.offsets[place + 1])
        names = [events.ids.operators[owner] if owner >= 0 else "" for owner in events.ids.owners[part]]
        owners[root] = dict(zip(events.ids.ids[part].tolist(), names, strict=True))
    expected: dict[int, dict[int, str]] = {1: {16: "", 64: ""}, 2: {32: ""}}
    for lineage, owner in ((a, "map"), (b, "sink")):
        for root, record_id in zip(lineage.roots.tolist(), lineage.ids.tolist(), strict=True):
            expected[root][record_id] = owner
    assert owners == expected


def test_single_ids_of_new_roots_explain_their_values(exact: FTHandler) -> None:
    roots = exact.persister.roots("source", 0, 0, 0, 3)
    children = exact.anchor.of_roots(roots, 3)
    for channel in (0, 1):
        children.copies(0, "map", channel)
    ids = exact.anchor.event_ids(roots)
    assert ids is not None
    check_event_ids(ids, children.owed, "Persist")
    assert np.diff(ids.offsets).tolist() == [2, 2, 2]


def test_roots_are_named_by_their_place_and_carry_their_shard() -> None:
    handler = FTHandler("op", job="job", run="run", shard=3, shards=4)
    roots = handler.persister.roots("source", 1, 2, 10, 5)
    tail = handler.persister.roots("source", 1, 2, 12, 3)
    assert roots is not None
    assert tail is not None
    assert (roots[2:] == tail).all()
    assert (shard_of(roots, 4) == 3).all()
    others = [("other", 1, 2), ("source", 2, 2), ("source", 1, 3)]
    named = [handler.persister.roots(*place, 10, 5) for place in others]
    named += [
        FTHandler("op", job="job", run="again", shard=3, shards=4).persister.roots("source", 1, 2, 10, 5)
    ]
    assert len({root for part in [roots, *named] if part is not None for root in part.tolist()}) == 25


def test_with_fault_tolerance_on_anchors_are_needed(handler: FTHandler) -> None:
    with pytest.raises(ValueError, match="every record has RecordIds"):
        handler.xor.settle(None, u64())
    with pytest.raises(ValueError, match="every record has RecordIds"):
        handler.xor.fail(None, [])


def test_with_fault_tolerance_off_nothing_is_collected_and_a_failure_is_raised() -> None:
    handler: Handler = NonFTHandler()
    assert handler.persister.roots("s", 0, 0, 0, 5) is None
    handler.xor.settle(None, u64())
    assert handler.xor.events() is None
    assert handler.xor.failures() == ()
    with pytest.raises(JobError, match="'parse' failed: no number"):
        handler.xor.fail(None, [RowFailure(0, "parse", "no number", "trace")])
    assert handler.persister.root_range("s", 0, 0, 0, 5) is None


def test_a_failed_record_leaves_no_ids_behind(exact: FTHandler) -> None:
    children = exact.anchor.derive(TWO_ROOTS, np.array([0, 1]))
    children.copies(0, "map", 0)
    exact.xor.fail(TWO_ROOTS, [RowFailure(0, "f", "no", "")])
    exact.xor.settle(TWO_ROOTS, children.owed, np.array([1]))
    events = exact.xor.events()
    assert events is not None
    assert events.ids is not None
    check_event_ids(events.ids, events.values, "Xor")
    assert len(events.ids.ids) == 2
