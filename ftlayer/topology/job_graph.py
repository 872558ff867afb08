"""The graph as it runs: chains of operators, the edges between them, and which slot runs which subtask."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from ftlayer.checkpoint.failure_policy import FailurePolicy
from ftlayer.partitioning.partitioners import Forward, Partitioner
from ftlayer.partitioning.replay import ReplayPartitioner
from ftlayer.topology.facts import LETTERS
from ftlayer.topology.operators import IterationHead, Operator, Replay, Source
from ftlayer.vertex.calls import StreamOptions


@dataclass(frozen=True)
class JobVertex:
    """A chain: operators that hand records to each other within one subtask. ``uid`` is the first one's.

    ``failures``: what becomes of records that fail in it, in barrier mode; None: the first one fails the job.
    """

    uid: str
    operators: tuple[Operator, ...]
    parallelism: int
    failures: FailurePolicy | None = None

    @property
    def tells_its_end(self) -> bool:
        """Whether its subtasks say when their data has ended: the job's last checkpoint waits for them.

        Those of sources, of loops, and those in which records may wait for another attempt.
        """
        return isinstance(self.operators[0], Source | IterationHead) or self.failures is not None


@dataclass(frozen=True)
class JobEdge:
    """Records of one output of a chain on their way to one input of another.

    Attributes:
        number: position in `JobGraph.edges`; part of the ids of what travels on it.
        source, target: uids of the chains.
        input: which input of the target's first operator, 0 or 1.
        partitioner: decides from the payload; on an edge from a `Replay`, the twin that decides from the
            stored record.
        schema: of the records.
        tag: the side output of the source chain that it carries, "" for the main one, `LETTERS` for its dead letters.
        routing: for edges from a source, an operator with timers or a `Replay`, which column of the stored
            ``key_hash`` the partitioner's ``routing`` goes to and its twin reads; None where nothing is stored.
        feedback: it leads back to the head of an iteration, within each slot.
    """

    number: int
    source: str
    target: str
    input: int
    partitioner: Partitioner | ReplayPartitioner
    schema: pa.Schema
    tag: str = ""
    routing: int | None = None
    feedback: bool = False

    @property
    def is_forward(self) -> bool:
        """Whether subtask i sends to subtask i alone."""
        return isinstance(self.partitioner, Forward)


@dataclass(frozen=True)
class Channel:
    """One subtask's records on their way to one other, by one edge."""

    edge: int
    sender: int
    receiver: int


@dataclass(frozen=True)
class JobGraph:
    """The graph that runs. Subtask i of a chain runs in slot i; a `Replay` has one subtask (see `slot_of`).

    ``options`` has the retry options of each stream that records are persisted under. ``max_parallelism`` is the
    number of key groups in barrier mode (the graph is not tracked then), 0 without checkpoints.
    """

    name: str
    vertices: tuple[JobVertex, ...]
    edges: tuple[JobEdge, ...]
    tracked: bool
    options: tuple[tuple[str, StreamOptions], ...] = ()
    max_parallelism: int = 0

    @property
    def checkpointed(self) -> bool:
        """Whether barriers flow through it."""
        return self.max_parallelism > 0

    @cached_property
    def slots(self) -> int:
        """Number of slots: the highest parallelism."""
        return max(vertex.parallelism for vertex in self.vertices)

    def vertex(self, uid: str) -> JobVertex:
        return self._by_uid[uid]

    def edges_from(self, uid: str) -> tuple[JobEdge, ...]:
        """Return the edges that leave a chain, in their order."""
        return tuple(edge for edge in self.edges if edge.source == uid)

    def edges_into(self, uid: str) -> tuple[JobEdge, ...]:
        """Return the edges that reach a chain, in their order."""
        return tuple(edge for edge in self.edges if edge.target == uid)

    def slot_of(self, uid: str, subtask: int) -> int:
        """Return the slot of a subtask. Replays are spread over the slots, the first one's in slot 0."""
        if isinstance(self.vertex(uid).operators[0], Replay):
            return self.replays.index(uid) % self.slots
        return subtask

    def subtasks_in(self, slot: int) -> tuple[tuple[str, int], ...]:
        """Return (uid, subtask) of everything that runs in a slot."""
        return tuple(
            (vertex.uid, subtask)
            for vertex in self.vertices
            for subtask in range(vertex.parallelism)
            if self.slot_of(vertex.uid, subtask) == slot
        )

    def channels(self, edge: JobEdge) -> tuple[Channel, ...]:
        senders = range(self.vertex(edge.source).parallelism)
        receivers = range(self.vertex(edge.target).parallelism)
        return tuple(
            Channel(edge.number, sender, receiver)
            for sender in senders
            for receiver in receivers
            if not edge.is_forward or sender == receiver
        )

    def loop_of(self, head: str) -> set[str]:
        """Return the chains between the head of a loop and the tails that lead back to it, with both."""
        return self._reached(head, back=False) & self._reached(head, back=True)

    def _reached(self, uid: str, *, back: bool) -> set[str]:
        found = {uid}
        todo = [uid]
        while todo:
            here = todo.pop()
            edges = self.edges_into(here) if back else self.edges_from(here)
            for other in (edge.source if back else edge.target for edge in edges):
                if other not in found:
                    found.add(other)
                    todo.append(other)
        return found

    def sends_letters(self, uid: str) -> bool:
        """Whether a chain's dead letters are records of the topology: then it keeps none."""
        return any(edge.tag == LETTERS for edge in self.edges_from(uid))

    def sources(self) -> tuple[Source, ...]:
        return tuple(op for vertex in self.vertices for op in vertex.operators if isinstance(op, Source))

    def stream_of(self, uid: str, tag: str = "") -> str:
        """Return the name under which records of a source, or of an operator's timers, are persisted."""
        return stream_name(self.name, uid, tag)

    @cached_property
    def _by_uid(self) -> dict[str, JobVertex]:
        return {vertex.uid: vertex for vertex in self.vertices}

    @cached_property
    def replays(self) -> list[str]:
        """Return the uids of all chains of a `Replay`."""
        return [vertex.uid for vertex in self.vertices if isinstance(vertex.operators[0], Replay)]


def stream_name(topology: str, uid: str, tag: str = "") -> str:
    """Return the name under which an output's records are persisted."""
    return f"{topology}/{uid}:{tag}" if tag else f"{topology}/{uid}"
