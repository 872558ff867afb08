"""Tracebacks that records share: stored once, for as long as a record has them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer.errors import StoreDamagedError, StoreFullError
from ftlayer.vertex import calls
from ftlayer.vertex.store import dead_index as failed
from ftlayer.vertex.store import rows as texts
from ftlayer.vertex.store.dead_index import FailedTable
from ftlayer.vertex.store.rows import StoredAttempt, unpack

FRAMES = ["Traceback:\n" + f"  File {name}\n" * 40 for name in ("one", "two")]


def stored_texts(vertex: Any) -> dict[bytes, int]:
    with vertex.store.read() as txn:
        entries = txn.scan("meta", b"text/", b"text0")
        return {bytes(key)[len(b"text/") :]: unpack(value)[0] for key, value in entries}


def held_texts(vertex: Any) -> dict[bytes, int]:
    with vertex.store.read() as txn:
        records = [failed.decode(value) for table in FailedTable for _, value in txn.scan(table)]
    return Counter(each.frames for record in records for each in record.history if each.frames)


def fail(vertex: Any, *roots: int, traceback: str, fatal: bool = False) -> calls.Failed:
    failures = tuple(calls.Failure(r, "broken", "op", f"{traceback}ValueError: {r}", fatal) for r in roots)
    return vertex.call(calls.Fail(failures, vertex.layer.incarnation))


def test_a_traceback_is_stored_once_and_read_in_full(vertex):
    vertex.open()
    vertex.persist([1, 2, 3])
    fail(vertex, 1, 2, traceback=FRAMES[0], fatal=True)
    fail(vertex, 3, traceback=FRAMES[0])
    assert list(stored_texts(vertex).values()) == [3]
    assert [record.traceback for record in vertex.list("dead")] == [
        f"{FRAMES[0]}ValueError: {root}" for root in (1, 2)
    ]
    vertex.restart()
    assert [r.traceback for r in vertex.list("waiting")] == [f"{FRAMES[0]}ValueError: 3"]
    vertex.call(calls.Purge(tuple(record.key for record in vertex.list("dead"))))
    vertex.advance(1_000)
    assert len(vertex.take()) == 1
    assert stored_texts(vertex) == {}


def test_a_lost_transaction_leaves_no_count(vertex):
    vertex.open()
    vertex.persist([1])
    vertex.store.fail_next_commit = True
    with pytest.raises(StoreFullError):
        fail(vertex, 1, traceback=FRAMES[0])
    vertex.restart()
    assert stored_texts(vertex) == {}
    vertex.persist([2])
    fail(vertex, 2, traceback=FRAMES[0])
    assert list(stored_texts(vertex).values()) == [1]


def test_a_missing_text_is_damage(vertex):
    with vertex.store.write(intake=False) as txn:
        changes = texts.TextChanges()
        changes.release_all((StoredAttempt(1, 1, "why", "op", frames=b"\1" * 16),))
        with pytest.raises(StoreDamagedError, match="lacks the text"):
            changes.write(txn)
        with pytest.raises(StoreDamagedError, match="lacks the text"):
            texts.read(txn, b"\1" * 16)
        assert texts.read(txn, b"") == ""


actions = st.one_of(
    st.tuples(st.just("fail"), st.integers(1, 3), st.sampled_from([*FRAMES, "short\n"]), st.booleans()),
    st.tuples(st.just("time out")),
    st.tuples(st.just("late")),
    st.tuples(st.just("take")),
    st.tuples(st.just("requeue")),
    st.tuples(st.just("purge")),
    st.tuples(st.just("restart")),
    st.tuples(st.just("seal"), st.integers(1, 3), st.sampled_from(FRAMES), st.booleans()),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=st.lists(actions, max_size=12))
def test_counts_are_those_of_the_records_whatever_happens(history, kit):
    vertex = kit.Vertex()
    vertex.open(max_attempts=2)
    vertex.call(calls.OpenQuery("q", "run", ("q/files",)))
    roots = 1
    batch = 0
    for action, *more in history:
        dead = tuple(record.key for record in vertex.list("dead"))[:2]
        match action:
            case "fail":
                rows, frames, fatal = more
                names = list(range(roots, roots + rows))
                roots += rows
                vertex.persist(names)
                fail(vertex, *names, traceback=frames, fatal=fatal)
            case "seal":
                rows, frames, fatal = more
                names = list(range(roots, roots + rows))
                roots += rows
                failures = tuple(calls.Failure(r, "broken", "op", frames, fatal) for r in names)
                sealed = calls.SealedRows("q/files", kit.payload(["x"] * rows), kit.u64(names), failures)
                vertex.call(calls.BeginBatch("q", 1, batch))
                vertex.call(calls.Seal("q", 1, batch, {}, (sealed,)))
                vertex.call(calls.Commit("q", 1, batch))
                batch += 1
            case "time out":
                vertex.persist([roots])
                roots += 1
                vertex.advance(2_000)
            case "late":
                for record in vertex.list("waiting"):
                    vertex.xor((record.root, record.root))
                vertex.advance(200)
            case "take":
                vertex.advance(1_000)
                vertex.take()
            case "requeue":
                vertex.call(calls.Requeue(dead))
            case "purge":
                vertex.call(calls.Purge(dead))
            case "restart":
                vertex.restart()
        assert stored_texts(vertex) == held_texts(vertex)
