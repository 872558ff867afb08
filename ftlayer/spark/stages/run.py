"""Run the stages of one micro-batch on Spark and read back what they left: pages and their heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ftlayer.errors import InvalidTopologyError
from ftlayer.functions.chains.segments import ROW_TAG
from ftlayer.spark.stages.known import TriedRoots
from ftlayer.spark.stages.pages import (
    CARRIER_DTYPE,
    NAME,
    NAMED_PAGE_COLUMNS,
    PAGE_SCHEMA,
    ROOT,
    U64,
    MapArrow,
    PageHead,
    WithNames,
    binary_value,
    counted_pages,
    ipc_to_rows,
    keep_rows,
    make_carriers,
    read_carriers,
    roots_of,
    rows_to_ipc,
    to_roots,
)
from ftlayer.spark.stages.task import (
    EMITTED_ID,
    FT,
    FrameStep,
    Repartition,
    RootGiver,
    Skip,
    Spread,
    StagePlan,
    StageTask,
    Transform,
    numbers_of_partitions,
)
from ftlayer.vertex.calls import I32, Failure, SealedRows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


ROOT_TYPE = pa.struct([("root", pa.int64())])
NO_ROOTS: U64 = np.zeros(0, np.uint64)
NO_CARRIERS = np.zeros(0, CARRIER_DTYPE)


@dataclass
class Verdict:
    """The sum of the heads of a batch's pages.

    Attributes:
        rows_in: source rows of the batch, delivered ones included.
        rows_out: rows of the last stage, those of failed roots included.
        failures: one for each failed root, by root.
        delivered: the offsets [start, end) of the rows the vertex delivered, None if there were none.
        delivered_roots, delivered_origins, delivered_tries: their roots, origins and tries.
        without_rows: failed roots, sorted, of which the pages so far have no row.
        carriers: the carriers of rows resumed from another query (`CARRIER_DTYPE`).
        emitted_roots: roots with rows to hand on; may repeat.
        emitted_values: for each, the XOR of the ids of its rows in one page.
        emitted_parents, emitted_ids: the root and the id of each row to hand on, if the vertex keeps every id.
    """

    rows_in: int = 0
    rows_out: int = 0
    failures: dict[int, Failure] = field(default_factory=dict)
    failed_rows: dict[int, pa.RecordBatch] = field(default_factory=dict)
    delivered: tuple[int, int] | None = None
    delivered_roots: U64 = field(default_factory=lambda: NO_ROOTS)
    delivered_origins: U64 = field(default_factory=lambda: NO_ROOTS)
    delivered_tries: U64 = field(default_factory=lambda: NO_ROOTS)
    without_rows: U64 = field(default_factory=lambda: NO_ROOTS)
    carriers: np.ndarray[tuple[int], np.dtype[np.void]] = field(default_factory=lambda: NO_CARRIERS)
    emitted_roots: U64 = field(default_factory=lambda: NO_ROOTS)
    emitted_values: U64 = field(default_factory=lambda: NO_ROOTS)
    emitted_parents: U64 = field(default_factory=lambda: NO_ROOTS)
    emitted_ids: U64 = field(default_factory=lambda: NO_ROOTS)

    @property
    def tried(self) -> TriedRoots:
        """What later stages may be asked of the rows that the vertex delivered."""
        return TriedRoots.of(self.delivered_roots, self.delivered_origins, self.delivered_tries)

    @property
    def failed_roots(self) -> U64:
        return np.array(sorted(self.failures), np.uint64)

    @property
    def dropped_roots(self) -> U64:
        """The failed roots, sorted, that the last pages may have rows of: to be left out when these are read.

        None where rows fail in the first stage alone: comparing the roots of two million rows with 10,000 takes 0.3 s.
        """
        return np.setdiff1d(self.failed_roots, self.without_rows, assume_unique=True)

    def fail(self, failure: Failure) -> None:
        self.failures.setdefault(failure.root, failure)


def first_stage_verdict(heads: Sequence[PageHead]) -> Verdict:
    verdict = Verdict()
    for head in heads:
        verdict.rows_in += head.rows_in
        add_failures(verdict, head)
        if head.delivered is not None:
            start, end = head.delivered
            known = verdict.delivered or head.delivered
            verdict.delivered = (min(start, known[0]), max(end, known[1]))
    for name in ("delivered_roots", "delivered_origins", "delivered_tries"):
        setattr(verdict, name, _roots(heads, name))
    verdict.carriers = read_carriers(b"".join(head.carried for head in heads))
    return verdict


def add_failures(verdict: Verdict, head: PageHead) -> None:
    """Add a page's failures, with the source rows that came along."""
    rows = list(ipc_to_rows(head.failed_rows))
    whole = pa.concat_batches(rows) if rows else None
    for failed in head.failures:
        verdict.fail(failed.failure(head.tracebacks[failed.traceback], head.place))
        if failed.row >= 0 and whole is not None:
            verdict.failed_rows[failed.root] = whole.slice(failed.row, 1)


