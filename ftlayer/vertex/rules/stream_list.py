"""Which streams there are: what a shard holds of each, what it has seen of each, and since when the oldest waits."""

from __future__ import annotations

from dataclasses import asdict

from ftlayer.store import failed
from ftlayer.store.failed import FailedTable
from ftlayer.store.kv import ReadTransaction
from ftlayer.vertex.calls.jobs import HistogramDetails
from ftlayer.vertex.calls.records import StreamDetails, StreamList
from ftlayer.vertex.rules.names import names_of
from ftlayer.vertex.rules.state import ShardState
from ftlayer.vertex.rules.streams import Stream


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
