"""Dead letters: one more of them, a start of the vertex with all of them, its memory, and listing them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.harness import Target
from bench.scale.curve import Curve, Point, ends, figure
from bench.scale.lab import Lab, footprint
from bench.scale.vertices import CALL_ROWS, OPTIONS, STREAM, core_over, pid_of, rows_of, start_figures, vertex
from ftlayer.common.clock import system_now
from ftlayer.records.ids import random_root_ids
from ftlayer.vertex.calls import DeadGroups, Fail, Failure, OpenStream, Persist, StreamOpened

LETTERS = (1_000, 10_000, 100_000, 1_000_000)
REASONS = 20
PAYLOAD_BYTES = 100
ASKED = 10


def fill(folder: Path, letters: int) -> float:
    """Have so many records die in a store, by the rules, without a service in front; return CPU µs a letter."""
    payload = rows_of(CALL_ROWS, PAYLOAD_BYTES)
    with core_over(folder) as (store, core):
        with store.write(intake=True) as txn:
            opened = core.apply(txn, OpenStream(STREAM, OPTIONS), None, system_now())
            opened.after()
        assert isinstance(opened.reply, StreamOpened)
        begin = time.process_time()
        for start in range(0, letters, CALL_ROWS):
            roots = random_root_ids(min(CALL_ROWS, letters - start))
            with store.write(intake=True) as txn:
                kept = core.apply(
                    txn, Persist(STREAM, payload.slice(0, len(roots)), roots, roots), None, system_now()
                )
            kept.after()
            failures = tuple(
                Failure(
                    root,
                    f"ValueError: {'abcdefghijklmnopqrst'[row % REASONS]} is no number",
                    "parse",
                    fatal=True,
                )
                for row, root in enumerate(roots.tolist())
            )
            with store.write(intake=False) as txn:
                died = core.apply(txn, Fail(failures, opened.reply.incarnation), None, system_now())
            died.after()
        took = time.process_time() - begin
    return took / letters * 1e6 if letters else 0.0


def asking(folder: Path) -> dict[str, float]:
    """Return ms of CPU that the vertex takes to tell the groups."""
    with vertex(folder) as running, running.client(client_id="scale") as client:
        pid = pid_of(running)
        client.call(DeadGroups())
        before = footprint(pid).cpu_s
        for _ in range(ASKED):
            client.call(DeadGroups())
        return {"groups_ms": (footprint(pid).cpu_s - before) / ASKED * 1_000}


def measure(lab: Lab, quick: bool) -> Iterator[Point]:
    for letters in (0, *(LETTERS[:2] if quick else LETTERS)):
        with lab.folder() as folder:
            figures = {"letter_us": fill(folder, letters)}
            figures |= start_figures(folder, "dead")
            yield Point("dead letters", letters, figures | asking(folder))


def metrics(points: Sequence[Point]) -> dict[str, float]:
    empty, many = ends(points, "dead letters")
    few = sorted(point.x for point in points)[1]
    more = many.figures["start_cpu_ms"] - empty.figures["start_cpu_ms"]
    return {
        "dead_us_a_letter": many.figures["letter_us"],
        "dead_start_us_a_letter": more / many.x * 1_000,
        "dead_anonymous_mib_more": many.figures["anonymous_mib"] - empty.figures["anonymous_mib"],
        "dead_list_most_vs_fewest": many.figures["list_us"] / figure(points, "dead letters", few, "list_us"),
    }


CURVE = Curve(
    "dead_letters",
    "Dead letters",
    "dead letters",
    {
        "start_ms": "start of the vertex, ms",
        "list_us": "CPU µs a listed letter",
        "letter_us": "CPU µs to make one",
        "anonymous_mib": "memory of the vertex, MiB",
    },
    measure,
    metrics,
    {
        "dead_start_us_a_letter": Target(at_most=0.5, unit="µs"),
        "dead_anonymous_mib_more": Target(at_most=32, unit="MiB"),
        "dead_list_most_vs_fewest": Target(at_most=1.5),
    },
    frozenset({"start_ms"}),
)
