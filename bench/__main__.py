"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from pathlib import Path
from typing import Any

import bench
from bench import harness
from bench.checkout import installed_package

_NOT_BENCHMARKS = {"__main__", "checkout", "harness", "jobs", "peers", "screenshots"}


def main() -> None:
    """Run one benchmark and report it; a missed target is shown, and is no failure of the process."""
    names = sorted({module.name for module in pkgutil.iter_modules(bench.__path__)} - _NOT_BENCHMARKS)
    parser = argparse.ArgumentParser(prog="python -m bench", description="Run one of ftlayer's benchmarks.")
    parser.add_argument("name", choices=names)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="scale: the curves to measure; all without it"
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: under 45 seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE as well")
    parser.add_argument(
        "--pyflink", action="store_true", help="topology: measure PyFlink too, where it is installed"
    )
    options = parser.parse_args()

    with installed_package():
        module = importlib.import_module(f"bench.{options.name}")
        facts = harness.machine()
        # Peers that take minutes are asked for.
        more: dict[str, Any] = {"pyflink": True} if options.pyflink else {}
        if options.parts:
            known = getattr(module, "PARTS", ())
            unknown = [part for part in options.parts if part not in known]
            if unknown:
                parser.error(
                    f"{options.name} has no {', '.join(unknown)}; it has {', '.join(known) or 'no parts'}"
                )
            more["parts"] = options.parts
        metrics: dict[str, float] = module.run(options.quick, **more)
    harness.report(options.name, metrics, module.TARGETS)
    if options.json is not None:
        harness.write_json(options.json, options.name, facts, metrics, options.quick)


if __name__ == "__main__":
    main()
