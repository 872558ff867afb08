"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import pkgutil
import sys
from pathlib import Path
from typing import Any

import bench
from bench import harness
from bench.checkout import installed_package

_NOT_BENCHMARKS = {
    *("__main__", "checkout", "harness", "jobs", "keyed_count", "large_state", "limits", "peers"),
    *("screenshots", "sides"),
}


def names() -> list[str]:
    """Return the benchmarks that there are."""
    return sorted({module.name for module in pkgutil.iter_modules(bench.__path__)} - _NOT_BENCHMARKS)


def main() -> None:
    """Run one benchmark and report it; a missed target is shown, and is no failure of the process."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Run one of ftlayer's benchmarks.")
    parser.add_argument("name", choices=names())
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="scale: the curves to measure; all without it"
    )
    parser.add_argument("--quick", action="store_true", help="less work, and one pair of runs for each ratio")
    parser.add_argument(
        "--pairs",
        type=int,
        metavar="N",
        help=f"a ratio is the median of N pairs of runs (default {harness.PAIRS}; 1 with --quick)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE as well")
    parser.add_argument(
        "--pyflink", action="store_true", help="topology: measure PyFlink too, where it is installed"
    )
    options = parser.parse_args()

    # Spark's workers run what this does, whose environment need not be activated.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    with installed_package():
        module = importlib.import_module(f"bench.{options.name}")
        facts = harness.machine()
        more = _asked_for(parser, options, module)
        metrics: dict[str, float] = module.run(options.quick, **more)
    harness.report(options.name, metrics, module.TARGETS)
    if options.json is not None:
        harness.write_json(options.json, options.name, facts, metrics, options.quick)


def _asked_for(parser: argparse.ArgumentParser, options: argparse.Namespace, module: Any) -> dict[str, Any]:
    """Return what the benchmark is called with beside ``quick``; ends the process where it does not take it."""
    takes = inspect.signature(module.run).parameters
    more: dict[str, Any] = {}
    if options.pyflink:
        # Peers that take minutes are asked for.
        more["pyflink"] = True
    if options.parts:
        known = module.PARTS if "parts" in takes else ()
        if unknown := [part for part in options.parts if part not in known]:
            parser.error(
                f"{options.name} has no {', '.join(unknown)}; it has {', '.join(known) or 'no parts'}"
            )
        more["parts"] = options.parts
    if options.pairs is not None:
        if options.pairs < 1:
            parser.error(f"--pairs: expected 1 or more, got {options.pairs}")
        more["pairs"] = options.pairs
    elif "pairs" in takes:
        more["pairs"] = 1 if options.quick else harness.PAIRS
    if untaken := more.keys() - takes.keys():
        parser.error(f"{options.name} takes no {', '.join(f'--{name}' for name in sorted(untaken))}")
    if "pairs" in more:
        harness.note_pairs(more["pairs"])
    return more


if __name__ == "__main__":
    main()
