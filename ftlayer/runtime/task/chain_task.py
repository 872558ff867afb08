"""A chain of functions, maybe with a sink at its end, as a task."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from ftlayer.checkpoint.letters import ChainLetter
from ftlayer.common.clock import Now
from ftlayer.common.rules.circuit import CircuitStatus
from ftlayer.common.rules.histogram import Histogram
from ftlayer.functions.chains.firing import TimerKind
from ftlayer.functions.current import UNTRACKED, Known
from ftlayer.functions.failures import raise_signalled
from ftlayer.records.ids import U64Array
from ftlayer.runtime.handler import Handler
from ftlayer.runtime.protocol import messages
from ftlayer.runtime.protocol.messages import Batch, Idle, Readmit, Watermark
from ftlayer.runtime.task.actions import (
    Action,
    ChannelReset,
    ElementCame,
    HoldInput,
    RowsPersisted,
    TaskEnded,
    TaskEvent,
    TaskStart,
    TimeCame,
    refused,
)
from ftlayer.runtime.task.contract import ChainCompanion, KnownOf, replayed
from ftlayer.runtime.task.event_time import Alarm, StatusWatermarkValve
from ftlayer.runtime.task.pipeline import OperatorChain, Outlet
from ftlayer.topology.job_graph import Channel, JobEdge

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FailureCounts:
    """Records of a subtask of a chain that failed.

    Attributes:
        retried: how often one failed and another attempt followed, in this run.
        dead: how many were given up, in this run.
        waiting, waiting_bytes: those that wait for another attempt now.
        paused: it takes no input now, since too many fail or wait.
    """

    retried: int = 0
    dead: int = 0
    waiting: int = 0
    waiting_bytes: int = 0
    paused: bool = False


NO_FAILURES = FailureCounts()


class ChainRows:
    """One subtask's; its `ChainTask` owns it. By default nothing waits in it."""

    def opened(self, now: Now) -> None:
        """All functions are open, and state is restored."""

    @abstractmethod
    def take(self, input: int, batch: Batch, now: Now) -> list[Action]:
        """Run a batch of one input of the chain, and send what came of it."""

    @abstractmethod
    def fire(self, stage: int, kind: TimerKind, now: Now) -> list[Action]:
        """Fire the timers of a stage of the pipeline that are due, and send what they put out on its way."""

    def again(self, now: Now) -> list[Action]:
        return []

    def readmit(self, letters: tuple[ChainLetter, ...], now: Now) -> None:
        raise ValueError(f"{len(letters)} dead letters came back to a chain that makes none")

    def holds(self, mark: Watermark | Idle) -> bool:
        """Whether the chain is to keep a mark of its inputs to itself for now."""
        return False

    def ends(self, now: Now) -> None:
        """No more records come, but those that wait: they are not to wait for long."""

    def last(self) -> None:
        """The chain has said that it is done: what fails from now on has no further attempt."""

    def due_ms(self, now: Now) -> int | None:
        """Return the monotone time (ms) at which `again` has something to do; None while nothing waits."""
        return None

    def hold_ms(self, now: Now) -> int:
        """Return for how long the chain is to take nothing; 0: it goes on."""
        return 0

    def circuits(self, now_ms: int) -> dict[str, CircuitStatus]:
        """Return where circuit breakers are, by operator, at a monotone time. Any thread may look."""
        return {}

    @property
    def counts(self) -> FailureCounts:
        return NO_FAILURES


class WholeBatches(ChainRows):
    """Where a record that fails is the handler's to settle: a batch goes through as it is."""

    counts = NO_FAILURES

    def __init__(self, pipeline: OperatorChain, handler: Handler, outlet: Outlet) -> None:
        self._pipeline = pipeline
        self._handler = handler
        self._outlet = outlet

    def take(self, input: int, batch: Batch, now: Now) -> list[Action]:
        lineage = batch.lineage
        fresh = lineage is None or lineage.origins is None or not replayed(lineage).all()
        known: Known = UNTRACKED if lineage is None else KnownOf(lineage)
        passed = self._pipeline.run(batch.payload, batch.times, fresh, input, now, known)
        return self._outlet.take(lineage, batch.payload.num_rows, passed, now)

    def fire(self, stage: int, kind: TimerKind, now: Now) -> list[Action]:
        found = self._pipeline.stages[stage]
        if kind == "event":
            fired = found.chain.fire_event_timers(found.watermark_ms, now.wall_ms)
        else:
            fired = found.chain.fire_processing_timers(now.wall_ms)
        if not fired:
            return []
        passed = self._pipeline.run_behind(stage, fired, now)
        if passed.failures:
            # Chains end behind timers where records are tracked: here only the task can fail.
            self._handler.xor.fail(None, passed.failures)
        return self._outlet.take_fired(passed.outputs, now)


