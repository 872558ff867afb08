"""Persist, register, XOR, touch, fail, expire: the tracking of roots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ftlayer.common.clock import Now
from ftlayer.common.rules.restart import next_attempt
from ftlayer.errors import ProtocolError
from ftlayer.records.failures import Failure
from ftlayer.records.ids import ids_of
from ftlayer.vertex import calls
from ftlayer.vertex.acker import NEVER, IdLists, Roots
from ftlayer.vertex.rules.source_ranges import (
    EndedRow,
    LiveSegment,
    SourcePartition,
    SourceRange,
    by_segment,
    locate,
    locations_of,
)
from ftlayer.vertex.rules.state import ShardState
from ftlayer.vertex.rules.streams import Stream, held, shortened, stored_attempt
from ftlayer.vertex.store import dead_index as failed
from ftlayer.vertex.store.dead_index import FailedRecord, FailedTable
from ftlayer.vertex.store.key_value import WriteTransaction, put_planned
from ftlayer.vertex.store.rows import (
    I64,
    U64,
    History,
    RowInfo,
    SingleRows,
    StoredBatch,
    first_attempts,
    take_rows,
)
from ftlayer.vertex.store.streams import SegmentKind, StreamTime, get_position, put_ms, put_position


@dataclass(slots=True)
class Moved:
    """Where rows went: keys of those ``waiting``, by root, roots of the ``dead``, how many holders are asked for."""

    waiting: dict[int, bytes] = field(default_factory=dict)
    dead: list[int] = field(default_factory=list)
    wanted: int = 0


class Failing:
    def __init__(self, state: ShardState) -> None:
        self._state = state

    def move_tracked(
        self,
        txn: WriteTransaction,
        roots: U64,
        locations: U64,
        causes: Sequence[Failure],
        now: Now,
        *,
        timed_out: bool = False,
    ) -> Moved:
        """Move rows of tracked segments, or want them of their holder; ``roots`` are of the attempts that ended."""
        moved = Moved()
        for segment, rows, positions in by_segment(locations):
            live = self._state.live.get(segment)
            if live is not None and live.source is not None:
                of_these = [causes[at] for at in positions]
                moved.wanted += self._want(live, rows, roots[positions], of_these, now, timed_out=timed_out)
                continue
            new = self._state.live.finish(segment, rows)
            if live is None or not new.any():
                continue
            rows, positions = rows[new], positions[new]
            live.stream.in_flight -= len(rows)
            if timed_out:
                live.stream.counters.timed_out += len(rows)
            else:
                live.stream.counters.failed_explicit += len(rows)
            taken = self._state.segments.rows(txn, segment, rows).with_roots(roots[positions])
            of_these = self._causes(live.stream, roots[positions], [causes[at] for at in positions], now)
            bodies = self._state.payloads.rows(txn, taken.payload)
            keys = [
                self.move(txn, live.stream, taken.info, bodies, row, cause, now)
                for row, cause in enumerate(of_these)
            ]
            for position, key in zip(positions.tolist(), keys, strict=True):
                if key is None:
                    moved.dead.append(int(roots[position]))
                else:
                    moved.waiting[int(roots[position])] = key
            if self._state.followed is not None:
                is_dead = [key is None for key in keys]
                self._state.followed.failed(roots[positions], of_these, is_dead, now)
            self._state.live.write_segment(txn, segment)
        return moved

    def _want(
        self, live: LiveSegment, rows: I64, roots: U64, causes: list[Failure], now: Now, *, timed_out: bool
    ) -> int:
        assert live.source is not None
        source = live.source
        new = [
            at for at, row in enumerate(rows.tolist()) if not source.done[row] and not source.is_wanted(row)
        ]
        if not timed_out:
            for row in rows.tolist():
                source.fail_timed_out(row)
        told = self._causes(live.stream, roots[new], [causes[at] for at in new], now)
        for at, cause in zip(new, told, strict=True):
            source.end(int(rows[at]), EndedRow(int(roots[at]), cause, timed_out))
        if timed_out:
            live.stream.counters.timed_out += len(new)
        else:
            live.stream.counters.failed_explicit += len(new)
        return len(new)

    def _causes(self, stream: Stream, roots: U64, causes: list[Failure], now: Now) -> list[Failure]:
        if not self._state.circuits.ended(stream, roots.tolist(), causes, now.mono_ms):
            return causes
        return [held(cause) for cause in causes]

    def _history(self, info: RowInfo, row: int, cause: Failure, now: Now) -> History:
        """Return the attempts of a record that has failed once more, whose tracebacks are held from here on."""
        texts = self._state.group.texts
        earlier = shortened(info.history(row))
        if earlier:
            texts.hold_all(earlier, info.texts)
        number = earlier[-1].number + 1 if earlier else 1
        return (*earlier, stored_attempt(number, now.wall_ms, cause, texts.hold))

    def move(
        self,
        txn: WriteTransaction,
        stream: Stream,
        info: RowInfo,
        bodies: SingleRows,
        row: int,
        cause: Failure,
        now: Now,
        *,
        body_row: int | None = None,
    ) -> bytes | None:
        """Store the failed row of ``info`` (of ``bodies`` at ``body_row``); return its key, None if it is dead."""
        origin, attempt = int(info.origins[row]), int(info.attempts[row])
        retry = next_attempt(stream.options, origin, attempt, cause, wall_ms=now.wall_ms)
        hashes, flat = failed.hashes_of(info.key_hashes, row)
        record = FailedRecord(
            root=int(info.roots[row]),
            origin=origin,
            attempt=retry.attempt if retry else attempt,
            key_hashes=hashes,
            flat_hashes=flat,
            history=self._history(info, row, cause, now),
            digest=bodies.digest,
            body=bodies.body(row if body_row is None else body_row),
            edit=info.edit(row),
        )
        if retry and (cause.after_ms or 0) > stream.longest_pause_ms:
            stream.asked_pause_ms = cause.after_ms or 0
            put_ms(txn, StreamTime.ASKED_PAUSE, stream.number, stream.asked_pause_ms)
        if retry is None:
            stream.died_ms = max(stream.died_ms, now.wall_ms)
        time_ms = retry.not_before_ms if retry else stream.died_ms
        key = failed.key_of(stream.number, time_ms, self._state.new_serial())
        if retry is None:
            failed.put(txn, FailedTable.DEAD, key, record)
            self._state.dead_index.add(txn, key, record)
            stream.dead += 1
            stream.counters.dead += 1
            return None
        failed.put(txn, FailedTable.WAITING, key, record)
        stream.waiting += 1
        return key


# Rows that one tick moves after a timeout: about a quarter of a second's work, so that calls are not held up for long.
EXPIRED_PER_TICK = 10_000

NONE_FAILED: Mapping[int, calls.Failure] = {}


class Tracking:
    def __init__(self, state: ShardState, failing: Failing) -> None:
        self._state = state
        self._failing = failing
        self._expired: deque[Roots] = deque()
        self._failed_early: deque[tuple[Roots, list[calls.Failure]]] = deque()

    @calls.handles(calls.Persist)
    def persist(
        self, txn: WriteTransaction, call: calls.Persist, now: Now
    ) -> tuple[calls.Accepted, Callable[[], None] | None]:
        """Store rows as a segment; the callback registers them once they are committed."""
        state = self._state
        state.owners.check([call.stream], call.owner)
        stream = state.stream(call.stream)
        rows = call.payload.num_rows
        check_intake(stream, rows)
        if call.position is not None and not self._advance_position(txn, stream, call.position):
            return calls.Accepted(rows), None
        if rows == 0:
            return calls.Accepted(0), None
        info = first_attempts(np.ascontiguousarray(ids_of(call.roots)), call.key_hashes)
        # Before it is committed: what comes behind it in this transaction is no part of the trial.
        state.circuits.let_out(stream, info.roots, now.mono_ms)
        sequence = state.new_segment()
        state.segments.append(
            txn, sequence, stream.number, SegmentKind.TRACKED, StoredBatch(info, call.payload)
        )
        group = state.group
        group.add_rows(stream.name, rows)

        def register() -> None:
            group.add_rows(stream.name, -rows)
            stream.counters.persisted += rows
            self.register(stream, sequence, call.roots, call.values, now, call.ids)

        return calls.Accepted(rows), register

    def register(
        self,
        stream: Stream,
        sequence: int,
        roots: calls.RowRoots,
        values: U64 | None,
        now: Now,
        ids: calls.EventIds | None = None,
        source: SourceRange | None = None,
    ) -> None:
        """Enter all rows of a new segment, ``values`` as in `enter`; those of a ``source`` are not in the store."""
        state = self._state
        done = np.zeros(len(roots), np.bool_) if source is None else source.done
        state.live.add(sequence, stream, done, now, now.wall_ms, source)
        if state.followed is not None:
            state.followed.registered(stream.name, ids_of(roots), now)
        failed = state.early.take(roots)
        locations = locations_of(sequence, 1 if isinstance(roots, calls.RootRange) else len(roots))
        self.enter(stream, roots, values, locations, now, self._lists(ids), failed)

    def register_replays(self, stream: Stream, sequence: int, info: RowInfo, now: Now) -> None:
        """Enter all rows of a tracked segment that is new, each with its root as its one copy's id."""
        roots = info.roots
        oldest_ms = min((history[0].wall_ms for history in info.histories if history), default=now.wall_ms)
        self._state.live.add(sequence, stream, np.zeros(len(roots), np.bool_), now, oldest_ms)
        self.enter(stream, roots, roots, locations_of(sequence, len(roots)), now, self._own_ids(roots))

    def enter(
        self,
        stream: Stream,
        roots: calls.RowRoots,
        values: U64 | None,
        locations: U64,
        now: Now,
        ids: IdLists | None,
        failed: Mapping[int, calls.Failure] = NONE_FAILED,
    ) -> None:
        """Enter rows of live segments in the tracker; their time starts now. Those in ``failed`` end at once.

        ``values`` None: the roots' own ids. Of a range of roots ``locations`` has the first one's.
        """
        tracker = self._state.tracker
        duplicates = tracker.duplicate_registrations
        bucket = self._state.bucket(stream, now.mono_ms)
        if isinstance(roots, calls.RootRange):
            first = int(locations[0])
            complete = tracker.register_range(roots, values, location=first, bucket=bucket, ids=ids)
        else:
            values = roots if values is None else values
            complete = tracker.register(roots, values, locations=locations, bucket=bucket, ids=ids)
        stream.counters.registered += len(roots)
        stream.in_flight += len(roots)
        if tracker.duplicate_registrations > duplicates:
            if isinstance(roots, calls.RootRange):
                locations = locations[0] + np.arange(len(roots), dtype=np.uint64)
            self._replay_refused(stream, ids_of(roots), locations, complete)
        if failed:
            complete = self._end_failed(complete, failed)
        self._state.complete(complete, now)

    def _end_failed(self, complete: Roots, failed: Mapping[int, calls.Failure]) -> Roots:
        """Take out roots that failed before they came; their rows are moved by the next `end_attempts`."""
        roots = np.fromiter(failed, np.uint64, len(failed))
        forgotten = self._state.tracker.forget(roots)
        ended = np.isin(complete.roots, roots)
        roots = np.concatenate([roots[forgotten.pending], complete.roots[ended]])
        locations = np.concatenate([forgotten.locations[forgotten.pending], complete.locations[ended]])
        self._failed_early.append((Roots(roots, locations), [failed[root] for root in roots.tolist()]))
        return Roots(complete.roots[~ended], complete.locations[~ended])

    def _replay_refused(self, stream: Stream, roots: U64, locations: U64, complete: Roots) -> None:
        """Rows whose root was pending already could never complete: replay them under roots of their own."""
        pending = self._state.are_pending(roots, locations)
        refused = locations[~pending & ~np.isin(locations, complete.locations)]
        stream.counters.duplicate_roots += len(refused)
        for segment, rows, _ in by_segment(refused):
            live = self._state.live.get(segment)
            assert live is not None, "rows that were refused are not done"
            if live.source is None:
                stream.in_flight -= len(rows)
                stream.add_due(segment, rows)
            else:
                stream.unstored += live.source.recall(rows)

    def _advance_position(
        self, txn: WriteTransaction, stream: Stream, position: calls.SourcePosition
    ) -> bool:
        last = get_position(txn, stream.number, position.partition)
        if last == (position.start, position.end):
            return False
        reached = None if last is None else last[1]
        if position.start != reached:
            raise ProtocolError(
                f"partition {position.partition!r} of {stream.name!r} has come to {reached!r}, and these "
                f"rows start at {position.start!r}; ask OpenStream for its positions and go on there"
            )
        put_position(txn, stream.number, position.partition, position.start, position.end)
        return True

    @calls.handles(calls.Xor)
    def xor(self, txn: None, call: calls.Xor, now: Now) -> calls.Xored:
        """Fold events into pending roots. In memory only: what completes is written down by the next flush."""
        state = self._state
        ids = self._lists(call.ids)
        unknown = state.tracker.unknown_xors
        if call.hold:
            bucket = state.orphan_rotations.bucket(self._orphan_timeout_ms(), now.mono_ms)
            complete = state.tracker.xor(
                call.roots, call.deltas, hold_unregistered=True, bucket=bucket, ids=ids
            )
        else:
            complete = state.tracker.xor(call.roots, call.deltas, ids=ids)
        state.complete(complete, now)
        unknown = state.tracker.unknown_xors - unknown
        state.counters.late_ignored += unknown
        return calls.Xored(len(complete.roots), unknown)

    @calls.handles(calls.Touch)
    def touch(self, txn: None, call: calls.Touch, now: Now) -> calls.Touched:
        state = self._state
        timeouts = {stream.options.timeout_ms for stream in state.streams.values()}
        if len(timeouts) == 1:
            bucket = state.rotations.bucket(timeouts.pop(), now.mono_ms)
            return calls.Touched(int(np.count_nonzero(state.tracker.touch(call.roots, bucket))))
        # A root's stream, and with it its timeout, is known by its location.
        located = state.tracker.locate(call.roots)
        roots, locations = call.roots[located.pending], located.locations[located.pending]
        for segment, _, positions in by_segment(locations):
            live = state.live.get(segment)
            if live is not None:
                state.tracker.touch(roots[positions], state.bucket(live.stream, now.mono_ms))
        return calls.Touched(len(roots))

    @calls.handles(calls.Fail)
    def fail(self, txn: WriteTransaction, call: calls.Fail, now: Now) -> calls.Failed:
        """End attempts, once each; later events are ignored. With ``hold`` unknown roots end when they come."""
        state = self._state
        state.check_incarnation(call.incarnation)
        failures: dict[int, calls.Failure] = {}
        for failure in call.failures:
            failures.setdefault(failure.root, failure)
        roots = np.fromiter(failures, np.uint64, len(failures))
        forgotten = state.tracker.forget(roots)
        pending = roots[forgotten.pending]
        causes = [failures[root] for root in pending.tolist()]
        moved = self._failing.move_tracked(txn, pending, forgotten.locations[forgotten.pending], causes, now)
        for root in pending.tolist():
            state.timed_out.pop(root, None)
        held = self._hold(roots[~forgotten.pending], failures, now) if call.hold else 0
        waiting, dead = len(moved.waiting), len(moved.dead)
        unknown = len(call.failures) - waiting - dead - moved.wanted - held
        state.counters.late_ignored += unknown
        return calls.Failed(waiting, dead, unknown, held)

    def _hold(self, roots: U64, failures: Mapping[int, calls.Failure], now: Now) -> int:
        """Keep failures of unknown roots for two timeouts; return how many these are."""
        state = self._state
        bucket = state.orphan_rotations.bucket(self._orphan_timeout_ms(), now.mono_ms)
        for root in roots.tolist():
            state.counters.orphans_dropped += state.early.hold(root, failures[root], bucket)
        return len(roots)

    def advance(self, now: Now) -> None:
        """Take note of what expired, before anything is put into a bucket."""
        state = self._state
        buckets = state.rotations.expired(now.mono_ms)
        if buckets:
            # They stay in the tracker: events that come before the replay is sent may still complete them.
            self._expired.append(state.tracker.expire(buckets, keep_as=NEVER))
        buckets = state.orphan_rotations.expired(now.mono_ms)
        if buckets:
            state.counters.orphans_dropped += state.tracker.drop_orphans(buckets) + state.early.drop(buckets)

    def end_attempts(self, txn: WriteTransaction, now: Now) -> None:
        """Move rows of roots that had failed when they came, and of expired ones, `EXPIRED_PER_TICK` at most."""
        while self._failed_early:
            (roots, locations), causes = self._failed_early.popleft()
            self._failing.move_tracked(txn, roots, locations, causes, now)
        budget = EXPIRED_PER_TICK
        while self._expired and budget:
            roots, locations = self._expired.popleft()
            if len(roots) > budget:
                self._expired.appendleft(Roots(roots[budget:], locations[budget:]))
                roots, locations = roots[:budget], locations[:budget]
            budget -= len(roots)
            self._time_out(txn, roots, locations, now)

    def _time_out(self, txn: WriteTransaction, roots: U64, locations: U64, now: Now) -> None:
        state = self._state
        # Between the expiry and now a root may have completed or failed, and be another row's.
        still = state.are_pending(roots, locations)
        roots, locations = roots[still], locations[still]
        causes = [calls.Failure(0, "")] * len(roots)
        for segment, _, positions in by_segment(locations):
            live = state.live.get(segment)
            if live is not None:
                cause = calls.Failure(0, f"timed out after {live.stream.options.timeout_ms} ms")
                for position in positions.tolist():
                    causes[position] = cause
        moved = self._failing.move_tracked(txn, roots, locations, causes, now, timed_out=True)
        state.timed_out.update(moved.waiting)
        if moved.dead:
            state.tracker.forget(np.array(moved.dead, np.uint64))

    @property
    def ends_attempts(self) -> bool:
        return bool(self._expired or self._failed_early)

    def _orphan_timeout_ms(self) -> int:
        """Events that came before their registration are dropped after two timeouts."""
        timeouts = [stream.options.timeout_ms for stream in self._state.streams.values()]
        return 2 * max(timeouts, default=30_000)

    def reissue(self, stream: Stream, sequence: int, rows: I64, roots: U64, now: Now) -> None:
        """Register rows of a live segment under fresh roots, each with its root as its one copy's id."""
        live = self._state.live.get(sequence)
        assert live is not None, "only rows of live segments are due"
        if live.registered is None:
            live.registered, live.oldest_ms = now, now.wall_ms
        live.hand_out(rows, roots)
        self.enter(stream, roots, roots, locate(sequence, rows), now, self._own_ids(roots))

    def _lists(self, ids: calls.EventIds | None) -> IdLists | None:
        if ids is None or not self._state.exact:
            return None
        names = (*ids.operators, "")  # position -1: the event acknowledges the id itself
        owners = [names[owner] for owner in ids.owners.tolist()]
        return IdLists(ids.ids, ids.offsets.astype(np.int64), owners)

    def _own_ids(self, roots: U64) -> IdLists | None:
        return IdLists(roots, np.arange(len(roots) + 1)) if self._state.exact else None


