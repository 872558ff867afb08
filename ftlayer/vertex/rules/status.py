"""How much is to be done: for a query that would like to end, and for monitoring, which sees it by stream too."""

from __future__ import annotations

from dataclasses import asdict, fields

from ftlayer.clock import Now
from ftlayer.errors import ProtocolError
from ftlayer.store import batches, failed
from ftlayer.store.failed import FailedTable
from ftlayer.store.kv import KeyValueStore, ReadTransaction
from ftlayer.store.meta import QueryRecord, get_query
from ftlayer.store.streams import get_bounds
from ftlayer.vertex.calls import QueryStatus, QueryStatusCall, StatsReply, StreamStatus, StreamStatusCall
from ftlayer.vertex.calls.jobs import HistogramDetails
from ftlayer.vertex.calls.records import StreamDetails, StreamList
from ftlayer.vertex.rules.counters import StreamCounters
from ftlayer.vertex.rules.names import names_of
from ftlayer.vertex.rules.replay import Replays
from ftlayer.vertex.rules.state import ShardState
from ftlayer.vertex.rules.streams import Stream


class Status:
    """`QueryStatusCall`, `StreamStatusCall` and `Stats`."""

    def __init__(self, state: ShardState, store: KeyValueStore, replay: Replays) -> None:
        self._state = state
        self._store = store
        self._replay = replay

    def query(self, txn: ReadTransaction, call: QueryStatusCall, now: Now) -> QueryStatus:
        """Count the rows of a query's streams. Rows that a sealed batch is about to move count as
        delivered.
        """
        query = get_query(txn, call.query)
        if query is None:
            raise ProtocolError(f"query {call.query!r} is unknown: open it first (OpenQuery)")
        streams = [self._state.stream(name) for name in query.streams]
        times = [self._replay.next_due_ms(txn, stream, now) for stream in streams]
        due = min((time for time in times if time is not None), default=None)
        unread = sum(max(stream.logged - self._offered(stream.number, txn), 0) for stream in streams)
        return QueryStatus(
            waiting=sum(stream.waiting + stream.due_rows for stream in streams),
            deliverable=unread,
            delivered=sum(stream.logged for stream in streams) - unread + self._sealed_rows(txn, query),
            pending=sum(stream.in_flight for stream in streams),
            dead=sum(stream.dead for stream in streams),
            next_due_in_ms=-1 if due is None else max(due - now.wall_ms, 0),
        )

    def of_streams(self, txn: ReadTransaction, call: StreamStatusCall, now: Now) -> StreamStatus:
        """Count the rows of streams that are pushed."""
        self._state.owners.check(call.streams, call.owner)
        streams = [self._state.stream(name) for name in call.streams]
        due, next_due_in_ms = 0, -1
        for stream in streams:
            count, pause_ms = self._due(txn, stream, now)
            due += count
            if pause_ms >= 0:
                next_due_in_ms = pause_ms if next_due_in_ms < 0 else min(pause_ms, next_due_in_ms)
        return StreamStatus(
            pending=sum(stream.in_flight for stream in streams),
            due=due,
            waiting=sum(stream.waiting + stream.due_rows for stream in streams) - due,
            dead=sum(stream.dead for stream in streams),
            next_due_in_ms=next_due_in_ms,
            done=sum(stream.counters.completed for stream in streams),
            circuits=self._state.circuits.statuses(call.streams, now.mono_ms),
        )

    def _due(self, txn: ReadTransaction, stream: Stream, now: Now) -> tuple[int, int]:
        """Return how many replays of a stream can be taken now, and in how many ms one can be (-1: none is there)."""
        next_due = self._replay.next_due_ms(txn, stream, now)
        pause_ms = -1 if next_due is None else max(next_due - now.wall_ms, 0)
        held_ms = self._state.circuits.held_ms(stream, now.mono_ms)
        if held_ms is not None:
            return 0, -1 if pause_ms < 0 else max(pause_ms, held_ms)
        return stream.due_rows + self._replay.count_due(txn, stream, now), pause_ms

    def stats(self, now: Now) -> StatsReply:
        """Return all counters and gauges."""
        state = self._state
        streams = state.streams.values()
        counted = [asdict(stream.counters) for stream in streams]
        values = {
            each.name: float(sum(counters[each.name] for counters in counted))
            for each in fields(StreamCounters)
        }
        values |= {name: float(value) for name, value in asdict(state.counters).items()}
        values |= {
            "incarnation": float(state.incarnation),
            "streams": float(len(state.streams)),
            "pending": float(sum(stream.in_flight for stream in streams)),
            "waiting": float(sum(stream.waiting + stream.due_rows for stream in streams)),
            "in_delivery": float(sum(stream.logged for stream in streams)),
            "dead_letters": float(sum(stream.dead for stream in streams)),
            "tracked_roots": float(state.tracker.pending_count),
            "orphans": float(state.tracker.orphan_count + len(state.early)),
            "live_segments": float(len(state.live)),
            "used_bytes": float(self._store.used_bytes),
            "used_share": float(self._store.used_share),
        }
        return StatsReply(values, state.circuits.all_statuses(now.mono_ms))

    def _offered(self, number: int, txn: ReadTransaction) -> int:
        """Return how many uncommitted rows of a log the query was told of."""
        stream = self._state.numbers[number]
        return max(stream.offered - get_bounds(txn, number).committed, 0)

    def _sealed_rows(self, txn: ReadTransaction, query: QueryRecord) -> int:
        if query.last_sealed <= query.last_committed:
            return 0
        head = batches.get_head(txn, query.number, query.last_sealed)
        if head is None:
            return 0
        parts = batches.parts(txn, query.number, query.last_sealed, head.parts, self._state.payloads)
        emitted = sum(len(emit.roots) // 8 for emit in head.emitted if emit.segment >= 0)
        return sum(len(part.rows) for part in parts) + emitted


def list_streams(state: ShardState, txn: ReadTransaction) -> StreamList:
    """Return all streams of a shard by name. Reads one waiting record a stream, and no payload."""
    oldest_ms = state.live.oldest_ms()
    return StreamList(
        tuple(
            _details(state, txn, stream, oldest_ms.get(stream.number, 0))
            for _, stream in sorted(state.streams.items())
        )
    )


def _details(state: ShardState, txn: ReadTransaction, stream: Stream, pending_since_ms: int) -> StreamDetails:
    names = names_of(state, txn, stream)
    since_ms = (pending_since_ms, stream.log_age.since_ms, _waits_since_ms(state, txn, stream))
    counters = stream.counters
    return StreamDetails(
        stream=stream.name,
        owner=names.owner,
        title=names.title,
        source=names.source,
        pending=stream.in_flight,
        waiting=stream.waiting + stream.due_rows,
        in_delivery=stream.logged,
        dead=stream.dead,
        persisted=counters.persisted + counters.ingested,
        completed=counters.completed + counters.delivered_done,
        failed=counters.failed,
        died=counters.dead,
        oldest_ms=min(filter(None, since_ms), default=0),
        max_pending=stream.options.max_pending,
        kind=names.kind,
        counters=asdict(counters),
        completion=HistogramDetails.of(stream.completion),
    )


def _waits_since_ms(state: ShardState, txn: ReadTransaction, stream: Stream) -> int:
    """Return when the record that is due first failed for the first time; 0: none waits."""
    if not stream.waiting:
        return 0
    for key, value in failed.scan(txn, FailedTable.WAITING, stream.number):
        if key not in state.cancelled:
            history = failed.decode(value).history
            return history[0].wall_ms if history else 0
    return 0
