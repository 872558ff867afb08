"""The exact tracker behind the rules: which id a stuck root waits for, and who owes it."""

from __future__ import annotations

from functools import reduce
from operator import xor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.errors import UnsupportedError
from ftlayer.records.ids import Explanation, OwedId
from ftlayer.vertex import calls
from ftlayer.vertex.calls import EventIds, Explain
from ftlayer.vertex.calls.common import check_event_ids, plain_event_ids, stored_event_ids


def event_ids(*lists: dict[int, str]) -> EventIds:
    """Make the lists of events: id → the operator that is to acknowledge it, "" for this event itself."""
    operators = sorted({owner for ids in lists for owner in ids.values()} - {""})
    owners = [operators.index(o) if o else -1 for ids in lists for o in ids.values()]
    return EventIds(
        np.array([i for ids in lists for i in ids], np.uint64),
        np.cumsum([0, *map(len, lists)], dtype=np.int32),
        np.array(owners, np.int32),
        tuple(operators),
    )


def folded(*lists: dict[int, str]) -> list[int]:
    return [reduce(xor, ids, 0) for ids in lists]


class Kit:
    """A vertex with the exact tracker, and calls with ids."""

    def __init__(self, kit: Any, **options: Any) -> None:
        self.kit = kit
        self.vertex = kit.Vertex(tracker="exact", **options)
        self.opened = self.vertex.open()

    def persist(self, **roots: dict[int, str]) -> None:
        lists = list(roots.values())
        numbers = [int(name[1:]) for name in roots]
        self.vertex.persist(numbers, folded(*lists), ids=event_ids(*lists))

    def xor(self, root: int, ids: dict[int, str], *, hold: bool = False) -> calls.Xored:
        values = self.kit.u64(folded(ids))
        incarnation = self.vertex.layer.incarnation
        return self.vertex.call(
            calls.Xor(self.kit.u64([root]), values, incarnation, hold, ids=event_ids(ids))
        )

    def explain(self, root: int) -> Any:
        with self.vertex.store.read() as txn:
            return self.vertex.layer.read(txn, Explain(root), self.vertex.now).found


@pytest.fixture
def exact(kit: Any) -> Kit:
    return Kit(kit)


def test_a_stuck_root_tells_which_id_is_missing_and_who_owes_it(exact: Kit) -> None:
    assert exact.opened.exact
    exact.persist(r1={11: "parse", 12: "count"}, r2={13: "parse"})
    exact.xor(1, {11: "", 21: "write", 22: "write"})
    exact.xor(1, {21: ""})
    assert exact.explain(1) == Explanation(
        True, 12 ^ 22, True, (OwedId(12, "count", True), OwedId(22, "write", True))
    )
    exact.xor(1, {12: ""})
    assert exact.explain(1).owed == (OwedId(22, "write", True),)
    assert exact.xor(1, {22: ""}).completed == 1
    assert exact.explain(1) is None
    assert exact.explain(2).owed == (OwedId(13, "parse", True),)


def test_an_acknowledgement_without_its_emission_is_told_apart(exact: Kit) -> None:
    exact.persist(r1={11: "parse"})
    exact.xor(1, {21: ""})
    assert set(exact.explain(1).owed) == {OwedId(11, "parse", True), OwedId(21, "", False)}


def test_events_held_for_a_registration_are_explained(exact: Kit) -> None:
    exact.xor(5, {31: ""}, hold=True)
    assert exact.explain(5) == Explanation(False, 31, True, (OwedId(31, "", False),))


def test_events_without_ids_are_admitted(exact: Kit) -> None:
    exact.persist(r1={11: "parse", 12: "count"})
    exact.vertex.xor((1, 11))
    explained = exact.explain(1)
    assert not explained.ids_known
    assert explained.value == 12


