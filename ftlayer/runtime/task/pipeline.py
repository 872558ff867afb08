"""The operators of a chain between its inputs and its outputs, run over batches.

`AssignWatermarks` may stand anywhere in a chain, and what is behind it lives in another event time than what is
before it. So a chain is cut into *stages*, each beginning with one (the first maybe without).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from ftlayer.common.checks import fast_dataclass
from ftlayer.common.clock import Now
from ftlayer.common.rules.restart import TRACEBACK, is_programs_text
from ftlayer.errors import JobError
from ftlayer.functions.chains.firing import (
    ChainOperator,
    DueTimers,
    Interrupted,
    Timer,
    TimerGuard,
    TimerKind,
    never,
)
from ftlayer.functions.chains.topology import TimerOutput, TopologyChain
from ftlayer.functions.current import UNTRACKED, Known, begin_running, end_running
from ftlayer.functions.failures import failed_rows
from ftlayer.functions.keyed import Backend
from ftlayer.functions.steps import MAIN
from ftlayer.functions.undo import LateFailure, UndoLog
from ftlayer.records.failures import RowFailure
from ftlayer.records.ids import NO_ROOTS, I64Array, U64Array
from ftlayer.runtime.handler import Handler
from ftlayer.runtime.protocol.messages import (
    MIN_TIME_MS,
    EndOfStream,
    Idle,
    LatencyMarker,
    RecordIds,
    Watermark,
)
from ftlayer.runtime.task.actions import Action
from ftlayer.runtime.task.contract import SinkBody
from ftlayer.runtime.task.emitter import Emitter, SinkLatencies
from ftlayer.runtime.task.event_time import NO_INPUTS, TimedInputs, WatermarkGenerator, times_of
from ftlayer.runtime.task.routes import Routes
from ftlayer.topology.job_graph import Channel, has_timers
from ftlayer.topology.operators import AssignWatermarks


@fast_dataclass
class Rows:
    """Rows on their way through a chain, each from a row of the batch it began with.

    ``parents`` and ``times`` (ms since 1970; None: there are none) are int64[n].
    """

    payload: pa.RecordBatch
    parents: I64Array
    times: I64Array | None

    def keep(self, keep: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Rows:
        if keep.all():
            return self
        times = None if self.times is None else self.times[keep]
        return Rows(self.payload.filter(pa.array(keep)), self.parents[keep], times)


@dataclass(slots=True)
class Passed:
    """The results of a chain by tag (`MAIN` is always there), and what failed.

    A row that failed is no parent of what came out.
    """

    outputs: dict[str, Rows]
    failures: list[RowFailure] = field(default_factory=list)


@fast_dataclass
class Fired:
    """What came of some timers of one operator, behind all stages.

    Attributes:
        timers: in the order they were fired in.
        passed: the rows that parents and failures name are places in ``timers``.
    """

    operator: str
    kind: TimerKind
    timers: list[Timer]
    passed: Passed

    @property
    def size(self) -> int:
        return len(self.timers)

    @property
    def has_failures(self) -> bool:
        return bool(self.passed.failures)


@dataclass(slots=True)
class ChainStage:
    """Operators that live in one event time.

    Attributes:
        generator: makes that time's watermark; None: it comes from before.
        chain: the functions.
        uids: of the operators.
        watermark_ms: how far it is.
    """

    generator: WatermarkGenerator | None
    chain: TopologyChain
    uids: tuple[str, ...] = ()
    watermark_ms: int = MIN_TIME_MS


class OperatorChain:
    """The stages of a chain in one subtask. `progress`, `late` and `row` may be looked at by another thread."""

    def __init__(
        self,
        operators: Sequence[ChainOperator | AssignWatermarks],
        inputs: Sequence[pa.Schema],
        backend: Backend,
        log: UndoLog | None = None,
        timed: TimedInputs = NO_INPUTS,
        interrupted: Interrupted = never,
    ) -> None:
        """``inputs`` are the schemas of what the first operator takes, ``timed`` its channels; the rest as in
        `TopologyChain`.

        Raises what `TopologyChain` raises.
        """
        self._log = log
        # The channel and the split that a batch comes from which goes through; None: that is not known.
        self.origin: tuple[Channel, int] | None = None
        cuts = [place for place, operator in enumerate(operators) if isinstance(operator, AssignWatermarks)]
        self.stages: list[ChainStage] = []
        self._running: tuple[TopologyChain, I64Array] | None = None
        for start, end in zip([0, *cuts], [*cuts, len(operators)], strict=True):
            first = operators[start] if start < end else None
            generator = None
            if isinstance(first, AssignWatermarks):
                # What timers emit is of no split.
                from_splits = not any(has_timers(operator) for operator in operators[:start])
                generator = WatermarkGenerator(first, timed if from_splits else NO_INPUTS)
            if generator is None and start == end and cuts:
                continue  # the chain begins with an AssignWatermarks
            functions = [op for op in operators[start:end] if not isinstance(op, AssignWatermarks)]
            chain = TopologyChain(functions, inputs, backend, log, interrupted)
            self.stages.append(ChainStage(generator, chain, tuple(op.uid for op in operators[start:end])))
            if start < end:
                inputs = [operators[end - 1].schema]

    @property
    def progress(self) -> int:
        """A number that changes whenever a record is done, or a timer."""
        return sum(stage.chain.progress for stage in self.stages)

    @property
    def late(self) -> int:
        return sum(stage.chain.late for stage in self.stages)

    @property
    def row(self) -> int | None:
        """The row of the batch that a function of one record works on now, or on what came of it.

        None within a function a batch at a time, a timer, and between two batches.
        """
        running = self._running
        row = None if running is None else running[0].row
        # Past the end: between the two looks the chain has gone on to other rows.
        return None if running is None or row is None or row >= len(running[1]) else int(running[1][row])

    def open(self, mono_ms: int) -> None:
        for stage in self.stages:
            stage.chain.open()
            if stage.generator is not None:
                stage.generator.start(mono_ms)

    def close(self) -> None:
        for stage in reversed(self.stages):
            stage.chain.close()

    def run(
        self,
        payload: pa.RecordBatch,
        times: I64Array | None,
        fresh: bool,
        input: int,
        now: Now,
        known: Known = UNTRACKED,
        watermark_ms: int = MIN_TIME_MS,
        enters: str = "",
    ) -> Passed:
        """Run a batch of one input. ``fresh``: it holds more than replays; ``known``: what functions may ask of it.

        ``watermark_ms``: where the first stage is not so far, its functions are told this one. ``enters``: uid of the
        operator to begin with, "" for the first one.

        With a log, raises `LateFailure` for a row of the batch: see `TopologyChain.run`.
        """
        parents: I64Array = np.arange(payload.num_rows, dtype=np.int64)
        try:
            first = self._stage_of(enters) if enters else 0
            return self._run(
                first, Rows(payload, parents, times), fresh, input, now, known, watermark_ms, enters
            )
        finally:
            self._running = None

    def stage_of_timers(self, operator: str) -> int | None:
        """Return the stage that an operator with timers is in; None: there is none of this uid."""
        places = (place for place, stage in enumerate(self.stages) if operator in stage.chain.timed)
        return next(places, None)

    def due_timers(self, stage: int, kind: TimerKind, now: Now) -> DueTimers:
        """Return the timers of a stage that its watermark, or the wall clock, has reached; for `fire`."""
        found = self.stages[stage]
        if kind == "event":
            return found.chain.due_event_timers(found.watermark_ms, now.wall_ms)
        return found.chain.due_processing_timers(now.wall_ms)

    def timers_again(
        self, stage: int, operator: str, kind: TimerKind, timers: Sequence[Timer], now: Now
    ) -> DueTimers:
        """Return timers of an operator in a stage (`stage_of_timers`), whether they are set or not; for `fire`."""
        found = self.stages[stage]
        return found.chain.timers_again(operator, kind, timers, found.watermark_ms, now.wall_ms)

    def fire(
        self, stage: int, due: DueTimers, most: int, now: Now, guard: TimerGuard | None = None
    ) -> Fired | None:
        """Fire up to ``most`` timers of one operator of a stage; None: there are none left.

        What they put out goes through the stages behind. With a log raises `LateFailure` with the place of a timer
        among those that it took: see `OperatorTimers.fire`, which raises the rest.
        """
        fired = due.fire(most, guard)
        if fired is None:
            return None
        outputs = {
            output.tag: Rows(
                output.batch, output.parents, None if fired.times is None else fired.times[output.parents]
            )
            for output in fired.outputs
        }
        passed = self._run(stage + 1, outputs.pop(MAIN), True, 0, now, None)
        if passed.failures:
            failed = failed_rows(passed.failures)
            outputs = {tag: rows.keep(~np.isin(rows.parents, failed)) for tag, rows in outputs.items()}
        passed.outputs |= outputs
        passed.failures += fired.failures
        return Fired(fired.operator, fired.kind, fired.timers, passed)

    def _stage_of(self, uid: str) -> int:
        """Return the stage that an operator inside the chain is of, or that it begins."""
        return next(
            place
            for place, stage in enumerate(self.stages)
            if stage.chain.begins_at(uid)
            or (stage.generator is not None and stage.generator.operator.uid == uid)
        )

    def run_behind(self, stage: int, fired: dict[str, TimerOutput], now: Now) -> Passed:
        """Run what timers of a stage put out through the stages behind it. Its rows are their own parents."""
        outputs = {
            tag: Rows(output.batch, np.arange(output.batch.num_rows, dtype=np.int64), output.times)
            for tag, output in fired.items()
        }
        main = outputs.pop(MAIN, None)
        if main is None:
            return Passed(outputs)
        passed = self._run(stage + 1, main, True, 0, now, None)
        passed.outputs.update(outputs)
        return passed

    def _run(
        self,
        first: int,
        rows: Rows,
        fresh: bool,
        input: int,
        now: Now,
        known: Known | None,
        watermark_ms: int = MIN_TIME_MS,
        enters: str = "",
    ) -> Passed:
        """Run rows through the stages from ``first`` on; ``known`` is None for what timers put out."""
        passed = Passed({MAIN: rows})
        for stage in self.stages[first:]:
            told_ms = max(watermark_ms, stage.watermark_ms)
            self._through(stage, passed, fresh, input, now, known, told_ms, enters)
            input, watermark_ms, enters = 0, MIN_TIME_MS, ""
        if passed.failures and len(self.stages) > 1:
            # A stage knows nothing of rows that come from the same parent and were not in it.
            failed = [failure.row for failure in passed.failures]
            passed.outputs = {
                tag: rows.keep(~np.isin(rows.parents, failed)) for tag, rows in passed.outputs.items()
            }
        return passed

    def _through(
        self,
        stage: ChainStage,
        passed: Passed,
        fresh: bool,
        input: int,
        now: Now,
        known: Known | None,
        watermark_ms: int,
        enters: str,
    ) -> None:
        rows = passed.outputs[MAIN]
        # A row that enters behind the generator has its time.
        if stage.generator is not None and not stage.chain.begins_at(enters):
            rows = self._timed(stage.generator, rows, passed.failures)
            if rows.times is not None:
                stage.generator.observe(rows.times, fresh, now.mono_ms, self.origin)
        # What timers put out has no row of a batch to name.
        self._running = None if known is None else (stage.chain, rows.parents)
        token = None if known is None else begin_running(known, lambda: stage.chain.row, rows.parents)
        try:
            result = stage.chain.run(
                rows.payload, rows.times, watermark_ms, now.wall_ms, input=input, enters=enters
            )
        except LateFailure as late:
            raise LateFailure(int(rows.parents[late.row])) from None
        finally:
            if token is not None:
                end_running(token)
        for tag, output in result.outputs.items():
            times = output.times
            if times is None and rows.times is not None:
                times = rows.times[output.parents]
            passed.outputs[tag] = Rows(output.batch, rows.parents[output.parents], times)
        for failure in result.failures:
            row = int(rows.parents[failure.row])
            passed.failures.append(failure if row == failure.row else replace(failure, row=row))

    def _timed(self, generator: WatermarkGenerator, rows: Rows, failures: list[RowFailure]) -> Rows:
        """Give rows the times of their column; where it is null, the row they come from fails."""
        operator = generator.operator
        times, nulls = times_of(rows.payload.column(operator.column))
        timed = Rows(rows.payload, rows.parents, times)
        if nulls is None:
            return timed
        failed = np.unique(rows.parents[nulls])
        if self._log is not None:
            self._log.late(int(failed[0]))
        reason = f"column {operator.column!r} is null, and it is where the record's time is taken from"
        failures.extend(RowFailure(row, operator.uid, reason, "") for row in failed.tolist())
        return timed.keep(~np.isin(rows.parents, failed))


class Outlet:
    """The end of a chain. What it settles and fails lies in the handler, to be taken from there.

    Attributes:
        latencies: how old records are when a sink is done with them; nothing where there is none.
    """

    latencies: SinkLatencies

    def take(self, lineage: RecordIds | None, records: int, passed: Passed, now: Now) -> list[Action]:
        raise NotImplementedError

    def take_fired(self, outputs: dict[str, Rows], now: Now) -> list[Action]:
        raise NotImplementedError

    def mark(self, mark: Watermark | Idle | EndOfStream) -> list[Action]:
        """Pass a mark on, behind what was taken before it."""
        return []

    @abstractmethod
    def marker(self, marker: LatencyMarker, now: Now) -> list[Action]:
        """Pass a latency marker on behind what was taken before it, or see how old it is where that is written."""

    def accepted(self, ticket: int) -> list[Action]:
        """The vertex has persisted what was asked for."""
        raise ValueError(f"ticket {ticket} was accepted, and nothing is persisted here")

    def flush(self, now: Now, *, force: bool) -> None:
        """Settle what has waited long enough (``force``: everything)."""

    def close(self) -> None:
        """Give resources up."""

    @property
    def waiting(self) -> bool:
        """Whether something has yet to be accepted by the vertex before it can be sent."""
        return False

    @property
    def due_ms(self) -> int | None:
        """Monotone time (ms) at which `flush` has something to do; None while nothing waits."""
        return None

    @property
    def held(self) -> U64Array:
        """Roots of what is held back here. Another thread may look."""
        return NO_ROOTS


@fast_dataclass
class Routed:
    """What came of a batch, before any of it is sent.

    Attributes:
        outputs: by tag, with what users' partitioners say of its rows (None where none is asked).
        failures: of records, those that a partitioner refused with them.
    """

    outputs: dict[str, tuple[Rows, Routes | None]]
    failures: list[RowFailure]


class ChannelOutlet(Outlet):
    due_ms: int | None = None

    def __init__(self, handler: Handler, emitter: Emitter) -> None:
        self._handler = handler
        self._emitter = emitter
        self.latencies = SinkLatencies()

    def take(self, lineage: RecordIds | None, records: int, passed: Passed, now: Now) -> list[Action]:
        routed = self.route(passed)
        if routed.failures:
            self._handler.xor.fail(lineage, routed.failures)
        return self.send(lineage, records, routed)

    def route(self, passed: Passed, log: UndoLog | None = None) -> Routed:
        """Ask where rows go, if users' functions say so; rows of a record for which one raises are left out.

        With ``log`` of what the chain has changed, raises `LateFailure` for such a record.
        """
        outputs: dict[str, tuple[Rows, Routes | None]] = {}
        for tag, rows in passed.outputs.items():
            outputs[tag] = rows, self._emitter.ask(tag, rows.payload) if self._emitter.asks else None
        refused: dict[int, RowFailure] = {}
        for rows, routes in outputs.values():
            for failure in () if routes is None else routes.failures:
                record = int(rows.parents[failure.row])
                refused.setdefault(record, replace(failure, row=record))
        if not refused:
            return Routed(outputs, passed.failures)
        if log is not None:
            log.late(min(refused))
        for tag, (rows, routes) in outputs.items():
            keep = ~np.isin(rows.parents, list(refused))
            outputs[tag] = rows.keep(keep), None if routes is None else routes.keep(keep)
        return Routed(outputs, [*passed.failures, *refused.values()])

    def send(self, lineage: RecordIds | None, records: int, routed: Routed) -> list[Action]:
        actions: list[Action] = []
        owed: U64Array | None = None
        sent: list[str] = []
        for tag, (rows, _) in routed.outputs.items():
            if rows.payload.num_rows and self._emitter.reads(tag):
                sent.append(tag)
        for tag in sent:
            rows, routes = routed.outputs[tag]
            emission = self._emitter.derived(
                tag, rows.payload, lineage, rows.parents, rows.times, routes=routes, only=len(sent) == 1
            )
            actions.extend(emission.sends)
            owed = emission.owed if owed is None else owed ^ emission.owed
        failures = routed.failures
        self._handler.xor.settle(lineage, owed, unharmed(records, failures) if failures else None)
        return actions

    def take_fired(self, outputs: dict[str, Rows], now: Now) -> list[Action]:
        actions: list[Action] = []
        for tag, rows in outputs.items():
            if rows.payload.num_rows:
                emission = self._emitter.derived(tag, rows.payload, None, rows.parents, rows.times)
                actions.extend(emission.sends)
        return actions

    def mark(self, mark: Watermark | Idle | EndOfStream) -> list[Action]:
        return [*self._emitter.mark(mark)]

    def marker(self, marker: LatencyMarker, now: Now) -> list[Action]:
        return [*self._emitter.marker(marker)]


class SinkOutlet(Outlet):
    """Rows go into a sink, and a failure fails the task: no record has to be settled.

    Attributes:
        latencies: how old records are when the sink has been given them.
    """

    waiting = False
    held = NO_ROOTS

    def __init__(self, handler: Handler, sink: SinkBody) -> None:
        self._handler = handler
        self._sink = sink
        self.latencies = SinkLatencies()

    def take(self, lineage: RecordIds | None, records: int, passed: Passed, now: Now) -> list[Action]:
        self._handler.xor.fail(None, passed.failures)
        self._write(passed.outputs[MAIN], now)
        return []

    def take_fired(self, outputs: dict[str, Rows], now: Now) -> list[Action]:
        if MAIN in outputs:
            self._write(outputs[MAIN], now)
        return []

    def marker(self, marker: LatencyMarker, now: Now) -> list[Action]:
        self.latencies.came(marker, now)
        return []

    def flush(self, now: Now, *, force: bool) -> None:
        self._fail(self._sink.flush(now.mono_ms, force=force).failures)

    def close(self) -> None:
        self._sink.close()

    @property
    def due_ms(self) -> int | None:
        return self._sink.due_ms

    def _write(self, rows: Rows, now: Now) -> None:
        if rows.payload.num_rows:
            self._fail(self._sink.write(rows.payload, now.mono_ms).failures)

    def _fail(self, failures: Sequence[RowFailure]) -> None:
        try:
            self._handler.xor.fail(None, failures)
        except JobError as error:
            # A function that writes meets its own mistake with any row; one of a map may have met a row's.
            error.is_programs = is_programs_text(f"{TRACEBACK}\n{failures[0].traceback}")
            raise


def unharmed(records: int, failures: Sequence[RowFailure]) -> I64Array | None:
    """Return which of so many records have no failure; None for all of them."""
    if not failures:
        return None
    alive = np.ones(records, np.bool_)
    alive[[failure.row for failure in failures]] = False
    return np.flatnonzero(alive)
