from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ftlayer.errors import SourceChangedError, SourceError
from ftlayer.runtime.connectors import lane
from ftlayer.runtime.connectors.lane import BatchLimits
from ftlayer.runtime.connectors.offset_reader import pack_rows
from ftlayer.runtime.connectors.readers import IterableReader
from ftlayer.runtime.protocol.messages import AssignSplits, ReaderRange
from ftlayer.topology.connectors import partitioned
from ftlayer.topology.operators import IterableSource, Source

ID = pa.schema([("id", pa.int64())])
TEXT = pa.schema([("text", pa.binary())])


def test_everything_comes_in_order_and_in_batches(driver: Any, vertex: Any) -> None:
    reader = driver.open(lambda: range(1_000), rows=64)
    reader.start()
    batches = list(driver.all(reader))
    for rows in batches:
        vertex.persist(rows)
    assert vertex.rows == list(range(1_000))
    assert vertex.names == [(0, ordinal) for ordinal in range(1_000)]
    assert max(rows.payload.num_rows for rows in batches) <= 64
    assert reader.ended
    assert reader.take(0) is None


def test_records_and_record_batches_do_not_mix(driver: Any) -> None:
    def numbers() -> Iterator[Any]:
        yield from range(10)
        yield pa.record_batch({"id": [1]})

    reader = driver.open(numbers, rows=100, age_ms=1_000_000)
    reader.start()
    assert driver.next(reader).payload.column(0).to_pylist() == list(range(10))
    with pytest.raises(SourceError, match=r"nothing but pyarrow\.RecordBatches"):
        driver.next(reader)


def test_no_rows_at_all(driver: Any) -> None:
    reader = driver.open(lambda: iter(()))
    reader.start()
    assert driver.next(reader) is None


def test_partitions_are_shared_out(driver: Any) -> None:
    source = Source("s", IterableSource(tuple((lambda i=i: [i, i]) for i in range(5))), ID)
    got = []
    for subtask in range(2):
        reader = driver.open(source, subtask, 2)
        reader.start()
        got.append({(rows.partition, rows.number) for rows in driver.all(reader)})
    assert got == [{("p0", 0), ("p2", 2), ("p4", 4)}, {("p1", 1), ("p3", 3)}]


def test_more_subtasks_than_partitions(driver: Any) -> None:
    reader = driver.open(lambda: range(5), 3, 4)
    reader.start()
    assert reader.ended
    assert driver.next(reader) is None


def test_a_partition_that_blocks_holds_no_other_back(driver: Any) -> None:
    go = threading.Event()

    def blocking() -> Iterator[int]:
        go.wait()
        yield 1

    reader = driver.open(Source("s", IterableSource((blocking, lambda: range(50))), ID), rows=10)
    reader.start()
    got = 0
    while got < 50:
        rows = driver.next(reader)
        assert rows.partition == "p1"
        got += rows.payload.num_rows
    assert not reader.ended
    go.set()
    assert driver.next(reader).partition == "p0"
    assert driver.next(reader) is None


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    total=st.integers(0, 60),
    limit=st.integers(1, 20),
    crashes=st.lists(st.integers(0, 5), max_size=4),
    chunk=st.integers(0, 9),
)
def test_a_restart_goes_on_where_rows_were_accepted(
    driver: Any, make_vertex: Any, total: int, limit: int, crashes: list[int], chunk: int
) -> None:
    """``chunk`` 0: records; otherwise record batches of that size."""

    def items() -> Iterator[Any]:
        if not chunk:
            return iter(range(total))
        starts = range(0, total, chunk)
        return (pa.record_batch({"id": list(range(at, min(at + chunk, total)))}, schema=ID) for at in starts)

    vertex = make_vertex()
    for kept in [*crashes, None]:
        reader = driver.open(items, rows=limit, positions=vertex.snapshot())
        reader.start()
        for count, rows in enumerate(driver.all(reader)):
            if count == kept:
                break
            vertex.persist(rows)
        reader.stop()
    assert vertex.rows == list(range(total))
    assert vertex.names == [(0, ordinal) for ordinal in range(total)]


