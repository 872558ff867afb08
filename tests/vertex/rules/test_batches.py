"""The micro-batch protocol: run, verdict, seal, sink, commit; what each crash point means."""

from __future__ import annotations

import numpy as np
import pytest

from ftlayer.errors import ProtocolError, StaleOwnerError, StoreFullError
from ftlayer.vertex import calls
from ftlayer.vertex.calls import BatchState, Envelope, Failure, StreamOptions

FILES, CLICKS = "q/files", "ingest/clicks"


class Query:
    """A query's side of the protocol."""

    def __init__(self, vertex, kit, **options):
        self.vertex, self.kit = vertex, kit
        self.options = StreamOptions(**{"timeout_ms": 1_000, "backoff_ms": (100,), "jitter": 0.0, **options})
        self.open()

    def open(self, name="q", streams=(FILES, CLICKS)):
        self.name = name
        self.opened = self.vertex.call(calls.OpenQuery(name, "run", streams, self.options))
        self.epoch = self.opened.epoch
        return self.opened

    def begin(self, batch):
        return self.vertex.call(calls.BeginBatch(self.name, self.epoch, batch))

    def seal(self, batch, delivered=None, **content):
        return self.vertex.call(calls.Seal(self.name, self.epoch, batch, delivered or {}, **content))

    def reseal(self, batch, **content):
        return self.vertex.call(calls.Reseal(self.name, self.epoch, batch, **content))

    def commit(self, batch):
        return self.vertex.call(calls.Commit(self.name, self.epoch, batch))

    def run(self, batch, delivered=None, **content):
        begun = self.begin(batch)
        self.seal(batch, delivered, **content)
        self.commit(batch)
        return begun

    def failed(self, *roots, stream=FILES, fatal=False):
        rows = self.kit.payload([f"row {root}" for root in roots])
        failures = tuple(Failure(root, "broken", fatal=fatal) for root in roots)
        return calls.SealedRows(stream, rows, self.kit.u64(roots), failures)

    def emitted(self, roots, values, stream=FILES, with_payload=True):
        rows = self.kit.payload([f"row {root}" for root in roots]) if with_payload else None
        return calls.EmittedRows(stream, rows, self.kit.u64(roots), self.kit.u64(values))

    def ingest(self, *texts, stream=CLICKS):
        return self.vertex.call(calls.Ingest(stream, self.kit.payload(list(texts))))

    def deliverable(self, start, max_rows=1_000, stream=CLICKS):
        return self.vertex.call(calls.Deliverable(stream, start, max_rows)).end

    def read(self, start, end, stream=CLICKS):
        return self.kit.flat(self.vertex.call(calls.ReadDeliveries(stream, start, end)))

    def status(self):
        return self.vertex.call(calls.QueryStatusCall(self.name))


@pytest.fixture
def query(vertex, kit):
    return Query(vertex, kit)


def test_a_failed_row_waits_from_the_commit_on_and_is_delivered_when_due(query, vertex):
    assert query.begin(0).state is BatchState.NEW
    assert query.seal(0, failed=(query.failed(5, 6),)) == calls.Sealed(2, 0)
    assert vertex.counts()["waiting"] == 0
    assert query.commit(0) == calls.Committed(again=False)
    assert vertex.counts()["waiting"] == 2
    assert query.deliverable(0, stream=FILES) == 0
    vertex.advance(100)
    assert query.deliverable(0, 1, stream=FILES) == 1
    assert query.deliverable(0, stream=FILES) == 2
    rows = query.read(0, 2, stream=FILES)
    assert [row[1:] for row in rows] == [(5, 2, "row 5"), (6, 2, "row 6")]
    assert {row[0] for row in rows}.isdisjoint({5, 6})


