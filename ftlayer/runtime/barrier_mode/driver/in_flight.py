"""Records that an unaligned checkpoint has overtaken: which new subtask works them off, and on which channel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ftlayer.checkpoint.snapshots import ChannelState, Checkpoint, InFlight
from ftlayer.errors import IncompatibleCheckpointError
from ftlayer.partitioning.key_groups import HashByKeyGroup
from ftlayer.partitioning.partitioners import Broadcast, Global, Rebalance, Shuffle
from ftlayer.runtime.barrier_mode.driver.compatibility import named, partitioner_text
from ftlayer.topology.job_graph import JobEdge, JobGraph

KEEP_GROUPS = "groups"
"""`InFlight.keep` for rows of the task's key groups alone."""

COPIES = partitioner_text(Broadcast())


class InFlightDealer:
    """Deals them out. ``incoming[uid, subtask]`` and ``outgoing[uid, subtask]`` are in the order of each channel."""

    def __init__(self, checkpoint: Checkpoint, graph: JobGraph) -> None:
        """Raises `IncompatibleCheckpointError` naming the edge whose records cannot be dealt out.

        Records for operators that the graph has no more are left out.
        """
        self.incoming: dict[tuple[str, int], list[InFlight]] = defaultdict(list)
        self.outgoing: dict[tuple[str, int], list[InFlight]] = defaultdict(list)
        self._checkpoint = checkpoint
        self._graph = graph
        self._parallelism = {info.chain: info.parallelism for info in checkpoint.operators}
        # Records leave a chain from its last operator, to the first one of another.
        self._last_of = {info.chain: info.uid for info in checkpoint.operators}
        self._known = {operator.uid for vertex in graph.vertices for operator in vertex.operators}
        for states in self._by_edge():
            self._deal(states)

    def _by_edge(self) -> Iterator[list[ChannelState]]:
        """Yield the states of each edge: on each channel what had left its sender first."""
        edges: dict[int, list[ChannelState]] = defaultdict(list)
        for part in self._checkpoint.subtasks:
            for state in part.channels:
                edges[state.edge].append(state)
        for states in edges.values():
            yield sorted(states, key=lambda state: (state.sender, state.receiver, state.outgoing))

    def _deal(self, states: Sequence[ChannelState]) -> None:
        first = states[0]
        if first.target not in self._known:
            return
        edge = self._edge_of(first)
        before, now = self._checkpoint.edges[first.edge].partitioner, partitioner_text(edge.partitioner)
        receivers = self._graph.vertex(edge.target).parallelism
        same_receivers = self._parallelism[first.target] == receivers
        same_senders = self._parallelism[first.source] == self._graph.vertex(edge.source).parallelism
        if before == COPIES != now:
            raise self._refusal(first, f"each receiver had a copy, and they are partitioned by {now} now")
        if before != now:
            self._anew(edge, states, f"they were partitioned by {before}, and are by {now} now")
        elif same_receivers and same_senders:
            self._as_they_were(edge, states)
        elif same_receivers:
            # Who sends has changed, not who receives.
            for state in states:
                self._put(edge, state, state.receiver)
        else:
            were = self._parallelism[first.target]
            reason = f"their channels ({now}) mean nothing at parallelism {receivers} instead of {were}"
            self._anew(edge, states, reason)

    def _anew(self, edge: JobEdge, states: Sequence[ChannelState], reason: str) -> None:
        """Deal them out by the edge's partitioner; ``reason`` is why they cannot go where they were going."""
        receivers = self._graph.vertex(edge.target).parallelism
        if isinstance(edge.partitioner, HashByKeyGroup):
            for state in states:
                for receiver in range(receivers):
                    self._put(edge, state, receiver, KEEP_GROUPS)
        elif isinstance(edge.partitioner, Global):
            for state in states:
                self._put(edge, state, 0)
        elif isinstance(edge.partitioner, Rebalance | Shuffle):
            channels = {(state.sender, state.receiver): None for state in states}
            turn = {channel: number for number, channel in enumerate(channels)}
            for state in states:
                self._put(edge, state, turn[state.sender, state.receiver] % receivers)
        else:
            raise self._refusal(states[0], reason)

    def _as_they_were(self, edge: JobEdge, states: Sequence[ChannelState]) -> None:
        for state in states:
            part = InFlight(edge.number, state.sender, state)
            if state.outgoing:
                self.outgoing[edge.source, state.sender].append(part)
            else:
                self.incoming[edge.target, state.receiver].append(part)

    def _put(self, edge: JobEdge, state: ChannelState, receiver: int, keep: str = "") -> None:
        sender = state.sender % self._graph.vertex(edge.source).parallelism
        self.incoming[edge.target, receiver].append(InFlight(edge.number, sender, state, keep))

    def _edge_of(self, state: ChannelState) -> JobEdge:
        """Return the edge between the same operators, which may be in chains that are cut otherwise."""
        found = [
            edge
            for edge in self._graph.edges
            if (edge.tag, edge.target, edge.input) == (state.tag, state.target, state.input)
            and self._graph.vertex(edge.source).operators[-1].uid == self._last_of[state.source]
        ]
        if not found:
            raise self._refusal(state, "the job has no such stream between chains any more")
        # Several edges may lead from the same output to the same input.
        place = self._checkpoint.edges[state.edge].place
        if place >= len(found):
            raise self._refusal(
                state, f"there were {place + 1} such streams or more, and there are {len(found)} now"
            )
        return found[place]

    def _refusal(self, state: ChannelState, reason: str) -> IncompatibleCheckpointError:
        return IncompatibleCheckpointError(
            f"{named(self._checkpoint)} is unaligned, and holds records on their way from {state.source!r} to "
            f"{state.target!r}: {reason}. Restore the job as it was, take a savepoint (which is aligned, and holds no "
            "such records), and restore from that"
        )
