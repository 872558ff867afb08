"""A chain of functions as it runs in a topology: state, timers and side outputs beside the records.

Records have the form `VALUES`. They become Python objects once for neighbouring per-record functions, and Arrow
again only for a function a batch at a time and at the chain's end. What one function hands to its neighbour is
not checked against its schema: a misfit shows where the next one, or the chain's end, meets it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pyarrow as pa

from ftlayer.common.checks import check_ran, fast_dataclass
from ftlayer.common.printable import described
from ftlayer.errors import FTLayerError, JobError
from ftlayer.functions.chains import firing
from ftlayer.functions.chains.record_segment import RecordSegment
from ftlayer.functions.chains.segments import (
    AggregateSegment,
    AsyncSegment,
    BatchSegment,
    Segment,
    WindowSegment,
    run_segments,
    segments_of,
)
from ftlayer.functions.conversion import VALUES, concat
from ftlayer.functions.current import UNTRACKED, running
from ftlayer.functions.failures import I64, SegmentOutcome, failed_rows, first_of_each, raise_signalled
from ftlayer.functions.keyed import Backend
from ftlayer.functions.process import uses_timers
from ftlayer.functions.steps import MAIN
from ftlayer.functions.undo import LateFailure, UndoBackend, UndoLog
from ftlayer.functions.windows import WindowFunction
from ftlayer.records.failures import RowFailure


@fast_dataclass
class OutputRows:
    """Records of one output, and the input row that each comes from: int64[n].

    ``times`` are their event times (int64[n], ms since 1970) where they have others than those rows.
    """

    batch: pa.RecordBatch
    parents: I64
    times: I64 | None = None


@fast_dataclass
class TopologyResult:
    """What a batch gave.

    Attributes:
        outputs: by tag; `MAIN` is always there, a side output if it has records. The records of one parent are
            in the order they were emitted in.
        failures: one for each input row that failed, ascending. Such a row is no parent in any output.
    """

    outputs: dict[str, OutputRows]
    failures: list[RowFailure]


@fast_dataclass
class TimerOutput:
    """Records that timers gave. ``times`` is int64[n], their event times; None in processing time.

    That is the timer's time, if ``on_timer`` has set no other one.
    """

    batch: pa.RecordBatch
    times: I64 | None


class TopologyChain:
    """Functions made ready to run in one subtask. Not for several threads, save `progress`, `late` and `row`.

    All or nothing for each input row: if a function raises for it, or for what came of it, it has no outputs.
    State is not taken back with one exception: a reduce keeps its aggregate if a function right behind it (none
    of a batch at a time between, no flat_map before it) raises. What a process function has set, and the timers,
    stay.
    """

    def __init__(
        self,
        operators: Sequence[firing.ChainOperator],
        inputs: Sequence[pa.Schema],
        backend: Backend,
        log: UndoLog | None = None,
        interrupted: firing.Interrupted = firing.never,
    ) -> None:
        """Prepare ``operators``; ``inputs`` are the schemas of what the first one takes (two for a `CoProcess`).

        With ``log``, what a row that fails has changed is taken back. The caller keeps the log: it is emptied when the
        results have gone their way. ``interrupted``: timers that are due are to wait.

        Raises InvalidTopologyError if they cannot be run as a chain: a `CoProcess` that is not the first, two
        side outputs of one name, keys that a schema lacks.
        """
        self._log = log
        prepared = firing.prepare(operators, inputs, backend if log is None else UndoBackend(backend, log))
        self._processes = prepared.processes
        path = self._path = prepared.paths[0]
        # Where the first function gives times, what is behind it runs on its own.
        head = 1 if any(firing.gives_times(process.function) for process in prepared.processes) else None
        # What a log takes back, and what another function shares, lies in the tables at once.
        keeps = log is None and not prepared.processes
        self._paths = [segments_of(path[:head], VALUES, log=log, keeps=keeps) for path in prepared.paths]
        self._behind = None if head is None else segments_of(path[head:], VALUES, log=log)
        self._firings = {
            process: firing.Firing(process, process.timers, path[process.position + 1 :], log, interrupted)
            for process in prepared.processes
            if process.timers is not None and uses_timers(process.function)
        }
        # Few chains ever run from their middle: those segments are made when they are needed first.
        self._inside: dict[str, list[Segment]] = {}
        self._schemas = {MAIN: operators[-1].schema if operators else inputs[0]}
        for process in prepared.processes:
            self._schemas |= dict(process.step.side)
        tails = [f.tail for f in self._firings.values()]
        self._caching = _per_record(self._paths[0]) if keeps else []
        self._running = [_per_record(segments) for segments in self._paths]
        all_segments = [*self._paths, self._behind or [], *tails]
        self._counting = [segment for segments in all_segments for segment in _counted(segments)]

    def begins_at(self, uid: str) -> bool:
        return any(step.uid == uid for step in self._path)

    def open(self) -> None:
        """Open all process functions; what one raises goes up, as an error with the operator's uid."""
        for process in self._processes:
            uid = process.step.uid
            try:
                check_ran(process.function.open(process.step.context), "it")
            except FTLayerError as error:
                error.operator = error.operator or uid
                raise
            except BaseException as error:
                raise_signalled(error)
                failed = JobError(f"open() of {uid!r} raised {described(error)}")
                failed.operator = uid
                raise failed from error

    def close(self) -> None:
        """Close all process functions, the last one first; raises what one raises, when all have been called."""
        with ExitStack() as stack:
            for process in self._processes:
                stack.callback(process.function.close)

    @property
    def progress(self) -> int:
        """A number that changes whenever a record, or a timer, is done. Another thread may look.

        Within a function a batch at a time it stands still; of an async one it counts the calls.
        """
        return sum(s.progress for s in self._counting) + sum(f.fired for f in self._firings.values())

    @property
    def late(self) -> int:
        """How many records went nowhere, since their windows were over. Another thread may look."""
        functions = [process.function for process in self._processes]
        return sum(function.late for function in functions if isinstance(function, WindowFunction))

    @property
    def row(self) -> int | None:
        """The input row that a function of one record works on now, or on what came of it. Another thread may look.

        None within a function a batch at a time, an async one, a timer, behind a function that gives times, and between
        two batches.
        """
        for segments in self._running:
            for segment in segments:
                if (row := segment.row) is not None:
                    return row
        return None

    @property
    def has_timers(self) -> bool:
        return bool(self._firings)

    @property
    def next_event_ms(self) -> int | None:
        return _earliest(f.timers.event.next_ms() for f in self._firings.values())

    @property
    def next_processing_ms(self) -> int | None:
        return _earliest(f.timers.processing.next_ms() for f in self._firings.values())

    def run(
        self,
        batch: pa.RecordBatch,
        times: I64 | None,
        watermark_ms: int,
        now_wall_ms: int,
        *,
        input: int = 0,
        enters: str = "",
    ) -> TopologyResult:
        """Run n rows of one input.

        Args:
            batch: the rows, of the input's schema.
            times: int64[n], their event times (ms since 1970); None if they have none.
            watermark_ms: the watermark now. Timers that are set, and lie behind it, wait for `fire_event_timers`.
            now_wall_ms: the wall clock, ms since 1970.
            input: 0, or 1 for the second input of a `CoProcess`.
            enters: uid of the operator to begin with; the first one where it is none of those that `begins_at` names.

        With a log, raises `LateFailure` if all that the batch has changed has to be taken back, to run it in pieces.
        """
        for process in self._processes:
            process.step.context.watermark = watermark_ms
            process.step.context.now_ms = now_wall_ms
        try:
            if enters and self.begins_at(enters):
                for segment in self._caching:
                    segment.forget()
                outputs, failures = self._run(self._from(enters), None, batch, times)
            else:
                outputs, failures = self._run(self._paths[input], self._behind, batch, times)
        except LateFailure:
            for process in self._processes:
                process.step.context._take_side()
            raise
        finally:
            if self._processes:
                self._leave()
        if not failures:
            return TopologyResult(outputs, [])
        failed = failed_rows(failures)
        outputs = {tag: _without(output, failed) for tag, output in outputs.items()}
        kept = {tag: output for tag, output in outputs.items() if tag == MAIN or output.batch.num_rows}
        return TopologyResult(kept, first_of_each(failures))

    def _from(self, uid: str) -> list[Segment]:
        found = self._inside.get(uid)
        if found is None:
            place = next(place for place, step in enumerate(self._path) if step.uid == uid)
            found = self._inside[uid] = segments_of(self._path[place:], VALUES, log=self._log)
            self._running.append(_per_record(found))
            self._counting.extend(_counted(found))
        return found

    def _run(
        self,
        path: Sequence[Segment],
        behind: Sequence[Segment] | None,
        batch: pa.RecordBatch,
        times: I64 | None,
    ) -> tuple[dict[str, OutputRows], list[RowFailure]]:
        rows = np.arange(batch.num_rows, dtype=np.int64)
        outcome = run_segments(path, batch, rows, times, self._log)
        outputs = self._outputs(outcome)
        if behind is None:
            return outputs, outcome.failures
        with running(UNTRACKED, lambda: None):
            return outputs, [*outcome.failures, *self._run_behind(behind, outputs)]

    def _outputs(self, outcome: SegmentOutcome) -> dict[str, OutputRows]:
        outputs = {MAIN: OutputRows(outcome.batch, outcome.parents)}
        for side in outcome.side:
            outputs[side.tag] = OutputRows(side.batch, side.parents)
        return outputs

    def _run_behind(self, segments: Sequence[Segment], outputs: dict[str, OutputRows]) -> list[RowFailure]:
        """Run what a function gave that gives times too; its rows stand in for the batch's meanwhile."""
        batch, times = firing.taken_off(outputs[MAIN].batch)
        rows = outputs[MAIN].parents
        try:
            outcome = run_segments(
                segments, batch, np.arange(batch.num_rows, dtype=np.int64), times, self._log
            )
        except LateFailure as late:
            raise LateFailure(int(rows[late.row])) from None
        for tag, output in self._outputs(outcome).items():
            outputs[tag] = OutputRows(output.batch, rows[output.parents], times[output.parents])
        return [replace(failure, row=int(rows[failure.row])) for failure in outcome.failures]

    @property
    def timed(self) -> frozenset[str]:
        return frozenset(process.step.uid for process in self._firings)

    def due_event_timers(self, watermark_ms: int, now_wall_ms: int) -> firing.DueTimers:
        """Return the timers that the watermark has reached, to be fired operator by operator."""
        return firing.DueTimers(self._reached(watermark_ms, now_wall_ms), self._fired)

    def due_processing_timers(self, now_wall_ms: int) -> firing.DueTimers:
        """Return the timers that the wall clock has reached; as `due_event_timers`.

        Timers that are set meanwhile and due at once may wait for the next call.
        """
        self._set_clock(now_wall_ms)
        return firing.DueTimers((f.processing(now_wall_ms) for f in self._firings.values()), self._fired)

    def timers_again(
        self,
        operator: str,
        kind: firing.TimerKind,
        timers: Sequence[firing.Timer],
        watermark_ms: int,
        now_wall_ms: int,
    ) -> firing.DueTimers:
        """Return timers of one operator (see `timed`) to be fired, whether they are set or not."""
        self._set_clock(now_wall_ms)
        (process,) = [process for process in self._firings if process.step.uid == operator]
        process.step.context.watermark = max(watermark_ms, process.step.context.watermark)
        return firing.DueTimers(iter([self._firings[process].again(kind, timers)]), self._fired)

    def fire_event_timers(self, watermark_ms: int, now_wall_ms: int) -> dict[str, TimerOutput]:
        """Fire the timers that the watermark has reached, operator by operator; return what they gave, by tag.

        Only outputs with records. Raises `TimerFailedError` if a function does: the slot has to end, since there is
        no record to blame and the timers are gone. Where a timer is to fail alone, fire `due_event_timers`.
        """
        return self._fire(self.due_event_timers(watermark_ms, now_wall_ms))

    def fire_processing_timers(self, now_wall_ms: int) -> dict[str, TimerOutput]:
        return self._fire(self.due_processing_timers(now_wall_ms))

    def _reached(self, watermark_ms: int, now_wall_ms: int) -> Iterator[firing.OperatorTimers]:
        self._set_clock(now_wall_ms)
        for process in self._processes:
            # One after the other: what the timers of one give comes before the next one's watermark.
            process.step.context.watermark = watermark_ms
            if process in self._firings:
                yield self._firings[process].event(watermark_ms)

    def _set_clock(self, now_wall_ms: int) -> None:
        for process in self._processes:
            process.step.context.now_ms = now_wall_ms

    def _fire(self, due: firing.DueTimers) -> dict[str, TimerOutput]:
        if self._log is not None:
            # A failure ends the task: no record has to be found among others.
            self._log.alone = True
        found: dict[str, list[tuple[pa.RecordBatch, I64 | None]]] = {}
        while (fired := due.fire(firing.FIRED_AT_ONCE)) is not None:
            if fired.failures:
                raise firing.timer_failed(fired.failures[0])
            for output in fired.outputs:
                if output.batch.num_rows:
                    times = None if fired.times is None else fired.times[output.parents]
                    found.setdefault(output.tag, []).append((output.batch, times))
        return {
            tag: TimerOutput(concat([batch for batch, _ in pieces], self._schemas[tag]), _joined(pieces))
            for tag, pieces in found.items()
        }

    def _fired(self) -> None:
        """Leave nothing of a round that was turned round behind."""
        for process in self._processes:
            process.step.context._take_side()
        self._leave()

    def _leave(self) -> None:
        for process in self._processes:
            process.step.context._leave()


def _earliest(times: Iterable[int | None]) -> int | None:
    return min((ms for ms in times if ms is not None), default=None)


def _without(output: OutputRows, failed: I64) -> OutputRows:
    keep = ~np.isin(output.parents, failed)
    if keep.all():
        return output
    times = None if output.times is None else output.times[keep]
    return OutputRows(output.batch.filter(pa.array(keep)), output.parents[keep], times)


def _joined(pieces: Sequence[tuple[pa.RecordBatch, I64 | None]]) -> I64 | None:
    times = [times for _, times in pieces if times is not None]
    return np.concatenate(times) if times else None


def _counted(
    segments: Sequence[Segment],
) -> list[RecordSegment | AsyncSegment | AggregateSegment | WindowSegment]:
    return [segment for segment in segments if not isinstance(segment, BatchSegment)]


def _per_record(segments: Sequence[Segment]) -> list[RecordSegment]:
    own = [segment.by_record for segment in segments if isinstance(segment, WindowSegment)]
    return [*own, *(segment for segment in segments if isinstance(segment, RecordSegment))]
