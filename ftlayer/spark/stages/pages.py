"""Pages: what a stage leaves behind. One Spark row holds many rows as Arrow IPC bytes.

A page has a *head* (what the driver counts: rows in and out, failures, deliveries), its *data* (the rows
that go on, each with its root) and, where a later stage may need it, the *source* rows with their roots.
Materializing pages instead of rows saves Spark a conversion to its own row format and back for every
row, and lets rows of failed roots be left out at the speed of Arrow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ftlayer.common.printable import described
from ftlayer.errors import CodecError, RecomputedResultError
from ftlayer.records.failures import FailedRow

# A carrier: the ids of a record that is handed to another query, as 20 bytes in any column or header.
#
# Layout, little-endian: root (uint64), record id (uint64), incarnation of the vertex (uint32).


CARRIER_DTYPE = np.dtype([("root", "<u8"), ("id", "<u8"), ("incarnation", "<u4")])
CARRIER_BYTES = CARRIER_DTYPE.itemsize


def make_carriers(roots: npt.NDArray[np.uint64], ids: npt.NDArray[np.uint64], incarnation: int) -> pa.Array:
    carriers = np.empty(len(roots), CARRIER_DTYPE)
    carriers["root"], carriers["id"], carriers["incarnation"] = roots, ids, incarnation
    return _binary_of(carriers)


def _binary_of(records: npt.NDArray[np.void]) -> pa.Array:
    """Return an Arrow binary array with one value a record."""
    offsets = np.arange(len(records) + 1, dtype=np.int32) * records.dtype.itemsize
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(records.tobytes())]
    return pa.Array.from_buffers(pa.binary(), len(records), buffers)


def check_carriers(column: pa.Array, name: str) -> bytes:
    """Return the carriers of a column end to end; `CodecError` names the first row that has none."""
    if not pa.types.is_binary(column.type) and not pa.types.is_large_binary(column.type):
        raise CodecError(
            f"column {name!r} is {column.type}; a carrier is binary, {CARRIER_BYTES} bytes a row"
        )
    values = column.to_pylist()
    for row, value in enumerate(values):
        if value is None or len(value) != CARRIER_BYTES or value[:8] == bytes(8) or value[8:16] == bytes(8):
            raise CodecError(
                f"column {name!r}: row {row} holds no carrier of a tracked record "
                f"({'null' if value is None else f'{len(value)} bytes'}); every record that is resumed must "
                "have been handed on by emit()"
            )
    return b"".join(values)


def read_carriers(data: bytes) -> npt.NDArray[np.void]:
    """Return carriers laid end to end as a structured array (`CARRIER_DTYPE`)."""
    return np.frombuffer(data, CARRIER_DTYPE)


# Which rows of a first stage the vertex delivered: a mark of 40 bytes in the column ``_ft``, null for a source's own.
#
# Layout, little-endian: root (uint64), the range of offsets [start, end) that was read with the row (int64), origin
# and tries (uint64, see `ftlayer.records.ids`); behind them, as UTF-8, why the row does not fit its source any more,
# where that is so: then its columns are null. One flat column, because every row of the source pays for it: Spark
# writes a null struct of three fields to Arrow in twice the time that the text of a log line takes.


SOURCE_FT = "binary"
"""The type of the column before the first stage (DDL)."""

MARK_DTYPE = np.dtype(
    [("root", "<u8"), ("start", "<i8"), ("end", "<i8"), ("origin", "<u8"), ("tries", "<u8")]
)


def make_marks(
    roots: npt.NDArray[np.uint64],
    start: int,
    end: int,
    origins: npt.NDArray[np.uint64],
    tries: npt.NDArray[np.uint64],
    misfits: Mapping[int, str] = MappingProxyType({}),
) -> pa.Array:
    """Return one mark a row, as an Arrow binary array; that of a row in ``misfits`` says why it does not fit."""
    marks = np.empty(len(roots), MARK_DTYPE)
    marks["root"], marks["start"], marks["end"] = roots, start, end
    marks["origin"], marks["tries"] = origins, tries
    if misfits:
        ends = [mark.tobytes() + misfits.get(row, "").encode() for row, mark in enumerate(marks)]
        return pa.array(ends, pa.binary())
    return _binary_of(marks)


def read_marks(column: pa.Array) -> npt.NDArray[np.void]:
    """Return the marks of the rows that have one, in their order (`MARK_DTYPE`)."""
    size = MARK_DTYPE.itemsize
    return np.frombuffer(b"".join(mark[:size] for mark in column.drop_null().to_pylist()), MARK_DTYPE)


def read_misfits(column: pa.Array) -> dict[int, str]:
    """Return the rows that do not fit their source any more, with the reason."""
    size = MARK_DTYPE.itemsize
    return {
        row: mark[size:].decode()
        for row, mark in enumerate(column.to_pylist())
        if mark is not None and len(mark) > size
    }


U64 = npt.NDArray[np.uint64]

ROOT = "_ft_root"
"""Column of a page's rows: the root, uint64."""

