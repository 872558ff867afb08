"""Batches that are collected in C, against those made of lists of records."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import date
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ftlayer.errors import SourceRowError
from ftlayer.records.kernels import native
from ftlayer.runtime.connectors.lane import (
    BatchLimits,
    Filling,
    Misfit,
    PartitionLane,
    PlainFilling,
    RecordFilling,
    RowMaker,
    SparkRowMaker,
    SplitProgress,
)
from ftlayer.runtime.connectors.offset_reader import PositionChain

KINDS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-(2**7), 2**7 - 1),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float64(): st.floats(allow_nan=False),
    pa.string(): st.text(max_size=30),
    pa.binary(): st.binary(max_size=30),
}
ODD = st.sampled_from([None, 1.5, 2**70, "\ud800", date(2024, 1, 1), (), pa.record_batch({"a": [1]})])
NUMBER = pa.schema([pa.field("n", pa.int64(), nullable=False)])


@st.composite
def sources(draw: st.DrawFn) -> tuple[pa.Schema, list[Any]]:
    """A schema, and records of which most are plain."""
    kinds = draw(st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=3))
    schema = pa.schema(
        [pa.field(f"c{place}", kind, nullable=draw(st.booleans())) for place, kind in enumerate(kinds)]
    )
    values = [
        KINDS[kind] if not field.nullable else st.none() | KINDS[kind]
        for kind, field in zip(kinds, schema, strict=True)
    ]
    record = values[0] if len(values) == 1 else st.tuples(*values)
    rows = draw(st.lists(record, max_size=60))
    if draw(st.booleans()):
        odd = draw(ODD if len(values) == 1 else ODD | st.tuples(*[value | ODD for value in values]))
        rows.insert(draw(st.integers(0, len(rows))), odd)
    return schema, rows


def read(
    schema: pa.Schema, items: Iterator[Any], limit: int, now: Callable[[], int]
) -> tuple[list[pa.RecordBatch], str]:
    """Read with a lane whose batches are cut by the loop wherever the source calls for it."""
    lane = PartitionLane(RowMaker("s", schema), BatchLimits(limit, 1), now, lambda: None)
    split = SplitProgress("p", 0, 0, PositionChain({}), lambda rows, done: b"", tells_done=False)
    found: list[pa.RecordBatch] = []
    error = ""

    def take() -> None:
        nonlocal error
        if error:
            return
        try:
            while (rows := lane.take(now())) is not None:
                found.append(rows.payload)
        except SourceRowError as raised:
            error = error or str(raised)

    def taking() -> Iterator[Any]:
        for item in items:
            take()
            yield item

    lane.run(lambda: lane.pump(taking(), split))
    take()
    return found, error


@settings(max_examples=60)
@given(sources(), st.integers(1, 40), st.lists(st.booleans(), max_size=60))
@example((NUMBER, [1, 2, None]), 40, [True, False, True])
def test_a_lane_gives_what_its_source_gives_until_a_record_does_not_fit(
    source: tuple[pa.Schema, list[Any]], limit: int, ages: list[bool]
) -> None:
    schema, rows = source
    clock = 0

    def items() -> Iterator[Any]:
        nonlocal clock
        for place, row in enumerate(rows):
            clock += place < len(ages) and ages[place]
            yield row

    def fits(row: Any) -> bool:
        try:
            RowMaker("s", schema).batch([row])
        except SourceRowError:
            return False
        return True

    assume(not rows or not isinstance(rows[0], pa.RecordBatch))  # that is a source of batches
    found, error = read(schema, items(), limit, lambda: clock)
    assert bool(error) == (not all(map(fits, rows)))
    got = pa.Table.from_batches(found, schema)
    assert got.equals(
        pa.Table.from_batches([RowMaker("s", schema).batch(rows[: len(got)])] if got else [], schema)
    )
    if not error:
        assert len(got) == len(rows)
    for batch in found:
        batch.validate(full=True)
        assert 0 < batch.num_rows <= limit


def fillings(limit: int) -> list[Filling]:
    maker = RowMaker("s", NUMBER)
    collector = maker.collector(limit, 0)
    assert collector is not None
    assert collector.put(0)
    return [PlainFilling(maker, collector), RecordFilling(maker, [0], limit)]


@pytest.mark.parametrize("which", [0, 1])
def test_what_comes_behind_a_cut_is_left(which: int) -> None:
    filling = fillings(100)[which]
    cut: list[Any] = []

    def items() -> Iterator[int]:
        yield from range(1, 20)
        cut.extend(filling.cut())
        yield 20
        raise AssertionError("it reads on")

    assert not filling.collect(items())
    assert cut[0].column(0).to_pylist() == list(range(20))
    assert filling.left == [20]


@pytest.mark.parametrize("which", [0, 1])
def test_an_end_an_error_and_the_limit(which: int) -> None:
    filling = fillings(10)[which]
    assert filling.collect(iter(range(1, 5)))
    assert sum(part.num_rows for part in filling.cut()) == 5
    filling = fillings(10)[which]
    rest = iter(range(1, 50))
    assert not filling.collect(rest)
    assert sum(part.num_rows for part in filling.cut()) == 10
    assert next(rest) == 10
    filling = fillings(10)[which]
    with pytest.raises(ZeroDivisionError):
        filling.collect(1 // (3 - number) for number in range(5))
    assert sum(part.num_rows for part in filling.cut()) == 4
    assert filling.left == []


def test_a_batch_holds_on_to_no_more_than_its_rows() -> None:
    collector = RowMaker("s", pa.schema([("n", pa.int64()), ("t", pa.string())])).collector(16_384, 16_384)
    assert collector is not None
    assert collector.collect(iter([(1, "one"), (None, None)])) == []
    rows, columns = collector.cut()
    assert rows == 2
    sizes = [len(part) for column in columns for part in column[:3] if part is not None]
    assert sum(sizes) < 64


def test_what_the_kernel_refuses() -> None:
    for types, nullable, limit in [
        (b"O", b"\1", 1),
        (b"l", b"", 1),
        (b"", b"", 1),
        (b"l", b"\1", 0),
        (b"l", b"\1", 2**31),
    ]:
        with pytest.raises(ValueError, match=r"column|limit"):
            native.RecordCollector(types, nullable, limit, 0)
    collector = native.RecordCollector(b"l", b"\0", 2, 2**40)
    with pytest.raises(TypeError, match="an iterator, not list"):
        collector.collect([1])  # type: ignore[arg-type]
    assert [collector.put(record) for record in (1, None, True, 2)] == [True, False, False, True]
    with pytest.raises(RuntimeError):
        collector.put(3)
    assert collector.cut()[0] == 2
    assert collector.collect(iter([1])) == []
    for call in (collector.cut, lambda: collector.put(1)):
        with pytest.raises(RuntimeError):
            call()


def test_a_collector_that_collects_takes_no_second_call() -> None:
    collector = native.RecordCollector(b"l", b"\0", 10, 0)

    def items() -> Iterator[int]:
        for call in (lambda: collector.put(1), lambda: collector.collect(iter([1]))):
            with pytest.raises(RuntimeError):
                call()
        yield 7

    assert collector.collect(items()) == []
    assert collector.ended
    assert collector.cut()[0] == 1


def test_readers_of_spark_give_tuples_of_one_value_and_columns_of_other_types_are_not_plain() -> None:
    assert SparkRowMaker("s", NUMBER).collector(1, 1) is None
    assert SparkRowMaker("s", pa.schema([("a", pa.int64()), ("b", pa.string())])).collector(1, 1) is not None
    assert RowMaker("s", pa.schema([("t", pa.timestamp("us"))])).collector(1, 1) is None


@given(st.lists(st.integers(0, 9) | st.sampled_from(["x", 1.5, None]), max_size=30), st.integers(1, 9))
def test_rows_that_do_not_fit_are_told_with_their_place_where_they_are_kept(
    rows: list[Any], limit: int
) -> None:
    """They count in the position like all others, and the first is the error where they are not kept."""
    for keeps in (True, False):
        lane = PartitionLane(
            RowMaker("s", NUMBER), BatchLimits(limit, 1, keeps_misfits=keeps), lambda: 0, lambda: None
        )
        chain = PositionChain({})
        split = SplitProgress("p", 0, 5, chain, lambda rows, done: b"%d" % rows, tells_done=False)
        found: list[Any] = []

        def taking(lane: PartitionLane = lane, found: list[Any] = found) -> Iterator[Any]:
            for row in rows:
                while (taken := lane.take(9)) is not None:
                    found.append(taken)
                yield row

        try:
            lane.run(lambda lane=lane, split=split, taking=taking: lane.pump(taking(), split))  # type: ignore[misc]
            while (taken := lane.take(9)) is not None:
                found.append(taken)
        except SourceRowError as raised:
            said = str(raised)
            first = next(place for place, row in enumerate(rows) if type(row) is not int)
            assert not keeps
            assert said.startswith(f"row {5 + first} of split 'p': source 's' gave {rows[first]!r}, which")
            assert sum(each.payload.num_rows for each in found) <= first
            continue
        assert keeps or all(type(row) is int for row in rows)
        got: list[Any] = []
        for each in found:
            assert each.first_ordinal == 5 + len(got)
            got += (
                [f"{each.misfit.split(':')[0]} {each.payload['row'][0]}"]
                if each.misfit
                else each.payload["n"].to_pylist()
            )
            assert each.position.end == b"%d" % (5 + len(got))
        assert got == [
            row if type(row) is int else f"row {5 + place} of split 'p' {row!r}"
            for place, row in enumerate(rows)
        ]


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([1, 2, None, "x"]))), st.booleans())
def test_rows_of_a_log_that_do_not_fit_take_their_own_offsets(
    steps: list[tuple[int, Any]], batched: bool
) -> None:
    """One whose offset cannot be read has no place: it is the error."""
    schema = pa.schema([("offset", pa.int64()), pa.field("n", pa.int64(), nullable=False)])
    offsets = list(accumulate((step for step, _ in steps), initial=99))[1:]
    values = [None if batched and not isinstance(value, int | None) else value for _, value in steps]
    rows: list[Any] = list(zip(offsets, values, strict=True))
    found: list[Any] = []
    lane = PartitionLane(
        SparkRowMaker("s", schema, "offset"), BatchLimits(4, 1, keeps_misfits=True), lambda: 0, lambda: None
    )
    split = SplitProgress(
        "p",
        0,
        0,
        PositionChain({}),
        lambda rows, done: b"%d" % rows,
        tells_done=False,
        offsets=("offset", 100),
    )

    def items() -> Iterator[Any]:
        given = rows
        if batched:
            given = [
                pa.record_batch(
                    [pa.array(offsets, pa.int64()), pa.array(values, pa.int64())], ["offset", "n"]
                )
            ]
        yield from given

    def drain() -> None:
        while (taken := lane.take(9)) is not None:
            found.append(taken)

    worker = threading.Thread(target=lane.run, args=(lambda: lane.pump(items(), split),))
    worker.start()
    while worker.is_alive():
        drain()
        worker.join(0.001)
    drain()
    got: list[Any] = []
    reached = 0
    for each in found:
        assert each.first_ordinal == reached
        reached = each.first_ordinal + each.span
        places = range(each.first_ordinal, reached) if each.places is None else each.places.tolist()
        assert each.position.end == b"%d" % reached
        if each.misfit:
            assert each.misfit.startswith(f"offset {100 + places[0]} of split 'p': source 's' gave ")
            got.append((100 + places[0], None))
        else:
            assert each.payload["offset"].to_pylist() == [100 + place for place in places]
            got += zip(each.payload["offset"].to_pylist(), each.payload["n"].to_pylist(), strict=True)
    assert got == [(at, value if type(value) is int else None) for at, value in rows]

    lost = SparkRowMaker("s", schema, "offset").parts([("x", 1)])[0]
    assert isinstance(lost, Misfit)
    assert not split.can_pass(lost)
