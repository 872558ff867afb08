"""Two queries, the second with the real protocol and runner: whatever dies when, no record is lost between them.

The first one is a few calls: it has handed its records on, replays them when they are due, and never crashes.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.functions.steps import Map
from ftlayer.spark.batch.runner import SourceOfQuery, SparkRunner
from ftlayer.spark.protocol import STEPS, BatchProtocol
from ftlayer.spark.stages.pages import make_carriers
from ftlayer.spark.stages.run import QueryPlan
from ftlayer.spark.stages.task import plan_stages
from ftlayer.vertex import calls
from ftlayer.vertex.calls import Envelope

PLAIN = pa.schema([("v", pa.int64())])
CARRIED = PLAIN.append(pa.field("ft", pa.binary()))
UP = "up/rows"
DOWN = "down/carried"
OPTIONS = calls.StreamOptions(timeout_ms=60_000, max_attempts=3, backoff_ms=(100,), jitter=0.0)


class CrashError(Exception):
    """The second query's driver dies."""


class Handover:
    """``up`` hands rows on by a carrier that is read by offset; ``down`` resumes them."""

    def __init__(self, kit: SimpleNamespace, values: list[int]) -> None:
        self.kit = kit
        self.vertex = kit.Vertex()
        self.values = values
        self.carried: list[pa.RecordBatch] = []
        self.up_batch = self.up_read = 0
        self.ids = 0
        self.offsets: list[int] = []  # Spark's log of the second query: where each batch ends
        self.commits = 0
        self.lives = 0
        self.overwritten: dict[int, Counter[int]] = {}
        self.up_epoch = self.vertex.call(calls.OpenQuery("up", "run", (UP,), OPTIONS), "up").epoch
        self.hand_on(values)
        self.start()

    # ------------------------------------------------------------ the first query

    def new_ids(self, count: int) -> list[int]:
        self.ids += count
        return [hash((id_, "mixed")) & (2**64 - 1) for id_ in range(self.ids - count, self.ids)]

    def hand_on(self, values: list[int]) -> None:
        """One batch of ``up``: new rows, and what is to be replayed."""
        end = self.vertex.call(calls.Deliverable(UP, self.up_read, 100), "up").end
        again = self.vertex.call(calls.ReadDeliveries(UP, self.up_read, end), "up").batches
        parts = [(part.payload, part.roots, False) for part in again]
        if values:
            payload = pa.RecordBatch.from_pylist([{"v": value} for value in values], schema=PLAIN)
            parts.append((payload, self.kit.u64(self.new_ids(len(values))), True))
        emitted = []
        for payload, roots, is_new in parts:
            children = self.kit.u64(self.new_ids(len(roots)))
            emitted.append(calls.EmittedRows(UP, payload if is_new else None, roots, children))
            carriers = make_carriers(roots, children, self.vertex.incarnation)
            self.carried.append(pa.RecordBatch.from_arrays([payload.column(0), carriers], schema=CARRIED))
        epoch, batch = self.up_epoch, self.up_batch
        seal = calls.Seal("up", epoch, batch, {UP: (self.up_read, end)}, emitted=_merged(emitted, self.kit))
        for call in (calls.BeginBatch("up", epoch, batch), seal, calls.Commit("up", epoch, batch)):
            self.vertex.call(call, "up")
        self.up_batch, self.up_read = batch + 1, end

    # ------------------------------------------------------------ the second query

    def start(self) -> None:
        self.lives += 1
        self.opened = self.vertex.call(
            calls.OpenQuery("down", f"run-{self.lives}", (DOWN,), OPTIONS), f"down-{self.lives}"
        )

    def process(self, failing: set[int], *, crash: str = "", restart: str = "") -> calls.BatchDetails | None:
        """Run the next batch (again); values of ``failing`` fail at each try."""
        if len(self.offsets) == self.commits:
            if sum(batch.num_rows for batch in self.carried) == (self.offsets[-1] if self.offsets else 0):
                return None
            self.offsets.append(sum(batch.num_rows for batch in self.carried))
        batch = len(self.offsets) - 1
        start = self.offsets[batch - 1] if batch else 0
        table = pa.Table.from_batches(self.carried).slice(start, self.offsets[batch] - start)
        rows = self.kit.source_rows(table.to_pylist(), CARRIED)

        def check(record: Any) -> Any:
            if record["v"] in failing:
                raise ValueError(f"record {record['v']}")
            return {"v": record["v"]}

        plan = QueryPlan(
            plan_stages([Map("check", check, PLAIN)]),
            (SimpleNamespace(names=["v"]),),  # type: ignore[arg-type]
            carrier="ft",
        )
        runner = SparkRunner(
            self.kit.FakeFrame([[rows]]),
            plan,
            self,
            SourceOfQuery("carried", DOWN),
            self.opened,
            lambda: self.vertex.incarnation,
            "down",
            f"run-{self.lives}",
            lambda call, name: self.vertex.apply(call, Envelope(name, 1)),
        )

        def watch(step: str, number: int) -> None:
            if step == restart:
                self.vertex.restart()
            if step == crash:
                raise CrashError

        try:
            with patch("ftlayer.spark.stages.run.with_column", lambda schema, *more: schema):
                report = BatchProtocol(
                    "down",
                    self.opened.epoch,
                    lambda call: self.vertex.call(call, f"down-{self.lives}"),
                    runner,
                    watch,
                ).process(batch)
        except CrashError:
            self.start()
            return None
        self.commits = batch + 1
        return report

    def write(self, batch: int, result: Any, incarnation: int) -> None:
        """A sink that overwrites by batch id."""
        self.overwritten[batch] = Counter(row[0] for row in result.good_rows().toLocalIterator())

    # ------------------------------------------------------------ both

    def drain(self) -> None:
        for _ in range(40):
            while self.process(set()) is not None:
                pass
            if self.vertex.call(calls.QueryStatusCall("up"), "up").drained:
                return
            self.vertex.advance(70_000)
            self.hand_on([])
        raise AssertionError("never drained")

    def check(self) -> None:
        """Every record is in the sink or dead."""
        written = sum(self.overwritten.values(), Counter())
        assert set(written) | set(self.vertex.values("dead")) == set(self.values)