PAGE_COLUMNS = "head binary, data binary, source binary, part int"
"""The columns of a page as Spark sees them (DDL). Where rows are spread over partitions, a page has further
rows, without a head: the data for partition ``part``."""

PAGE_SCHEMA = pa.schema(
    [("head", pa.binary()), ("data", pa.binary()), ("source", pa.binary()), ("part", pa.int32())]
)

PAGE_BYTES = 512 << 10
"""A page is closed when its data have this many bytes: large enough that a page's fixed cost does not
count, small enough that the JVM's garbage collector does not take it for a humongous object (1 MiB and
more with a heap of 4 GiB), each of which it keeps in regions of its own."""


@dataclass(frozen=True, slots=True)
class PageHead:
    """A page's summary for the driver. Roots and ids are uint64, little-endian.

    ``delivered`` is (lowest offset, highest offset + 1) of the rows that came from the vertex, ``delivered_roots``
    their roots, and beside them their origins and tries (`ftlayer.records.ids`). ``carried`` are the carriers of
    resumed rows, end to end. ``seen_roots`` and ``sent_roots``, filled where a transform is watched, are the distinct
    roots of the rows in and out. ``emitted_ids``, filled for a vertex that keeps every id, are the ids of the rows
    handed on, ``emitted_parents`` the root of each. ``place`` is the task that made the page, in words.
    """

    rows_in: int
    rows_out: int
    failures: tuple[FailedRow, ...]
    tracebacks: tuple[str, ...]
    failed_rows: bytes | None
    delivered: tuple[int, int] | None
    delivered_roots: bytes
    carried: bytes
    seen_roots: bytes
    sent_roots: bytes
    emitted_roots: bytes
    emitted_values: bytes
    emitted_parents: bytes = b""
    emitted_ids: bytes = b""
    delivered_origins: bytes = b""
    delivered_tries: bytes = b""
    place: str = ""

    def to_bytes(self) -> bytes:
        values = [getattr(self, name) for name in _HEAD_FIELDS]
        values[2] = [[getattr(row, name) for name in _FAILED_FIELDS] for row in self.failures]
        packed: bytes = msgpack.packb(values)
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> PageHead:
        try:
            values = msgpack.unpackb(data, use_list=False)
            failures = tuple(FailedRow(*row) for row in values[2])
            named = dict(zip(_HEAD_FIELDS, values, strict=True))
            return cls(**{**named, "failures": failures})
        except (ValueError, TypeError, LookupError, msgpack.exceptions.UnpackException) as error:
            raise CodecError(f"not the head of a page: {described(error)}") from error


_HEAD_FIELDS = tuple(field.name for field in fields(PageHead))
_FAILED_FIELDS = tuple(field.name for field in fields(FailedRow))