def test_re_reading_gives_the_same_rows_and_ids_until_a_later_batch_begins(query, vertex):
    query.ingest("a", "b")
    query.ingest("c")
    assert query.deliverable(0) == 3
    rows = query.read(0, 3)
    assert query.read(1, 3) == rows[1:]
    vertex.restart()
    query.open()
    assert query.read(0, 3) == rows
    query.run(0, {CLICKS: (0, 2)})
    assert query.read(0, 3) == rows
    vertex.restart()
    query.open()
    assert query.begin(0).state is BatchState.COMMITTED
    assert query.read(0, 3) == rows
    assert query.begin(1).state is BatchState.NEW
    assert query.read(0, 3) == rows[2:]


def test_committed_rows_are_removed_from_the_store(query, vertex):
    query.ingest("a", "b")
    query.run(0, {CLICKS: (0, 2)})
    query.begin(1)
    assert vertex.stored("segments") == {}
    assert vertex.stored("delivery") == {}
    assert query.status().drained


def test_rule_10_a_failed_delivered_row_is_tried_again_and_ends_dead(query, vertex):
    query.options = StreamOptions(max_attempts=2, backoff_ms=(100,), jitter=0.0)
    query.open()
    query.ingest("a", "b")
    ((root, origin, _, _), _) = query.read(0, query.deliverable(0))
    query.begin(0)
    assert query.seal(0, {CLICKS: (0, 2)}, redelivered=(Failure(root, "no"),)) == calls.Sealed(1, 0)
    query.commit(0)
    vertex.advance(100)
    assert query.deliverable(2) == 3
    ((again, same, attempt, text),) = query.read(2, 3)
    assert (same, attempt, text) == (origin, 2, "a")
    assert again != root
    query.begin(1)
    assert query.seal(1, {CLICKS: (2, 3)}, redelivered=(Failure(again, "no"),)) == calls.Sealed(0, 1)
    query.commit(1)
    (dead,) = vertex.list("dead")
    assert (dead.origin, len(dead.history)) == (origin, 2)
    assert query.status().drained


def test_a_fatal_failure_of_a_seal_is_dead_at_once(query, vertex):
    query.begin(0)
    assert query.seal(0, failed=(query.failed(5, fatal=True),)) == calls.Sealed(0, 1)
    query.commit(0)
    assert vertex.counts() == {"pending": 0, "waiting": 0, "delivery": 0, "dead": 1}


def test_a_batch_that_was_not_sealed_leaves_no_trace(query, vertex):
    query.begin(0)
    vertex.restart()
    query.open()
    assert query.begin(0) == calls.BatchBegun(BatchState.NEW)
    assert query.opened.last_sealed == -1


def test_what_a_committed_batch_reports_is_handed_back_until_the_next_begins(query, vertex, kit):
    """The query that committed may have died before it told the others."""

    def report(*roots, failed=()):
        events = tuple(calls.Xor(kit.u64([root]), kit.u64([root + 1]), 1, hold=True) for root in roots)
        fails = tuple(
            calls.Fail((Failure(root, "no", "op", "trace", True),), 1, hold=True) for root in failed
        )
        return calls.Report(events, fails)

    def content(found):
        done = [(e.roots.tolist(), e.values.tolist(), e.incarnation, e.hold, e.ids) for e in found.done]
        return done, found.failed

    first, second = report(5, 6), report(5, failed=(6,))
    query.begin(0)
    query.seal(0, report=first)
    assert query.begin(0).report == calls.Report()
    query.reseal(0, report=second)
    query.commit(0)
    vertex.restart()
    query.open()
    begun = query.begin(0)
    assert (begun.state, content(begun.report)) == (BatchState.COMMITTED, content(second))
    query.begin(1)
    assert query.begin(0).report == calls.Report()
    query.seal(1, report=first)
    query.reseal(1)
    query.commit(1)
    assert query.begin(1).report == calls.Report()