def check_intake(stream: Stream, rows: int) -> None:
    if rows > stream.options.max_pending:
        raise ProtocolError(
            f"{rows} rows in one call, and {stream.name!r} may have {stream.options.max_pending} in flight "
            "(max_pending); send fewer at a time"
        )


WANTED_AT_ONCE = 65_536
"""Rows that one reply wants: what is more is told when these are stored."""


class RangeCalls:
    def __init__(self, state: ShardState, tracking: Tracking, failing: Failing) -> None:
        self._state = state
        self._tracking = tracking
        self._failing = failing

    @calls.handles(calls.NoteRange)
    def note(self, txn: WriteTransaction, call: calls.NoteRange, now: Now) -> calls.RangeNoted:
        """Keep a range that is about to be opened: no row of it can be registered before."""
        state = self._state
        state.owners.check([call.stream], call.owner)
        put_planned(txn, state.stream(call.stream).number, call.number, call.planned, first=call.first)
        return calls.RangeNoted()

    @calls.handles(calls.TakeOver)
    def take_over(self, txn: WriteTransaction, call: calls.TakeOver, now: Now) -> calls.TakenOver:
        """Give partitions to a holder: from now on it is asked for rows, and no other one registers any."""
        state = self._state
        state.owners.check([call.stream], call.owner)
        stream = state.stream(call.stream)
        held = []
        for name in call.partitions:
            partition = state.ranges.opened(txn, stream, name)
            partition.holder = call.holder
            partition.write(txn, state.next_segment)
            ranges = tuple(calls.OpenRange(each.segment, each.facts) for each in partition.ranges.values())
            held.append(calls.HeldPartition(name, partition.head, *partition.head_at, ranges))
        return calls.TakenOver(state.incarnation, tuple(held))

    @calls.handles(calls.Register)
    def register(self, txn: None, call: calls.Register, now: Now) -> calls.Registered:
        """Enter rows of which there is no payload here. In memory only; a call that comes again has no effect."""
        state = self._state
        state.owners.check([call.stream], call.owner)
        stream = state.stream(call.stream)
        facts = call.range
        partition = self._held(stream, facts.partition, call.holder)
        check_intake(stream, facts.rows)
        known = partition.known(facts)
        if known is not None:
            return calls.Registered(known.segment)
        if facts.start != partition.head:
            raise ProtocolError(
                f"partition {facts.partition!r} of {stream.name!r} is registered up to {partition.head!r}, and these "
                f"rows start at {facts.start!r}; ask TakeOver and go on there"
            )
        sequence = state.new_segment()
        done = np.zeros(facts.rows, np.bool_)
        roots = ids_of(call.roots)
        added = SourceRange(partition, sequence, facts, done, roots)
        partition.add(added)
        stream.counters.persisted += facts.rows
        if call.wanted:
            self._want_all(stream, added, now)
            return calls.Registered(sequence)
        state.circuits.let_out(stream, roots, now.mono_ms)
        self._tracking.register(stream, sequence, call.roots, call.values, now, call.ids, source=added)
        return calls.Registered(sequence)

    def _want_all(self, stream: Stream, added: SourceRange, now: Now) -> None:
        rows = len(added.done)
        self._state.live.add(added.segment, stream, added.done, now, now.wall_ms, added)
        added.recall(np.arange(rows))
        stream.in_flight += rows
        stream.unstored += rows

    @calls.handles(calls.AskRanges)
    def ask(self, txn: None, call: calls.AskRanges, now: Now) -> calls.RangesTold:
        state = self._state
        state.owners.check([call.stream], call.owner)
        stream = state.stream(call.stream)
        below: dict[str, int] = {}
        wanted: list[calls.WantedRows] = []
        left = WANTED_AT_ONCE
        for partition in state.ranges.of_stream(stream):
            if partition.holder != call.holder:
                continue
            below[partition.name] = partition.done_below
            for each in partition.ranges.values():
                rows = each.wanted()[:left]
                left -= len(rows)
                if len(rows):
                    wanted.append(calls.WantedRows(each.segment, rows.astype(np.uint64)))
        return calls.RangesTold(below, tuple(wanted))

    @calls.handles(calls.StoreRows)
    def store(self, txn: WriteTransaction, call: calls.StoreRows, now: Now) -> calls.RowsStored:
        """Store rows that are wanted: those that failed wait or are dead, those that were recalled are due."""
        state = self._state
        state.check_incarnation(call.incarnation)
        state.owners.check([call.stream], call.owner)
        stream = state.stream(call.stream)
        live = state.live.get(call.segment)
        if live is None or live.source is None or live.stream is not stream:
            return calls.RowsStored(0)  # all of it is done
        source = live.source
        self._held(stream, source.partition.name, call.holder)
        rows = call.rows.astype(np.int64)
        if len(rows) and int(rows[-1]) >= len(source.done):
            raise ProtocolError(f"row {rows[-1]} of a range that has {len(source.done)}")
        at = np.flatnonzero(~source.done[rows] & source.wanted_of(rows))
        if not len(at):
            return calls.RowsStored(0)
        ended = np.array([source.why(row) is not None for row in rows[at].tolist()], np.bool_)
        self._store_ended(txn, source, call, at[ended], now)
        self._store_recalled(txn, source, call, at[~ended])
        state.live.finish(call.segment, rows[at])
        stream.in_flight -= len(at)
        source.partition.write(txn, state.next_segment)
        return calls.RowsStored(len(at))

    def _store_recalled(
        self, txn: WriteTransaction, source: SourceRange, call: calls.StoreRows, at: I64
    ) -> None:
        if not len(at):
            return
        state, stream = self._state, source.partition.stream
        roots = state.fresh_roots(len(at)) if source.roots is None else source.roots[call.rows[at]]
        hashes = None if call.key_hashes is None else call.key_hashes[at]
        sequence = state.new_segment()
        batch = StoredBatch(first_attempts(roots, hashes), take_rows(call.payload, at))
        state.segments.append(txn, sequence, stream.number, SegmentKind.TRACKED, batch)
        state.live.add(sequence, stream, np.zeros(len(at), np.bool_))
        stream.add_due(sequence, np.arange(len(at)))
        stream.unstored -= len(at)

    def _store_ended(
        self, txn: WriteTransaction, source: SourceRange, call: calls.StoreRows, at: I64, now: Now
    ) -> None:
        if not len(at):
            return
        state, stream = self._state, source.partition.stream
        bodies = state.payloads.rows(txn, call.payload)
        for place in at.tolist():
            row = int(call.rows[place])
            why = source.why(row)
            assert why is not None
            root = np.array([why.root], np.uint64)
            origin = root if source.roots is None else source.roots[row : row + 1]
            hashes = None if call.key_hashes is None else call.key_hashes[place : place + 1]
            info = RowInfo(root, origin, np.ones(1, np.int32), hashes)
            key = self._failing.move(txn, stream, info, bodies, 0, why.cause, now, body_row=place)
            if not why.timed_out:
                continue
            if key is None:
                state.tracker.forget(root)
            else:
                state.timed_out[why.root] = key

    def _held(self, stream: Stream, name: str, holder: str) -> SourcePartition:
        partition = self._state.ranges.get(stream, name)
        if partition is None or partition.holder != holder:
            raise ProtocolError(
                f"partition {name!r} of {stream.name!r} has another holder than {holder!r}: begin with TakeOver"
            )
        return partition
