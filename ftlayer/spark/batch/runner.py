"""Runs a micro-batch on Spark for the protocol: stages, sink, and word to the queries it resumed from."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ftlayer.errors import CodecError, QueryError, StaleIncarnationError
from ftlayer.functions.data_sources import to_arrow_schema
from ftlayer.records.ids import xor_fold_by_root
from ftlayer.records.traced import KeySelector
from ftlayer.spark.batch.sinks import BatchSink, unknown_row
from ftlayer.spark.circuits import FailureTally
from ftlayer.spark.deliveries.source import check_none_gone, fit_rows, row_digests
from ftlayer.spark.protocol import BatchOutcome
from ftlayer.spark.stages.pages import U64
from ftlayer.spark.stages.run import (
    QueryPlan,
    RunOptions,
    StagesResult,
    Verdict,
    map_in_arrow,
    run_stages,
    sealed_rows,
    split_root,
)
from ftlayer.spark.stages.task import FT, RootGiver, Skip
from ftlayer.vertex import calls
from ftlayer.vertex.persister import IdBook

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


# Find, in a batch that is run again, the source rows that its seal took: as a multiset, by content.
#
# Partition numbers and the order of rows may differ between the runs (SPARK-28650), so a row is known by
# what it holds. Of rows that are equal, as many are left out as the seal took.


FOUND_COLUMNS = "partition int, ordinal bigint, digest binary"
FOUND_SCHEMA = pa.schema([("partition", pa.int32()), ("ordinal", pa.int64()), ("digest", pa.binary())])


def rows_to_skip(source: DataFrame, sealed: calls.BatchBegun, schema: pa.Schema) -> Skip:
    """Return what a run of ``source`` (whose rows must not change between readings) has to leave out.

    ``schema`` are the source's columns. If it has gained some since the seal, rows are known by those they had.

    Raises `QueryError` when a row that the seal took is not in the source any more, and `CodecError` when the sealed
    rows do not fit the source as it is now.
    """
    wanted: Counter[bytes] = Counter()
    known_by: set[tuple[str, ...]] = set()
    for rows in sealed.failed:
        names = tuple(name for name in schema.names if name in rows.payload.schema.names)
        known_by.add(names)
        wanted.update(row_digests(_as_read_now(rows.payload, schema, names)))
    roots = frozenset(sealed.redelivered) | frozenset(failure.root for failure in sealed.resumed)
    if not wanted:
        return Skip(roots=roots)
    # A row that is known by more columns has fewer that it could be: it chooses first.
    widest_first = tuple(sorted(known_by, key=len, reverse=True))
    found = map_in_arrow(source, _find(frozenset(wanted), widest_first), FOUND_COLUMNS).toLocalIterator()
    chosen = choose(((row[0], row[1], bytes(row[2])) for row in found), wanted)
    return Skip(chosen, roots)


def _as_read_now(payload: pa.RecordBatch, schema: pa.Schema, names: tuple[str, ...]) -> pa.RecordBatch:
    check_none_gone(payload.schema, schema)
    shape = pa.schema([schema.field(name) for name in names])
    fitted = fit_rows(payload, shape)
    if fitted.misfits:
        raise CodecError(
            "rows that failed in the first run of this batch cannot be found in it with the source's schema as it is "
            f"now, for example: {next(iter(fitted.misfits.values()))}. Read the source with its former schema until "
            "this batch is through"
        )
    return pa.RecordBatch.from_arrays(fitted.columns, names=list(names))


def choose(found: Iterable[tuple[int, int, bytes]], wanted: Counter[bytes]) -> dict[int, frozenset[int]]:
    """Choose among the rows found, (partition, ordinal, digest), as many of each digest as are wanted."""
    left = wanted.copy()
    chosen: dict[int, set[int]] = {}
    for partition, ordinal, digest in found:
        places = chosen.setdefault(partition, set())
        if left[digest] > 0 and ordinal not in places:
            left[digest] -= 1
            places.add(ordinal)
    missing = sum(left.values())
    if missing:
        raise QueryError(
            f"{missing} of {sum(wanted.values())} source rows that failed in the first run of this batch are "
            "not in it any more: the source did not give the same rows for the same offsets again. They are safe "
            "in the vertex, but the batch cannot go on; restore the source's data for these offsets"
        )
    return {partition: frozenset(ordinals) for partition, ordinals in chosen.items() if ordinals}


def _find(
    wanted: frozenset[bytes], known_by: tuple[tuple[str, ...], ...]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def find(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        partition = context.partitionId() if context is not None else 0
        ordinal = 0
        for batch in batches:
            delivered = batch.column(FT).is_valid().to_pylist()
            digests = zip(*(row_digests(batch.select(names)) for names in known_by), strict=True)
            hits = [
                {"partition": partition, "ordinal": ordinal + place, "digest": digest}
                for place, found in enumerate(digests)
                for digest in found
                if digest in wanted and not delivered[place]
            ]
            ordinal += batch.num_rows
            if hits:
                yield pa.RecordBatch.from_pylist(hits, schema=FOUND_SCHEMA)

    return find


TRIES_IN_PLACE = 3
"""Further tries, at once, for a record that passed when its batch was sealed and fails in the run again."""

WORKER_DIED = re.compile(r"Python worker exited unexpectedly|^SystemExit\b", re.MULTILINE)
"""In Spark's text of a failed task: its Python worker died, or a function called sys.exit."""