def add_last_stage(verdict: Verdict, heads: Sequence[PageHead]) -> None:
    """Add what goes out at the end: counts and the ids handed on."""
    verdict.rows_out += sum(head.rows_out for head in heads)
    for name in ("emitted_roots", "emitted_values", "emitted_parents", "emitted_ids"):
        setattr(verdict, name, _roots(heads, name))


def lost_roots(sent: Sequence[PageHead], seen: Sequence[PageHead]) -> U64:
    """Return the roots that one stage sent and the next never saw: lost in the transform between them."""
    return np.setdiff1d(_roots(sent, "sent_roots"), _roots(seen, "seen_roots"))


def sealed_rows(
    stream: str,
    rows: Sequence[tuple[int, pa.RecordBatch]],
    failures: dict[int, Failure],
    key_hashes: I32 | None,
) -> SealedRows:
    """Put single failed rows, each with its root, into the form that a seal takes."""
    payload = pa.concat_batches([row for _, row in rows])
    roots = np.array([root for root, _ in rows], np.uint64)
    return SealedRows(stream, payload, roots, tuple(failures[int(root)] for root in roots), key_hashes)


def _roots(heads: Sequence[PageHead], name: str) -> U64:
    return to_roots(b"".join(getattr(head, name) for head in heads))


@dataclass(frozen=True)
class RunOptions:
    """How a batch is run: which rows to leave out, alone in child processes or not, tries in place."""

    giver: RootGiver
    skip: Skip = field(default_factory=Skip)
    isolate: bool = False
    again: int = 0


@dataclass(frozen=True)
class QueryPlan:
    """The stages of a query with what they need to know of its source and sink.

    ``schemas`` are the user's columns after each stage (Spark's types); ``emits`` and ``carrier`` as in
    `StageTask`; ``key`` the columns whose hash is stored with a failed source row. ``rejects``: the sink may fail
    rows, so that all source rows are kept until it has taken them.
    """

    stages: StagePlan
    schemas: tuple[StructType, ...]
    key: tuple[str, ...] = ()
    emits: str = ""
    carrier: str = ""
    strict: bool = True
    exact: bool = False
    rejects: bool = False