@pytest.mark.parametrize(
    "records", [list(range(100)), [pa.record_batch({"id": range(60)}, schema=ID)] * 2, []]
)
def test_an_iterable_that_is_shorter_than_its_position_is_an_error(driver: Any, records: list[Any]) -> None:
    reader = driver.open(lambda: iter(records), positions={"p0": pack_rows(300)})
    reader.start()
    there = sum(each.num_rows if isinstance(each, pa.RecordBatch) else 1 for each in records)
    message = rf"source 'numbers': partition 0 ends behind {there} records now, and 300 of it were read"
    with pytest.raises(SourceChangedError, match=message):
        driver.next(reader)


def table_of(rows: int, step: int) -> Source:
    return Source("table", IterableSource(partitioned(pa.table({"id": range(rows)}), step), step), ID)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 150), min_size=1, max_size=4).map(sorted),
    parallelism=st.integers(1, 3),
    step=st.integers(1, 12),
    kept=st.lists(st.integers(0, 8), min_size=4, max_size=4),
)
@example(sizes=[20, 25], parallelism=1, step=10, kept=[2, 0, 0, 0])
@example(sizes=[900, 1_000], parallelism=1, step=10, kept=[70, 0, 0, 0])
def test_a_table_that_grows_is_read_once(
    driver: Any, make_vertex: Any, sizes: list[int], parallelism: int, step: int, kept: list[int]
) -> None:
    """It grows between two runs, over steps too; the last run reads it to its end."""
    vertex = make_vertex()
    for size, most in zip(sizes, [*kept[: len(sizes) - 1], None], strict=True):
        known = vertex.snapshot()
        for subtask in range(parallelism):
            reader = driver.open(table_of(size, step), subtask, parallelism, rows=5, positions=known)
            reader.start()
            for rows in islice(driver.all(reader), most):
                vertex.persist(rows)
            reader.stop()
    assert sorted(vertex.rows) == list(range(sizes[-1]))


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_a_table_that_has_lost_a_partition_which_was_read_is_an_error(driver: Any, parallelism: int) -> None:
    positions = {f"p{part}": pack_rows(rows, 100) for part, rows in enumerate((80, 0, 80))}
    raised = []
    for subtask in range(parallelism):
        reader = driver.open(table_of(90, 100), subtask, parallelism, positions=positions)
        reader.start()
        try:
            list(driver.all(reader))
        except SourceChangedError as error:
            raised.append(str(error))
    assert len(raised) == 1
    assert raised[0].startswith(
        "source 'table': partition 2 ends behind 0 records now, and 80 of it were read"
    )


@pytest.mark.parametrize(
    ("positions", "first"),
    [
        ({"p0": pack_rows(60)}, 60),  # as they were written before tables were dealt out by steps
        ({"p0": pack_rows(60, 80)}, 60),
        ({"p0": pack_rows(101)}, None),
        ({"p0": pack_rows(75), "p1": pack_rows(3)}, None),
        ({"p0": pack_rows(75, 80), "p1": pack_rows(3, 80)}, None),
    ],
)
def test_rows_that_were_dealt_out_otherwise_are_known(
    driver: Any, positions: dict[str, bytes], first: int | None
) -> None:
    reader = driver.open(table_of(150, 100), positions=positions, rows=1_000)
    reader.start()
    if first is None:
        with pytest.raises(
            SourceChangedError, match=r"partition [01] were read before, .* steps of 100 rows"
        ):
            list(driver.all(reader))
    else:
        numbers = [n for rows in driver.all(reader) for n in rows.payload.column(0).to_pylist()]
        assert sorted(numbers) == list(range(first, 150))


def test_a_position_of_another_kind_of_source(driver: Any) -> None:
    reader = driver.open(lambda: range(5), positions={"p0": b"\x93\x01\x02\x03"})
    reader.start()
    with pytest.raises(SourceError, match="uid of its own"):
        driver.next(reader)