@dataclass(frozen=True)
class SourceOfQuery:
    """The wrapped source of a query and the vertex's stream for what it replays or ingests."""

    name: str
    stream: str


@dataclass(frozen=True)
class SparkRunner:
    frame: DataFrame
    plan: QueryPlan
    sink: BatchSink
    source: SourceOfQuery
    opened: calls.QueryOpened
    incarnation: Callable[[], int]
    query: str
    run_id: str
    call_once: Callable[[calls.Xor | calls.Fail, str], Any]

    def run(self, batch: int, sealed: calls.BatchBegun | None) -> StagesResult:
        """Run the stages; alone in child processes if a record kills its worker."""
        giver = RootGiver(
            self.query, self.run_id, self.source.name, batch, self.opened.shard, self.opened.shards
        )
        frame = self.frame
        skip = Skip()
        if sealed is not None and (sealed.failed or sealed.redelivered or sealed.resumed):
            # Read once: the places of the rows to leave out hold for this reading only.
            frame = frame.localCheckpoint(eager=True)
            schema = to_arrow_schema(frame.schema)
            skip = rows_to_skip(frame, sealed, schema.remove(schema.get_field_index(FT)))
        again = TRIES_IN_PLACE if sealed is not None else 0
        try:
            return run_stages(frame, self.plan, RunOptions(giver, skip, again=again))
        except Exception as error:
            if not WORKER_DIED.search(str(error)):
                raise
            return run_stages(frame, self.plan, RunOptions(giver, skip, isolate=True, again=again))

    def tally(self, result: StagesResult) -> FailureTally:
        failures = result.verdict.failures.values()
        return FailureTally(result.verdict.rows_in, Counter(f.operator for f in failures if not f.fatal))

    def outcome(self, result: StagesResult, sealed: calls.BatchBegun | None) -> BatchOutcome:
        verdict = result.verdict
        delivered = {self.source.stream: verdict.delivered} if verdict.delivered is not None else {}
        known = set(verdict.delivered_roots.tolist())
        return replace(
            self._failed(result, verdict.failures, sealed),
            delivered=delivered,
            emitted=() if self.plan.carrier else tuple(self._emitted_rows(result, known)),
            rows_in=verdict.rows_in,
            rows=verdict.rows_out,
        )

    def write(self, batch: int, result: StagesResult) -> tuple[calls.Failure, ...]:
        return self.sink.write(batch, result, self.incarnation())

    def reject(
        self, result: StagesResult, rejected: tuple[calls.Failure, ...], sealed: calls.BatchBegun | None
    ) -> BatchOutcome:
        """Let records fail, with all their rows: the sink gets the others when it is called again."""
        verdict = result.verdict
        for failure in rejected:
            if failure.root in verdict.failures:
                raise unknown_row(failure.operator, failure.root)
        failures = {failure.root: failure for failure in rejected}
        outcome = self._failed(result, failures, sealed)
        if outcome.failures < len(failures):
            given = {int(root) for rows in outcome.failed for root in rows.roots}
            given.update(failure.root for failure in (*outcome.redelivered, *outcome.resumed))
            unknown = next(failure for failure in rejected if failure.root not in given)
            raise unknown_row(unknown.operator, unknown.root)
        for failure in rejected:
            verdict.fail(failure)
        return replace(outcome, report=self._report(verdict, sealed))

    def _failed(
        self, result: StagesResult, failures: dict[int, calls.Failure], sealed: calls.BatchBegun | None
    ) -> BatchOutcome:
        """Return ``failures`` in the form of a seal; records that are not in the batch are left out."""
        verdict = result.verdict
        known = set(verdict.delivered_roots.tolist())
        redelivered = tuple(f for root, f in failures.items() if root in known)
        others = {root: f for root, f in failures.items() if root not in known}
        carried = set(verdict.carriers["id"].tolist()) if self.plan.carrier else set()
        return BatchOutcome(
            delivered={},
            failed=() if self.plan.carrier else tuple(self._failed_rows(result, others)),
            redelivered=redelivered,
            resumed=tuple(failure for root, failure in others.items() if root in carried),
            emitted=(),
            report=self._report(verdict, sealed),
            rows_in=0,
            rows=0,
        )

    def report(self, batch: int, report: calls.Report) -> None:
        """Acknowledge the resumed records that are done and fail the others.

        Events of an incarnation that is gone are refused and need not be heard: its roots are replayed. They
        are named by the batch: after a crash they are reported again, and an id XORed twice would undo itself.
        """
        events: tuple[calls.Xor | calls.Fail, ...] = (*report.failed, *report.done)
        for event in events:
            name = f"{self.query}/{batch}/{type(event).__name__}/{event.incarnation}"
            try:
                self.call_once(event, name)
            except StaleIncarnationError:
                continue

    def release(self, result: StagesResult) -> None:
        for pages in result.pages:
            pages.release()

    def _report(self, verdict: Verdict, sealed: calls.BatchBegun | None) -> calls.Report:
        """Collect what is to be told of the records that were resumed; a failure in an earlier run stands."""
        before = sealed.resumed if sealed is not None else ()
        failures = {**verdict.failures, **{failure.root: failure for failure in before}}
        exact = self.plan.emits or "-" if self.plan.exact else ""
        events = list(resumed_events(verdict, failures, exact))
        return calls.Report(
            tuple(event for event in events if isinstance(event, calls.Xor)),
            tuple(event for event in events if isinstance(event, calls.Fail)),
        )

    def _failed_rows(
        self, result: StagesResult, failures: dict[int, calls.Failure]
    ) -> Iterable[calls.SealedRows]:
        if not failures:
            return
        at_hand = result.verdict.failed_rows
        rows = [(root, at_hand[root]) for root in failures if root in at_hand]
        missing = np.array(sorted(root for root in failures if root not in at_hand), np.uint64)
        if len(missing):
            for batch in result.pages[0].source_rows(missing):
                roots, source = split_root(batch)
                rows += [(int(root), source.slice(place, 1)) for place, root in enumerate(roots)]
        if not rows:
            return
        packed = sealed_rows(self.source.stream, rows, failures, None)
        key = self.plan.key
        yield replace(packed, key_hashes=KeySelector(key).hash(packed.payload) if key else None)

    def _emitted_rows(self, result: StagesResult, known: set[int]) -> Iterable[calls.EmittedRows]:
        verdict = result.verdict
        good = ~np.isin(verdict.emitted_roots, verdict.failed_roots)
        roots, values = xor_fold_by_root(verdict.emitted_roots[good], verdict.emitted_values[good])
        if not len(roots):
            return
        order = np.argsort(roots)
        roots, values = roots[order], values[order]
        delivered = np.isin(roots, np.array(sorted(known), np.uint64))
        if delivered.any():
            ids = self._emitted_ids(verdict, roots[delivered])
            yield calls.EmittedRows(self.source.stream, None, roots[delivered], values[delivered], ids)
        roots, values = roots[~delivered], values[~delivered]
        if not len(roots):
            return
        batches = [split_root(batch) for batch in result.pages[0].source_rows(roots)]
        found: U64 = np.concatenate([part for part, _ in batches])
        payload = pa.Table.from_batches([rows for _, rows in batches]).combine_chunks().to_batches()[0]
        values = values[np.searchsorted(roots, found)]
        yield calls.EmittedRows(self.source.stream, payload, found, values, self._emitted_ids(verdict, found))

    def _emitted_ids(self, verdict: Verdict, roots: U64) -> calls.EventIds | None:
        if not self.plan.exact:
            return None
        return event_ids(roots, verdict.emitted_parents, verdict.emitted_ids, self.plan.emits)


