"""The micro-batch protocol: run → verdict → seal → sink → commit → report. Rules only; Spark and the vertex are given.

What a crash means, by where it happens:

| after | the batch is | when Spark runs it again |
| --- | --- | --- |
| begin, run | new | it runs afresh; nothing of the first run is known |
| seal | sealed | rows that had failed are left out, the rest runs, and the sink is called (again) |
| the sink rejects rows | sealed | the same; what was rejected is not sealed yet, and the sink rejects it again |
| that is sealed | sealed | the same; what was rejected is among the rows that had failed |
| sink | sealed | the same: a sink that skips known batch ids skips it |
| commit | committed | nothing is run, the sink is not called; its report is sent (again) |

The report, what became of records that other queries handed on, is sealed with the verdict and sent behind the commit:
from the commit on no run can say anything else of them. Sent before it, a record that had passed could fail in a run
again, when the query that it came from had already let go of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from ftlayer.spark.circuits import FailureTally
from ftlayer.vertex import calls

STEPS = ("begin", "begun", "run", "sealed", "written", "committed", "reported")
"""The steps that a watcher is told of, in order; faults are injected at each of them."""

JUDGED = "judged"
"""A further step, between "run" and "sealed": which records have failed is known."""

REJECTED = "rejected"
"""A further step, before "written": the sink has rejected rows, and these are sealed as failed."""


@dataclass(frozen=True)
class BatchOutcome:
    """The result of running a batch, in the form that a seal takes."""

    delivered: dict[str, tuple[int, int]]
    failed: tuple[calls.SealedRows, ...]
    redelivered: tuple[calls.Failure, ...]
    resumed: tuple[calls.Failure, ...]
    emitted: tuple[calls.EmittedRows, ...]
    report: calls.Report
    rows_in: int
    rows: int

    @property
    def failures(self) -> int:
        return sum(len(rows.roots) for rows in self.failed) + len(self.redelivered) + len(self.resumed)


R = TypeVar("R")


class Runner(Protocol[R]):
    """The protocol's side effects: run a batch, hand its rows to the sink."""

    def run(self, batch: int, sealed: calls.BatchBegun | None) -> R:
        """Run the batch. ``sealed`` is what an earlier run's seal said; its failed rows are left out."""

    def tally(self, result: R) -> FailureTally: ...

    def outcome(self, result: R, sealed: calls.BatchBegun | None) -> BatchOutcome:
        """Return what the run came to; its report has the failures of ``sealed`` too."""

    def write(self, batch: int, result: R) -> tuple[calls.Failure, ...]:
        """Call the sink with the good rows. Nothing: it has taken them; otherwise these records are rejected."""

    def reject(
        self, result: R, rejected: tuple[calls.Failure, ...], sealed: calls.BatchBegun | None
    ) -> BatchOutcome:
        """Let what the sink rejects fail, from now on; the outcome says so.

        That has to be sealed before the sink is called again, with the rest.
        """

    def report(self, batch: int, report: calls.Report) -> None:
        """Tell the queries whose records were resumed here what became of them. Has its effect once."""

    def release(self, result: R) -> None: ...


class BatchGate(Protocol):
    """Says whether a batch may be run, and whether what it came to may be sealed."""

    def wait(self) -> None:
        """Wait until a batch may be run."""

    def passes(self, tally: FailureTally) -> bool:
        """Take what a run came to; False: it is given up, and run again behind `wait`."""

    def sink_passes(self, records: int, rejected: tuple[calls.Failure, ...]) -> bool:
        """Take what the sink rejects of so many records; False: they do not fail, it is called again behind `wait`."""


class BatchProtocol(Generic[R]):
    """Takes micro-batches through the protocol, for one query in one epoch."""

    def __init__(
        self,
        query: str,
        epoch: int,
        call: calls.Asked,
        runner: Runner[R],
        watch: Callable[[str, int], None] = lambda step, batch: None,
        gate: BatchGate | None = None,
    ) -> None:
        """``gate`` holds batches in which too many records fail; None: there is none."""
        self._gate = gate
        self._query = query
        self._epoch = epoch
        self._call = call
        self._runner = runner
        self._watch = watch

    def process(self, batch: int) -> calls.BatchDetails:
        """Take one batch from wherever it is to committed.

        Raises whatever the vertex, Spark or the sink raises; the batch is then where the table above says.
        """
        self._watch("begin", batch)
        begun = self._call(calls.BeginBatch(self._query, self._epoch, batch))
        self._watch("begun", batch)
        if begun.state is calls.BatchState.COMMITTED:
            self._runner.report(batch, begun.report)
            self._watch("reported", batch)
            return calls.BatchDetails(batch, state=begun.state)
        sealed = begun if begun.state is calls.BatchState.SEALED else None
        result, held = self._run(batch, sealed)
        try:
            self._watch("run", batch)
            outcome = self._runner.outcome(result, sealed)
            self._watch(JUDGED, batch)
            reply = self._seal(batch, outcome, again=sealed is not None)
            self._watch("sealed", batch)
            report = outcome.report
            rejected = 0
            records = outcome.rows_in
            while failures := self._runner.write(batch, result):
                if not self._sink_passes(records, failures):
                    held += 1
                    records = outcome.rows_in
                    continue
                # Counted once, however often the sink rejects some more of them.
                records = 0
                more = self._runner.reject(result, failures, sealed)
                reply = self._seal(batch, more, again=True)
                self._watch(REJECTED, batch)
                rejected += more.failures
                report = more.report
            if self._gate is not None:
                self._gate.sink_passes(records, ())
            self._watch("written", batch)
            self._call(calls.Commit(self._query, self._epoch, batch))
            self._watch("committed", batch)
            self._runner.report(batch, report)
            self._watch("reported", batch)
        finally:
            self._runner.release(result)
        return replace(_report(batch, begun, outcome, reply, rejected), held=held)

    def _run(self, batch: int, sealed: calls.BatchBegun | None) -> tuple[R, int]:
        """Run the batch until no more of it fails than may; return also how often it was held."""
        held = 0
        while True:
            if self._gate is not None:
                self._gate.wait()
            result = self._runner.run(batch, sealed)
            try:
                if self._gate is None or self._gate.passes(self._runner.tally(result)):
                    return result, held
            except BaseException:
                self._runner.release(result)
                raise
            self._runner.release(result)
            held += 1

    def _sink_passes(self, records: int, rejected: tuple[calls.Failure, ...]) -> bool:
        """Whether the sink rejects no more than it may; if it does, wait until it may be called again."""
        if self._gate is None or self._gate.sink_passes(records, rejected):
            return True
        self._gate.wait()
        return False

    def _seal(self, batch: int, outcome: BatchOutcome, *, again: bool) -> calls.Sealed:
        said = outcome.failed, outcome.redelivered, outcome.resumed, outcome.emitted, outcome.report
        if again:
            return self._call(calls.Reseal(self._query, self._epoch, batch, *said))
        return self._call(calls.Seal(self._query, self._epoch, batch, outcome.delivered, *said))


def _report(
    batch: int, begun: calls.BatchBegun, outcome: BatchOutcome, reply: calls.Sealed, rejected: int
) -> calls.BatchDetails:
    failed = outcome.failures + rejected
    return calls.BatchDetails(
        batch=batch,
        state=begun.state,
        rows_in=outcome.rows_in,
        rows_out=outcome.rows,
        failed=failed,
        waiting=reply.waiting,
        dead=reply.dead,
        delivered=sum(end - start for start, end in outcome.delivered.values()),
        # Not told by the rows: each run has roots of its own.
        differs=begun.state is calls.BatchState.SEALED and failed > 0,
    )