def rows_to_ipc(batches: Iterable[pa.RecordBatch]) -> pa.Buffer | None:
    """Return the batches (one schema) as one IPC stream, None where there is no row."""
    kept = [batch for batch in batches if batch.num_rows]
    if not kept:
        return None
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, kept[0].schema) as writer:
        for batch in kept:
            writer.write_batch(batch)
    return sink.getvalue()


def ipc_to_rows(data: bytes | pa.Buffer | None) -> Iterator[pa.RecordBatch]:
    """Read the batches of `rows_to_ipc` without a copy; `CodecError` for anything else."""
    if data is None:
        return
    try:
        yield from pa.ipc.open_stream(data)
    except (pa.ArrowException, OSError) as error:
        raise CodecError(f"the rows of a page cannot be read: {error}") from error


def with_roots(batch: pa.RecordBatch, roots: U64) -> pa.RecordBatch:
    return batch.append_column(ROOT, pa.array(roots))


def roots_of(batch: pa.RecordBatch) -> U64:
    roots: U64 = batch.column(ROOT).to_numpy(zero_copy_only=True)
    return roots


def keep_rows(batch: pa.RecordBatch, dropped: U64) -> pa.RecordBatch:
    if not len(dropped):
        return batch
    keep = ~np.isin(roots_of(batch), dropped)
    return batch if keep.all() else batch.filter(pa.array(keep))


def to_roots(data: bytes) -> U64:
    return np.frombuffer(data, np.uint64)


def page_row(head: PageHead, data: pa.Buffer | None, source: pa.Buffer | None) -> pa.RecordBatch:
    """Return one page as the one-row batch that Spark stores; copies nothing."""
    columns = [binary_value(value) for value in (pa.py_buffer(head.to_bytes()), data, source)]
    return pa.RecordBatch.from_arrays([*columns, pa.array([0], pa.int32())], schema=PAGE_SCHEMA)


def part_row(part: int, data: pa.Buffer | None) -> pa.RecordBatch:
    """Return the data that a page has for one partition, as a row of its own."""
    nothing = binary_value(None)
    columns = [nothing, binary_value(data), nothing, pa.array([part], pa.int32())]
    return pa.RecordBatch.from_arrays(columns, schema=PAGE_SCHEMA)


def binary_value(data: pa.Buffer | None) -> pa.Array:
    """Return a binary array of one value (null for None) without copying it."""
    if data is None:
        return pa.nulls(1, pa.binary())
    offsets = pa.py_buffer(np.array([0, data.size], np.int32))
    return pa.Array.from_buffers(pa.binary(), 1, [None, offsets, data])


MapArrow = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

NAME = "name"
NAMED_PAGE_COLUMNS = f"{PAGE_COLUMNS}, {NAME} binary"
"""The columns of a page with its name (DDL)."""

NAME_BYTES = 16


@dataclass(frozen=True)
class WithNames:
    """Gives the pages of a stage's task their names: only the copy that the driver has counted is ever read.

    Spark may hold two copies of one block, left by two attempts of a task that both came to their end (speculation,
    or an executor that was given up and came back), and reads whichever is nearer. Where functions answer differently
    each time, the copies differ, and rows read from the one would be judged by the head of the other.
    """

    task: MapArrow

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the task; each page gets the column `NAME`, and its parts (rows without a head) the same one."""
        name = b""
        for row in self.task(batches):
            if row.column("head").null_count == 0:
                name = os.urandom(NAME_BYTES)
            yield row.append_column(NAME, pa.array([name], pa.binary()))


def counted_pages(
    batches: Iterator[pa.RecordBatch], column: str, names: frozenset[bytes]
) -> Iterator[pa.Scalar[Any]]:
    """Yield ``column`` of each page; `RecomputedResultError` for a page that is none of ``names``."""
    for batch in batches:
        for name, value in zip(batch.column(NAME).to_pylist(), batch.column(column), strict=True):
            if name not in names:
                raise RecomputedResultError(
                    "a page of this batch is not the one that was counted: Spark has another copy of it, from "
                    "another attempt of its task; the batch has to run again"
                )
            yield value
