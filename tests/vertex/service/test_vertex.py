"""Several shards behind one face."""

from __future__ import annotations

import dataclasses
import json
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ftlayer.config import VertexOptions
from ftlayer.errors import (
    ConfigError,
    MalformedRequestError,
    ProtocolError,
    StaleIncarnationError,
    StoreDamagedError,
    StorePathError,
    UnknownJobError,
    VertexUnavailableError,
)
from ftlayer.records.ids import random_root_ids
from ftlayer.vertex.calls import (
    Accepted,
    Announced,
    AnnounceJob,
    AskJob,
    BeginBatch,
    Changed,
    Commit,
    DeadGroups,
    Edit,
    EditAndRequeue,
    EmittedRows,
    Fail,
    Failed,
    Failure,
    GetJob,
    Ingest,
    JobDetails,
    JobKind,
    JobOrder,
    ListAudit,
    ListJobs,
    ListRecords,
    ListStreams,
    OpenQuery,
    OpenStream,
    OrderAction,
    OrderState,
    Persist,
    Purge,
    QueryOpened,
    QueryStatusCall,
    Seal,
    SealedRows,
    SelectRecords,
    Stats,
    StreamOpened,
    StreamOptions,
    Touch,
    Touched,
    Xor,
    Xored,
)
from ftlayer.vertex.client.client import VertexClient
from ftlayer.vertex.rules.streams import owner_of
from ftlayer.vertex.service.embedded import EmbeddedVertex
from ftlayer.vertex.service.vertex import Router

SHARDS = 4


@pytest.fixture
def running(tmp_path: Path, serving: Callable[..., Any]) -> Iterator[Any]:
    with serving(tmp_path / "vertex", shards=SHARDS) as it:
        yield it


def persist(client: VertexClient, stream: str, rows: int = 3) -> Persist:
    shard, shards = client.shard_of(stream)
    assert shards == SHARDS
    roots = random_root_ids(rows, shard=shard, shards=shards)
    return Persist(stream, pa.record_batch({"n": range(rows)}), roots, random_root_ids(rows))


def streams_of_all_shards(client: VertexClient) -> list[str]:
    found: dict[int, str] = {}
    for number in range(100):
        found.setdefault(client.shard_of(f"job{number}/s")[0], f"job{number}/s")
    assert len(found) == SHARDS
    return list(found.values())


@pytest.fixture
def pending(client: VertexClient) -> list[Persist]:
    """Three pending roots on each shard."""
    calls = []
    for stream in streams_of_all_shards(client):
        client.call(OpenStream(stream))
        call = persist(client, stream)
        assert client.call(call) == Accepted(3)
        calls.append(call)
    return calls


def joined(calls: list[Persist]) -> tuple[np.ndarray, np.ndarray]:
    order = np.random.default_rng(1).permutation(3 * len(calls))
    return (
        np.concatenate([call.roots for call in calls])[order],
        np.concatenate([call.values for call in calls])[order],
    )


def test_streams_of_one_job_share_a_shard(client: VertexClient) -> None:
    assert len({client.shard_of(f"job/{number}")[0] for number in range(20)}) == 1
    assert owner_of("ingest/clicks") == "ingest/clicks"


def test_one_xor_completes_roots_of_all_shards(client: VertexClient, pending: list[Persist]) -> None:
    roots, values = joined(pending)
    incarnation = client.health().incarnation
    assert client.call(Touch(roots, incarnation)) == Touched(12)
    with client.pipeline() as pipeline:
        assert pipeline.submit(Xor(roots, values, incarnation)).result() == Xored(12, 0)
    assert client.call(Xor(roots[:0], values[:0], incarnation)) == Xored(0, 0)


def wait_for_another_ms() -> None:
    since_ms = time.time_ns() // 1_000_000
    while time.time_ns() // 1_000_000 == since_ms:
        time.sleep(0.001)