class Pages:
    """The pages of one stage. Their lineage is cut: what is lost is missed, never recomputed."""

    def __init__(self, frame: DataFrame, spread: Spread | None = None) -> None:
        """``frame``, whose rows are pages, runs with `heads`; ``spread`` says how their rows were sorted."""
        self._frame = frame.localCheckpoint(eager=False)
        self._spread = spread
        self._names: frozenset[bytes] = frozenset()

    def heads(self) -> list[PageHead]:
        """Run the stage and fetch the head of each page; only the pages whose heads these are can be read.

        One job of Spark's does both, and cuts the lineage behind it. A page that is lost until then is made anew, under
        another name.
        """
        heads = self._frame.select(NAME, "head").where("head is not null")
        pages = heads.collect()
        self._names = frozenset(bytes(name) for name, _ in pages)
        return [PageHead.from_bytes(head) for _, head in pages]

    def rows(self, schema: StructType, dropped: U64, *, tracked: bool) -> DataFrame:
        """Return the pages' rows without those of ``dropped`` roots; ``tracked`` keeps the column ``_ft``."""
        if not tracked:
            return self._data().mapInArrow(_unpack(self._names, schema.names, dropped), schema)

        def ft(rows: pa.RecordBatch) -> pa.Array:
            return pa.StructArray.from_arrays([_signed_roots(rows)], fields=list(ROOT_TYPE))

        return self._with(schema, dropped, FT, "struct<root: bigint>", ft)

    def _data(self) -> DataFrame:
        if self._spread is None:
            return self._frame.select(NAME, "data")
        # Each further step would be one more analysis of the frame. Of a page's head, whose data are in other rows, its
        # name goes along.
        frame, count = self._frame.select(NAME, "data", "part"), self._spread.partitions
        if hasattr(frame, "repartitionById"):
            return frame.repartitionById(count, "part")
        from pyspark.sql import functions

        numbers = functions.lit(numbers_of_partitions(count))  # for Spark 4.0, which goes by a hash alone
        return frame.repartition(count, functions.get(numbers, "part"))

    def tagged_rows(self, schema: StructType, dropped: U64) -> DataFrame:
        """Return the pages' rows with the column `ROW_TAG`: a number that names the record of each."""
        return self._with(schema, dropped, ROW_TAG, "bigint", _signed_roots)

    def carried_rows(self, schema: StructType, dropped: U64, column: str, carry: Carry) -> DataFrame:
        def carriers(rows: pa.RecordBatch) -> pa.Array:
            ids = rows.column(EMITTED_ID).to_numpy(zero_copy_only=True)
            return make_carriers(carry.roots_for(roots_of(rows)), ids, carry.incarnation)

        return self._with(schema, dropped, column, "binary", carriers)

    def _with(
        self,
        schema: StructType,
        dropped: U64,
        column: str,
        ddl: str,
        values: Callable[[pa.RecordBatch], pa.Array],
    ) -> DataFrame:
        unpack = _unpack(self._names, schema.names, dropped, column, values)
        return self._data().mapInArrow(unpack, with_column(schema, column, ddl))

    def source_rows(self, roots: U64) -> Iterator[pa.RecordBatch]:
        """Fetch the source rows of ``roots`` (sorted), with the column `ROOT`."""
        pick = _pick_source(self._names, roots)
        picked = self._frame.select(NAME, "source").mapInArrow(pick, "source binary")
        for row in picked.toLocalIterator():
            yield from ipc_to_rows(row[0])

    def release(self) -> None:
        # Now rather than when Spark's cleaner comes by.
        self._frame._jdf.queryExecution().logical().rdd().unpersist(False)


@dataclass(frozen=True)
class Carry:
    """What turns a row's root and id into its carrier; ``resumed`` maps ids back to foreign roots."""

    incarnation: int
    resumed: np.ndarray[tuple[int], np.dtype[np.void]] = field(default_factory=lambda: NO_CARRIERS)

    def roots_for(self, roots: U64) -> U64:
        """Return the roots as the vertex knows them: for resumed rows, those their carriers named."""
        if not len(self.resumed):
            return roots
        order = np.argsort(self.resumed["id"])
        place = np.searchsorted(self.resumed["id"], roots, sorter=order)
        found: U64 = self.resumed["root"][order[place]].astype(np.uint64)
        return found


@dataclass
class StagesResult:
    """All pages of a batch and what they add up to."""

    pages: list[Pages]
    verdict: Verdict
    schema: StructType
    stages: StagePlan

    def good_rows(self) -> DataFrame:
        return self._repartitioned(
            self.pages[-1].rows(self.schema, self.verdict.dropped_roots, tracked=False)
        )

    def tagged_rows(self) -> DataFrame:
        return self._repartitioned(self.pages[-1].tagged_rows(self.schema, self.verdict.dropped_roots))

    def emitted_rows(self, column: str, incarnation: int) -> DataFrame:
        """Return the user's rows that go to the sink, with the carrier of each in ``column``."""
        carry = Carry(incarnation, self.verdict.carriers)
        rows = self.pages[-1].carried_rows(self.schema, self.verdict.dropped_roots, column, carry)
        return self._repartitioned(rows)

    def _repartitioned(self, rows: DataFrame) -> DataFrame:
        moved = self.stages.key_after(len(self.pages) - 1) is not None
        return apply_frame_steps(rows, self.stages.before_sink[moved:])


