"""What the curves are measured in: a Spark session that is made when it is needed, directories, processes' figures."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import cpu_seconds_of
from bench.jobs import session

MIB = 1 << 20
MOST_SLOTS = 24
"""The session has room for so many."""


@dataclass(frozen=True)
class Footprint:
    """Of a process, from proc(5): CPU seconds so far, and bytes of memory.

    ``anonymous`` is memory of its own; ``mapped`` are pages of files, a store's among them, which the system takes back
    when it needs them.
    """

    cpu_s: float
    anonymous: int
    mapped: int
    peak: int


def footprint(pid: int) -> Footprint:
    """Return what a process has taken so far."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    anonymous, files, shared, peak = (
        int(status[name].split()[0]) << 10 for name in ("RssAnon", "RssFile", "RssShmem", "VmHWM")
    )
    return Footprint(cpu_seconds_of(pid), anonymous, files + shared, peak)


class Lab:
    """Directories and a Spark session for the curves; leaving its block removes them."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._spark: Any = None
        self._folders = 0

    def __enter__(self) -> Lab:
        self._root = Path(tempfile.mkdtemp(prefix="ftlayer-scale-"))
        self._stack.callback(shutil.rmtree, self._root, ignore_errors=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def spark(self) -> Any:
        """The session, with room for `MOST_SLOTS` slots; each job has workers of its own."""
        if self._spark is None:
            options = {"spark.python.worker.reuse": "false", "spark.ui.showConsoleProgress": "false"}
            _, self._spark = self._stack.enter_context(session(f"local[{MOST_SLOTS}]", options))
        return self._spark

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Give a new directory, which goes in the end."""
        self._folders += 1
        folder = self._root / str(self._folders)
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    @property
    def job_name(self) -> str:
        """A name for the job in the latest folder."""
        return f"scale-{self._folders}"


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Wait until it is so; `TimeoutError` says what was not."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(0.05)