def _merged(emitted: list[Any], kit: SimpleNamespace) -> tuple[Any, ...]:
    """Delivered rows of one stream come together."""
    new = [part for part in emitted if part.payload is not None]
    old = [part for part in emitted if part.payload is None]
    if old:
        roots = kit.u64(root for part in old for root in part.roots.tolist())
        values = kit.u64(value for part in old for value in part.values.tolist())
        new.append(calls.EmittedRows(UP, None, roots, values))
    return tuple(new)


@pytest.mark.parametrize("others", [set(), {3}], ids=["none failed before", "another failed before"])
@pytest.mark.parametrize("crash", STEPS)
def test_a_record_that_passed_and_fails_in_the_run_again_is_replayed(
    kit: SimpleNamespace, crash: str, others: set[int]
) -> None:
    both = Handover(kit, [1, 2, 3])
    assert both.process(others, crash=crash) is None
    both.process({1} | others)
    both.drain()
    both.check()


histories = st.lists(
    st.tuples(
        st.sampled_from(["batch that runs again"] * 3 + ["batch", "hand on", "time", "vertex", "query"]),
        st.sets(st.integers(0, 4), min_size=1),
        st.sampled_from(STEPS),
        st.sampled_from(["", *STEPS]),
    ),
    max_size=10,
)


@settings(max_examples=60, deadline=None)
@given(histories)
def test_no_history_loses_a_record_between_two_queries(kit: SimpleNamespace, history: Any) -> None:
    both = Handover(kit, [0, 1, 2, 3, 4])
    for what, failing, crash, restart in history:
        match what:
            case "batch":
                both.process(failing, restart=restart)
            case "batch that runs again":
                both.process(set(), crash=crash)
                both.process(failing)
            case "hand on":
                both.hand_on([])
            case "time":
                both.vertex.advance(150)
            case "vertex":
                both.vertex.restart()
            case "query":
                both.start()
    both.drain()
    both.check()
