"""Pending roots in the vertex: what one more record costs, and a start with all of them, through the service."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.harness import Target
from bench.scale.curve import Curve, Point, ends
from bench.scale.lab import Lab, footprint
from bench.scale.vertices import (
    CALL_ROWS,
    STREAM,
    declare,
    memory_of,
    pid_of,
    rows_of,
    start_figures,
    vertex,
    warm,
)
from ftlayer.records.ids import random_root_ids
from ftlayer.vertex.calls import Persist, Xor
from ftlayer.vertex.client.client import VertexClient

PENDING = (10_000, 100_000, 1_000_000, 10_000_000)
ROW_BYTES = 100


def fill(client: VertexClient, rows: int) -> None:
    """Have so many roots pending."""
    payload = rows_of(2 * CALL_ROWS, ROW_BYTES)
    for start in range(0, rows, len(payload)):
        roots = random_root_ids(min(len(payload), rows - start))
        client.call(Persist(STREAM, payload.slice(0, len(roots)), roots, roots))


def churn(client: VertexClient, incarnation: int, rows: int) -> None:
    """Persist and complete so many."""
    payload = rows_of(CALL_ROWS, ROW_BYTES)
    for _ in range(0, rows, CALL_ROWS):
        roots = random_root_ids(CALL_ROWS)
        client.call(Persist(STREAM, payload, roots, roots))
        client.call(Xor(roots, roots, incarnation))


def measure(lab: Lab, quick: bool) -> Iterator[Point]:
    churned = (32 if quick else 256) * CALL_ROWS
    for pending in (0, *(PENDING[:2] if quick else PENDING)):
        with lab.folder() as folder:
            with vertex(folder) as running, running.client(client_id="scale") as client:
                pid = pid_of(running)
                warm(client)
                incarnation = declare(client)
                churn(client, incarnation, 16 * CALL_ROWS)
                begun = footprint(pid)
                fill(client, pending)
                filled = footprint(pid)
                churn(client, incarnation, churned)
                figures = {"root_us": (footprint(pid).cpu_s - filled.cpu_s) / churned * 1e6}
                if pending:
                    figures["pend_us"] = (filled.cpu_s - begun.cpu_s) / pending * 1e6
                    figures["bytes_a_root"] = (filled.anonymous - begun.anonymous) / pending
                figures |= memory_of(footprint(pid))
            figures |= {f"again_{name}": value for name, value in start_figures(folder, "").items()}
        yield Point("vertex", pending, figures)


def metrics(points: Sequence[Point]) -> dict[str, float]:
    empty, many = ends(points, "vertex")
    return {
        "pending_root_us_most_vs_none": many.figures["root_us"] / empty.figures["root_us"],
        "pending_bytes_a_root": many.figures["bytes_a_root"],
        "pending_start_ns_a_root": (many.figures["again_start_cpu_ms"] - empty.figures["again_start_cpu_ms"])
        / many.x
        * 1e6,
    }


CURVE = Curve(
    "pending",
    "Pending roots",
    "pending roots",
    {
        "root_us": "the vertex's CPU µs for one more record",
        "anonymous_mib": "memory of the vertex, MiB",
        "again_start_cpu_ms": "CPU ms of a start",
    },
    measure,
    metrics,
    {"pending_bytes_a_root": Target(at_most=64, unit="bytes")},
    frozenset({"anonymous_mib", "again_start_cpu_ms"}),
)
