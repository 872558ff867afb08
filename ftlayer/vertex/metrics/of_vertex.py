"""What a vertex tells of itself and of its streams."""

from __future__ import annotations

from collections.abc import Mapping

from ftlayer.circuit import CircuitState, CircuitStatus
from ftlayer.vertex.calls import StatsReply, StreamDetails, StreamList
from ftlayer.vertex.calls.jobs import JobKind
from ftlayer.vertex.metrics import catalogue
from ftlayer.vertex.metrics.families import Families

OwnerLabels = Mapping[str, Mapping[str, str]]
"""By owner: the label with the name that people gave, ``query`` or ``topology``."""


def owner_labels(streams: StreamList) -> OwnerLabels:
    """Return the labels of each owner of streams."""
    return {each.owner: owner_label(each.kind, each.title) for each in streams.streams if each.owner}


def owner_label(kind: JobKind | None, name: str) -> dict[str, str]:
    """Return the label that names an owner; an ingest that no query reads has none."""
    return {"query" if kind is JobKind.QUERY else "topology": name} if name else {}


def add_build(families: Families, version: str) -> None:
    families.add(catalogue.BUILD_INFO, 1, {"version": version})


def add_vertex(families: Families, stats: StatsReply, streams: StreamList, version: str, now_ms: int) -> None:
    """Add the samples of a vertex. Streams of which nothing is held and nothing was seen are left out."""
    add_build(families, version)
    for name, metric in catalogue.VERTEX.items():
        families.add(metric, stats.values[name], {})
    for name, kind in catalogue.IGNORED.items():
        families.add(catalogue.EVENTS_IGNORED, stats.values[name], {"kind": kind})
    for stream in streams.streams:
        if _is_shown(stream):
            _add_stream(families, stream, now_ms)
    add_circuits(families, stats.circuits, owner_labels(streams))


def add_circuits(
    families: Families, circuits: Mapping[str, Mapping[str, CircuitStatus]], owners: OwnerLabels
) -> None:
    """Add circuit breakers, by owner and by name (of an operator, "" for all others)."""
    for owner, by_name in sorted(circuits.items()):
        for name, status in sorted(by_name.items()):
            labels = {**owners.get(owner, {"topology": owner}), "circuit": name}
            families.add(catalogue.CIRCUIT_OPENED, status.opened, labels)
            for state in CircuitState:
                value = float(status.state is state)
                families.add(catalogue.CIRCUIT_STATE, value, {**labels, "state": state})


def _is_shown(stream: StreamDetails) -> bool:
    """A store keeps the streams of queries that are long gone: each would be forty series of zeros."""
    held = stream.pending + stream.waiting + stream.in_delivery + stream.dead
    return bool(held or any(stream.counters.values()))


def _add_stream(families: Families, stream: StreamDetails, now_ms: int) -> None:
    labels = {**owner_label(stream.kind, stream.title), "source": stream.source}
    for name, metric in catalogue.RECORDS.items():
        families.add(metric, stream.counters[name], labels)
    for name, cause in catalogue.CAUSES.items():
        families.add(catalogue.ATTEMPTS_FAILED, stream.counters[name], {**labels, "cause": cause})
    families.add(catalogue.PENDING, stream.pending, labels)
    families.add(catalogue.PENDING_LIMIT, stream.max_pending, labels)
    families.add(catalogue.WAITING, stream.waiting, labels)
    families.add(catalogue.IN_DELIVERY, stream.in_delivery, labels)
    families.add(catalogue.DEAD_LETTERS, stream.dead, labels)
    age_ms = max(now_ms - stream.oldest_ms, 0) if stream.oldest_ms else 0
    families.add(catalogue.OLDEST, age_ms / 1_000, labels)
    if stream.completion is not None:
        families.observe(catalogue.COMPLETION, stream.completion.histogram(), labels)