def test_a_sealed_batch_hands_back_what_failed(query, vertex):
    query.ingest("a", "b")
    roots = [row[0] for row in query.read(0, query.deliverable(0))]
    query.begin(0)
    content = {
        "failed": (query.failed(5, 6), query.failed(7, stream=CLICKS)),
        "redelivered": (Failure(roots[1], "no"),),
        "resumed": (Failure(99, "other query's"),),
    }
    query.seal(0, {CLICKS: (0, 2)}, **content)
    vertex.restart()
    assert query.open().last_sealed == 0
    begun = query.begin(0)
    assert begun.state is BatchState.SEALED
    assert (begun.redelivered, begun.resumed) == ((roots[1],), content["resumed"])
    for got, sent in zip(begun.failed, content["failed"], strict=True):
        assert (got.stream, got.payload, got.failures) == (sent.stream, sent.payload, sent.failures)
        assert got.roots.tolist() == sent.roots.tolist()
    assert query.status().deliverable + query.status().delivered == 2 + 3
    assert query.commit(0) == calls.Committed(again=False)
    assert vertex.counts()["waiting"] == 4


def test_sealing_again_must_say_the_same(query):
    query.begin(0)
    first = query.seal(0, failed=(query.failed(5),))
    assert query.seal(0, failed=(query.failed(5),)) == first
    with pytest.raises(ProtocolError, match="Reseal"):
        query.seal(0, failed=(query.failed(6),))
    query.commit(0)
    assert query.seal(0, failed=(query.failed(5),)) == first
    query.begin(1)
    with pytest.raises(ProtocolError, match="committed"):
        query.seal(0, failed=(query.failed(5),))


def test_a_reseal_adds_failures(query, vertex):
    query.ingest("a", "b")
    one, two = (row[0] for row in query.read(0, query.deliverable(0)))
    query.begin(0)
    query.seal(0, {CLICKS: (0, 2)}, failed=(query.failed(5),), redelivered=(Failure(one, "no"),))
    again = query.reseal(0, failed=(query.failed(6),), redelivered=(Failure(one, "no"), Failure(two, "no")))
    assert again == calls.Sealed(4, 0)
    begun = query.begin(0)
    assert begun.redelivered == (one, two)
    assert [part.roots.tolist() for part in begun.failed] == [[5], [6]]
    query.commit(0)
    assert vertex.counts()["waiting"] == 4
    with pytest.raises(ProtocolError, match="committed"):
        query.reseal(0)
    with pytest.raises(ProtocolError, match="not sealed"):
        query.reseal(1)


def test_a_commit_is_idempotent_and_needs_a_seal(query, vertex):
    with pytest.raises(ProtocolError, match="not sealed"):
        query.commit(0)
    query.begin(0)
    query.seal(0, failed=(query.failed(5),))
    query.commit(0)
    vertex.restart()
    assert query.commit(0) == calls.Committed(again=True)
    assert vertex.counts()["waiting"] == 1


def test_a_batch_cannot_overtake_a_sealed_one(query):
    query.begin(0)
    query.seal(0)
    with pytest.raises(ProtocolError, match="sealed and not committed"):
        query.begin(1)
    with pytest.raises(ProtocolError, match="sealed and not committed"):
        query.seal(1)


def test_a_newer_run_fences_the_older_one(query, vertex):
    epoch = query.epoch
    query.begin(0)
    query.seal(0)
    assert query.open().epoch == epoch + 1
    for call in (
        calls.BeginBatch("q", epoch, 0),
        calls.Seal("q", epoch, 0, {}),
        calls.Reseal("q", epoch, 0),
        calls.Commit("q", epoch, 0),
    ):
        with pytest.raises(StaleOwnerError, match="taken over"):
            vertex.call(call)
    with pytest.raises(ProtocolError, match="never given"):
        vertex.call(calls.Commit("q", epoch + 2, 0))
    with pytest.raises(ProtocolError, match="unknown"):
        vertex.call(calls.Commit("other", 1, 0))


def test_an_ingest_belongs_to_one_query(query, vertex, kit):
    with pytest.raises(StaleOwnerError, match="'q'"):
        Query(vertex, kit).open("other", (CLICKS,))
    query.open("q", (FILES,))
    query.ingest("a")
    other = Query(vertex, kit)
    other.open("q", (FILES,))
    other.open("other", (CLICKS,))
    assert [row[3] for row in other.read(0, other.deliverable(0))] == ["a"]


