"""Recall and the status of streams through a client, and touching very many roots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ftlayer.errors import MalformedRequestError, ProtocolError, StaleIncarnationError
from ftlayer.records.ids import random_root_ids
from ftlayer.vertex.calls import (
    Fail,
    Failure,
    OpenStream,
    Persist,
    Recall,
    Recalled,
    StreamOptions,
    StreamStatus,
    StreamStatusCall,
    TakeReplays,
    Touch,
    Touched,
    Xor,
    Xored,
)
from ftlayer.vertex.client.client import VertexClient

STREAMS = ("job/clicks", "job/pulse")


def persist(client: VertexClient, stream: str, rows: int) -> Persist:
    shard, shards = client.shard_of(stream)
    roots = random_root_ids(rows, shard=shard, shards=shards)
    call = Persist(stream, pa.record_batch({"n": np.arange(rows)}), roots, random_root_ids(rows))
    client.call(call)
    return call


def taken(client: VertexClient, stream: str) -> np.ndarray[Any, np.dtype[np.uint64]]:
    reply: Any = client.call(TakeReplays(stream, 1_000))
    return np.concatenate([np.empty(0, np.uint64), *(part.roots for part in reply.batches)])


@pytest.mark.parametrize("shards", [1, 4])
def test_a_recalled_job_is_done_by_its_replays(
    tmp_path: Path, serving: Callable[..., Any], shards: int
) -> None:
    with serving(tmp_path / "vertex", shards=shards) as running:
        client = running.client()
        for stream in (*STREAMS, "other/s"):
            client.call(OpenStream(stream, StreamOptions(backoff_ms=(600_000,), jitter=0.0)))
        clicks, _ = (persist(client, stream, 3) for stream in STREAMS)
        other = persist(client, "other/s", 2)
        incarnation = client.health().incarnation
        client.call(Fail((Failure(int(clicks.roots[0]), "broken"),), incarnation))

        assert client.call(Recall(STREAMS, incarnation)) == Recalled(5)
        assert client.call(Xor(clicks.roots, clicks.values, incarnation)) == Xored(0, 3)
        status: Any = client.call(StreamStatusCall(STREAMS))
        assert (status.pending, status.due, status.waiting, status.dead) == (0, 5, 1, 0)
        assert status.next_due_in_ms == 0
        assert not status.drained

        roots = np.concatenate([taken(client, stream) for stream in STREAMS])
        assert client.call(Xor(roots, roots, incarnation)) == Xored(5, 0)
        status = client.call(StreamStatusCall(STREAMS))
        assert (status.pending, status.due, status.waiting) == (0, 0, 1)
        assert 0 < status.next_due_in_ms <= 600_000

        assert client.call(Xor(other.roots, other.values, incarnation)) == Xored(2, 0)
        assert client.call(StreamStatusCall(("other/s",))) == StreamStatus(0, 0, 0, 0, -1, done=2)


def test_what_cannot_be_meant_is_refused(tmp_path: Path, serving: Callable[..., Any]) -> None:
    with serving(tmp_path / "vertex", shards=2) as running:
        client = running.client()
        incarnation = client.health().incarnation
        client.call(OpenStream("job/clicks"))
        for call in (Recall, lambda streams, _: StreamStatusCall(streams)):
            with pytest.raises(MalformedRequestError, match="streams: expected one name or more"):
                client.call(call((), incarnation))
            with pytest.raises(MalformedRequestError, match=r"streams\[1\]: 'job/clicks' is named twice"):
                client.call(call(("job/clicks", "job/clicks"), incarnation))
            with pytest.raises(MalformedRequestError, match=r"streams\[0\]: expected 1 to 200 bytes"):
                client.call(call(("",), incarnation))
            with pytest.raises(MalformedRequestError, match=r"streams of one job .* 'job', 'other'"):
                client.call(call(("job/clicks", "other/s"), incarnation))
            with pytest.raises(ProtocolError, match="'job/pulse' is unknown"):
                client.call(call(STREAMS, incarnation))
        with pytest.raises(StaleIncarnationError):
            client.call(Recall(("job/clicks",), incarnation - 1))


def test_many_roots_are_touched_in_one_call(client: VertexClient) -> None:
    client.call(OpenStream("job/s"))
    calls = [persist(client, "job/s", 50_000) for _ in range(2)]
    roots = np.concatenate([call.roots for call in calls])
    assert client.call(Touch(roots, client.health().incarnation)) == Touched(100_000)
