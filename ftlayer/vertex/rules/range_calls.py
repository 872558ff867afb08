"""Calls of those who hold a source's partitions: take them over, register rows, say what is wanted, store that."""

from __future__ import annotations

import numpy as np

from ftlayer.common.clock import Now
from ftlayer.errors import ProtocolError
from ftlayer.records.ids import ids_of
from ftlayer.vertex import calls
from ftlayer.vertex.rules.failing import Failing
from ftlayer.vertex.rules.source_ranges import SourcePartition, SourceRange
from ftlayer.vertex.rules.state import ShardState
from ftlayer.vertex.rules.streams import Stream
from ftlayer.vertex.rules.tracking import Tracking, check_intake
from ftlayer.vertex.store.key_value import WriteTransaction, put_planned
from ftlayer.vertex.store.rows import I64, RowInfo, StoredBatch, first_attempts, take_rows
from ftlayer.vertex.store.streams import SegmentKind

WANTED_AT_ONCE = 65_536
"""Rows that one reply wants: what is more is told when these are stored."""


class RangeCalls:
    def __init__(self, state: ShardState, tracking: Tracking, failing: Failing) -> None:
        self._state = state
        self._tracking = tracking
        self._failing = failing

    # ------------------------------------------------------------ planning

    @calls.handles(calls.NoteRange)
    def note(self, txn: WriteTransaction, call: calls.NoteRange, now: Now) -> calls.RangeNoted:
        """Keep a range that is about to be opened: no row of it can be registered before."""
        state = self._state
        state.owners.check([call.stream], call.owner)
        put_planned(txn, state.stream(call.stream).number, call.number, call.planned, first=call.first)
        return calls.RangeNoted()

    # ------------------------------------------------------------ taking over

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

    # ------------------------------------------------------------ registering

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

    # ------------------------------------------------------------ what holders are told

    @calls.handles(calls.AskRanges)
    def ask(self, txn: None, call: calls.AskRanges, now: Now) -> calls.RangesTold:
        """Say what a holder need not hold any more, and what it is to store."""
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

    # ------------------------------------------------------------ storing

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
