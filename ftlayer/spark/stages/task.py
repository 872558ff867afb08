"""A stage in a Python worker: rows in, pages out. Runs inside ``mapInArrow``.

Everything a task needs is in its (picklable) `StageTask`; it talks to no other process. So what the driver reads
from the pages is exactly what Spark's winning task attempts produced.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ftlayer.errors import InvalidTopologyError, QueryError
from ftlayer.functions.chains.record_segment import CHUNK_ROWS
from ftlayer.functions.chains.segments import Chain, ChainResult, rows_at_once
from ftlayer.functions.current import UNTRACKED, Tries
from ftlayer.functions.failures import this_process
from ftlayer.functions.steps import FunctionStep
from ftlayer.records.failures import FailedRow, RowFailure
from ftlayer.records.ids import child_ids, operator_key, xor_fold_by_root
from ftlayer.records.keyhash import key_column, partition_of, spark_hash
from ftlayer.spark.stages.known import NOTHING_TRIED, TriedRoots, isolated, known_of_source
from ftlayer.spark.stages.pages import (
    PAGE_BYTES,
    U64,
    PageHead,
    check_carriers,
    page_row,
    part_row,
    read_carriers,
    read_marks,
    read_misfits,
    rows_to_ipc,
    with_roots,
)
from ftlayer.vertex.persister import FTPersister

# The recorded steps of a wrapped query, and the stages they run as.
#
# A *stage* is one pass over the rows in Spark's Python workers: consecutive functions chained into one
# ``mapInArrow``. Before it stand the steps that Spark itself runs on DataFrames (repartition, transform).


# Key partitioning ahead of Spark's shuffle: a stage sorts its rows into pages by their target partition.
#
# Spark then moves whole pages (`DataFrame.repartitionById`) where it would move rows one by one. The target is
# what Spark's own ``repartition(partitions, *columns)`` gives: pmod of its hash over the columns.


def numbers_of_partitions(count: int) -> list[int]:
    """Return a number for each partition that Spark's ``repartition(count, number)`` sends there."""
    found: dict[int, int] = {}
    first = 0
    while len(found) < count:
        numbers = np.arange(first, first + 8 * count, dtype=np.int32)
        targets = partition_of(spark_hash([pa.array(numbers)]), count)
        found.update(zip(targets.tolist(), numbers.tolist(), strict=True))
        first += 8 * count
    return [found[partition] for partition in range(count)]