class ChainTask:
    """One subtask of a chain of functions, with one input or the two of a `CoProcess`.

    A record that fails yields nothing and fails all its roots; any other is acknowledged when it is settled: when
    its children are emitted, or, at a sink, when all its rows are written.
    """

    def __init__(
        self,
        uid: str,
        subtask: int,
        edges: tuple[JobEdge, ...],
        gate: StatusWatermarkValve,
        pipeline: OperatorChain,
        rows: ChainRows,
        outlet: Outlet,
        companion: ChainCompanion,
    ) -> None:
        """``edges`` lead into the chain; ``rows`` and ``companion`` are its own."""
        self.uid = uid
        self.subtask = subtask
        self._input = {edge.number: edge.input for edge in edges}
        self._gate = gate
        self._pipeline = pipeline
        self._rows = rows
        self._outlet = outlet
        self._companion = companion
        self._alarm = Alarm()
        self._opened = False
        self._closing = False
        self._ended = False
        # Marks that have not entered, and not left, for records that wait.
        self._held: messages.Watermark | messages.Idle | None = None
        self._leaving: messages.Watermark | messages.Idle | None = None
        # A stage whose timers were interrupted, and the mark that goes on behind them. Nothing is taken meanwhile.
        self._cut: tuple[int, messages.Watermark | None] | None = None
        # The last watermark has gone its way; and nothing waits any more behind it, so that this was told.
        self._is_last = self._told_last = False
        self._generators = [stage.generator for stage in pipeline.stages if stage.generator is not None]
        # Whether it has timers, or watermarks of its own.
        self._is_timed = bool(self._generators) or any(stage.chain.has_timers for stage in pipeline.stages)

    def handle(self, event: TaskEvent, now: Now) -> list[Action]:
        match event:
            case ElementCame(channel, element):
                return self._came(channel, element, now)
            case TimeCame():
                return self._time_came(now)
            case TaskStart():
                self._opened = True
                self._pipeline.open(now.mono_ms)
                self._companion.opened()
                self._rows.opened(now)
                # What was interrupted before a restore comes before all else.
                actions = [*self.gate_moved(now), *self._event_time_moved(now)]
                return [*actions, *self._wake(now), *self._hold(now)]
            case ChannelReset(channel):
                if self._closing:
                    return []
                self._gate.reset(channel)
                for generator in self._generators:
                    generator.reset(channel, now.mono_ms)
                return [*self.gate_moved(now), *self._hold(now)]
            case Readmit(letters=letters):
                if self._closing:
                    return []  # They are still where they came from, and come with the job's next start.
                self._rows.readmit(letters, now)
                return self._wake(now)
            case RowsPersisted(ticket):
                return [*self._outlet.accepted(ticket), *self._end()]
            case _:
                raise refused(self.uid, event)

    def held_roots(self) -> U64Array:
        return self._outlet.held

    def gate_moved(self, now: Now) -> list[Action]:
        actions: list[Action] = []
        while (mark := self._gate.news()) is not None:
            self._held = mark
            actions.extend(self._let_go(now))
        if self._gate.ended and self._cut is None:
            actions.extend(self._close(now))
        return actions

    def flush(self, now: Now) -> list[Action]:
        self._outlet.flush(now, force=True)
        return self._companion.reports()

    def abandon(self) -> None:
        """Close the functions before the chain's end, if they were opened: it starts again elsewhere.

        What a function raises is logged. The chain takes nothing any more; its companion hears nothing of it.
        """
        opened = self._opened and not self._closing
        self._closing = self._ended = True
        if opened:
            try:
                self._pipeline.close()
            except BaseException as error:
                raise_signalled(error)
                logger.warning("%r does not close cleanly; it starts again", self.uid, exc_info=True)

    @property
    def is_over(self) -> bool:
        return self._closing

    @property
    def progress(self) -> int:
        """A number that changes whenever a record is done. Any thread may look."""
        return self._pipeline.progress

    @property
    def late(self) -> int:
        """How many records came too late for all windows, and went nowhere. Any thread may look."""
        return self._pipeline.late

    @property
    def failures(self) -> FailureCounts:
        return self._rows.counts

    def circuits(self, now_ms: int) -> dict[str, CircuitStatus]:
        return self._rows.circuits(now_ms)

    @property
    def watermark_ms(self) -> int:
        return self._pipeline.stages[-1].watermark_ms

    @property
    def event_times(self) -> dict[str, int]:
        """How far each operator's event time has come, before the end of the inputs."""
        found: dict[str, int] = {}
        for stage in self._pipeline.stages:
            reached_ms = (stage.generator or self._gate).reached_ms
            # What the chain holds back was not there yet.
            time_ms = min(stage.watermark_ms, reached_ms)
            if time_ms > messages.MIN_TIME_MS:
                found |= dict.fromkeys(stage.uids, time_ms)
        return found

    @property
    def split_times(self) -> dict[str, dict[str, int]]:
        return {generator.operator.uid: times for generator in self._generators if (times := generator.times)}

    def restore_event_time(self, times: Mapping[str, int], splits: Mapping[str, Mapping[str, int]]) -> None:
        """Begin where `event_times` and `split_times` were, so that what was late stays late."""
        for stage in self._pipeline.stages:
            time_ms = min((times[uid] for uid in stage.uids if uid in times), default=messages.MIN_TIME_MS)
            stage.watermark_ms = time_ms
            if stage.generator is None:
                self._gate.restore(time_ms)
            else:
                stage.generator.restore(time_ms, splits.get(stage.generator.operator.uid, {}))

    @property
    def latencies(self) -> Mapping[str, Histogram]:
        """By source: how old records are at the sink, if the chain ends in one. Any thread may look."""
        return self._outlet.latencies.histograms

    @property
    def row(self) -> int | None:
        """The row of its batch that a function works on now, None if unknown. Any thread may look."""
        return self._pipeline.row

    # ------------------------------------------------------------ records

    def _came(self, channel: Channel, element: messages.Element, now: Now) -> list[Action]:
        if self._closing:
            return []
        if isinstance(element, messages.Batch):
            self._pipeline.origin = None if element.split is None else (channel, element.split)
            actions, records = self._take(self._input[channel.edge], element, now), element.payload.num_rows
            self._pipeline.origin = None
        elif isinstance(element, messages.Splits):
            for generator in self._generators:
                generator.splits(channel, element, now.mono_ms)
            actions, records = self._event_time_moved(now), 0
        elif isinstance(element, messages.LatencyMarker):
            actions, records = self._outlet.marker(element, now), 0
        else:
            self._gate.mark(channel, element)
            if element == messages.EndOfStream() or element == messages.Watermark(messages.MAX_TIME_MS):
                for generator in self._generators:
                    generator.over(channel)
            actions, records = self.gate_moved(now), 0
            if not self._closing:
                actions.extend(self._event_time_moved(now))
        actions += self._wake(now)
        actions += self._hold(now)
        actions += self._companion.tend(records, now)
        return actions

    def _take(self, input: int, batch: messages.Batch, now: Now) -> list[Action]:
        actions = self._rows.take(input, batch, now)
        actions.extend(self._companion.reports())
        actions.extend(self._event_time_moved(now))
        return actions

    def _again(self, now: Now) -> list[Action]:
        """Run what waits for another attempt, and pass on what the chain kept to itself meanwhile."""
        actions = self._rows.again(now)
        # Also where nothing was put out: timers may have been set that are due.
        return [*actions, *self._event_time_moved(now), *self._let_go(now)]

    # ------------------------------------------------------------ event time

    def _let_go(self, now: Now) -> list[Action]:
        """Pass on what the inputs have said of event time, unless records wait that it is not to overtake."""
        actions: list[Action] = []
        mark = self._held
        if mark is not None and self._cut is None and not self._keeps(mark, now):
            self._held = None
            actions = self._before(0, mark, now)
            self._is_last = self._is_last or mark == messages.Watermark(messages.MAX_TIME_MS)
        actions.extend(self._leave(now))
        if self._is_last and self._cut is None and not self._told_last and not self._rows.counts.waiting:
            self._told_last = True
            self._rows.last()
            actions.extend(self._companion.data_ended())
        return actions

    def _leave(self, now: Now) -> list[Action]:
        """Send on what has come through, unless timers, or records of its own event time, wait that are before it."""
        mark = self._leaving
        if mark is None or self._keeps(mark, now):
            return []
        self._leaving = None
        return self._outlet.mark(mark)

    def _keeps(self, mark: messages.Watermark | messages.Idle, now: Now) -> bool:
        if not self._rows.holds(mark):
            return False
        if mark == messages.Watermark(messages.MAX_TIME_MS):
            self._rows.ends(now)
        return True

    def _event_time_moved(self, now: Now) -> list[Action]:
        """Say what the chain's own watermarks are now, and fire timers that were set behind a watermark."""
        actions: list[Action] = []
        if not self._is_timed:
            return actions
        for place, stage in enumerate(self._pipeline.stages):
            while (
                self._cut is None
                and stage.generator is not None
                and (mark := stage.generator.mark(now.mono_ms)) is not None
            ):
                actions.extend(self._behind(place, mark, now))
            actions.extend(self._fire(place, now) if self._cut is None else ())
        return actions

    def _before(self, place: int, mark: messages.Watermark | messages.Idle, now: Now) -> list[Action]:
        """Take a mark in front of a stage. One with a watermark of its own cares for the end alone."""
        generator = self._pipeline.stages[place].generator
        if generator is None:
            return self._behind(place, mark, now)
        if mark != messages.Watermark(messages.MAX_TIME_MS):
            return []
        generator.end()
        last = generator.mark(now.mono_ms)
        return [] if last is None else self._behind(place, last, now)

    def _behind(self, place: int, mark: messages.Watermark | messages.Idle, now: Now) -> list[Action]:
        actions: list[Action] = []
        if isinstance(mark, messages.Watermark):
            self._pipeline.stages[place].watermark_ms = mark.time_ms
            actions.extend(self._fire(place, now, mark))
            if self._cut is not None:
                return actions
        return [*actions, *self._past(place, mark, now)]

    def _past(self, place: int, mark: messages.Watermark | messages.Idle, now: Now) -> list[Action]:
        last = place + 1 == len(self._pipeline.stages)
        if last:
            self._leaving = mark
        return self._leave(now) if last else self._before(place + 1, mark, now)

    def _fire(self, place: int, now: Now, behind: messages.Watermark | None = None) -> list[Action]:
        """Fire what a stage's watermark has reached; where that is interrupted, ``behind`` waits for the rest."""
        if not self._is_due(place):
            return []
        actions = self._rows.fire(place, "event", now)
        if self._is_due(place):
            self._cut = place, behind
        return actions

    def _is_due(self, place: int) -> bool:
        stage = self._pipeline.stages[place]
        due = stage.chain.next_event_ms
        return due is not None and due <= stage.watermark_ms

    def _resume(self, now: Now) -> list[Action]:
        """Fire the timers that were interrupted, then do what had to wait for them."""
        if self._cut is None:
            return []
        (place, mark), self._cut = self._cut, None
        actions = self._fire(place, now, mark)
        if self._cut is None and mark is not None:
            actions.extend(self._past(place, mark, now))
        return [*actions, *self._event_time_moved(now), *self._let_go(now), *self.gate_moved(now)]

    # ------------------------------------------------------------ time and end

    def _time_came(self, now: Now) -> list[Action]:
        if self._closing:
            return []
        self._alarm.rung()
        rest_ms = self._companion.rest_ms
        if rest_ms is not None:
            return [*self._alarm.set(now.mono_ms + rest_ms), *self._companion.tend(0, now)]
        actions = self._resume(now)
        if self._cut is not None or self._closing:
            return [*actions, *self._hold(now), *self._companion.tend(0, now)]
        for place, stage in enumerate(self._pipeline.stages):
            due = stage.chain.next_processing_ms
            if due is not None and due <= now.wall_ms:
                actions.extend(self._rows.fire(place, "processing", now))
        actions.extend(self._event_time_moved(now))
        if self._cut is None:
            actions.extend(self._again(now))
        due_ms = self._outlet.due_ms
        if due_ms is not None and due_ms <= now.mono_ms:
            self._outlet.flush(now, force=False)
            actions.extend(self._companion.reports())
        return [*actions, *self._wake(now), *self._hold(now), *self._companion.tend(0, now)]

    def _hold(self, now: Now) -> list[Action]:
        if self._cut is not None:
            return [HoldInput(now.mono_ms)]
        pause_ms = 0 if self._closing else self._rows.hold_ms(now)
        return [HoldInput(now.mono_ms + pause_ms)] if pause_ms else []

    def _wake(self, now: Now) -> list[Action]:
        if self._closing:
            return []
        due: list[int] = []
        for ms in (self._outlet.due_ms, self._rows.due_ms(now)):
            if ms is not None:
                due.append(ms)
        for stage in self._pipeline.stages if self._is_timed else ():
            if stage.generator is not None and (due_ms := stage.generator.due_ms) is not None:
                due.append(due_ms)
            timer = stage.chain.next_processing_ms
            if timer is not None:
                due.append(now.mono_ms + max(timer - now.wall_ms, 0))
        return self._alarm.set(min(due)) if due else []

    def _close(self, now: Now) -> list[Action]:
        self._closing = True
        actions = self.flush(now)
        self._pipeline.close()
        self._outlet.close()
        actions.extend(self._outlet.mark(messages.EndOfStream()))
        actions.extend(self._end())
        self._companion.closed()
        return actions

    def _end(self) -> list[Action]:
        if not self._closing or self._ended or self._outlet.waiting:
            return []
        self._ended = True
        return [TaskEnded()]