def run_stages(source: DataFrame, plan: QueryPlan, options: RunOptions) -> StagesResult:
    """Run all stages over ``source`` (the user's columns and `FT`) and reach the verdict.

    Raises what Spark raises when a task fails for a reason that cannot be pinned on a record.
    """
    pages: list[Pages] = []
    heads: list[list[PageHead]] = []
    verdict = Verdict()
    last = len(plan.stages.stages) - 1
    frame = source
    try:
        for number, stage in enumerate(plan.stages.stages):
            if number:
                rows = pages[-1].rows(plan.schemas[number - 1], verdict.dropped_roots, tracked=True)
                moved = plan.stages.key_after(number - 1) is not None
                frame = apply_frame_steps(rows, stage.frame_steps[moved:])
            spread = _spread(source, plan.stages.key_after(number))
            task = _task(plan, options, number, last, spread, verdict.tried)
            pages.append(Pages(map_in_arrow(frame, WithNames(task), NAMED_PAGE_COLUMNS), spread))
            heads.append(pages[-1].heads())
            if number == 0:
                verdict = first_stage_verdict(heads[0])
                if not plan.carrier:  # the only root that several rows may come with
                    verdict.without_rows = verdict.failed_roots
            else:
                # What failed before was left out on the way here; of what fails in this stage other rows may pass.
                verdict.without_rows = verdict.failed_roots
                for head in heads[-1]:
                    add_failures(verdict, head)
                _add_lost(verdict, plan, number, heads)
        add_last_stage(verdict, heads[-1])
    except BaseException:
        for done in pages:
            done.release()
        raise
    return StagesResult(pages, verdict, plan.schemas[-1], plan.stages)


def apply_frame_steps(frame: DataFrame, steps: tuple[FrameStep, ...]) -> DataFrame:
    """Apply repartitions and transforms as Spark does; a transform must keep the column `FT`."""
    for step in steps:
        frame = apply_frame_step(frame, step)
        if isinstance(step, Transform):
            check_keeps_ft(frame, step.uid)
    return frame


def map_in_arrow(frame: DataFrame, function: MapArrow, schema: StructType | str) -> DataFrame:
    """Return ``frame.mapInArrow(function, schema)``, for columns of any name: PySpark's reads these as expressions."""
    if not any(set(name) & set(".`") for name in frame.columns):
        return frame.mapInArrow(function, schema)
    plain = frame.toDF(*(f"c{place}" for place in range(len(frame.columns))))
    return plain.mapInArrow(_Renaming(function, frame.columns), schema)


@dataclass(frozen=True)
class _Renaming:
    function: MapArrow
    names: list[str]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return self.function(batch.rename_columns(self.names) for batch in batches)


def apply_frame_step(frame: DataFrame, step: FrameStep) -> DataFrame:
    if isinstance(step, Transform):
        result: DataFrame = step.function(frame)
        return result
    # Spark reads a name as an expression: dots part it, and backticks quote it.
    paths = [[name] if name in frame.columns else name.split(".") for name in step.columns]
    columns: list[Any] = [".".join(f"`{part.replace('`', '``')}`" for part in path) for path in paths]
    if step.partitions is None:
        return frame.repartition(*columns)
    return frame.repartition(step.partitions, *columns)


def check_keeps_ft(frame: Any, uid: str) -> None:
    """Raise `InvalidTopologyError` if ``frame``, made by transform ``uid``, has lost the column `FT`."""
    fields = {field.name: field.dataType.simpleString() for field in frame.schema.fields}
    if FT not in fields:
        raise InvalidTopologyError(
            f"transform {uid!r} does not keep the column {FT!r}, so its rows cannot be tracked: keep it in "
            'its select (select("*", …)), and do aggregations in the sink, where tracking has ended'
        )
    if fields[FT] != "struct<root:bigint>":
        raise InvalidTopologyError(
            f"transform {uid!r} changed the column {FT!r} to {fields[FT]}: pass it on as it is"
        )


