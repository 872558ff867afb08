"""Two queries: one hands records on with `emit`, the other resumes them. Nothing is lost, whichever crashes when."""

from __future__ import annotations

import zlib
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer.vertex import calls
from ftlayer.vertex.calls import BatchState, Failure, StreamOptions

STREAM = "a/rows"


class TwoQueries:
    """Query ``a`` emits each of its rows into a carrier; query ``b`` reads the carrier by offset."""

    def __init__(self, kit: Any, rows: int, salt: int) -> None:
        self.kit, self.salt = kit, salt
        self.vertex = kit.Vertex()
        self.source = [f"row {i}" for i in range(rows)]
        self.options = StreamOptions(timeout_ms=500, max_attempts=4, backoff_ms=(50,), jitter=0.0)
        self.ids = 0
        self.batch = self.read_to = self.delivered_to = self.sealed_to = 0
        self.carrier: list[tuple[str, int, int]] = []  # text, root, record id
        self.carried: set[int] = set()  # batches the carrier has
        self.carrier_read = 0
        self.done: list[str] = []
        self.open()

    def open(self) -> None:
        self.epoch = self.vertex.call(calls.OpenQuery("a", "run", (STREAM,), self.options)).epoch

    def new_id(self) -> int:
        self.ids += 1
        return zlib.crc32(b"%d" % self.ids) << 32 | self.ids

    def emit_batch(self, stop_after: str, size: int) -> None:
        """One batch of ``a``, which stops after a step; its sink skips batches it knows."""
        begun = self.vertex.call(calls.BeginBatch("a", self.epoch, self.batch))
        end = min(self.read_to + size, len(self.source))
        upto = self.vertex.call(calls.Deliverable(STREAM, self.delivered_to, 5)).end
        if begun.state is BatchState.SEALED:
            end, upto = self.sealed_to, self.sealed_upto
        rows = [(self.new_id(), text) for text in self.source[self.read_to : end]]
        replays = [
            (root, text)
            for root, _, _, text in self.kit.flat(
                self.vertex.call(calls.ReadDeliveries(STREAM, self.delivered_to, upto))
            )
        ]
        children = {root: self.new_id() for root, _ in rows + replays}
        emitted = tuple(
            calls.EmittedRows(
                STREAM,
                self.kit.payload([text for _, text in part]) if part is rows else None,
                self.kit.u64(root for root, _ in part),
                self.kit.u64(children[root] for root, _ in part),
            )
            for part in (rows, replays)
            if part
        )
        if begun.state is BatchState.SEALED and self.batch not in self.carried:
            self.vertex.call(calls.Reseal("a", self.epoch, self.batch, emitted=emitted))
        elif begun.state is BatchState.NEW:
            delivered = {STREAM: (self.delivered_to, upto)}
            self.vertex.call(calls.Seal("a", self.epoch, self.batch, delivered, emitted=emitted))
        self.sealed_to, self.sealed_upto = end, upto
        if stop_after == "seal":
            return
        if self.batch not in self.carried:
            self.carried.add(self.batch)
            self.carrier += [(text, root, children[root]) for root, text in rows + replays]
        if stop_after == "sink":
            return
        self.vertex.call(calls.Commit("a", self.epoch, self.batch))
        self.batch, self.read_to, self.delivered_to = self.batch + 1, end, upto

    def resume(self, count: int, *, reporting: bool) -> None:
        """Query ``b`` works on what the carrier has; without ``reporting`` it dies before it tells the vertex."""
        for text, root, record_id in self.carrier[self.carrier_read : self.carrier_read + count]:
            self.carrier_read += 1
            verdict = zlib.crc32(f"{text}/{root}/{self.salt}".encode()) % 4
            if not reporting:
                continue
            incarnation = self.vertex.layer.incarnation
            if verdict == 0:
                self.vertex.call(calls.Fail((Failure(root, "b refused it"),), incarnation))
            else:
                self.done.append(text)
                ids = self.kit.u64([root])
                self.vertex.call(calls.Xor(ids, self.kit.u64([record_id]), incarnation, hold=True))

    def drain(self) -> None:
        for _ in range(60):
            self.vertex.advance(2_000)
            self.emit_batch("", 100)
            self.resume(1_000, reporting=True)
            status = self.vertex.call(calls.QueryStatusCall("a"))
            if status.drained and self.read_to == len(self.source):
                return
        raise AssertionError(f"never drained: {status}")


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.integers(0, 15),
    salt=st.integers(0, 100),
    steps=st.lists(
        st.tuples(
            st.sampled_from(
                ["emit", "emit", "seal", "sink", "resume", "resume", "b dies", "recall", "vertex", "time"]
            ),
            st.integers(1, 8),
        ),
        max_size=25,
    ),
)
def test_records_handed_to_another_query_are_finished_there_or_dead(kit, rows, salt, steps):
    both = TwoQueries(kit, rows, salt)
    for what, number in steps:
        if what in ("resume", "b dies"):
            both.resume(number, reporting=what == "resume")
        elif what == "vertex":
            both.vertex.restart()
            both.open()
        elif what == "recall":
            both.vertex.recall(STREAM)
        elif what == "time":
            both.vertex.advance(number * 100)
        else:
            both.emit_batch("" if what == "emit" else what, number)
            both.open()
    both.drain()
    dead = [record.payload.column(0)[0].as_py() for record in both.vertex.list("dead")]
    assert len(dead) == len(set(dead))
    assert set(both.done) | set(dead) == set(both.source)
    counts = both.vertex.counts()
    assert (counts["pending"], counts["waiting"], counts["delivery"]) == (0, 0, 0)
