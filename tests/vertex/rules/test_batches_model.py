"""A simulated query over the vertex, crashing at every step: each row ends exactly once in the sink or dead."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ftlayer.vertex import calls
from ftlayer.vertex.calls import BatchState, Failure, StreamOptions

FILES, CLICKS = "q/files", "ingest/clicks"
STEPS = ("planned", "begun", "sealed", "sunk", "committed", "done")
MAX_ATTEMPTS = 3


class CrashError(Exception):
    """The driver is gone; what it did so far stays."""


@dataclass(frozen=True)
class Plan:
    """An entry of Spark's offset log."""

    source: tuple[int, int]
    delivered: dict[str, tuple[int, int]]


class Simulation:
    """Spark's logs, a rewindable source, and a sink that skips batch ids it knows."""

    def __init__(self, kit: Any, rows: int, per_batch: int, salt: int) -> None:
        self.kit, self.salt, self.per_batch = kit, salt, per_batch
        self.vertex = kit.Vertex()
        self.source = [f"file {i}" for i in range(rows)]
        self.ingested: list[str] = []
        self.plans: list[Plan] = []
        self.finished = 0  # batches in Spark's commit log
        self.sink: dict[int, list[str]] = {}
        self.roots = 0
        self.failing = True
        self.resealed: set[str] = set()
        self.flaky = 0  # grows where functions are to answer differently when they run again
        self.options = StreamOptions(max_attempts=MAX_ATTEMPTS, backoff_ms=(100,), jitter=0.0)
        self.start()

    def start(self) -> None:
        opened = self.vertex.call(calls.OpenQuery("q", "run", (FILES, CLICKS), self.options))
        self.epoch = opened.epoch

    def ingest(self, count: int) -> None:
        texts = [f"click {len(self.ingested) + i}" for i in range(count)]
        self.vertex.call(calls.Ingest(CLICKS, self.kit.payload(texts)))
        self.ingested += texts

    def verdict(self, text: str, attempt: int) -> str:
        """The same for a record and attempt, unless functions are flaky."""
        if not self.failing:
            return "good"
        number = zlib.crc32(f"{text}/{attempt}/{self.salt}/{self.flaky}".encode()) % 10
        return "fatal" if number == 0 else "bad" if number < 4 else "good"

    def plan(self) -> Plan:
        if len(self.plans) > self.finished:
            return self.plans[self.finished]
        last = self.plans[-1] if self.plans else Plan((0, 0), {FILES: (0, 0), CLICKS: (0, 0)})
        start = last.source[1]
        delivered = {}
        for stream, (_, end) in last.delivered.items():
            reply = self.vertex.call(calls.Deliverable(stream, end, self.per_batch))
            delivered[stream] = end, reply.end
        plan = Plan((start, min(start + self.per_batch, len(self.source))), delivered)
        self.plans.append(plan)
        return plan

    def run_batch(self, crash_after: str = "") -> None:
        """Run one batch of the protocol; raise after the step named."""

        def step(name: str) -> None:
            if name == crash_after:
                raise CrashError(name)

        plan, batch = self.plan(), self.finished
        step("planned")
        begun = self.vertex.call(calls.BeginBatch("q", self.epoch, batch))
        step("begun")
        if begun.state is not BatchState.COMMITTED:
            good = self.run(plan, batch, begun)
            step("sealed")
            self.sink.setdefault(batch, good)
            step("sunk")
            self.vertex.call(calls.Commit("q", self.epoch, batch))
        step("committed")
        self.finished += 1
        step("done")

    def crash(self, after: str) -> None:
        """Run a batch up to a step. (One that was committed before has no verdict to seal and no sink.)"""
        try:
            self.run_batch(after)
        except CrashError:
            return
        assert after in ("sealed", "sunk")

    def run(self, plan: Plan, batch: int, begun: calls.BatchBegun) -> list[str]:
        """Run the functions and seal what failed; return the good rows."""
        left_out = Counter(text for part in begun.failed for text in part.payload.column(0).to_pylist())
        good: list[str] = []
        failed: list[tuple[str, Failure]] = []
        redelivered: list[Failure] = []
        for text in self.source[slice(*plan.source)]:
            if left_out[text]:
                left_out[text] -= 1
                continue
            self.roots += 1
            verdict = self.verdict(text, 1)
            if verdict == "good":
                good.append(text)
            else:
                failed.append((text, Failure(self.roots, verdict, fatal=verdict == "fatal")))
        for stream, (start, end) in plan.delivered.items():
            reply = self.vertex.call(calls.ReadDeliveries(stream, start, end))
            for root, _, attempt, text in self.kit.flat(reply):
                if root in begun.redelivered:
                    continue
                verdict = self.verdict(text, attempt)
                if verdict == "good":
                    good.append(text)
                else:
                    redelivered.append(Failure(root, verdict, fatal=verdict == "fatal"))
        parts: tuple[calls.SealedRows, ...] = ()
        if failed:
            roots = self.kit.u64(failure.root for _, failure in failed)
            failures = tuple(failure for _, failure in failed)
            parts = (calls.SealedRows(FILES, self.kit.payload([t for t, _ in failed]), roots, failures),)
        content: dict[str, Any] = {"failed": parts, "redelivered": tuple(redelivered)}
        if begun.state is BatchState.NEW:
            self.vertex.call(calls.Seal("q", self.epoch, batch, plan.delivered, **content))
        elif failed or redelivered:
            self.resealed.update(self.sink.get(batch, []))
            self.vertex.call(calls.Reseal("q", self.epoch, batch, **content))
        return good

    def drain(self) -> None:
        """Let everything pass, until nothing is left to do."""
        self.failing = False
        for _ in range(50):
            self.vertex.advance(1_000)
            self.run_batch()
            status = self.vertex.call(calls.QueryStatusCall("q"))
            if status.drained and self.plans[-1].source[1] == len(self.source):
                return
        raise AssertionError(f"never drained: {status}")

    def outcome(self) -> Counter[str]:
        dead = [record.payload.column(0)[0].as_py() for record in self.vertex.list("dead")]
        return Counter(dead) + Counter(text for rows in self.sink.values() for text in rows)


