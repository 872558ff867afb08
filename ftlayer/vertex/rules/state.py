"""The memory that all rules of a shard work on, and how it is made from the store."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from ftlayer.common.checks import LONGEST_MS, check_choice, check_int
from ftlayer.common.clock import Now
from ftlayer.common.rules.circuit import LEAST_RECORDS, CircuitBreaker, CircuitState, CircuitStatus
from ftlayer.errors import ProtocolError, StaleIncarnationError, StoreDamagedError
from ftlayer.records.ids import RowRoots, ids_of, root_ids, shard_bits
from ftlayer.records.traced import Sampler
from ftlayer.vertex.acker import AckerTable, BucketRotations, ExactTracker, Roots, Tracker
from ftlayer.vertex.calls import Envelope, Failure, Reply, StreamCircuit
from ftlayer.vertex.rules import source_ranges
from ftlayer.vertex.rules.followed import FollowedAttempts
from ftlayer.vertex.rules.grouping import DeadIndex
from ftlayer.vertex.rules.streams import (
    MAX_REASON,
    MAX_TRACEBACK,
    Owners,
    ShardCounters,
    Stream,
    cut,
    owner_of,
    stream_of_record,
)
from ftlayer.vertex.store import dead_index as failed
from ftlayer.vertex.store import streams as stored
from ftlayer.vertex.store.dead_index import FailedTable
from ftlayer.vertex.store.key_value import ReadTransaction, WriteTransaction
from ftlayer.vertex.store.rows import U64, Payloads, TextChanges


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """Options of one `FTLayerCore`.

    ``shard`` of ``shards`` (a power of two) is in the top bits of its root ids. ``tracker`` "exact"
    remembers every id, some hundred times slower, so that `Explain` can tell what a root waits for.
    A root expires between its stream's timeout and timeout x (1 + 1 / (buckets - 1)). What completed is
    written down ``flush_ms`` after it did; what is not written when the vertex is lost is replayed.
    ``traced`` is the share of records whose attempts are followed (`FollowedAttempts`), 0 for none.

    Raises `ConfigError` for a value out of range.
    """

    shard: int = 0
    shards: int = 1
    tracker: Literal["table", "exact"] = "table"
    buckets: int = 3
    flush_ms: int = 100
    traced: float = 0.0

    def __post_init__(self) -> None:
        shard_bits(self.shards)
        check_int(self.shard, "shard", least=0, most=self.shards - 1)
        check_choice(self.tracker, "tracker", ("table", "exact"))
        check_int(self.buckets, "buckets", least=2, most=1_000)
        check_int(self.flush_ms, "flush_ms", least=0, most=LONGEST_MS)


# Circuit breakers of topologies: while too many records of a stream fail, its records are held, and none dies.
#
#     closed ──too many fail──▶ open ──its pause is over──▶ half-open ──a trial goes well──▶ closed
#                                ▲                              │
#                                └───────a trial fails──────────┘
#
# While a breaker is not closed, the streams that it pauses take no new records (`hold_of`), send no replays
# (`may_take`), and what fails or times out of them uses up no attempt: it waits to be let out (`ended`). Half-open, a
# few replays are the trial, or one batch of a source; they take turns. Only what was let out as the trial counts as
# one: what was under way before comes to its end whenever it does.
#
# A stream may have several breakers, and a breaker several streams: those of one job that name it. Rules alone: each
# method is an event with its time, or a question at a time.


TRIAL_ROWS = LEAST_RECORDS
"""Replays of one trial: of fewer records a share would say less."""

TRIAL_MS = 5_000
"""A trial is decided on what has come to its end by then; if nothing has, as much again is let out."""

OTHERS_AFTER_MS = 5_000
"""So long a trial waits for replays, or for new records, before it takes what there is."""


@dataclass(slots=True)
class _Trial:
    roots: set[int]
    out_ms: int
    records: int = 0
    failed: int = 0


@dataclass(slots=True, eq=False)
class _Circuit:
    breaker: CircuitBreaker
    streams: dict[str, Stream] = field(default_factory=dict)
    trial: _Trial | None = None
    half_open_ms: int = 0
    trials: int = 0

    @property
    def is_closed(self) -> bool:
        return self.breaker.state is CircuitState.CLOSED

    def is_for(self, now_ms: int, *, replays: bool) -> bool:
        """Whether the next trial is of replays, or of new records: by turns, so that neither kind holds up all."""
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
        if self.trial is not None:
            return max(self.trial.out_ms + TRIAL_MS - now_ms, 0)
        return self.breaker.status(now_ms).next_trial_in_ms

    def try_with(self, roots: Iterable[int], now_ms: int) -> None:
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

    def may_take(self, stream: Stream, limit: int, now_ms: int) -> int:
        for declared, circuit in self._of.get(stream.name, ()):
            if not circuit.lets_out(now_ms):
                limit = 0
            elif not circuit.is_closed:
                is_trial = declared.counts and circuit.is_for(now_ms, replays=True)
                limit = min(limit, TRIAL_ROWS) if is_trial else 0
        return limit

    def hold_of(self, stream: Stream, now_ms: int) -> str | None:
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
        return {
            declared.name: circuit.breaker.status(now_ms)
            for stream in streams
            for declared, circuit in self._of.get(stream, ())
        }

    def all_statuses(self, now_ms: int) -> dict[str, dict[str, CircuitStatus]]:
        found = {query: dict(circuits) for query, circuits in self.reported.items()}
        for (job, name), circuit in self._circuits.items():
            found.setdefault(job, {})[name] = circuit.breaker.status(now_ms)
        return found

    def let_out(self, stream: Stream, roots: U64, now_ms: int) -> None:
        """These go out: they are the trial of what is half-open."""
        for declared, circuit in self._of.get(stream.name, ()):
            if declared.counts and circuit.breaker.state is CircuitState.HALF_OPEN and len(roots):
                circuit.try_with(roots.tolist(), now_ms)

    def done(self, stream: Stream, roots: U64, now_ms: int) -> None:
        for declared, circuit in self._of.get(stream.name, ()):
            if declared.counts:
                circuit.done(roots, now_ms)

    def ended(self, stream: Stream, roots: Sequence[int], causes: Sequence[Failure], now_ms: int) -> bool:
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
        for circuit in self._circuits.values():
            if circuit.trial is not None:
                circuit.forget(roots.tolist(), now_ms)


def source_of(stream: str) -> str:
    """Return the uid of the operator whose records a topology's stream has."""
    return stream.partition("/")[2].partition(":")[0]