def _add_lost(verdict: Verdict, plan: QueryPlan, number: int, heads: list[list[PageHead]]) -> None:
    """Under ``strict``, a root that went into a transform and did not come out has failed."""
    watched = [step for step in plan.stages.stages[number].transforms if not step.drops]
    if not (plan.strict and watched):
        return
    names = ", ".join(repr(step.uid) for step in watched)
    lost = lost_roots(heads[number - 1], heads[number])
    for root in np.setdiff1d(lost, verdict.failed_roots):
        verdict.fail(
            Failure(
                int(root),
                f"lost in transform {names}: no row of it came out; if dropping rows is meant, say "
                "transform(…, drops=True)",
                watched[0].uid,
            )
        )


def _spread(source: DataFrame, key: Repartition | None) -> Spread | None:
    if key is None:
        return None
    default = source.sparkSession.conf.get("spark.sql.shuffle.partitions")
    return Spread(key.columns, key.partitions or int(str(default)))


def _task(
    plan: QueryPlan, options: RunOptions, number: int, last: int, spread: Spread | None, tried: TriedRoots
) -> StageTask:
    stages = plan.stages.stages
    first = number == 0

    def watched(index: int) -> bool:
        inside = plan.strict and 0 < index < len(stages)
        return inside and any(not step.drops for step in stages[index].transforms)

    return StageTask(
        functions=stages[number].functions,
        giver=options.giver if first else None,
        keep_source=first
        and (plan.stages.keeps_source or bool(plan.emits) or plan.rejects)
        and not plan.carrier,
        isolate=options.isolate,
        again=options.again,
        skip=options.skip if first else Skip(),
        emits=plan.emits if number == last else "",
        carrier=plan.carrier if first else "",
        watch=watched(number) or watched(number + 1),
        exact=plan.exact,
        spread=spread,
        tried=tried,
    )


def _signed_roots(rows: pa.RecordBatch) -> pa.Array:
    return pa.array(roots_of(rows).view(np.int64))


def _unpack(
    pages: frozenset[bytes],
    names: list[str],
    dropped: U64,
    column: str = "",
    values: Callable[[pa.RecordBatch], pa.Array] | None = None,
) -> MapArrow:
    """Return what makes rows of pages, with one more ``column`` where there are ``values``."""

    def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for data in counted_pages(batches, "data", pages):
            for packed in ipc_to_rows(data.as_buffer()):
                rows = keep_rows(packed, dropped)
                kept = rows.select(names)
                yield kept if values is None else kept.append_column(column, values(rows))

    return unpack


def _pick_source(pages: frozenset[bytes], roots: U64) -> MapArrow:
    def pick(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for data in counted_pages(batches, "source", pages):
            stored = ipc_to_rows(data.as_buffer() if data.is_valid else None)
            packed = rows_to_ipc(rows.filter(pa.array(np.isin(roots_of(rows), roots))) for rows in stored)
            if packed is not None:
                schema = pa.schema([PAGE_SCHEMA.field("source")])
                yield pa.RecordBatch.from_arrays([binary_value(packed)], schema=schema)

    return pick


def with_column(schema: StructType, name: str, ddl: str) -> StructType:
    """Return a schema with one more column, of a type in Spark's DDL."""
    from pyspark.sql.types import StructField, StructType

    extra: Any = StructType.fromDDL(f"x {ddl}")
    return StructType([*schema.fields, StructField(name, extra["x"].dataType)])


def split_root(batch: pa.RecordBatch) -> tuple[U64, pa.RecordBatch]:
    """Return the roots of a page's rows, and the rows without them."""
    names = [name for name in batch.schema.names if name != ROOT]
    return roots_of(batch), batch.select(names)