# ---------------------------------------------------------------- ages


class Stepper:
    """An iterator that gives a record when it is told to; tells when it waits."""

    def __init__(self) -> None:
        self._wanted = threading.Semaphore(0)
        self.waits = threading.Semaphore(0)
        self._given = 0
        self._over = False

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.waits.release()
        if not self._over:
            self._wanted.acquire()
        if self._over:
            raise StopIteration
        self._given += 1
        return self._given - 1

    def give(self, records: int) -> None:
        """Return once the iterator is asked for the record behind them."""
        for _ in range(records):
            self._wanted.release()
            assert self.waits.acquire(timeout=900)

    def end(self) -> None:
        self._over = True
        self._wanted.release()


class Aged:
    """A reader of a `Stepper` with a clock that the test moves."""

    def __init__(self, rows: int, age_ms: int) -> None:
        self.now = 1_000
        self.wakes = 0
        self.steps = Stepper()
        self.limits = BatchLimits(rows, age_ms)
        source = Source("s", IterableSource((lambda: self.steps,)), ID)
        self.reader = IterableReader(source, 0, 1, {}, self.limits, self._wake, clock=lambda: self.now)
        self.reader.start()
        assert self.steps.waits.acquire(timeout=900)

    def _wake(self) -> None:
        self.wakes += 1

    def take(self) -> list[int] | None:
        rows = self.reader.take(self.now)
        return None if rows is None else rows.payload.column(0).to_pylist()


def test_records_wait_for_others_up_to_their_age() -> None:
    aged = Aged(rows=4, age_ms=5)
    assert aged.reader.due_ms is None
    aged.steps.give(1)
    assert aged.reader.due_ms == 1_005
    assert aged.wakes == 1
    aged.now = 1_004
    aged.steps.give(1)
    assert aged.take() is None
    aged.now = 1_005
    assert aged.take() == [0, 1]
    assert aged.reader.due_ms is None
    assert aged.take() is None


def test_records_that_need_not_wait_are_taken_as_they_are() -> None:
    aged = Aged(rows=8, age_ms=5)
    aged.steps.give(2)
    assert aged.take() is None
    aged.limits.waits = False
    assert aged.take() == [0, 1]
    assert aged.take() is None
    aged.steps.give(1)
    assert aged.wakes == 2
    assert aged.take() == [2]
    aged.steps.give(1)
    aged.limits.waits = True
    assert aged.take() is None


def test_the_age_begins_anew_with_the_record_after_a_cut() -> None:
    aged = Aged(rows=8, age_ms=5)
    aged.steps.give(1)
    aged.now = 1_010
    assert aged.take() == [0]
    aged.now = 2_000
    aged.steps.give(1)
    assert aged.reader.due_ms == 2_005
    assert aged.wakes == 2
    aged.now = 2_003
    aged.steps.give(2)
    assert aged.take() is None
    aged.now = 2_005
    assert aged.take() == [1, 2, 3]


def test_a_full_batch_does_not_wait() -> None:
    aged = Aged(rows=3, age_ms=1_000)
    aged.steps.give(3)
    assert aged.take() == [0, 1, 2]
    assert aged.take() is None


def test_the_end_does_not_wait() -> None:
    aged = Aged(rows=3, age_ms=1_000_000)
    aged.steps.give(2)
    aged.steps.end()
    while not aged.reader.ended:
        if (rows := aged.take()) is not None:
            assert rows == [0, 1]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 3) | st.sampled_from(["age", "take"]), max_size=30), st.integers(1, 5))