def test_open_query_sent_again_gives_the_same_epoch(vertex, kit):
    call = calls.OpenQuery("q", "run", (FILES,))
    first = vertex.call(call, Envelope("c", 1))
    assert vertex.call(call, Envelope("c", 1)) == first
    vertex.restart()
    again = vertex.call(call, Envelope("c", 1))
    assert (again.epoch, again.incarnation) == (first.epoch, first.incarnation + 1)


def test_seals_are_checked_against_the_delivery_log(query):
    query.ingest("a", "b", "c")
    (root, *_), *_ = query.read(0, query.deliverable(0))
    query.begin(0)
    for content, match in (
        ({"delivered": {CLICKS: (0, 4)}}, "ends at 3"),
        ({"delivered": {CLICKS: (1, 2)}}, "would be lost"),
        ({"delivered": {"q/other": (0, 0)}}, "none of the query's"),
        ({"failed": (query.failed(5, stream="q/other"),)}, "none of the query's"),
        ({"delivered": {CLICKS: (0, 1)}, "redelivered": (Failure(77, "no"),)}, "77 was not delivered"),
        ({"redelivered": (Failure(root, "no"),)}, "was not delivered"),
        ({"emitted": (query.emitted([5], [6], CLICKS, with_payload=False),)}, "no payload"),
        ({"failed": (query.failed(5),), "emitted": (query.emitted([5], [6]),)}, "all or nothing"),
    ):
        with pytest.raises(ProtocolError, match=match):
            query.seal(0, **content)


def test_offsets_of_another_store_are_refused(query):
    query.ingest("a")
    for call in (
        calls.Deliverable(CLICKS, 2, 10),
        calls.ReadDeliveries(CLICKS, 0, 2),
        calls.ReadDeliveries(CLICKS, 1, 0),
    ):
        with pytest.raises(ProtocolError, match="log ends at 1"):
            query.vertex.call(call)


def test_an_older_checkpoint_gets_what_is_left(query):
    query.ingest("a", "b")
    query.ingest("c", "d")
    query.run(0, {CLICKS: (0, 3)})
    query.begin(1)
    assert query.deliverable(0, 1) == 4
    assert [row[3] for row in query.read(0, 4)] == ["d"]


def test_emitted_rows_are_pending_from_the_commit_on(query, vertex):
    query.ingest("a", "b")
    (one, *_), (two, *_) = query.read(0, query.deliverable(0))
    query.begin(0)
    emitted = (query.emitted([5, 6], [50, 60]), query.emitted([two], [70], CLICKS, with_payload=False))
    query.seal(0, {CLICKS: (0, 2)}, emitted=emitted)
    assert vertex.xor((5, 50), hold=True) == calls.Xored(0, 0)
    assert vertex.counts()["pending"] == 0
    query.commit(0)
    assert [record.root for record in vertex.list("pending")] == [6, two]
    assert query.status().pending == 2
    query.begin(1)
    vertex.advance(200)
    vertex.restart()
    query.open()
    assert query.deliverable(2, stream=CLICKS) == 3
    ((again, origin, attempt, text),) = query.read(2, 3)
    assert (origin, attempt, text) == (two, 1, "b")
    assert again not in (one, two)
    assert [row[3] for row in query.read(0, query.deliverable(0, stream=FILES), FILES)] == ["row 6"]


def test_an_emitted_row_that_times_out_comes_back_to_its_query(query, vertex):
    query.run(0, emitted=(query.emitted([5], [50]),))
    vertex.advance(3_000)
    vertex.advance(100)
    assert query.deliverable(0, stream=FILES) == 1
    ((root, origin, attempt, text),) = query.read(0, 1, FILES)
    assert (origin, attempt, text) == (5, 2, "row 5")
    assert vertex.xor((5, 50)) == calls.Xored(0, 1)
    query.begin(1)
    query.seal(1, {FILES: (0, 1)}, emitted=(query.emitted([root], [51], with_payload=False),))
    query.commit(1)
    assert vertex.xor((root, 51)).completed == 1
    query.begin(2)
    vertex.advance(200)
    assert query.status().drained


