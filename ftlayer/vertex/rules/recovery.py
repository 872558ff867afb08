"""Memory from the store: what a new incarnation knows at its start.

Whatever was pending is due for replay at once, in the attempt it was in: the loss of the vertex uses up none.
"""

from __future__ import annotations

import numpy as np

from ftlayer.errors import StoreDamagedError
from ftlayer.store import failed
from ftlayer.store.failed import FailedTable
from ftlayer.store.kv import ReadTransaction
from ftlayer.store.segments import SegmentKind
from ftlayer.store.streams import all_streams, get_asked_pause_ms, get_bounds, get_died_ms
from ftlayer.vertex.rules.state import ShardState
from ftlayer.vertex.rules.streams import Stream, stream_of_record


def recover(state: ShardState, txn: ReadTransaction) -> None:
    """Fill an empty state."""
    state.owners.recover(txn)
    for name, record in all_streams(txn):
        stream = stream_of_record(name, record)
        bounds = get_bounds(txn, stream.number)
        stream.logged = bounds.next - bounds.committed
        stream.offered = bounds.committed
        stream.asked_pause_ms = get_asked_pause_ms(txn, stream.number)
        stream.died_ms = stream.gone_ms = get_died_ms(txn, stream.number)
        state.add_stream(stream)
    for key, _ in txn.scan(FailedTable.WAITING):
        _stream(state, failed.stream_of(key)).waiting += 1
    for key, _ in txn.scan(FailedTable.DEAD):
        stream = _stream(state, failed.stream_of(key))
        stream.dead += 1
        stream.died_ms = max(stream.died_ms, failed.time_of(key))
    for sequence, head in state.segments.heads(txn):
        state.next_segment = sequence + 1
        if head.kind is not SegmentKind.TRACKED:
            continue
        stream = _stream(state, head.stream)
        done = state.segments.done(txn, sequence, len(head))
        state.live.add(sequence, stream, done)
        pending = np.flatnonzero(~done)
        stream.add_due(sequence, pending)
        state.counters.recovered += len(pending)


def _stream(state: ShardState, number: int) -> Stream:
    stream = state.numbers.get(number)
    if stream is None:
        raise StoreDamagedError(f"the store has records of stream {number} and no such stream")
    return stream