def test_no_record_is_lost_or_too_old_however_it_is_cut(moves: list[Any], rows: int) -> None:
    aged = Aged(rows=rows, age_ms=5)
    taken: list[int] = []
    given_out = 0
    for move in moves:
        if move == "age":
            aged.now += 5
        if isinstance(move, int):
            for _ in range(move):
                aged.steps.give(1)
                given_out += 1
                while (got := aged.take()) is not None:
                    taken += got
        else:
            while (got := aged.take()) is not None:
                taken += got
        if move == "age":
            assert taken == list(range(given_out)), "what is old enough is there"
    aged.steps.end()
    while not aged.reader.ended:
        taken += aged.take() or []
    assert taken == list(range(given_out))


# ---------------------------------------------------------------- back-pressure, size


def test_a_reader_whose_loop_is_busy_waits(driver: Any) -> None:
    produced = 0

    def numbers() -> Iterator[int]:
        nonlocal produced
        while True:
            produced += 1
            yield produced

    reader = driver.open(numbers, rows=10, age_ms=100_000)
    reader.start()
    bound = (lane.READY_BATCHES + 1) * 10 + 1
    driver.until(lambda: produced >= bound - 1)
    assert produced <= bound
    for _ in range(5):
        assert driver.next(reader).payload.num_rows == 10
    assert produced <= bound + 60


def test_large_records_travel_in_small_batches(driver: Any) -> None:
    large = bytes(16 << 20)
    reader = driver.open(lambda: (large for _ in range(8)), rows=4_096, schema=TEXT)
    reader.start()
    sizes = [rows.payload.num_rows for rows in driver.all(reader)]
    assert sizes == [1] * 8


def test_batches_learn_the_size_of_records(driver: Any) -> None:
    record = bytes(1 << 20)
    reader = driver.open(lambda: (record for _ in range(64)), rows=4_096, age_ms=10_000, schema=TEXT)
    reader.start()
    sizes = [rows.payload.num_rows for rows in driver.all(reader)]
    assert sum(sizes) == 64
    assert max(sizes) <= 4


def test_large_record_batches_are_sliced(driver: Any, vertex: Any) -> None:
    whole = pa.record_batch({"id": list(range(1_000))})
    reader = driver.open(lambda: [whole, whole.slice(0, 0), whole.slice(0, 1)], rows=300)
    reader.start()
    sizes = []
    for rows in driver.all(reader):
        sizes.append(rows.payload.num_rows)
        vertex.persist(rows)
    assert sizes == [300, 300, 300, 100, 1]
    assert vertex.rows == [*range(1_000), 0]


# ---------------------------------------------------------------- ends


def numbers_that_break() -> Iterator[int]:
    yield from range(25)
    raise OSError("the line is dead")


def test_an_error_comes_behind_the_rows_before_it(driver: Any) -> None:
    reader = driver.open(numbers_that_break, rows=10, age_ms=1_000_000)
    reader.start()
    got: list[int] = []
    while len(got) < 25:
        got += driver.next(reader).payload.column(0).to_pylist()
    assert got == list(range(25))
    with pytest.raises(
        SourceError, match=r"'numbers' cannot be read on: OSError: the line is dead"
    ) as caught:
        driver.next(reader)
    assert isinstance(caught.value.__cause__, OSError)
    assert not reader.ended


@pytest.mark.parametrize("error", [SystemExit(3), MemoryError("much"), KeyboardInterrupt()])
def test_whatever_ends_the_thread_is_seen(driver: Any, error: BaseException) -> None:
    def numbers() -> Iterator[int]:
        yield 1
        raise error

    reader = driver.open(numbers)
    reader.start()
    assert driver.next(reader).payload.num_rows == 1
    with pytest.raises(SourceError, match=type(error).__name__):
        driver.next(reader)


def test_what_is_no_iterable(driver: Any) -> None:
    reader = driver.open(lambda: 7)
    reader.start()
    with pytest.raises(SourceError, match="'int' object is not iterable"):
        driver.next(reader)


def test_a_misfit_ends_the_source(driver: Any) -> None:
    reader = driver.open(lambda: [1, 2, "three"], age_ms=1_000_000)
    reader.start()
    assert driver.next(reader).payload.column(0).to_pylist() == [1, 2]
    with pytest.raises(SourceError, match=r"source 'numbers' gave 'three'"):
        driver.next(reader)