def test_records_of_all_shards_are_selected_and_grouped(client: VertexClient) -> None:
    roots = []
    for stream in streams_of_all_shards(client):
        client.call(OpenStream(stream, StreamOptions(max_attempts=1)))
        call = persist(client, stream)
        client.call(call)
        roots += call.roots.tolist()
    incarnation = client.health().incarnation
    for turn in range(3):  # by turns, so that a shard has no letters that all others' follow
        failures = tuple(Failure(root, "broken", "op") for root in roots[turn::3])
        client.call(Fail(failures, incarnation))
        wait_for_another_ms()
    groups: Any = client.call(DeadGroups())
    assert (len(groups.groups), groups.indexed) == (SHARDS, 1.0)
    owner = owner_of(groups.groups[0].stream)
    of_one: Any = client.call(DeadGroups(owner))
    assert [group.stream for group in of_one.groups] == [groups.groups[0].stream]
    assert sorted(root for page in pages(client, SelectRecords("dead", limit=2)) for root in page) == sorted(
        roots
    )
    latest: list[Any] = []
    after = b""
    while not latest or after:
        page: Any = client.call(SelectRecords("dead", newest=True, limit=5, after=after))
        latest += page.records
        after = page.more
    assert sorted(record.root for record in latest) == sorted(roots)
    died = [record.history[-1].at_ms for record in latest]
    assert died == sorted(died, reverse=True)
    (of_owner,) = pages(client, SelectRecords("dead", owner))
    assert len(of_owner) == 3
    everything: Any = client.call(SelectRecords("dead", owner, keys_only=True))
    other: Any = client.call(SelectRecords("dead", owner_of(groups.groups[1].stream), keys_only=True))
    keys = (everything.keys[0], other.keys[1])
    found = [root for page in pages(client, SelectRecords("dead", keys=keys)) for root in page]
    assert len(found) == 2
    letters: Any = client.call(SelectRecords("dead", owner, limit=2))
    edits = tuple(Edit(record.key, pa.record_batch({"n": [99]})) for record in letters.records)
    edits += (Edit(other.keys[0], pa.record_batch({"n": [99]})),)
    assert client.call(EditAndRequeue(edits, "anna")) == Changed(3)
    assert client.call(Purge((everything.keys[2], other.keys[1]), "bert")) == Changed(2)
    lines, after = [], b""
    while not lines or after:
        page = client.call(ListAudit(after, 1))
        lines += [(entry.at_ms, entry.who, entry.what, entry.count) for entry in page.entries]
        after = page.more
    assert lines == sorted(lines, key=lambda line: -line[0])
    assert sorted(line[1:] for line in lines) == [
        ("anna", "edit", 1),
        ("anna", "edit", 2),
        ("bert", "purge", 1),
        ("bert", "purge", 1),
    ]
    with pytest.raises(MalformedRequestError, match=r"SelectRecords\.keys\[0\]: not a key"):
        client.call(SelectRecords("dead", keys=(b"\xff\xff",)))


def pages(client: VertexClient, call: SelectRecords) -> list[list[int]]:
    """Return the roots of all pages."""
    found = []
    while True:
        page: Any = client.call(call)
        found.append([record.root for record in page.records])
        if not page.more:
            return found
        call = dataclasses.replace(call, after=page.more)


def test_jobs_of_all_shards_are_listed_and_asked(client: VertexClient) -> None:
    owners = [owner_of(stream) for stream in streams_of_all_shards(client)]
    for number, owner in enumerate(owners):
        job = JobDetails(owner, owner, JobKind.TOPOLOGY, "run-1", "acker", "running", False, number, number)
        assert client.call(AnnounceJob(job)) == Announced((), 0, True)
        order = JobOrder("o-1", owner, "run-1", OrderAction.DRAIN, "me", 1)
        asked: Any = client.call(AskJob(order))
        assert asked.answer.state is OrderState.WAITING
        assert client.call(AnnounceJob(job)) == Announced((order,), 0, True)
        found: Any = client.call(GetJob(owner))
        assert [record.order for record in found.orders] == [order]
    listed: Any = client.call(ListJobs())
    assert [found.job.owner for found in listed.jobs] == owners[::-1]
    with pytest.raises(UnknownJobError):
        client.call(GetJob("nothing"))


