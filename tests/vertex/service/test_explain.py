"""What a stuck root waits for, asked over the network: routed by its shard, and printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from ftlayer.cli.main import app
from ftlayer.errors import MalformedRequestError, UnsupportedError
from ftlayer.records.ids import Explanation, OwedId, random_root_ids
from ftlayer.vertex.calls import EventIds, Explain, Explained, OpenStream, Persist, StreamOpened, Xor, Xored

SHARDS = 4


def u64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def one_list(ids: list[int], owners: list[int], *operators: str) -> EventIds:
    return EventIds(u64(*ids), np.array([0, len(ids)], np.int32), np.array(owners, np.int32), operators)


@pytest.fixture
def exact(tmp_path: Path, serving: Callable[..., Any]) -> Any:
    with serving(tmp_path / "vertex", shards=SHARDS, tracker="exact") as it:
        yield it


def ftlayer(exact: Any, *arguments: str) -> Any:
    environment = {"FTLAYER_TOKEN": exact.token, "FTLAYER_ADDRESS": exact.address, "COLUMNS": "200"}
    return CliRunner().invoke(app, ["explain", *arguments], env=environment)


@pytest.mark.parametrize("pipelined", [False, True])
def test_roots_on_every_shard_are_explained(exact: Any, pipelined: bool) -> None:
    client = exact.client()
    assert client.health().exact

    def send(*to_send: Any) -> list[Any]:
        if not pipelined:
            return [client.call(call) for call in to_send]
        with client.pipeline() as pipeline:
            futures = [pipeline.submit(call) for call in to_send]
        return [future.result() for future in futures]

    roots: dict[int, int] = {}
    persists = []
    for number in range(100):
        stream = f"job{number}/s"
        shard, _ = client.shard_of(stream)
        if shard in roots:
            continue
        opened = client.call(OpenStream(stream))
        assert isinstance(opened, StreamOpened)
        assert opened.exact
        root = random_root_ids(1, shard=shard, shards=SHARDS)
        roots[shard] = int(root[0])
        lists = one_list([shard + 1, 99], [0, 1], "parse", "count")
        persists.append(Persist(stream, pa.record_batch({"n": [1]}), root, u64((shard + 1) ^ 99), ids=lists))
    assert len(roots) == SHARDS
    send(*persists)

    order = [2, 0, 3, 1]
    acknowledged = Xor(
        u64(*(roots[shard] for shard in order)),
        u64(*((shard + 1) ^ 7 for shard in order)),
        client.health().incarnation,
        ids=EventIds(
            u64(*(number for shard in order for number in (shard + 1, 7))),
            np.arange(0, 2 * SHARDS + 1, 2, dtype=np.int32),
            np.array([-1, 0] * SHARDS, np.int32),
            ("write",),
        ),
    )
    assert send(acknowledged) == [Xored(0, 0)]
    for root in roots.values():
        assert client.call(Explain(root)) == Explained(
            Explanation(True, 99 ^ 7, True, (OwedId(99, "count", True), OwedId(7, "write", True)))
        )


def test_the_command_prints_what_is_missing(exact: Any) -> None:
    client = exact.client()
    client.call(OpenStream("job/s"))
    shard, shards = client.shard_of("job/s")
    root = random_root_ids(1, shard=shard, shards=shards)
    ids = one_list([11, 12], [0, 1], "parse [1]", "count")
    client.call(Persist("job/s", pa.record_batch({"n": [1]}), root, u64(11 ^ 12), ids=ids))
    number = int(root[0])
    for text in (f"{number:016x}", f"{number:#x}", str(number)):
        result = ftlayer(exact, text)
        assert result.exit_code == 0, result.output
        assert f"{number:016x} is pending" in result.output
        assert "000000000000000b  parse [1]  its acknowledgement" in result.output
    client.call(Xor(root, u64(11 ^ 12), client.health().incarnation))
    result = ftlayer(exact, str(number))
    assert result.exit_code == 1
    assert "not pending" in result.output
    for wrong in ("0", "word", "0x10000000000000000"):
        assert ftlayer(exact, wrong).exit_code == 2


def test_a_restarted_vertex_knows_the_replay_and_not_the_old_root(
    tmp_path: Path, serving: Callable[..., Any]
) -> None:
    with serving(tmp_path / "vertex", tracker="exact") as running:
        client = running.client()
        client.call(OpenStream("job/s"))
        ids = one_list([11], [0], "parse")
        client.call(Persist("job/s", pa.record_batch({"n": [1]}), u64(5), u64(11), ids=ids))
        assert client.call(Explain(5)).found is not None
    with serving(tmp_path / "vertex", tracker="exact") as running:
        assert running.client().call(Explain(5)) == Explained()


def test_ids_that_do_not_fold_to_the_values_are_refused(exact: Any) -> None:
    client = exact.client()
    wrong = Xor(u64(5), u64(12), client.health().incarnation, ids=one_list([11], [-1]))
    with pytest.raises(MalformedRequestError, match=r"Xor\.ids: the XOR of list 0"):
        client.call(wrong)
    with client.pipeline() as pipeline, pytest.raises(MalformedRequestError, match=r"Xor\.ids"):
        pipeline.submit(wrong).result()
    with pytest.raises(MalformedRequestError, match=r"Explain\.root"):
        client.call(Explain(0))


def test_a_vertex_with_the_table_says_how_to_have_roots_explained(running: Any) -> None:
    client = running.client()
    assert not client.health().exact
    with pytest.raises(UnsupportedError, match='tracker="exact"'):
        client.call(Explain(5))
    result = ftlayer(running, "5")
    assert result.exit_code == 1
    assert 'tracker="exact"' in result.output