def test_finish_keeps_whole_batches_and_reads_no_further(driver: Any, vertex: Any) -> None:
    reader = driver.open(lambda: iter(int, 1), rows=5, age_ms=1_000_000)
    reader.start()
    vertex.persist(driver.next(reader))
    reader.finish()
    left = list(driver.all(reader))
    for rows in left:
        vertex.persist(rows)
    assert len(left) <= lane.READY_BATCHES
    assert reader.ended


def test_finish_does_not_wait_for_an_iterator_that_blocks() -> None:
    aged = Aged(rows=5, age_ms=5)
    aged.steps.give(2)
    aged.reader.finish()
    assert aged.reader.ended
    aged.now += 1_000
    assert aged.take() is None
    assert aged.reader.due_ms is None
    aged.steps.end()


def test_an_error_behind_finish_is_of_no_interest(driver: Any) -> None:
    go = threading.Event()

    def numbers() -> Iterator[int]:
        yield 1
        go.wait()
        raise OSError("closed")

    reader = driver.open(numbers)
    reader.start()
    driver.next(reader)
    reader.finish()
    driver.woken.clear()
    go.set()
    assert driver.woken.wait(600)
    assert reader.take(10**15) is None
    assert reader.ended


def test_stop_forgets_what_waits(driver: Any) -> None:
    reader = driver.open(lambda: range(100), rows=5)
    reader.start()
    driver.next(reader)
    reader.stop()
    assert reader.take(10**15) is None
    assert reader.ended


def test_threads_end_with_stop(driver: Any) -> None:
    source = Source("ending", IterableSource((lambda: iter(int, 1), lambda: range(10**9))), ID)
    reader = driver.open(source, rows=5)
    reader.start()
    driver.next(reader)
    reader.stop()

    def alive() -> list[str]:
        return [thread.name for thread in threading.enumerate() if "ending" in thread.name]

    driver.until(lambda: not alive())


def test_what_a_slot_imports_is_light() -> None:
    """Slots start quickly, and numba is forbidden in them."""
    code = (
        "import sys, ftlayer.runtime.connectors.readers, ftlayer.runtime.connectors.sinks;"
        "print([name for name in ('numba', 'pandas', 'pyspark.sql', 'lmdb') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_iterable_takes_no_splits(driver: Any) -> None:
    reader = driver.open(lambda: range(3))
    with pytest.raises(SourceError, match="iterable"):
        reader.assign(AssignSplits("numbers", 0, ReaderRange(1, "0", "1", 1, b""), ()))


def test_wakes_are_few() -> None:
    """One or two a batch, whatever its records are."""
    wakes = 0

    def wake() -> None:
        nonlocal wakes
        wakes += 1

    source = Source("s", IterableSource((lambda: range(100_000),)), ID)
    reader = IterableReader(source, 0, 1, {}, BatchLimits(1_000, 1_000_000), wake)
    reader.start()
    batches = 0
    while not reader.ended:
        batches += reader.take(0) is not None
    assert wakes <= 2 * batches + 2


@pytest.mark.parametrize("before", range(7))
def test_a_dataframe_goes_on_behind_its_positions_with_another_parallelism(
    driver: Any, vertex: Any, before: int
) -> None:
    frame = IterableSource(partitioned(pa.table({"id": range(250)}), 100))
    source = Source("frame", frame, pa.schema([("id", pa.int64())]))
    readers = [driver.open(source, subtask, 2, rows=30) for subtask in range(2)]
    for reader in readers:
        reader.start()
    for turn in range(before):
        rows = driver.next(readers[turn % 2])
        if rows is not None:
            vertex.persist(rows)
    for reader in readers:
        reader.stop()
    alone = driver.open(source, 0, 1, rows=30, positions=vertex.snapshot())
    alone.start()
    for rows in driver.all(alone):
        vertex.persist(rows)
    assert sorted(vertex.rows) == list(range(250))