def test_after_a_restart_the_old_root_is_unknown_and_its_replay_waits_for_its_own_id(exact: Kit) -> None:
    exact.persist(r1={11: "parse"})
    exact.vertex.restart()
    assert exact.explain(1) is None
    ((replayed, origin, _, _),) = exact.vertex.take()
    assert origin == 1
    assert exact.explain(replayed) == Explanation(True, replayed, True, (OwedId(replayed, "", True),))
    exact.xor(replayed, {replayed: "", 41: "write"})
    assert exact.explain(replayed).owed == (OwedId(41, "write", True),)


def test_a_replay_after_a_failure_waits_for_its_own_id(exact: Kit) -> None:
    exact.persist(r1={11: "parse"})
    exact.vertex.fail(1)
    exact.vertex.advance(1_000)
    ((replayed, _, _, _),) = exact.vertex.take()
    assert exact.explain(replayed).owed == (OwedId(replayed, "", True),)


@pytest.mark.parametrize("restarted", [False, True])
def test_emitted_rows_keep_their_ids_from_the_seal_to_the_commit(kit: Any, restarted: bool) -> None:
    exact = Kit(kit)
    vertex = exact.vertex
    streams = ("q/files", "ingest/clicks")
    opened = vertex.call(calls.OpenQuery("q", "run", streams))
    assert opened.exact
    vertex.call(calls.Ingest("ingest/clicks", kit.payload(["a", "b", "c"])))
    end = vertex.call(calls.Deliverable("ingest/clicks", 0, 10)).end
    (delivered,) = vertex.call(calls.ReadDeliveries("ingest/clicks", 0, end)).batches
    first, _, third = delivered.roots.tolist()
    # The lists of the delivered rows come in another order than their rows.
    lists = [{53: "next"}, {51: "next", 52: "other"}]
    emitted = (
        calls.EmittedRows(
            "ingest/clicks", None, kit.u64([third, first]), kit.u64(folded(*lists)), event_ids(*lists)
        ),
        calls.EmittedRows(
            "q/files", kit.payload(["x"]), kit.u64([7]), kit.u64([61]), event_ids({61: "next"})
        ),
    )
    vertex.call(calls.BeginBatch("q", opened.epoch, 0))
    vertex.call(calls.Seal("q", opened.epoch, 0, {"ingest/clicks": (0, end)}, emitted=emitted))
    if restarted:
        vertex.restart()
    vertex.call(calls.Commit("q", opened.epoch, 0))
    assert exact.explain(first).owed == (OwedId(51, "next", True), OwedId(52, "other", True))
    assert exact.explain(third).owed == (OwedId(53, "next", True),)
    assert exact.explain(7).owed == (OwedId(61, "next", True),)


def test_the_table_refuses_to_explain_and_takes_no_note_of_ids(kit: Any) -> None:
    vertex = kit.Vertex()
    assert not vertex.open().exact
    vertex.persist([1], [11], ids=event_ids({11: "parse"}))
    with vertex.store.read() as txn, pytest.raises(UnsupportedError, match='tracker="exact"'):
        vertex.layer.read(txn, Explain(1), vertex.now)
    assert vertex.xor((1, 11)).completed == 1


lists_of_ids = st.lists(
    st.dictionaries(st.integers(1, 2**64 - 1), st.sampled_from(["", "a", "b"]), max_size=4), max_size=5
)


@settings(max_examples=50, deadline=None)
@given(lists_of_ids, st.data())
def test_lists_are_taken_and_stored_as_a_list_of_dicts_would_be(lists: Any, data: st.DataObject) -> None:
    which = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=6) if lists else st.just([]))
    taken = event_ids(*lists).take(np.array(which, np.int64))
    check_event_ids(taken, np.array(folded(*(lists[i] for i in which)), np.uint64), "ids")
    stored = stored_event_ids(plain_event_ids(taken))
    assert stored is not None
    names = [stored.operators[owner] if owner >= 0 else "" for owner in stored.owners.tolist()]
    assert list(zip(stored.ids.tolist(), names, strict=True)) == [
        item for i in which for item in lists[i].items()
    ]
