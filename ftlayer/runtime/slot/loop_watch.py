"""What a head of an iteration sees of its loop: the part that is in its own slot, and what leaves that for others."""

from __future__ import annotations

from functools import partial

from ftlayer.runtime.slot.outputs import RemoteOutput
from ftlayer.runtime.slot.seat import Seat, Seating
from ftlayer.runtime.task.iteration import HeadTask
from ftlayer.topology.job_graph import JobGraph


def watch_loops(graph: JobGraph, seating: Seating) -> None:
    """Tell the heads of a slot how to see whether there is something in its part of their loops."""
    seats = seating.seats
    for seat in seats.values():
        if isinstance(seat.task, HeadTask):
            loop = _loop(graph, seat.uid)
            seat.task.watch(partial(_is_busy, [other for other in seats.values() if other.uid in loop]))


def _is_busy(seats: list[Seat]) -> bool:
    return any(
        seat.inbox.has_records
        or any(isinstance(output, RemoteOutput) and not output.is_empty for output in seat.outputs.values())
        for seat in seats
    )


def _loop(graph: JobGraph, head: str) -> set[str]:
    """Return the chains between a head and the tails that lead back to it, with both."""
    return _reached(graph, head, back=False) & _reached(graph, head, back=True)


def _reached(graph: JobGraph, uid: str, *, back: bool) -> set[str]:
    found = {uid}
    todo = [uid]
    while todo:
        here = todo.pop()
        edges = graph.edges_into(here) if back else graph.edges_from(here)
        for other in (edge.source if back else edge.target for edge in edges):
            if other not in found:
                found.add(other)
                todo.append(other)
    return found
