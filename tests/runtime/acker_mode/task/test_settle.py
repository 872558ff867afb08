from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.records.failures import RowFailure
from ftlayer.runtime.acker_mode.task.mode import Done, SettleQueue
from ftlayer.runtime.protocol.messages import RecordIds
from ftlayer.runtime.task.contract import Settled


def lineage_of(first: int, anchors: list[int]) -> RecordIds:
    """Records with so many anchors each; roots are numbered from ``first``, ids are root + 1,000."""
    offsets = np.concatenate([[0], np.cumsum(anchors)]).astype(np.int32)
    roots = np.arange(first, first + offsets[-1], dtype=np.uint64)
    single = all(count == 1 for count in anchors)
    return RecordIds(roots, roots + np.uint64(1000), None if single else offsets)


def failure(row: int) -> RowFailure:
    return RowFailure(row, "sink", f"row {row}", "")


@st.composite
def runs(draw: st.DrawFn):
    batches = draw(
        st.lists(
            st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.booleans()), min_size=1, max_size=5),
            min_size=1,
            max_size=5,
        )
    )
    failing = draw(st.sets(st.integers(0, 30), max_size=6))
    cuts = draw(st.lists(st.integers(0, 4), max_size=20))
    shuffled = draw(st.randoms(use_true_random=False))
    return batches, failing, cuts, shuffled


@given(runs())
def test_each_record_is_settled_once_with_its_last_row_and_fails_with_its_first_failure(run):
    batches, failing, cuts, random = run
    queue = SettleQueue()
    rows: list[tuple[int, int]] = []  # (batch, record) of every row given
    records: dict[tuple[int, int], list[int]] = {}  # rows of each live record
    told: dict[tuple[int, int], str] = {}
    roots: dict[int, tuple[int, int]] = {}
    settled = 0
    lineages: list[RecordIds] = []

    def take(done: Done) -> None:
        number = next(i for i, lineage in enumerate(lineages) if lineage is done.lineage)
        for record in done.records.tolist():
            assert (number, record) not in told
            told[number, record] = "done"
        for said in done.failures:
            assert (number, said.row) not in told
            told[number, said.row] = "failed"

    def check() -> None:
        for key, its_rows in records.items():
            if any(row < settled and row in failing for row in its_rows):
                assert told.get(key) == "failed"
            elif all(row < settled for row in its_rows):
                assert told.get(key) == "done"
            else:
                assert key not in told
        assert set(told) <= set(records)
        held = sorted(queue.held.tolist())
        assert held == sorted(root for root, key in roots.items() if key in records and key not in told)

    def settle(count: int) -> None:
        nonlocal settled
        count = min(count, len(rows) - settled)
        failures = [failure(row - settled) for row in failing if settled <= row < settled + count]
        random.shuffle(failures)
        answer = Settled(count, tuple(failures))
        settled += count
        for done in queue.settle(answer):
            take(done)
        check()

    first_root = 1
    for number, batch in enumerate(batches):
        lineage = lineage_of(first_root, [anchors for _, anchors, _ in batch])
        first_root += len(lineage.roots)
        lineages.append(lineage)
        for place, record in enumerate(lineage.record_of.tolist()):
            roots[int(lineage.roots[place])] = (number, record)
        alive = [record for record, (_, _, dead) in enumerate(batch) if not dead]
        parents = [record for record in alive for _ in range(batch[record][0])]
        random.shuffle(parents)
        for record in alive:
            records[number, record] = []
        for record in parents:
            records[number, record].append(len(rows))
            rows.append((number, record))
        take(queue.add(lineage, np.array(parents, np.int64), np.array(alive, np.int64)))
        check()
        if cuts:
            settle(cuts.pop())
    while cuts:
        settle(cuts.pop())
    settle(len(rows))
    assert set(told) == set(records)
    assert len(queue.held) == 0


def test_a_sink_that_settles_more_than_it_was_given_is_an_error():
    with pytest.raises(ValueError, match="settled 1 rows and was given 0"):
        SettleQueue().settle(Settled(1))