def test_a_reseal_replaces_what_was_emitted(query, vertex):
    query.begin(0)
    query.seal(0, emitted=(query.emitted([5], [50]),))
    query.reseal(0, emitted=(query.emitted([15, 16], [51, 61]),))
    query.commit(0)
    assert [record.root for record in vertex.list("pending")] == [15, 16]
    assert len(vertex.stored("segments")) == 2


def test_a_sealed_emit_is_not_pending_after_a_restart(query, vertex):
    query.begin(0)
    query.seal(0, emitted=(query.emitted([5], [50]),))
    vertex.restart()
    query.open()
    assert query.deliverable(0, stream=FILES) == 0
    query.commit(0)
    assert vertex.xor((5, 50)).completed == 1


def test_rule_11_ingested_rows_are_in_flight_until_their_commit(query, vertex, kit):
    query.options = StreamOptions(max_pending=3)
    query.open()
    query.ingest("a", "b")
    more = calls.Ingest(CLICKS, kit.payload(["c", "d"]))
    assert "max_pending" in vertex.layer.intake_blocked(more, vertex.now)
    query.run(0, {CLICKS: (0, 1)})
    assert vertex.layer.intake_blocked(more, vertex.now) is None
    vertex.store.share = 0.95
    assert vertex.layer.intake_blocked(calls.Seal("q", query.epoch, 1, {}), vertex.now) is not None
    assert vertex.layer.intake_blocked(calls.Commit("q", query.epoch, 1), vertex.now) is None


def test_ingest_before_any_query_and_a_lost_transaction(vertex, kit):
    call = calls.Ingest(CLICKS, kit.payload(["a"]))
    vertex.store.fail_next_commit = True
    with pytest.raises(StoreFullError):
        vertex.group(call, call)
    vertex.layer.lost()
    assert vertex.group(call, call) == [calls.Accepted(1)] * 2
    query = Query(vertex, kit)
    assert len(query.read(0, query.deliverable(0))) == 2


def test_a_lost_seal_leaves_no_trace(query, vertex):
    query.begin(0)
    vertex.store.fail_next_commit = True
    with pytest.raises(StoreFullError):
        query.seal(0, failed=(query.failed(5),), emitted=(query.emitted([6], [7]),))
    vertex.layer.lost()
    assert query.begin(0).state is BatchState.NEW
    query.seal(0, failed=(query.failed(8),), emitted=(query.emitted([9], [7]),))
    query.commit(0)
    assert [record.root for record in vertex.list("waiting") + vertex.list("pending")] == [8, 9]


def test_status_counts_each_row_once(query, vertex):
    query.ingest("a", "b", "c")
    assert query.status() == calls.QueryStatus(0, 3, 0, 0, 0, -1)
    query.deliverable(0, 2)
    assert query.status() == calls.QueryStatus(0, 1, 2, 0, 0, -1)
    query.run(0, {CLICKS: (0, 2)}, failed=(query.failed(5), query.failed(6, fatal=True)))
    assert query.status() == calls.QueryStatus(1, 1, 0, 0, 1, 100)
    vertex.advance(60)
    assert query.status().next_due_in_ms == 40


def test_pushed_streams_and_streams_read_by_offset_are_kept_apart(query):
    with pytest.raises(ProtocolError, match="read by offset"):
        query.vertex.take(stream=CLICKS)


def test_key_hashes_of_sealed_rows_come_back_with_their_replay(query, vertex, kit):
    hashes = np.array([[1, 2], [3, 4]], np.int32)
    rows = query.failed(5, 6)
    query.run(0, failed=(calls.SealedRows(FILES, rows.payload, rows.roots, rows.failures, hashes),))
    vertex.advance(100)
    reply = vertex.call(calls.ReadDeliveries(FILES, 0, query.deliverable(0, stream=FILES)))
    assert reply.batches[0].key_hashes.tolist() == hashes.tolist()
