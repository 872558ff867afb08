"""Benchmarks are run from a checkout of the repository, and measure the ftlayer that pip has built."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def installed_package() -> Iterator[None]:
    """Have this process and those it starts import ftlayer as pip installed it, and `bench` from the checkout.

    After `pip install .` the checkout's own ``ftlayer/`` has no C extension and comes first on Python's path. Where the
    extension was built in place, nothing is changed. Ends the process with a sentence when ftlayer is not installed.
    """
    if any((ROOT / "ftlayer" / f"_native{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        yield
        return
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
    if find_spec("ftlayer") is None:
        raise SystemExit(f"ftlayer is not installed: run `pip install '.[bench]'` in {ROOT}")
    with tempfile.TemporaryDirectory(prefix="ftlayer-bench-") as directory:
        # Processes that it starts, Spark's workers among them, find `bench` here and nothing else of the checkout.
        Path(directory, "bench").symlink_to(ROOT / "bench")
        named = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = directory if named is None else os.pathsep.join((directory, named))
        os.environ["PYTHONSAFEPATH"] = "1"
        yield
