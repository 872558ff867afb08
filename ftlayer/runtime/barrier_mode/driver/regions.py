"""Which slots have to restart together: those that records can pass between, by whatever way.

Flink's pipelined regions, slot by slot: what fails is a process, and with it everything that runs in it.
"""

from __future__ import annotations

from ftlayer.topology.job_graph import JobGraph
from ftlayer.topology.operators import ReaderSource, Source


def regions_of(graph: JobGraph) -> tuple[frozenset[int], ...]:
    """Return the connected sets of slots, by their lowest numbers.

    Slots that read one reader source belong together as well: its ranges are dealt out to all of them.
    """
    leader = list(range(graph.slots))

    def find(slot: int) -> int:
        while leader[slot] != slot:
            slot = leader[slot]
        return slot

    def join(one: int, other: int) -> None:
        first, second = sorted((find(one), find(other)))
        leader[second] = first

    for edge in graph.edges:
        for channel in graph.channels(edge):
            join(graph.slot_of(edge.source, channel.sender), graph.slot_of(edge.target, channel.receiver))
    for vertex in graph.vertices:
        first = vertex.operators[0]
        if isinstance(first, Source) and isinstance(first.connector, ReaderSource):
            for subtask in range(1, vertex.parallelism):
                join(0, subtask)
    found: dict[int, set[int]] = {}
    for slot in range(graph.slots):
        found.setdefault(find(slot), set()).add(slot)
    return tuple(frozenset(slots) for _, slots in sorted(found.items()))