def named(name: str) -> str:
    return f"of {name!r}" if name else "of all records"


MAX_HELD = 10_000
"""With a long traceback each, about 90 MB."""


class EarlyFailures:
    """Why roots failed that are not registered yet, the first reason of each.

    Each is in a bucket of the caller's, which drops it when its time is over. Of more than `MAX_HELD` the oldest ones
    are dropped: their roots time out instead.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, Failure]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, root: int, cause: Failure, bucket: int) -> int:
        """Keep why ``root`` failed; return how many were dropped for it."""
        if root in self._held:
            return 0
        kept = replace(
            cause, reason=cut(cause.reason, MAX_REASON), traceback=cut(cause.traceback, MAX_TRACEBACK)
        )
        self._held[root] = bucket, kept
        if len(self._held) <= MAX_HELD:
            return 0
        del self._held[next(iter(self._held))]
        return 1

    def take(self, roots: RowRoots) -> dict[int, Failure]:
        if not self._held:
            return {}
        return {root: self._held.pop(root)[1] for root in set(ids_of(roots).tolist()) & self._held.keys()}

    def drop(self, buckets: Sequence[int]) -> int:
        over = [root for root, (bucket, _) in self._held.items() if bucket in buckets]
        for root in over:
            del self._held[root]
        return len(over)


@dataclass(slots=True)
class Group:
    """Effects of the calls of an open transaction that are not in memory yet.

    It is dropped with its transaction. ``unconfirmed`` counts calls whose ``after`` did not run; ``irrevocable`` says
    that one of them changed memory already, so that a lost transaction leaves memory wrong.
    """

    replies: dict[Envelope, Reply] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    streams: dict[str, Stream] = field(default_factory=dict)
    texts: TextChanges = field(default_factory=TextChanges)
    unconfirmed: int = 0
    irrevocable: bool = False

    def add_rows(self, stream: str, rows: int) -> None:
        """Count rows that will be in flight (negative: that now are)."""
        self.rows[stream] = self.rows.get(stream, 0) + rows


class ShardState:
    def __init__(self, options: LayerOptions, incarnation: int) -> None:
        self.options = options
        self.incarnation = incarnation
        self.payloads = Payloads()
        self.segments = stored.Segments(self.payloads)
        self.live = source_ranges.LiveSegments(self.segments)
        self.ranges = source_ranges.SourceRanges()
        self.tracker: Tracker = ExactTracker() if options.tracker == "exact" else AckerTable()
        self.rotations = BucketRotations(options.buckets)
        self.orphan_rotations = BucketRotations(options.buckets)
        self.early = EarlyFailures()  # in buckets of `orphan_rotations`
        self.owners = Owners()
        self.circuits = Circuits()
        self.dead_index = DeadIndex()
        self.followed = FollowedAttempts(Sampler(options.traced)) if options.traced else None
        self.streams: dict[str, Stream] = {}
        self.numbers: dict[int, Stream] = {}
        self.timed_out: dict[int, bytes] = {}  # root → key of its record in the table of waiting ones
        self.cancelled: set[bytes] = set()  # keys of waiting records that completed late
        self.counters = ShardCounters()
        self.next_segment = 0
        self.group = Group()
        self._serials = 0
        # Drawn: what an earlier incarnation has given out may still come back in late events.
        self._fresh_key = os.urandom(16)
        self._fresh = 0

    def fresh_roots(self, rows: int) -> U64:
        """Return roots for rows that are sent again: none of them was given out before, nor will be again."""
        self._fresh += rows
        shard, shards = self.options.shard, self.options.shards
        return root_ids(self._fresh_key, self._fresh - rows, rows, shard=shard, shards=shards)

    @property
    def exact(self) -> bool:
        return isinstance(self.tracker, ExactTracker)

    def new_segment(self) -> int:
        """Return the number of the next segment. Lost transactions leave gaps."""
        self.next_segment += 1
        return self.next_segment - 1

    def new_serial(self) -> int:
        """Return a number that tells two keys apart, in any incarnation."""
        self._serials += 1
        return self.incarnation << 32 | self._serials

    def add_stream(self, stream: Stream) -> None:
        self.streams[stream.name] = stream
        self.numbers[stream.number] = stream
        self.circuits.declare(stream)

    def find_stream(self, name: str) -> Stream | None:
        """Return a stream, one made by this transaction too; None if there is none."""
        return self.streams.get(name) or self.group.streams.get(name)

    def stream(self, name: str) -> Stream:
        stream = self.find_stream(name)
        if stream is None:
            raise ProtocolError(f"stream {name!r} is unknown; declare it first (OpenStream, or OpenQuery)")
        return stream

    def bucket(self, stream: Stream, mono_ms: int) -> int:
        return self.rotations.bucket(stream.options.timeout_ms, mono_ms)

    def are_pending(self, roots: U64, locations: U64) -> stored.Mask:
        """Return which of these rows are pending under these roots, bool[n]: of rows with one root, one is."""
        located = self.tracker.locate(roots)
        pending: stored.Mask = located.pending & (located.locations == locations)
        return pending

    def forget_ranges(self, txn: WriteTransaction, stream: Stream) -> None:
        """Follow the ranges of a stream no more: its rows are stored from here on, and read from where these begin."""
        for partition in self.ranges.of_stream(stream):
            for each in partition.ranges.values():
                recalled = each.recalled_left
                left = int(np.count_nonzero(~each.done))
                self.live.forget(each.segment)
                if each.roots is not None:
                    # Late events must not complete them. Another stream's row may have the same root.
                    roots = each.roots[~each.done]
                    locations = source_ranges.locations_of(each.segment, len(each.done))[~each.done]
                    self.tracker.forget(roots[self.are_pending(roots, locations)])
                stream.in_flight -= left
                stream.unstored -= recalled
            self.ranges.forget(txn, partition)

    def complete(self, complete: Roots, now: Now) -> None:
        for segment, rows, positions in source_ranges.by_segment(complete.locations):
            live = self.live.get(segment)
            new = self.live.finish(segment, rows)
            done = complete.roots[positions[new]]
            finished = len(done)
            if live is not None:
                live.stream.in_flight -= finished
                live.stream.counters.completed += finished
                if finished and live.registered is not None:
                    seconds = (now.mono_ms - live.registered.mono_ms) / 1_000
                    live.stream.completion.observe(seconds, finished, root=int(done[-1]), at_ms=now.wall_ms)
                self.circuits.done(live.stream, done, now.mono_ms)
                if self.followed is not None:
                    self.followed.completed(done, now)
            if finished < len(rows):
                for root in complete.roots[positions[~new]].tolist():
                    self._cancel_replay(root)

    def _cancel_replay(self, root: int) -> None:
        """A row that is not in its segment any more, and whose root is still tracked, waits after a timeout."""
        key = self.timed_out.pop(root)
        self.cancelled.add(key)
        stream = self.numbers[int.from_bytes(key[:4], "big")]
        stream.waiting -= 1
        stream.counters.completed += 1
        stream.counters.cancelled_replays += 1

    def check_incarnation(self, incarnation: int) -> None:
        check_incarnation(incarnation, self.incarnation)


def check_incarnation(incarnation: int, own: int) -> None:
    if incarnation != own:
        raise StaleIncarnationError(
            f"the call is for incarnation {incarnation} of the vertex, this is {own}; "
            "what was pending is replayed under new ids: drop what you know of the old ones"
        )


def recover(state: ShardState, txn: ReadTransaction, now: Now) -> None:
    """Fill an empty state from the store. What was pending is due at once: the loss of the vertex ends no attempt."""
    state.owners.recover(txn)
    state.dead_index.recover(txn)
    for name, record in stored.all_streams(txn):
        stream = stream_of_record(name, record)
        bounds = stored.get_bounds(txn, stream.number)
        stream.logged = bounds.next - bounds.committed
        stream.offered = bounds.committed
        if stream.logged:
            stream.log_age.add(bounds.next, now.wall_ms)
        stream.asked_pause_ms = stored.get_ms(txn, stored.StreamTime.ASKED_PAUSE, stream.number)
        stream.died_ms = stream.gone_ms = stored.get_ms(txn, stored.StreamTime.DIED, stream.number)
        state.add_stream(stream)
    for number, count in failed.counts(txn, FailedTable.WAITING).items():
        _stream_of(state, number).waiting = count
    for number, count in failed.counts(txn, FailedTable.DEAD).items():
        stream = _stream_of(state, number)
        stream.dead = count
        stream.died_ms = max(stream.died_ms, failed.last_ms(txn, FailedTable.DEAD, number))
    for sequence, head in state.segments.heads(txn):
        state.next_segment = sequence + 1
        if head.kind is not stored.SegmentKind.TRACKED:
            continue
        stream = _stream_of(state, head.stream)
        done = state.segments.done(txn, sequence, len(head))
        state.live.add(sequence, stream, done)
        pending = np.flatnonzero(~done)
        stream.add_due(sequence, pending)
        stream.counters.recovered += len(pending)
    _recover_ranges(state, txn)


def _recover_ranges(state: ShardState, txn: ReadTransaction) -> None:
    """Know the partitions of sources that can be read again; what is not done of their ranges is wanted."""
    for number, name, ranges, floor in state.ranges.recovered(txn):
        stream = _stream_of(state, number)
        at = (ranges.number, ranges.place)
        partition = source_ranges.SourcePartition(stream, name, floor, at, floor, at)
        for facts, packed in ranges.ranges:
            done = np.zeros(facts.rows, np.bool_)
            if packed:
                bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=facts.rows, bitorder="little")
                done = bits.astype(np.bool_)
            found = source_ranges.SourceRange(partition, state.new_segment(), facts, done, None)
            partition.add(found)
            state.live.add(found.segment, stream, done, source=found)
            left = found.recall(np.flatnonzero(~done))
            stream.in_flight += left
            stream.unstored += left
            stream.counters.recovered += left
        partition.is_changed = False
        state.ranges.put(partition)


def _stream_of(state: ShardState, number: int) -> Stream:
    stream = state.numbers.get(number)
    if stream is None:
        raise StoreDamagedError(f"the store has records of stream {number} and no such stream")
    return stream