crashes = st.lists(
    st.tuples(st.sampled_from(STEPS), st.sampled_from(["query", "vertex"]), st.integers(0, 4)), max_size=14
)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(crashes=crashes, rows=st.integers(0, 25), per_batch=st.integers(1, 9), salt=st.integers(0, 1_000))
@example(crashes=[(step, "vertex", 2) for step in STEPS], rows=25, per_batch=6, salt=1)
@example(crashes=[(step, "query", 2) for step in STEPS for _ in range(2)], rows=25, per_batch=6, salt=2)
def test_every_row_ends_once_in_the_sink_or_dead(kit, crashes, rows, per_batch, salt):
    simulation = Simulation(kit, rows, per_batch, salt)
    for after, who, ingested in crashes:
        simulation.ingest(ingested)
        simulation.vertex.advance(60)
        simulation.run_batch()
        simulation.crash(after)
        if who == "vertex":
            simulation.vertex.restart()
        simulation.start()
    simulation.drain()
    assert simulation.outcome() == Counter(simulation.source + simulation.ingested)
    simulation.run_batch()  # the next batch's begin removes what the last one kept
    assert simulation.vertex.stored("segments") == {}
    assert simulation.vertex.stored("waiting") == {}
    assert simulation.vertex.stored("delivery") == {}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(crashes=crashes, rows=st.integers(0, 25), per_batch=st.integers(1, 9), salt=st.integers(0, 1_000))
def test_functions_that_answer_differently_lose_nothing(kit, crashes, rows, per_batch, salt):
    simulation = Simulation(kit, rows, per_batch, salt)
    for after, who, ingested in crashes:
        simulation.ingest(ingested)
        simulation.vertex.advance(60)
        simulation.flaky += 1
        simulation.crash(after)
        if who == "vertex":
            simulation.vertex.restart()
        simulation.start()
    simulation.drain()
    outcome = simulation.outcome()
    expected = set(simulation.source + simulation.ingested)
    assert set(outcome) == expected
    # Twice only what had passed, was in the sink, and failed when its sealed batch ran again.
    assert {text for text, count in outcome.items() if count > 1} <= simulation.resealed