def resumed_events(
    verdict: Verdict, failures: dict[int, calls.Failure], exact: str = ""
) -> Iterable[calls.Xor | calls.Fail]:
    """Return the events of resumed records, one or two for each incarnation that handed some on.

    A record is known here by its record id; its event goes to its root. A record that was read twice
    counts once: its id XORed twice would be no event at all. For a vertex that keeps every id, ``exact``
    names the operator that hands rows on further.
    """
    carriers = np.unique(verdict.carriers)
    emitted, values = xor_fold_by_root(verdict.emitted_roots, verdict.emitted_values)
    children = dict(zip(emitted.tolist(), values.tolist(), strict=True))
    for incarnation in np.unique(carriers["incarnation"]):
        part = carriers[carriers["incarnation"] == incarnation]
        failed = [replace(failure, root=int(root)) for root, failure in _failed_of(part, failures)]
        if failed:
            yield calls.Fail(tuple(failed), int(incarnation), hold=True)
        good = np.array([int(id_) not in failures for id_ in part["id"]], bool)
        if good.any():
            ids = part["id"][good].astype(np.uint64)
            extra = np.array([children.get(int(id_), 0) for id_ in ids], np.uint64)
            roots = part["root"][good].astype(np.uint64)
            single = None
            if exact:
                single = event_ids(ids, verdict.emitted_parents, verdict.emitted_ids, exact, own=True)
            yield calls.Xor(roots, ids ^ extra, int(incarnation), hold=True, ids=single)


def _failed_of(part: Any, failures: dict[int, calls.Failure]) -> Iterable[tuple[int, calls.Failure]]:
    """Return each root once, with the failure of the first of its records that failed."""
    seen: set[int] = set()
    for carrier in part:
        failure = failures.get(int(carrier["id"]))
        root = int(carrier["root"])
        if failure is not None and root not in seen:
            seen.add(root)
            yield root, failure


def event_ids(
    parents: U64, emitted_parents: U64, emitted_ids: U64, operator: str, *, own: bool = False
) -> calls.EventIds:
    """List the ids that each of ``parents`` (distinct) stands for in one event, for a vertex that keeps every id.

    ``emitted_ids`` are those of the rows handed on under ``emitted_parents``, which ``operator`` owes; with
    ``own`` the event acknowledges the parents themselves, too.
    """
    book = IdBook()
    if len(emitted_ids):
        book.note(emitted_parents, emitted_ids, operator)
    return book.take(parents, own=own)
