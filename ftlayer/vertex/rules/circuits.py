"""Circuit breakers of topologies: while too many records of a stream fail, its records are held, and none dies.

    closed ──too many fail──▶ open ──its pause is over──▶ half-open ──a trial goes well──▶ closed
                               ▲                              │
                               └───────a trial fails──────────┘

While a breaker is not closed, the streams that it pauses take no new records (`hold_of`), send no replays
(`may_take`), and what fails or times out of them uses up no attempt: it waits to be let out (`ended`). Half-open, a few
replays are the trial, or one batch of a source; they take turns. Only what was let out as the trial
counts as one: what was under way before comes to its end whenever it does.

A stream may have several breakers, and a breaker several streams: those of one job that name it. Rules alone: each
method is an event with its time, or a question at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ftlayer.circuit import LEAST_RECORDS, CircuitBreaker, CircuitState, CircuitStatus
from ftlayer.store.rows import U64
from ftlayer.vertex.calls import StreamCircuit
from ftlayer.vertex.rules.owners import owner_of
from ftlayer.vertex.rules.retry import Cause
from ftlayer.vertex.rules.streams import Stream

TRIAL_ROWS = LEAST_RECORDS
"""Replays of one trial: of fewer records a share would say less."""

TRIAL_MS = 5_000
"""A trial is decided on what has come to its end by then; if nothing has, as much again is let out."""

OTHERS_AFTER_MS = 5_000
"""So long a trial waits for replays, or for new records, before it takes what there is."""


@dataclass(slots=True)
class _Trial:
    """What was let out to see whether it passes. ``roots`` have no outcome yet."""

    roots: set[int]
    out_ms: int
    records: int = 0
    failed: int = 0


@dataclass(slots=True, eq=False)
class _Circuit:
    """A breaker with the streams that it pauses."""

    breaker: CircuitBreaker
    streams: dict[str, Stream] = field(default_factory=dict)
    trial: _Trial | None = None
    half_open_ms: int = 0
    trials: int = 0

    @property
    def is_closed(self) -> bool:
        return self.breaker.state is CircuitState.CLOSED

    def is_for(self, now_ms: int, *, replays: bool) -> bool:
        """Whether the next trial is one of replays, or of new records: they take turns, and wait for each other.

        Of replays alone, records that never pass would keep the breaker open; of new ones, each trial would hold more.
        """
        if now_ms - self.half_open_ms >= OTHERS_AFTER_MS:
            return True
        has_replays = any(stream.waiting or stream.due_rows for stream in self.streams.values())
        return replays == (has_replays and self.trials % 2 == 0)

    def lets_out(self, now_ms: int) -> bool:
        """Whether something may go out now: anything when it is closed, a trial when it is half-open."""
        was = self.breaker.state
        if not self.breaker.may_try(now_ms):
            return False
        if was is CircuitState.OPEN:
            self.half_open_ms = now_ms
        if self.trial is not None and now_ms - self.trial.out_ms >= TRIAL_MS and self.trial.records:
            self._decide(self.trial, now_ms)
            return self.is_closed
        return self.trial is None or now_ms - self.trial.out_ms >= TRIAL_MS

    def held_ms(self, now_ms: int) -> int:
        """Return for how long nothing will be let out, as things are."""
        if self.trial is not None:
            return max(self.trial.out_ms + TRIAL_MS - now_ms, 0)
        return self.breaker.status(now_ms).next_trial_in_ms

    def try_with(self, roots: Iterable[int], now_ms: int) -> None:
        """These records are the trial, or more of it."""
        if self.trial is None:
            self.trial = _Trial(set(), now_ms)
        self.trial.roots.update(roots)
        self.trial.out_ms = now_ms

    def done(self, roots: U64, now_ms: int) -> None:
        if self.is_closed:
            self.breaker.outcome(len(roots), 0, now_ms)
        elif self.trial is not None:
            self.ended(roots.tolist(), (), now_ms)

    def ended(self, roots: Sequence[int], failed: Sequence[int], now_ms: int) -> None:
        """These came to their end, ``failed`` of them by what may pass another time."""
        if self.is_closed:
            self.breaker.outcome(len(roots), len(failed), now_ms)
        elif self.trial is not None:
            trial = self.trial
            trial.records += len(trial.roots.intersection(roots))
            trial.failed += len(trial.roots.intersection(failed))
            trial.roots.difference_update(roots)
            of_all = trial.records + len(trial.roots)
            if not trial.roots or self._fails(of_all, trial.failed):
                self._decide(trial, now_ms)

    def forget(self, roots: Iterable[int], now_ms: int) -> None:
        """These will not come to an end under these ids."""
        if self.trial is None:
            return
        self.trial.roots.difference_update(roots)
        if not self.trial.roots:
            self._decide(self.trial, now_ms)

    def _decide(self, trial: _Trial, now_ms: int) -> None:
        self.trial = None
        if trial.records:
            self.trials += 1
            fails = self._fails(trial.records, trial.failed)
            self.breaker.tried(trial.records, trial.failed, now_ms, fails=fails)

    def _fails(self, records: int, failed: int) -> bool:
        """Whether too many of a trial have failed; a number a minute says nothing of the few that are in it."""
        if self.breaker.limit.share is None and 2 * failed > records:
            return True
        return self.breaker.trial_fails(records, failed)


_Declared = tuple[StreamCircuit, _Circuit]


class Circuits:
    """The breakers of a shard's streams, and what wrapped queries say of theirs."""

    def __init__(self) -> None:
        self._circuits: dict[tuple[str, str], _Circuit] = {}  # by job and name
        self._of: dict[str, tuple[_Declared, ...]] = {}  # by stream
        self.reported: dict[str, dict[str, CircuitStatus]] = {}  # by query

    def declare(self, stream: Stream) -> None:
        """Take the breakers that a stream's options name. One with another limit than before begins closed."""
        job = owner_of(stream.name)
        for _, circuit in self._of.pop(stream.name, ()):
            circuit.streams.pop(stream.name, None)
        declared: list[_Declared] = []
        for one in stream.options.circuits:
            circuit = self._circuits.setdefault((job, one.name), _Circuit(CircuitBreaker(one.limit)))
            if circuit.breaker.limit != one.limit:
                circuit.breaker, circuit.trial = CircuitBreaker(one.limit), None
            circuit.streams[stream.name] = stream
            declared.append((one, circuit))
        if declared:
            self._of[stream.name] = tuple(declared)
        self._circuits = {key: circuit for key, circuit in self._circuits.items() if circuit.streams}

    # ------------------------------------------------------------ questions

    def may_take(self, stream: Stream, limit: int, now_ms: int) -> int:
        """Return how many of ``limit`` replays may be sent now."""
        for declared, circuit in self._of.get(stream.name, ()):
            if not circuit.lets_out(now_ms):
                limit = 0
            elif not circuit.is_closed:
                is_trial = declared.counts and circuit.is_for(now_ms, replays=True)
                limit = min(limit, TRIAL_ROWS) if is_trial else 0
        return limit

    def hold_of(self, stream: Stream, now_ms: int) -> str | None:
        """Say why no new records are taken now; None when they are."""
        held = None
        for declared, circuit in self._of.get(stream.name, ()):
            if circuit.lets_out(now_ms) and (
                circuit.is_closed or (declared.counts and circuit.is_for(now_ms, replays=False))
            ):
                continue
            held = f"stream {stream.name!r}: the circuit breaker {named(declared.name)} is {circuit.breaker.state}"
        return held

    def held_ms(self, stream: Stream, now_ms: int) -> int | None:
        """Return how long no replay will be sent, as things are; None when they may be now."""
        pauses = [circuit.held_ms(now_ms) for _, circuit in self._of.get(stream.name, ())]
        return max(pauses, default=0) or None

    def statuses(self, streams: Iterable[str], now_ms: int) -> dict[str, CircuitStatus]:
        """Return what the breakers of streams of one job say, by name."""
        return {
            declared.name: circuit.breaker.status(now_ms)
            for stream in streams
            for declared, circuit in self._of.get(stream, ())
        }

    def all_statuses(self, now_ms: int) -> dict[str, dict[str, CircuitStatus]]:
        """Return what all breakers say, those of queries too, by job or query and name."""
        found = {query: dict(circuits) for query, circuits in self.reported.items()}
        for (job, name), circuit in self._circuits.items():
            found.setdefault(job, {})[name] = circuit.breaker.status(now_ms)
        return found

    # ------------------------------------------------------------ events

    def let_out(self, stream: Stream, roots: U64, now_ms: int) -> None:
        """These go out: they are the trial of what is half-open."""
        for declared, circuit in self._of.get(stream.name, ()):
            if declared.counts and circuit.breaker.state is CircuitState.HALF_OPEN and len(roots):
                circuit.try_with(roots.tolist(), now_ms)

    def done(self, stream: Stream, roots: U64, now_ms: int) -> None:
        for declared, circuit in self._of.get(stream.name, ()):
            if declared.counts:
                circuit.done(roots, now_ms)

    def ended(self, stream: Stream, roots: Sequence[int], causes: Sequence[Cause], now_ms: int) -> bool:
        """Attempts have failed or timed out; return whether they are held: they use up no attempt."""
        declared = self._of.get(stream.name, ())
        failed: dict[str, list[int]] = {one.name: [] for one, _ in declared if one.counts}
        own = next((name for name in failed if name in ("", source_of(stream.name))), None)
        for root, cause in zip(roots, causes, strict=True):
            name = cause.operator if cause.operator in failed else own
            if name is not None and not cause.fatal:
                failed[name].append(root)
        for one, circuit in declared:
            if one.counts:
                circuit.ended(roots, failed[one.name], now_ms)
        return not all(circuit.is_closed for _, circuit in declared)

    def recalled(self, roots: U64, now_ms: int) -> None:
        """These are due again, under other ids."""
        for circuit in self._circuits.values():
            if circuit.trial is not None:
                circuit.forget(roots.tolist(), now_ms)


def source_of(stream: str) -> str:
    """Return the uid of the operator whose records a topology's stream has."""
    return stream.partition("/")[2].partition(":")[0]


def named(name: str) -> str:
    """Return how a breaker is called in a sentence."""
    return f"of {name!r}" if name else "of all records"
