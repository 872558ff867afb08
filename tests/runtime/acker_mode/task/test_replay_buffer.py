"""What a source keeps of a partition, and what it makes of rows that are read again, cut otherwise than before."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.errors import SourceChangedError, SourceError
from ftlayer.records.ipc import digest_of
from ftlayer.runtime.acker_mode.task.range_source import BufferedRange, ReplayBuffer
from ftlayer.runtime.task.actions import SourceRows
from ftlayer.vertex.calls import HeldPartition, OpenRange, RowRange, SourcePosition

PARTITION, NUMBER = "p0", 7


def payload(first: int, rows: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(range(first, first + rows), pa.int64())})


def read(first: int, rows: int) -> SourceRows:
    position = SourcePosition(PARTITION, _position(first), _position(first + rows) or b"")
    return SourceRows(PARTITION, NUMBER, first, payload(first, rows), position)


def _position(place: int) -> bytes | None:
    return str(place).encode() if place else None


def facts(first: int, rows: int) -> RowRange:
    end = _position(first + rows) or b""
    digest = digest_of(payload(first, rows))
    return RowRange(PARTITION, _position(first), end, NUMBER, first, rows, rows, digest)


def held(first: int, sizes: list[int], segment: int = 100) -> HeldPartition:
    """A partition that is done up to ``first``, with open ranges of these sizes behind."""
    ranges, at = [], first
    for size in sizes:
        ranges.append(OpenRange(segment + len(ranges), facts(at, size)))
        at += size
    number, place = (NUMBER, at) if at else (-1, 0)
    return HeldPartition(PARTITION, _position(at), number, place, tuple(ranges))


def cut(first: int, end: int, sizes: Iterator[int]) -> Iterator[SourceRows]:
    while first < end:
        size = min(next(sizes), end - first)
        yield read(first, size)
        first += size


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_row_is_kept_once_or_is_new(data: st.DataObject) -> None:
    floor = data.draw(st.integers(0, 9))
    sizes = data.draw(st.lists(st.integers(1, 6), max_size=5))
    begins = data.draw(st.integers(0, floor))
    pieces = iter(data.draw(st.lists(st.integers(1, 7), min_size=60, max_size=60)))
    buffer = ReplayBuffer("numbers", PARTITION)
    found = held(floor, sizes)
    assert buffer.taken_over(found) == []
    head = floor + sum(sizes)
    new: list[int] = []
    for rows in cut(begins, head + 9, pieces):
        rest = buffer.take(rows)
        if rest is not None:
            assert rest.first_ordinal == head + len(new)
            new += rest.payload.column(0).to_pylist()
            buffer.add(BufferedRange(facts(rest.first_ordinal, rest.payload.num_rows), rest.payload))
    assert new == list(range(head, head + 9))
    buffer.check_ended()
    for open_range in found.ranges:
        kept = buffer.get(open_range.segment)
        assert kept is not None
        assert kept.payload.equals(payload(open_range.range.first, open_range.range.rows))
    buffer.forget_below(100 + len(sizes))
    assert all(buffer.get(each.segment) is None for each in found.ranges)


def test_what_the_vertex_does_not_know_any_more_is_registered_anew() -> None:
    buffer = ReplayBuffer("numbers", PARTITION)
    buffer.taken_over(held(0, []))
    for first in (0, 5, 10):
        kept = BufferedRange(facts(first, 5), payload(first, 5))
        assert buffer.take(read(first, 5)) is not None
        buffer.add(kept)
        buffer.named(kept, first)
    again = buffer.taken_over(held(5, [5], segment=900))
    assert [each.facts.first for each in again] == [10]
    assert buffer.get(900) is not None
    assert len(buffer) == 1, "what is done is not kept"
    assert buffer.head == b"10"


def test_rows_that_it_has_no_more_are_an_error_that_another_instance_mends() -> None:
    buffer = ReplayBuffer("numbers", PARTITION)
    buffer.taken_over(held(10, []))
    assert buffer.take(read(10, 5)) is not None
    with pytest.raises(SourceError, match="5 rows of partition 'p0' from 5 on are not done") as raised:
        buffer.taken_over(held(5, [5]))
    assert raised.value.recoverable is None


def test_other_rows_and_missing_ones_are_noticed() -> None:
    buffer = ReplayBuffer("numbers", PARTITION)
    buffer.taken_over(held(0, [5]))
    other = SourceRows(PARTITION, NUMBER, 0, payload(1, 5), read(0, 5).position)
    with pytest.raises(SourceChangedError, match="are other rows now"):
        buffer.take(other)
    buffer = ReplayBuffer("numbers", PARTITION)
    buffer.taken_over(held(0, [5]))
    buffer.take(read(0, 4))
    with pytest.raises(SourceChangedError, match=r"now the source ends.*, before their end"):
        buffer.check_ended()
    with pytest.raises(SourceChangedError, match="passes over them"):
        buffer.take(read(6, 4))
