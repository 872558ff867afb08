"""The memory that all rules of a shard work on, and how it is made from the store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ftlayer.acker import AckerTable, BucketRotations, ExactTracker, Roots, Tracker
from ftlayer.clock import Now
from ftlayer.errors import ProtocolError, StaleIncarnationError, StoreDamagedError
from ftlayer.records.ids import RowRoots, ids_of, root_ids
from ftlayer.records.traced import Sampler
from ftlayer.store import failed
from ftlayer.store.failed import FailedTable
from ftlayer.store.kv import ReadTransaction, WriteTransaction
from ftlayer.store.payloads import Payloads
from ftlayer.store.rows import U64
from ftlayer.store.segments import Mask, SegmentKind, Segments
from ftlayer.store.streams import all_streams, get_asked_pause_ms, get_bounds, get_died_ms
from ftlayer.store.texts import TextChanges
from ftlayer.vertex.calls import Envelope, Reply, RowRange
from ftlayer.vertex.rules.circuits import Circuits
from ftlayer.vertex.rules.counters import ShardCounters
from ftlayer.vertex.rules.followed import FollowedAttempts
from ftlayer.vertex.rules.grouping import DeadIndex
from ftlayer.vertex.rules.live import LiveSegments, by_segment, locations_of
from ftlayer.vertex.rules.options import LayerOptions
from ftlayer.vertex.rules.owners import Owners
from ftlayer.vertex.rules.retry import MAX_REASON, MAX_TRACEBACK, Cause, cut
from ftlayer.vertex.rules.source_ranges import SourcePartition, SourceRange, SourceRanges
from ftlayer.vertex.rules.streams import Stream, stream_of_record

MAX_HELD = 10_000
"""With a long traceback each, about 90 MB."""


class EarlyFailures:
    """Why roots failed that are not registered yet, the first reason of each.

    Each is in a bucket of the caller's, which drops it when its time is over. Of more than `MAX_HELD` the oldest ones
    are dropped: their roots time out instead.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, Cause]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, root: int, cause: Cause, bucket: int) -> int:
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

    def take(self, roots: RowRoots) -> dict[int, Cause]:
        """Return, and forget, what is held for any of these roots."""
        if not self._held:
            return {}
        return {root: self._held.pop(root)[1] for root in set(ids_of(roots).tolist()) & self._held.keys()}

    def drop(self, buckets: Sequence[int]) -> int:
        """Forget what is in these buckets; return how many that were."""
        over = [root for root, (bucket, _) in self._held.items() if bucket in buckets]
        for root in over:
            del self._held[root]
        return len(over)


@dataclass(slots=True)
class Group:
    """Effects of the calls of an open transaction that are not in memory yet.

    It is dropped with its transaction. ``unconfirmed`` counts calls whose ``after`` did not run;
    ``irrevocable`` says that one of them changed memory already, so that a lost transaction leaves memory
    wrong.
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
    """Memory of a shard, and the typed tables of its store."""

    def __init__(self, options: LayerOptions, incarnation: int) -> None:
        self.options = options
        self.incarnation = incarnation
        self.payloads = Payloads()
        self.segments = Segments(self.payloads)
        self.live = LiveSegments(self.segments)
        self.ranges = SourceRanges()
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
        """Whether the tracker keeps every id."""
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
        """Return a stream; `ProtocolError` if it is not declared."""
        stream = self.find_stream(name)
        if stream is None:
            raise ProtocolError(f"stream {name!r} is unknown; declare it first (OpenStream, or OpenQuery)")
        return stream

    def bucket(self, stream: Stream, mono_ms: int) -> int:
        """Return the bucket of roots of ``stream`` whose time starts now."""
        return self.rotations.bucket(stream.options.timeout_ms, mono_ms)

    def are_pending(self, roots: U64, locations: U64) -> Mask:
        """Return which of these rows are pending under these roots, bool[n]: of rows with one root, one is."""
        located = self.tracker.locate(roots)
        pending: Mask = located.pending & (located.locations == locations)
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
                    locations = locations_of(each.segment, len(each.done))[~each.done]
                    self.tracker.forget(roots[self.are_pending(roots, locations)])
                stream.in_flight -= left
                stream.unstored -= recalled
            self.ranges.forget(txn, partition)

    def complete(self, complete: Roots, now: Now) -> None:
        """Take note of roots that completed: their rows are done, or their replay is cancelled."""
        for segment, rows, positions in by_segment(complete.locations):
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
        """A row that is not in its segment any more, and whose root is still tracked, waits after a
        timeout.
        """
        key = self.timed_out.pop(root)
        self.cancelled.add(key)
        stream = self.numbers[int.from_bytes(key[:4], "big")]
        stream.waiting -= 1
        stream.counters.completed += 1
        stream.counters.cancelled_replays += 1

    def check_incarnation(self, incarnation: int) -> None:
        """Raise `StaleIncarnationError` for a call meant for another incarnation."""
        if incarnation != self.incarnation:
            raise StaleIncarnationError(
                f"the call is for incarnation {incarnation} of the vertex, this is {self.incarnation}; "
                "what was pending is replayed under new ids: drop what you know of the old ones"
            )


def recover(state: ShardState, txn: ReadTransaction, now: Now) -> None:
    """Fill an empty state: what a new incarnation knows at its start.

    Whatever was pending is due for replay at once, in the attempt it was in: the loss of the vertex uses up none.
    """
    state.owners.recover(txn)
    state.dead_index.recover(txn)
    for name, record in all_streams(txn):
        stream = stream_of_record(name, record)
        bounds = get_bounds(txn, stream.number)
        stream.logged = bounds.next - bounds.committed
        stream.offered = bounds.committed
        if stream.logged:
            stream.log_age.add(bounds.next, now.wall_ms)
        stream.asked_pause_ms = get_asked_pause_ms(txn, stream.number)
        stream.died_ms = stream.gone_ms = get_died_ms(txn, stream.number)
        state.add_stream(stream)
    for number, count in failed.counts(txn, FailedTable.WAITING).items():
        _stream_of(state, number).waiting = count
    for number, count in failed.counts(txn, FailedTable.DEAD).items():
        stream = _stream_of(state, number)
        stream.dead = count
        stream.died_ms = max(stream.died_ms, failed.last_ms(txn, FailedTable.DEAD, number))
    for sequence, head in state.segments.heads(txn):
        state.next_segment = sequence + 1
        if head.kind is not SegmentKind.TRACKED:
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
    for number, name, stored, floor in state.ranges.recovered(txn):
        stream = _stream_of(state, number)
        at = (stored.number, stored.place)
        partition = SourcePartition(stream, name, floor, at, floor, at)
        for each in stored.ranges:
            facts = RowRange(
                name, each.start, each.end, each.number, each.first, each.rows, each.span, each.digest
            )
            done = np.zeros(each.rows, np.bool_)
            if each.done:
                bits = np.unpackbits(np.frombuffer(each.done, np.uint8), count=each.rows, bitorder="little")
                done = bits.astype(np.bool_)
            found = SourceRange(partition, state.new_segment(), facts, done, None)
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
