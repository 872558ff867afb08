"""How a run begins: it declares streams or takes a query over, and recalls what an earlier one had under way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ftlayer.clock import Now
from ftlayer.errors import StaleOwnerError
from ftlayer.store.kv import WriteTransaction
from ftlayer.store.meta import QueryRecord, all_queries, get_query, put_query
from ftlayer.store.planned import all_planned
from ftlayer.store.streams import all_positions, next_stream_number
from ftlayer.vertex.calls import (
    OpenQuery,
    OpenStream,
    QueryOpened,
    Recall,
    Recalled,
    StreamOpened,
    StreamOptions,
)
from ftlayer.vertex.rules.live import by_segment
from ftlayer.vertex.rules.retry import check_timeout
from ftlayer.vertex.rules.state import ShardState
from ftlayer.vertex.rules.streams import Stream


class Opening:
    """`OpenStream` and `OpenQuery`."""

    def __init__(self, state: ShardState) -> None:
        self._state = state

    def stream(self, txn: WriteTransaction, call: OpenStream) -> StreamOpened:
        """Declare a stream, or give it new options."""
        self._state.owners.check([call.stream], call.owner)
        check_timeout(call.options, self._state.options.buckets)
        stream = self._declare(txn, call.stream, call.options)
        held = tuple(partition.name for partition in self._state.ranges.of_stream(stream))
        positions = all_positions(txn, stream.number)
        planned = all_planned(txn, stream.number)
        return StreamOpened(self._state.incarnation, positions, self._state.exact, held, planned)

    def query(self, txn: WriteTransaction, call: OpenQuery) -> QueryOpened:
        """Take a query over: a new epoch, which owns ``call.streams`` and no others."""
        state = self._state
        check_timeout(call.options, state.options.buckets)
        for name in call.streams:
            stream = state.find_stream(name)
            if stream is not None and stream.query not in ("", call.query):
                raise StaleOwnerError(
                    f"stream {name!r} belongs to query {stream.query!r}; a stream is read by one query: stop "
                    "that one and start it again without the stream, or give this query another one"
                )
        record = get_query(txn, call.query)
        if record is None:
            number = 1 + max((other.number for _, other in all_queries(txn)), default=0)
            record = QueryRecord(number, 0, call.run, ())
        for name in set(record.streams) - set(call.streams):
            self._own(txn, state.stream(name), "")
        for name in call.streams:
            self._own(txn, self._declare(txn, name, call.options), call.query)
        record = replace(
            record,
            epoch=record.epoch + 1,
            run=call.run,
            streams=call.streams,
            title=call.title or record.title,
        )
        put_query(txn, call.query, record)
        return QueryOpened(
            record.epoch,
            state.incarnation,
            record.last_sealed,
            record.last_committed,
            state.options.shard,
            state.options.shards,
            state.exact,
        )

    def _declare(self, txn: WriteTransaction, name: str, options: StreamOptions) -> Stream:
        stream = self._state.find_stream(name)
        if stream is None:
            stream = Stream(name, next_stream_number(txn), options)
        stream.options = options
        stream.write(txn)
        if options.replay != "source":
            self._state.forget_ranges(txn, stream)
        self._state.add_stream(stream)
        return stream

    def _own(self, txn: WriteTransaction, stream: Stream, query: str) -> None:
        stream.query = query
        stream.write(txn)


def recall(state: ShardState, call: Recall, now: Now) -> Recalled:
    """Make the pending rows of streams due at once, since the slots that worked on them may be gone.

    In memory only: after a restart they are due anyway. They are before what is due already, the oldest first.
    Roots that timed out stay in the tracker for their late events; their rows have left the segment.
    """
    state.check_incarnation(call.incarnation)
    state.owners.check(call.streams, call.owner)
    numbers = {state.stream(name).number for name in call.streams}
    roots, locations = state.tracker.pending()
    recalled = np.zeros(len(roots), np.bool_)
    for segment, rows, positions in reversed(list(by_segment(locations))):
        live = state.live.get(segment)
        if live is None or live.stream.number not in numbers:
            continue
        pending = ~live.done[rows]
        if live.source is not None:
            # Those that timed out are wanted before, and stay.
            pending &= ~live.source.wanted_of(rows)
            recalled[positions[pending]] = True
            count = live.source.recall(rows[pending])
            live.stream.unstored += count
            live.stream.counters.recalled += count
            continue
        recalled[positions[pending]] = True
        due = np.zeros(len(live.done), np.bool_)
        due[rows[pending]] = True
        live.stream.add_recalled(segment, np.flatnonzero(due))
        count = int(np.count_nonzero(due))
        live.stream.in_flight -= count
        live.stream.counters.recalled += count
    # In the order they were found in: that of the tracker's memory, several times as fast as any other.
    taken = roots[recalled]
    state.tracker.forget(taken)
    state.circuits.recalled(taken, now.mono_ms)
    return Recalled(len(taken))
