"""What a record costs in several versions of Python, in turn: ours in C, ours in Python, and no engine at all.

``BENCH_PYTHONS`` names the other interpreters, by ``:``; this checkout is installed in each (``pip install -e .``).
Every round runs `bench.peers.one_interpreter` in all of them, one after the other, and a ratio is that of two runs of
one round.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from bench.harness import Target, note, spread

TARGETS: dict[str, Target] = {}

PARTS = ("bare", "generated", "native")


def measure(python: str, records: int) -> dict[str, float]:
    """Return CPU nanoseconds a record by part, and the version as ``python``."""
    ran = subprocess.run(
        [python, "-m", "bench.peers.one_interpreter", str(records)],
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, float] = json.loads(ran.stdout)
    return found


def summary(rounds: list[list[dict[str, float]]]) -> dict[str, float]:
    """Return medians by version, and what the first interpreter's are multiplied by in the others.

    A round has what `measure` returns for each interpreter, in the same order.
    """
    found: dict[str, float] = {}
    for place, one in enumerate(rounds[0]):
        version = one["python"]
        for part in PARTS:
            found |= spread(f"{part}_ns_{version}", [each[place][part] for each in rounds])
            if place:
                name = f"{part}_{version}_vs_{rounds[0][0]['python']}"
                found |= spread(name, [each[place][part] / each[0][part] for each in rounds])
    return found


def run(quick: bool, pairs: int) -> dict[str, float]:
    others = [path for path in os.environ.get("BENCH_PYTHONS", "").split(os.pathsep) if path]
    if not others:
        note("BENCH_PYTHONS names no other interpreter (`/path/of/an/environment/bin/python`, by `:`)")
    records = 100_000 if quick else 300_000
    pythons = (sys.executable, *others)
    return summary([[measure(python, records) for python in pythons] for _ in range(pairs)])
