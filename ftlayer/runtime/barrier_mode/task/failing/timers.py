"""Timers of a chain that fail alone: each fires whole or not at all, and is tried again as a record is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from ftlayer.clock import Now
from ftlayer.failures import PermanentFailure
from ftlayer.functions.chains.firing import FIRED_AT_ONCE, DueTimers, Timer, TimerKind
from ftlayer.functions.failures import RowFailure
from ftlayer.functions.undo.log import LateFailure, UndoLog
from ftlayer.functions.undo.pieces import in_pieces
from ftlayer.runtime.barrier_mode.task.failing.attempts import RecordAttempts, first_of_each
from ftlayer.runtime.barrier_mode.task.failing.waiting import WaitingRecord
from ftlayer.runtime.task.actions import Action
from ftlayer.runtime.task.outlet import ChannelOutlet, Routed
from ftlayer.runtime.task.pipeline import Fired, OperatorChain
from ftlayer.runtime.task.suspects import Suspects

Waited = Mapping[Timer, WaitingRecord]
"""Timers of one operator that failed before."""

_NONE: Waited = {}


@dataclass(frozen=True, slots=True)
class _Piece:
    """Timers that fired together: `ftlayer.functions.undo.pieces.PieceOfWork`."""

    fired: Fired
    routed: Routed

    @property
    def size(self) -> int:
        return self.fired.size

    @property
    def has_failures(self) -> bool:
        return bool(self.routed.failures)


class TimersAlone:
    """See the module. One subtask's; not for several threads."""

    def __init__(
        self,
        pipeline: OperatorChain,
        log: UndoLog,
        outlet: ChannelOutlet,
        attempts: RecordAttempts,
        suspects: Suspects,
    ) -> None:
        self._pipeline = pipeline
        self._log = log
        self._outlet = outlet
        self._attempts = attempts
        self._suspects = suspects

    def fire(self, stage: int, kind: TimerKind, now: Now) -> list[Action]:
        """Fire what is due in a stage of the pipeline."""
        return self._fire(stage, self._pipeline.due_timers(stage, kind, now), _NONE, now)

    def again(self, due: Sequence[WaitingRecord], now: Now) -> list[Action]:
        """Fire timers whose next attempt is due."""
        actions: list[Action] = []
        for (operator, kind), group in groupby(sorted(due, key=_alike), key=_alike):
            stage = self._pipeline.stage_of_timers(operator)
            for waited in _each_once(group):
                if stage is None:
                    self._no_longer(operator, waited, now)
                    continue
                timers = self._pipeline.timers_again(stage, operator, kind, list(waited), now)
                actions += self._fire(stage, timers, waited, now)
        return actions

    def _no_longer(self, operator: str, waited: Waited, now: Now) -> None:
        reason = f"{operator!r} has no on_timer any more: nothing can fire for this timer"
        for timer in waited.values():
            failure = RowFailure(0, operator, reason, "", fatal=True)
            self._attempts.timer_failed(timer, failure, now, waited=True)

    def _fire(self, stage: int, due: DueTimers, waited: Waited, now: Now) -> list[Action]:
        actions: list[Action] = []
        self._log.traced = True
        for _, piece in in_pieces(self._log, FIRED_AT_ONCE, partial(self._piece, stage, due, now)):
            self._settle(piece, waited, now)
            actions += self._outlet.send(None, piece.size, piece.routed)
            self._suspects.over()
        return actions

    def _piece(self, stage: int, due: DueTimers, now: Now, start: int, most: int) -> _Piece | None:
        suspects = self._suspects
        if suspects.one_at_a_time:
            most = 1
        guard = self._check if suspects.looks_at_timers else None
        try:
            fired = self._pipeline.fire(stage, due, most, now, guard)
            return None if fired is None else _Piece(fired, self._outlet.route(fired.passed, self._log))
        except LateFailure as late:
            raise LateFailure(start + late.row) from None

    def _check(self, operator: str, kind: TimerKind, timer: Timer) -> None:
        """Fail a timer that ends the process."""
        conviction = self._suspects.fires(operator, kind, *timer)
        if conviction is not None:
            error = PermanentFailure(conviction.reason)
            error.add_note(f"{conviction.place}: {conviction.traceback}")
            raise error

    def _settle(self, piece: _Piece, waited: Waited, now: Now) -> None:
        failures = first_of_each(piece.routed.failures)
        for place, timer in enumerate(piece.fired.timers) if waited else ():
            if place not in failures and timer in waited:
                self._attempts.timer_through(waited[timer])
        for place, failure in failures.items():
            key, time_ms = timer = piece.fired.timers[place]
            entry = waited.get(timer)
            if entry is None:
                is_event = piece.fired.kind == "event"
                entry = self._attempts.new_timer(piece.fired.operator, key, time_ms, now, is_event=is_event)
            self._attempts.timer_failed(entry, failure, now, waited=timer in waited)


def _each_once(timers: Iterable[WaitingRecord]) -> Iterator[Waited]:
    """Cut timers into groups that have each once: one that waits may have been set again, and have failed again."""
    left = [*timers]
    while left:
        group: dict[Timer, WaitingRecord] = {}
        again: list[WaitingRecord] = []
        for timer in left:
            if group.setdefault((timer.key, timer.event_time_ms or 0), timer) is not timer:
                again.append(timer)
        yield group
        left = again


def _alike(timer: WaitingRecord) -> tuple[str, TimerKind]:
    return timer.operator, "event" if timer.is_event_timer else "processing"
