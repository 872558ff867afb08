"""A batch of which nearly every record fails, in the same place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from ftlayer.vertex.calls import (
    BatchBegun,
    BatchState,
    BeginBatch,
    Commit,
    Committed,
    Fail,
    Failed,
    Failure,
    ListRecords,
    OpenQuery,
    OpenStream,
    Persist,
    QueryOpened,
    RecordList,
    Seal,
    Sealed,
    SealedRows,
    Stats,
    StatsReply,
    StreamOptions,
)

ROWS = 40_000
FRAMES = "Traceback (most recent call last):\n" + '  File "somewhere.py", line 1, in parse\n' * 48


def failures_of(roots: np.ndarray) -> tuple[Failure, ...]:
    return tuple(
        Failure(root, f"ValueError: {root}", "parse", f"{FRAMES}ValueError: {root}")
        for root in roots.tolist()
    )


def used_bytes(client: Any) -> float:
    reply = client.call(Stats())
    assert isinstance(reply, StatsReply)
    return reply.values["used_bytes"]


def test_a_seal_of_many_failures_passes_and_stays_small(running: Any) -> None:
    """Written out, the tracebacks alone are more than the 16 x 4 MiB that the vertex takes for a call."""
    assert ROWS * len(FRAMES) > 64 << 20
    client = running.client()
    opened = client.call(OpenQuery("q", "run", ("q/s",), StreamOptions(max_attempts=1)))
    assert isinstance(opened, QueryOpened)
    roots = np.arange(1, ROWS + 1, dtype=np.uint64)
    rows = SealedRows("q/s", pa.record_batch({"n": roots}), roots, failures_of(roots))
    client.call(BeginBatch("q", opened.epoch, 0))
    assert client.call(Seal("q", opened.epoch, 0, {}, (rows,))) == Sealed(0, ROWS)
    assert used_bytes(client) < 8 << 20
    begun = client.call(BeginBatch("q", opened.epoch, 0))
    assert isinstance(begun, BatchBegun)
    assert begun.state is BatchState.SEALED
    assert begun.failed[0].failures == rows.failures
    assert client.call(Commit("q", opened.epoch, 0)) == Committed(again=False)
    assert used_bytes(client) < 40 << 20
    listed = client.call(ListRecords("dead", limit=2))
    assert isinstance(listed, RecordList)
    assert [record.traceback for record in listed.records] == [f.traceback for f in rows.failures[:2]]


def test_many_failures_in_one_call_pass(running: Any) -> None:
    client = running.client()
    client.call(OpenStream("job/s"))
    roots = np.arange(1, ROWS + 1, dtype=np.uint64)
    client.call(Persist("job/s", pa.record_batch({"n": roots}), roots, roots))
    failed = client.call(Fail(failures_of(roots), client.health().incarnation))
    assert failed == Failed(ROWS, 0, 0)
