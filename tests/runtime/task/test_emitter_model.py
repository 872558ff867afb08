"""Random topologies through the emitter, against a ledger of the copies that are out.

The ledger knows each copy that was sent and not acknowledged; the tracker knows only what it was told. A root's
XOR has to be 0 exactly when the ledger has no copy of it, whatever order the events come in.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.functions.steps import Map
from ftlayer.records.partitioning import (
    Broadcast,
    Custom,
    Forward,
    Global,
    HashByKey,
    Partitioner,
    Rebalance,
    Shuffle,
)
from ftlayer.records.traced import KeySelector
from ftlayer.runtime.handler import Events, FTHandler
from ftlayer.runtime.protocol.messages import Batch, RecordIds
from ftlayer.runtime.task.actions import Send
from ftlayer.runtime.task.emitter import Emitter
from ftlayer.topology.job_graph import Channel, JobEdge, JobGraph, JobVertex
from ftlayer.vertex.calls import EventIds

SCHEMA = pa.schema([("key", pa.string())])
KEY = KeySelector(("key",))
PARTITIONERS: list[Partitioner] = [
    Rebalance(),
    Shuffle(3),
    HashByKey(KEY),
    Broadcast(),
    Global(),
    Custom(KEY, lambda key, channels: len(key) % channels),
]


@st.composite
def graphs(draw: st.DrawFn) -> JobGraph:
    """Up to five chains, of which the first is the source; every other one has one or two inputs."""
    parallelism = draw(st.lists(st.integers(1, 3), min_size=3, max_size=5))
    vertices = tuple(
        JobVertex(f"v{number}", (Map(f"v{number}", lambda record: record, SCHEMA),), count)
        for number, count in enumerate(parallelism)
    )
    edges: list[JobEdge] = []
    for number in range(1, len(vertices)):
        sources = draw(st.lists(st.integers(0, number - 1), min_size=1, max_size=2))
        for place, source in enumerate(sources):
            choices = PARTITIONERS + ([Forward()] if parallelism[source] == parallelism[number] else [])
            partitioner = draw(st.sampled_from(choices))
            tag = draw(st.sampled_from(["", "side"])) if source else ""
            edges.append(JobEdge(len(edges), f"v{source}", f"v{number}", place, partitioner, SCHEMA, tag))
    return JobGraph("job", vertices, tuple(edges), tracked=True)


class Ledger:
    """Live copies by root, and the tracker beside it. Every id is XORed twice: when it comes and when it goes."""

    def __init__(self) -> None:
        self.live: Counter[int] = Counter()
        self.xors: dict[int, int] = {}
        self.seen: Counter[int] = Counter()
        self.sent: set[int] = set()

    def register(self, roots: np.ndarray, values: np.ndarray, ids: EventIds) -> None:
        for root in roots.tolist():
            assert root not in self.xors
            self.xors[root] = 0
        self._event(roots, values, ids)
        self._check(roots)

    def acknowledge(self, roots: np.ndarray, values: np.ndarray, ids: EventIds) -> None:
        assert len(set(roots.tolist())) == len(roots)
        self._event(roots, values, ids)
        self._check(roots)

    def out(self, lineage: RecordIds) -> None:
        """A batch is on its way."""
        for root, record_id in zip(lineage.roots.tolist(), lineage.ids.tolist(), strict=True):
            assert record_id != 0
            assert record_id not in self.sent, "no two copies share an id"
            self.sent.add(record_id)
            self.live[root] += 1

    def gone(self, lineage: RecordIds) -> None:
        """A batch is settled."""
        self.live.subtract(lineage.roots.tolist())

    def _event(self, roots: np.ndarray, values: np.ndarray, ids: EventIds) -> None:
        for root, value, (start, end) in zip(
            roots.tolist(), values.tolist(), pairwise(ids.offsets.tolist()), strict=True
        ):
            single = ids.ids[start:end].tolist()
            assert value == int(np.bitwise_xor.reduce(np.array([0, *single], np.uint64)))
            self.seen.update(single)
            self.xors[root] ^= value

    def _check(self, roots: np.ndarray) -> None:
        for root in roots.tolist():
            assert (self.xors[root] == 0) == (self.live[root] == 0)


class Topology:
    """Every subtask with its emitter; a record's life is decided by ``rng``."""

    def __init__(self, graph: JobGraph, rng: np.random.Generator) -> None:
        self.graph = graph
        self.rng = rng
        self.ledger = Ledger()
        self.handlers = {
            (vertex.uid, subtask): FTHandler(vertex.uid, job="job", run="run", exact=True)
            for vertex in graph.vertices
            for subtask in range(vertex.parallelism)
        }
        self.emitters = {place: Emitter(graph, *place, handler) for place, handler in self.handlers.items()}
        self.channels: dict[Channel, deque[Batch]] = {}
        self.buffers: dict[tuple[str, int], list[tuple[int, RecordIds, np.ndarray]]] = {}
        self.reports: list[tuple[RecordIds, Events]] = []

    def read(self, subtask: int, first: int, n: int) -> None:
        """Let the source read rows: registered before anything is sent."""
        handler, emitter = self.handlers["v0", subtask], self.emitters["v0", subtask]
        roots = handler.persister.roots("source", 0, subtask, first, n)
        assert roots is not None
        emission = emitter.roots(self.rows(n), roots)
        self.send(emission.sends)
        assert emission.ids is not None
        self.ledger.register(roots, emission.values, emission.ids)

    def rows(self, n: int) -> pa.RecordBatch:
        keys = self.rng.integers(0, 6, n)
        return pa.record_batch([pa.array(["k" * int(key) for key in keys], pa.string())], schema=SCHEMA)

    def send(self, sends: Iterable[Send]) -> None:
        for send in sends:
            assert isinstance(send.element, Batch)
            assert send.element.lineage is not None
            assert len(send.element.lineage) == send.element.num_rows > 0
            assert send.channel in self.graph.channels(self.graph.edges[send.channel.edge])
            self.ledger.out(send.element.lineage)
            self.channels.setdefault(send.channel, deque()).append(send.element)

    def step(self) -> bool:
        """Let some task take an element or settle something that it has held, or a report reach the vertex."""
        ready = [channel for channel, batches in self.channels.items() if batches]
        held = [place for place, buffer in self.buffers.items() if buffer]
        if not ready and not held and not self.reports:
            return False
        choice = int(self.rng.integers(0, len(ready) + len(held) + bool(self.reports)))
        if choice == len(ready) + len(held):
            lineage, events = self.reports.pop(int(self.rng.integers(0, len(self.reports))))
            assert events.ids is not None
            self.ledger.gone(lineage)
            self.ledger.acknowledge(events.roots, events.values, events.ids)
            return True
        if choice >= len(ready):
            place = held[choice - len(ready)]
            _, lineage, owed = self.buffers[place].pop(int(self.rng.integers(0, len(self.buffers[place]))))
            self.settle(place, lineage, owed)
            return True
        channel = ready[choice]
        batch = self.channels[channel].popleft()
        edge = self.graph.edges[channel.edge]
        assert batch.lineage is not None
        self.process((edge.target, channel.receiver), edge.input, batch.lineage)
        return True

    def process(self, place: tuple[str, int], side: int, lineage: RecordIds) -> None:
        emitter = self.emitters[place]
        owed = np.zeros(len(lineage.roots), np.uint64)
        for tag in ("", "", "side"):
            parents = self.rng.integers(0, len(lineage), int(self.rng.integers(0, 2 * len(lineage) + 1)))
            emission = emitter.derived(tag, self.rows(len(parents)), lineage, parents)
            self.send(emission.sends)
            owed ^= emission.owed
        buffer = self.buffers.setdefault(place, [])
        for other_side, other, other_owed in buffer:
            if other_side == side:
                continue
            # Equal pairs among them, and in later calls.
            n = int(self.rng.integers(0, 4))
            mine, theirs = self.rng.integers(0, len(lineage), n), self.rng.integers(0, len(other), n)
            left, right = ((lineage, mine), (other, theirs))[:: 1 if side == 0 else -1]
            pairs = emitter.pairs(self.rows(n), *left, *right)
            self.send(pairs.sends)
            owes, other_owes = (pairs.owed_left, pairs.owed_right)[:: 1 if side == 0 else -1]
            owed ^= owes
            other_owed ^= other_owes
        if self.rng.integers(0, 2):
            buffer.append((side, lineage, owed))
        else:
            self.settle(place, lineage, owed)

    def settle(self, place: tuple[str, int], lineage: RecordIds, owed: np.ndarray) -> None:
        handler = self.handlers[place]
        handler.xor.settle(lineage, owed)
        events = handler.xor.events()
        assert events is not None
        self.reports.append((lineage, events))


def run(graph: JobGraph, seed: int, batches: list[int]) -> Topology:
    rng = np.random.default_rng(seed)
    topology = Topology(graph, rng)
    firsts = [0] * graph.vertex("v0").parallelism
    for n in batches:
        subtask = int(rng.integers(0, len(firsts)))
        topology.read(subtask, firsts[subtask], n)
        firsts[subtask] += n
        for _ in range(int(rng.integers(0, 4))):
            topology.step()
    while topology.step():
        pass
    return topology


@settings(deadline=None, max_examples=60)
@given(graphs(), st.integers(0, 2**32), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_a_roots_value_is_0_exactly_when_no_copy_of_it_is_out(
    graph: JobGraph, seed: int, batches: list[int]
) -> None:
    ledger = run(graph, seed, batches).ledger
    assert not any(ledger.xors.values())
    assert set(ledger.seen) == ledger.sent
    assert set(ledger.seen.values()) <= {2}