def test_stats_are_of_all_shards(client: VertexClient, pending: list[Persist]) -> None:
    stats: Any = client.call(Stats())
    assert stats.values["pending"] == 12
    assert 0 < stats.values["used_share"] < 0.5


def test_streams_of_all_shards_are_listed_in_one_order(client: VertexClient, pending: list[Persist]) -> None:
    listed: Any = client.call(ListStreams())
    assert [each.stream for each in listed.streams] == sorted(call.stream for call in pending)
    assert {(each.pending, each.persisted, each.completion.total) for each in listed.streams} == {(3, 3, 0.0)}


def test_an_incarnation_of_one_shard_is_none_of_the_vertex(
    client: VertexClient, pending: list[Persist]
) -> None:
    roots, values = joined(pending)
    opened: Any = client.call(OpenStream("job0/s"))
    assert isinstance(opened, StreamOpened)
    assert opened.incarnation == client.health().incarnation == SHARDS
    with pytest.raises(StaleIncarnationError):
        client.call(Xor(roots, values, 1))


def test_roots_of_another_shard_are_refused(client: VertexClient) -> None:
    stream = streams_of_all_shards(client)[0]
    client.call(OpenStream(stream))
    call = persist(client, stream)
    other = (client.shard_of(stream)[0] + 1) % SHARDS
    foreign = call.roots.copy()
    foreign[1] = random_root_ids(1, shard=other, shards=SHARDS)[0]
    with pytest.raises(MalformedRequestError, match=r"Persist\.roots\[1\]"):
        client.call(dataclasses.replace(call, roots=foreign))


def test_records_of_all_shards_are_listed_and_purged(client: VertexClient, pending: list[Persist]) -> None:
    roots, _ = joined(pending)
    failures = tuple(Failure(int(root), "bad", fatal=True) for root in roots)
    assert client.call(Fail(failures, client.health().incarnation)) == Failed(0, 12, 0)
    keys: list[bytes] = []
    after = b""
    while True:
        page: Any = client.call(ListRecords("dead", limit=2, after=after))
        keys += [record.key for record in page.records]
        after = page.more
        if not after:
            break
    assert len(set(keys)) == len(keys) == 12
    one: Any = client.call(ListRecords("dead", pending[2].stream))
    assert {record.root for record in one.records} == set(pending[2].roots.tolist())
    assert client.call(Purge(tuple(keys[:5]))) == Changed(5)
    assert client.call(Purge(tuple(keys))) == Changed(7)
    assert client.call(Purge(())) == Changed(0)
    for wrong in (b"", b"\xff\xff", b"\x00\x04"):
        with pytest.raises(MalformedRequestError, match=r"keys\[0\]"):
            client.call(Purge((wrong,)))


# ---------------------------------------------------------------- queries


def test_a_query_is_where_its_ingest_is_for_ever(client: VertexClient) -> None:
    ingest = "ingest/clicks"
    home = client.shard_of(ingest)[0]
    for number in range(6):
        query = f"query{number}"
        if number:
            ingest = f"ingest/clicks{number}"
        client.call(OpenQuery(query, "run", (ingest, f"{query}/logs")))
        assert client.shard_of(f"{query}/logs")[0] == client.shard_of(ingest)[0]
        status: Any = client.call(QueryStatusCall(query))
        assert status.drained
    assert client.shard_of("ingest/clicks")[0] == home


def far_apart(client: VertexClient, count: int) -> list[str]:
    found: dict[int, str] = {}
    for number in range(100):
        found.setdefault(client.shard_of(f"ingest/i{number}")[0], f"ingest/i{number}")
    return list(found.values())[:count]


def test_ingests_of_different_shards_cannot_be_read_by_one_query(client: VertexClient) -> None:
    first, second = far_apart(client, 2)
    with pytest.raises(ProtocolError, match="one ingest a query"):
        client.call(OpenQuery("q", "run", (first, second)))
    client.call(OpenQuery("q", "run", (first,)))
    with pytest.raises(ProtocolError, match="new name"):
        client.call(OpenQuery("q", "run", (second,)))
    client.call(OpenQuery("q", "another run", (first,)))


