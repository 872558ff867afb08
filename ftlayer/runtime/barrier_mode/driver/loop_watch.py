"""What heads of loops hear of records that wait for another attempt in other slots.

A head sees what its own slot holds of its loop. The driver knows by heartbeats what the others do, and tells it. No
I/O, no threads, no clock.
"""

from __future__ import annotations

from collections.abc import Collection

from ftlayer.runtime.protocol.messages import LoopWaits
from ftlayer.topology.job_graph import JobGraph
from ftlayer.topology.operators import IterationHead


class LoopWatch:
    """The loops of a job in which records may wait."""

    def __init__(self, graph: JobGraph) -> None:
        self._loops: dict[str, set[str]] = {}
        self._slots: dict[str, list[int]] = {}
        self._told: set[tuple[int, str]] = set()  # slots that were told that records wait
        for vertex in graph.vertices:
            if isinstance(vertex.operators[0], IterationHead):
                chains = graph.loop_of(vertex.uid)
                self._loops[vertex.uid] = {uid for uid in chains if graph.vertex(uid).failures is not None}
                subtasks = range(vertex.parallelism)
                self._slots[vertex.uid] = [graph.slot_of(vertex.uid, subtask) for subtask in subtasks]

    def waits_in(self, chains: Collection[str]) -> list[tuple[int, LoopWaits]]:
        """Records wait in these chains, and in no others; return whom to tell what."""
        messages: list[tuple[int, LoopWaits]] = []
        for head, loop in self._loops.items():
            waits = not loop.isdisjoint(chains)
            changed = [slot for slot in self._slots[head] if ((slot, head) in self._told) != waits]
            messages += [(slot, LoopWaits(head, waits)) for slot in changed]
            self._told ^= {(slot, head) for slot in changed}
        return messages

    def began(self, slots: Collection[int]) -> None:
        """Tasks begin in these slots: they have heard nothing."""
        self._told = {(slot, head) for slot, head in self._told if slot not in slots}