@dataclass(frozen=True)
class Spread:
    columns: tuple[str, ...]
    partitions: int

    def split(self, batches: Sequence[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the rows of ``batches`` (one schema) by partition, in their order; empty ones are left out."""
        if not batches:
            return
        rows = pa.concat_batches(batches)
        targets = partition_of(spark_hash([key_column(rows, name) for name in self.columns]), self.partitions)
        order = np.argsort(targets, kind="stable")
        rows = rows.take(pa.array(order))
        edges = np.searchsorted(targets[order], np.arange(self.partitions + 1))
        for partition in np.flatnonzero(np.diff(edges)):
            start, stop = int(edges[partition]), int(edges[partition + 1])
            yield int(partition), rows.slice(start, stop - start)


@dataclass(frozen=True)
class Repartition:
    """Spark's own repartition, by number, by key, or both.

    ``hashable``: our hash over the columns is Spark's, so that a stage can sort rows by their target.
    """

    partitions: int | None
    columns: tuple[str, ...]
    hashable: bool = False


@dataclass(frozen=True)
class Transform:
    """Spark's own operators on a DataFrame that has the column ``_ft`` beside the user's and must keep it."""

    uid: str
    function: Callable[[Any], Any]
    drops: bool


FrameStep = Repartition | Transform
Step = FunctionStep | FrameStep


@dataclass(frozen=True)
class Stage:
    """Frame steps that Spark runs, then functions chained into one pass."""

    frame_steps: tuple[FrameStep, ...]
    functions: tuple[FunctionStep, ...]

    @property
    def transforms(self) -> tuple[Transform, ...]:
        return tuple(step for step in self.frame_steps if isinstance(step, Transform))


@dataclass(frozen=True)
class StagePlan:
    """The stages of a query, and the repartitions left to do on the way to the sink."""

    stages: tuple[Stage, ...]
    before_sink: tuple[Repartition, ...]

    def key_after(self, number: int) -> Repartition | None:
        """Return the repartition by key that comes right behind a stage, None if something else does."""
        behind: Sequence[FrameStep] = self.before_sink
        if number + 1 < len(self.stages):
            behind = self.stages[number + 1].frame_steps
        first = behind[0] if behind else None
        return first if isinstance(first, Repartition) and first.hashable else None

    @property
    def keeps_source(self) -> bool:
        return len(self.stages) > 1


def plan_stages(steps: Sequence[Step]) -> StagePlan:
    """Cut ``steps`` into stages.

    The first stage is always there, with no functions if need be: it gives the rows their roots. A
    transform at the end gets a stage behind it, so that its result is materialized and counted.
    """
    stages: list[Stage] = []
    frame_steps: list[FrameStep] = []
    functions: list[FunctionStep] = []
    for step in steps:
        if isinstance(step, FrameStep):
            # Rows that get lost are put down to a stage's transforms together: they have to allow the same.
            mixed = isinstance(step, Transform) and any(
                isinstance(other, Transform) and other.drops != step.drops for other in frame_steps
            )
            if functions or not stages or mixed:
                stages.append(Stage(tuple(frame_steps), tuple(functions)))
                frame_steps, functions = [], []
            frame_steps.append(step)
        else:
            functions.append(step)
    if functions or not stages or any(isinstance(step, Transform) for step in frame_steps):
        stages.append(Stage(tuple(frame_steps), tuple(functions)))
        frame_steps = []
    rest = tuple(step for step in frame_steps if isinstance(step, Repartition))
    return StagePlan(tuple(stages), rest)


def check_unique(steps: Sequence[Step], uid: str) -> None:
    """Raise `InvalidTopologyError` where ``uid`` is taken: ids are derived from it."""
    if any(getattr(step, "uid", None) == uid for step in steps):
        raise InvalidTopologyError(
            f"two operators of this query are named {uid!r}; names must differ, since record ids are derived "
            "from them: pass name=… to one of them"
        )


@cache
def leave_out_imports() -> None:
    """Keep all that a worker has by now out of garbage collections, once in its life.

    Spark collects garbage after each task, before the worker takes the next one. With ftlayer, pandas and pyarrow
    imported that is some 65 ms of CPU time, and a batch of a wrapped query has four tasks or more. What a worker makes
    later is collected as before.
    """
    gc.collect()
    gc.freeze()


I64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

FT = "_ft"
"""The column that carries a row's root through Spark: struct<root: bigint>. Before the first stage it is
null for a row of the source, and a mark for one that the vertex delivered (`ftlayer.spark.stages.pages`)."""

EMITTED_ID = "_ft_id"
"""Column of an emitting stage's rows: the row's record id, uint64."""


@dataclass(frozen=True)
class Skip:
    """Rows that a sealed batch, run again, must leave out: by place in their partition, or by root."""

    ordinals: dict[int, frozenset[int]] = field(default_factory=dict)
    roots: frozenset[int] = frozenset()


@dataclass(frozen=True)
class RootGiver:
    """Where the roots of a first stage's rows come from: the row's name, or the vertex that delivered it."""

    query: str
    run: str
    source: str
    batch: int
    shard: int
    shards: int

    def roots(self, partition: int, first_ordinal: int, n: int) -> U64:
        persister = FTPersister(self.query, self.run, self.shard, self.shards)
        return persister.roots(self.source, self.batch, partition, first_ordinal, n)


@dataclass(frozen=True)
class StageTask:
    """One stage's work on one partition.

    Attributes:
        giver: None behind the first stage, where `FT` names every row's root.
        again: how often a failing record of a batch that is run again is tried in place before it counts as failed.
        emits: the operator whose rows are handed on with ids of their own, or "".
        carrier: the column that brought the ids of rows resumed from another query: a row's root within this query is
            then its record id.
        watch: note all roots seen and sent, to find what a transform lost.
        exact: send single ids beside their folded values.
        spread: sorts the rows into pages by the partition they go to next.
        tried: what is known of delivered rows behind the first stage.
    """

    functions: tuple[FunctionStep, ...]
    giver: RootGiver | None
    keep_source: bool = False
    isolate: bool = False
    again: int = 0
    skip: Skip = field(default_factory=Skip)
    emits: str = ""
    carrier: str = ""
    watch: bool = False
    exact: bool = False
    spread: Spread | None = None
    tried: TriedRoots = NOTHING_TRIED

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        if context is None:
            raise QueryError("a stage runs inside a Spark task; there is none here")
        leave_out_imports()
        yield from self.pages(batches, context.partitionId(), task_place())

    def pages(
        self, batches: Iterator[pa.RecordBatch], partition: int, place: str = ""
    ) -> Iterator[pa.RecordBatch]:
        """Turn the rows of ``partition`` into pages (`__call__` without Spark); ``place`` says in words where."""
        page = _Page(self, partition, place, 0)
        ordinal = 0
        for batch in batches:
            # What may end its process is run again in parts of this many rows.
            at_once = CHUNK_ROWS if self.isolate else rows_at_once(self.functions, batch)
            for start in range(0, batch.num_rows, at_once):
                rows = batch.slice(start, at_once)
                page.add(rows, ordinal)
                ordinal += rows.num_rows
                if page.bytes >= PAGE_BYTES:
                    yield from page.close()
                    page = _Page(self, partition, place, page.next_out)
        if not page.empty:
            yield from page.close()

    def run(self, rows: pa.RecordBatch, known: Tries = UNTRACKED) -> ChainResult:
        """Run the functions; again in place, or in a child process, where the task says so."""
        result = self._run_once(rows, known)
        for _ in range(self.again):
            places = np.unique([failure.row for failure in result.failures if _may_pass_now(failure)])
            if not len(places):
                break
            retry = self._run_once(rows.take(pa.array(places)), known.take(places))
            # The outcome of trying these rows again takes the place of their first one.
            batches = result.batches + [(rows, places[parents]) for rows, parents in retry.batches]
            failures = [failure for failure in result.failures if not _may_pass_now(failure)]
            failures += [replace(failure, row=int(places[failure.row])) for failure in retry.failures]
            result = ChainResult(batches, failures)
        return result

    def _run_once(self, rows: pa.RecordBatch, known: Tries) -> ChainResult:
        if not self.isolate or not self.functions:
            return self._run(rows, known)
        result, chain = isolated(rows, known, self._run), self.functions[0].uid
        # A process that has ended does not say how far in the chain it was.
        failures = [replace(each, operator=each.operator or chain) for each in result.failures]
        return ChainResult(result.batches, failures)

    def _run(self, rows: pa.RecordBatch, known: Tries) -> ChainResult:
        if not self.functions:
            return ChainResult([(rows, np.arange(rows.num_rows))], [])
        return self._chain.run(rows, known)

    @cached_property
    def _chain(self) -> Chain:
        return Chain(self.functions)


def task_place() -> str:
    """Return which of Spark's tasks this is, and where, in words; "" outside of any."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        return ""
    return this_process(
        f"Spark stage {context.stageId()}, partition {context.partitionId()}, attempt {context.attemptNumber()}"
    )


def _may_pass_now(failure: RowFailure) -> bool:
    """Whether trying again at once makes sense: not for what is dead, nor for what asked for a pause."""
    return not failure.fatal and failure.after_ms is None


class _Page:
    def __init__(self, task: StageTask, partition: int, place: str, next_out: int) -> None:
        """``next_out`` is the number of rows that earlier pages of the partition put out."""
        self._task = task
        self._partition = partition
        self._place = place
        self.next_out = next_out
        self._rows_in = 0
        self._out: list[pa.RecordBatch] = []
        self._source: list[pa.RecordBatch] = []
        self._roots_out: list[U64] = []
        self._failures: list[FailedRow] = []
        self._tracebacks: dict[str, int] = {}
        self._failed_rows: list[pa.RecordBatch] = []
        self._failed_count = 0
        self._offsets: list[I64] = []
        self._delivered: list[np.ndarray[tuple[int], np.dtype[np.void]]] = []
        self._carried: list[bytes] = []
        self._seen: list[U64] = []
        self._emitted: list[tuple[U64, U64]] = []
        self.bytes = 0

    @property
    def empty(self) -> bool:
        return self._rows_in == 0

    def add(self, chunk: pa.RecordBatch, ordinal: int) -> None:
        """Run the rows of ``chunk``, whose first is the partition's ``ordinal``-th."""
        rows, roots, delivered, known, at = self._named(chunk, ordinal)
        # Rows that are left out count: their carriers and offsets are in this page.
        self._rows_in += chunk.num_rows
        self.bytes += roots.nbytes
        if not rows.num_rows:
            return
        if self._task.watch:
            self._seen.append(roots)
        result = self._task.run(rows, known)
        for out, parents in result.batches:
            if out.num_rows:
                self._keep(out, roots[parents])
        self._fail(result.failures, rows, roots, delivered, ordinal, at)
        if self._task.keep_source:
            source = with_roots(rows, roots)
            self._source.append(source)
            self.bytes += source.nbytes

    def _named(
        self, chunk: pa.RecordBatch, ordinal: int
    ) -> tuple[pa.RecordBatch, U64, Flags, Tries, I64 | None]:
        """Split `FT` off: the user's columns, a root for each row, whether the vertex delivered it, its tries.

        The last is where each row was in ``chunk``, None if none was left out.
        """
        n = chunk.num_rows
        names = [name for name in chunk.schema.names if name != FT]
        ft = chunk.column(FT)
        delivered = np.zeros(n, bool)
        if self._task.giver is None:
            roots = _known_roots(ft)
            return chunk.select(names), roots, delivered, self._task.tried.known(roots), None
        if self._task.carrier:
            carried = check_carriers(chunk.column(self._task.carrier), self._task.carrier)
            self._carried.append(carried)
            given: U64 = read_carriers(carried)["id"].astype(np.uint64)
        else:
            given = self._task.giver.roots(self._partition, ordinal, n)
        roots, known = given, UNTRACKED if self._task.carrier else Tries(given, None)
        if ft.null_count < n:
            delivered = ft.is_valid().to_numpy(zero_copy_only=False)
            marks = read_marks(ft)
            self._offsets += [marks["start"], marks["end"]]
            self._delivered.append(marks)
            roots = given.copy()
            roots[delivered] = marks["root"]
            known = known_of_source(roots, delivered, marks)
        rows = chunk.select(names)
        out = self._left_out(ordinal, roots, delivered)
        if delivered.any():
            self._fail_misfits(read_misfits(ft), roots, out)
        if out.any():
            keep = ~out
            at = np.flatnonzero(keep)
            return rows.filter(pa.array(keep)), roots[keep], delivered[keep], known.take(at), at
        return rows, roots, delivered, known, None

    def _left_out(self, ordinal: int, roots: U64, delivered: Flags) -> Flags:
        n = len(roots)
        skip = self._task.skip
        places = skip.ordinals.get(self._partition, frozenset())
        if not places and not skip.roots:
            return np.zeros(n, bool)
        by_root = delivered | bool(self._task.carrier)
        out = [ordinal + i in places or (by_root[i] and int(roots[i]) in skip.roots) for i in range(n)]
        return np.array(out, bool)

    def _fail_misfits(self, misfits: dict[int, str], roots: U64, out: Flags) -> None:
        """Fail rows that their source cannot hold any more, and leave them out: no function could take them."""
        for row, reason in misfits.items():
            if not out[row]:
                assert self._task.giver is not None
                index = self._tracebacks.setdefault("", len(self._tracebacks))
                operator = self._task.giver.source
                self._failures.append(FailedRow(int(roots[row]), -1, operator, reason, index, fatal=True))
                out[row] = True

    def _keep(self, out: pa.RecordBatch, roots: U64) -> None:
        self._roots_out.append(roots)
        out = with_roots(out, roots)
        if self._task.emits:
            # A root may have many rows here; the place in the partition makes their ids distinct.
            places = np.arange(self.next_out, self.next_out + len(roots), dtype=np.uint64)
            ids = child_ids(
                roots,
                operator=operator_key(self._task.emits),
                edge=0,
                ordinals=places,
                channel=self._partition,
            )
            out = out.append_column(EMITTED_ID, pa.array(ids))
            self._emitted.append((roots, ids))
        self.next_out += len(roots)
        self._out.append(out)
        self.bytes += out.nbytes

    def _fail(
        self,
        failures: list[RowFailure],
        rows: pa.RecordBatch,
        roots: U64,
        delivered: Flags,
        ordinal: int,
        at: I64 | None,
    ) -> None:
        """Note the first failure of each row; rows the vertex does not have go along."""
        first = {failure.row: failure for failure in reversed(failures)}
        taken: list[int] = []
        for row, failure in sorted(first.items()):
            place, read_as = -1, ""
            if self._task.giver is not None and not delivered[row] and not self._task.carrier:
                place = self._failed_count + len(taken)
                taken.append(row)
                number = ordinal + (row if at is None else int(at[row]))
                read_as = f"row {number} of partition {self._partition} of batch {self._task.giver.batch}"
            index = self._tracebacks.setdefault(failure.traceback, len(self._tracebacks))
            self._failures.append(FailedRow.of(int(roots[row]), place, failure, index, read_as))
        if taken:
            self._failed_rows.append(rows.take(pa.array(taken)))
            self._failed_count += len(taken)
            self.bytes += self._failed_rows[-1].nbytes

    def close(self) -> Iterator[pa.RecordBatch]:
        """Return the page as batches of one row: the page with its head, then its parts if rows are spread."""
        roots_out = _join(self._roots_out)
        watch, exact = self._task.watch, self._task.exact
        delivered = None
        if self._offsets:
            offsets = np.concatenate(self._offsets)
            delivered = (int(offsets.min()), int(offsets.max()))
        parents, ids = (_join([pair[side] for pair in self._emitted]) for side in (0, 1))
        roots, values = xor_fold_by_root(parents, ids)
        packed = rows_to_ipc(self._failed_rows)
        head = PageHead(
            rows_in=self._rows_in,
            rows_out=len(roots_out),
            failures=tuple(self._failures),
            tracebacks=tuple(self._tracebacks),
            failed_rows=None if packed is None else packed.to_pybytes(),
            delivered=delivered,
            delivered_roots=_column(self._delivered, "root"),
            delivered_origins=_column(self._delivered, "origin"),
            delivered_tries=_column(self._delivered, "tries"),
            carried=b"".join(self._carried),
            seen_roots=np.unique(_join(self._seen)).tobytes() if watch else b"",
            sent_roots=np.unique(roots_out).tobytes() if watch else b"",
            emitted_roots=roots.tobytes(),
            emitted_values=values.tobytes(),
            emitted_parents=parents.tobytes() if exact else b"",
            emitted_ids=ids.tobytes() if exact else b"",
            place=self._place,
        )
        spread = self._task.spread
        yield page_row(head, None if spread else rows_to_ipc(self._out), rows_to_ipc(self._source))
        if spread:
            for part, rows in spread.split(self._out):
                yield part_row(part, rows_to_ipc([rows]))


def _known_roots(ft: pa.Array) -> U64:
    """Return the root that each row behind the first stage has."""
    # A null struct may have anything in its fields.
    roots: U64 = ft.field("root").fill_null(0).to_numpy(zero_copy_only=False).view(np.uint64)
    if ft.null_count or not roots.all():
        raise QueryError(
            f"rows came out of a transform whose column {FT!r} is null, so it is unknown which record "
            "they derive from (an outer join or a union that makes rows of its own?); leave them out "
            "of the transform's result"
        )
    return roots


def _column(marks: list[np.ndarray[tuple[int], np.dtype[np.void]]], name: str) -> bytes:
    return _join([part[name].astype(np.uint64) for part in marks]).tobytes()


def _join(parts: list[U64]) -> U64:
    joined: U64 = np.concatenate(parts) if parts else np.zeros(0, np.uint64)
    return joined
