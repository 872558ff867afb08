"""The graph that a user built: operators and how records flow between them, before anything is chained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from ftlayer.checkpoint.dead_letters.letter import LETTER_SCHEMA
from ftlayer.checkpoint.options import OnFailure
from ftlayer.functions.steps import MAIN
from ftlayer.records.partitioning import Forward, Partitioner, Rebalance
from ftlayer.topology.job_graph import LETTERS, display_name, outputs_of
from ftlayer.topology.operators import Operator
from ftlayer.vertex.calls import StreamOptions


@dataclass(frozen=True)
class StreamNode:
    """An operator and the number of its subtasks.

    ``retry`` has the retry options of a source's records; None for those of the topology. ``on_failure``: what
    becomes of records that fail in it in barrier mode; None: as the topology's checkpointing says.
    """

    operator: Operator
    parallelism: int
    retry: StreamOptions | None = None
    on_failure: OnFailure | None = None

    @property
    def uid(self) -> str:
        return self.operator.uid

    @property
    def name(self) -> str:
        return display_name(self.operator)


@dataclass(frozen=True)
class StreamEdge:
    """Records of one output of an operator on their way to one input of another.

    ``source`` and ``target`` are uids, ``tag`` is the output ("" for the main one, `LETTERS` for dead letters). Without
    a ``partitioner`` it is `Forward` where both have the same parallelism, else `Rebalance`. ``feedback``: it leads
    from the end of an iteration back to its head.
    """

    source: str
    target: str
    input: int = 0
    partitioner: Partitioner | None = None
    tag: str = MAIN
    feedback: bool = False


@dataclass(frozen=True)
class StreamGraph:
    """Operators and edges in the order in which they were made. `ftlayer.topology.checks.check_graph` checks one."""

    name: str
    nodes: tuple[StreamNode, ...]
    edges: tuple[StreamEdge, ...]

    def node(self, uid: str) -> StreamNode:
        """Return the node of the operator with this uid; KeyError if there is none."""
        return self._by_uid[uid]

    def edges_from(self, uid: str) -> tuple[StreamEdge, ...]:
        return self._outgoing.get(uid, ())

    def edges_into(self, uid: str) -> tuple[StreamEdge, ...]:
        return self._incoming.get(uid, ())

    def partitioner_of(self, edge: StreamEdge) -> Partitioner:
        """Return the edge's partitioner, the automatic one where none was chosen."""
        if edge.partitioner is not None:
            return edge.partitioner
        same = self.node(edge.source).parallelism == self.node(edge.target).parallelism
        return Forward() if same else Rebalance()

    def schema_of(self, edge: StreamEdge) -> pa.Schema:
        if edge.tag == LETTERS:
            return LETTER_SCHEMA
        return outputs_of(self.node(edge.source).operator)[edge.tag]

    @cached_property
    def in_order(self) -> tuple[StreamNode, ...]:
        """The nodes, each behind all that it gets records from for the first time: feedback edges do not count.

        Those in and behind another circle are left out.
        """
        return tuple(self._kahn())

    def circle(self) -> tuple[str, ...]:
        """Return the uids of one circle in the direction of the records, () if there is none.

        Those that feedback edges close do not count.
        """
        done = {node.uid for node in self.in_order}
        rest = [node.uid for node in self.nodes if node.uid not in done]
        if not rest:
            return ()
        # Each of the rest waits for another of the rest: going back from one has to come round.
        path: list[str] = []
        here = rest[0]
        while here not in path:
            path.append(here)
            here = next(
                edge.source for edge in self.edges_into(here) if edge.source not in done and not edge.feedback
            )
        return tuple(reversed(path[path.index(here) :]))

    def behind(self, uid: str) -> frozenset[str]:
        """Return the uids of all operators that records of this one may reach."""
        found: set[str] = set()
        todo = [uid]
        while todo:
            for edge in self.edges_from(todo.pop()):
                if edge.target not in found:
                    found.add(edge.target)
                    todo.append(edge.target)
        return frozenset(found)

    def _kahn(self) -> Iterator[StreamNode]:
        """Order the nodes topologically (Kahn, "Topological sorting of large networks", 1962), as made where free."""
        waits_for = {
            node.uid: sum(not edge.feedback for edge in self.edges_into(node.uid)) for node in self.nodes
        }
        ready = [node for node in self.nodes if not waits_for[node.uid]]
        place = {node.uid: number for number, node in enumerate(self.nodes)}
        while ready:
            node = ready.pop(0)
            yield node
            for edge in self.edges_from(node.uid):
                waits_for[edge.target] -= not edge.feedback
                if not waits_for[edge.target] and not edge.feedback:
                    ready.append(self.node(edge.target))
            ready.sort(key=lambda one: place[one.uid])

    @cached_property
    def _by_uid(self) -> dict[str, StreamNode]:
        return {node.uid: node for node in self.nodes}

    @cached_property
    def _outgoing(self) -> dict[str, tuple[StreamEdge, ...]]:
        return {uid: tuple(edge for edge in self.edges if edge.source == uid) for uid in self._by_uid}

    @cached_property
    def _incoming(self) -> dict[str, tuple[StreamEdge, ...]]:
        return {uid: tuple(edge for edge in self.edges if edge.target == uid) for uid in self._by_uid}