def test_the_batch_protocol_on_the_querys_shard(client: VertexClient) -> None:
    [ingest] = far_apart(client, 1)
    opened: Any = client.call(OpenQuery("q", "run", (ingest, "q/logs")))
    assert isinstance(opened, QueryOpened)
    client.call(Ingest(ingest, pa.record_batch({"n": [1, 2]})))
    client.call(BeginBatch("q", opened.epoch, 0))
    shard, shards = client.shard_of("q/logs")
    assert (opened.shard, opened.shards) == (shard, shards)
    roots = random_root_ids(1, shard=shard, shards=shards)
    failed = SealedRows("q/logs", pa.record_batch({"n": [1]}), roots, (Failure(int(roots[0]), "bad"),))
    seal = Seal("q", opened.epoch, 0, {}, (failed,))
    elsewhere = streams_of_all_shards(client)
    elsewhere = [stream for stream in elsewhere if client.shard_of(stream)[0] != shard]
    foreign = random_root_ids(1, shard=(shard + 1) % shards, shards=shards)
    for wrong, named in [
        (dataclasses.replace(seal, delivered={elsewhere[0]: (0, 1)}), "delivered"),
        (dataclasses.replace(seal, failed=(dataclasses.replace(failed, stream=elsewhere[0]),)), "failed"),
        (dataclasses.replace(seal, emitted=(EmittedRows("q/logs", None, foreign, foreign),)), "emitted"),
    ]:
        with pytest.raises(MalformedRequestError, match=named):
            client.call(wrong)
    client.call(seal)
    client.call(Commit("q", opened.epoch, 0))
    status: Any = client.call(QueryStatusCall("q"))
    assert status.waiting == 1


# ---------------------------------------------------------------- what is fixed at the first start


def test_the_number_of_shards_is_fixed(tmp_path: Path, serving: Callable[..., Any]) -> None:
    with serving(tmp_path / "vertex", shards=2):
        pass
    with pytest.raises(ConfigError, match="shards=2"), serving(tmp_path / "vertex", shards=4):
        pass
    with serving(tmp_path / "vertex", shards=2) as running:
        assert running.client().health().shards == 2


def test_the_store_is_for_its_owner_alone(tmp_path: Path, serving: Callable[..., Any]) -> None:
    with serving(tmp_path / "vertex"):
        assert (tmp_path / "vertex").stat().st_mode & 0o777 == 0o700


def test_routes_survive_and_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "routes.json"
    router = Router(path, 8)
    ingest = next(name for n in range(99) if router.shard_of(name := f"ingest/{n}") != router.shard_of("q"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        # Clients ask again for as long as the vertex is away: who holds all descriptors lets one go.
        with pytest.raises(
            VertexUnavailableError, match=r"routes\.json cannot be written now: Too many open files"
        ):
            router.open_query("q", (ingest,))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    shard = router.open_query("q", (ingest,))
    assert shard == router.shard_of(ingest)
    assert Router(path, 8).shard_of("q") == shard
    assert json.loads(path.read_text()) == {"q": shard}
    path.write_text("[1, 2")
    with pytest.raises(StoreDamagedError, match="routes"):
        Router(path, 8)


def test_a_directory_with_other_files_is_refused_and_left_as_it_is(
    tmp_path: Path, serving: Callable[..., Any]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StorePathError, match=r"has other files in it \(notes\.txt\)"), serving(tmp_path):
        pass
    with pytest.raises(StorePathError, match=r"notes\.txt"):
        EmbeddedVertex(VertexOptions(tmp_path)).start()
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_a_new_volume_and_what_a_start_that_was_cut_short_has_left_are_taken(
    tmp_path: Path, serving: Callable[..., Any]
) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "vertex.log").write_text("began")
    (tmp_path / "vertex.new").write_text("{")
    with serving(tmp_path):
        pass
    (tmp_path / "notes.txt").write_text("beside a store")
    with serving(tmp_path) as running:
        assert running.vertex.shards == 1
