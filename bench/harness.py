"""What the benchmarks share: targets, timing, sides that are compared in pairs, the machine, and the report."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PAIRS = 7
"""A ratio is the median of so many pairs of runs, unless ``--pairs`` says otherwise."""

_VERSIONS_OF = ("numpy", "numba", "pyarrow", "pyspark", "lmdb")
_notes: list[str] = []
_kept: dict[str, Any] = {}
_ticks: dict[tuple[int, str], int] = {}
"""Clock ticks of processes, by their ids and when they were started."""


@dataclass(frozen=True)
class Target:
    """A bound that a metric should keep: ``at_least`` or ``at_most``, with the unit it is given in."""

    at_least: float | None = None
    at_most: float | None = None
    unit: str = ""

    def is_met(self, value: float) -> bool:
        above = self.at_least is None or value >= self.at_least
        return above and (self.at_most is None or value <= self.at_most)

    def __str__(self) -> str:
        low = "" if self.at_least is None else f"≥ {readable(self.at_least)}"
        return low if self.at_most is None else f"{low} ≤ {readable(self.at_most)}".strip()


@dataclass(frozen=True)
class Run:
    """One run of one side: records a second, and CPU µs a record; 0 where that is not known."""

    rate: float
    cpu_us: float = 0.0


Sides = Mapping[str, Callable[[], Run]]
"""What is compared, by name: each call is one run."""

Ratios = Mapping[str, tuple[str, str]]
"""Whose rate is divided by whose, by the ratio's name."""


def note(text: str) -> None:
    """Say something beside the metrics: what was skipped, and why."""
    _notes.append(text)


def note_pairs(pairs: int) -> None:
    """Say how many pairs of runs each ratio is of, and have it written to the JSON file."""
    few = "" if pairs >= PAIRS else f", fewer than the {PAIRS} that a figure to rely on takes"
    plural = "s" if pairs > 1 else ""
    note(f"each ratio and latency is the median of {pairs} interleaved pair{plural} of runs{few}")
    keep("pairs", pairs)


def keep(name: str, value: Any) -> None:
    """Have something beside the metrics written to the JSON file, under ``name``."""
    _kept[name] = value


def seconds(function: Callable[[], object]) -> float:
    """Time one call by the monotone clock."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def cpu_seconds(function: Callable[[], object]) -> float:
    """Time one call by the CPU time of this thread, system calls and page faults included.

    For work on a single thread that waits for nothing: the same as `seconds` on a machine of its own,
    and not distorted where others compete for the cores.
    """
    start = time.thread_time()
    function()
    return time.thread_time() - start


def cpu_seconds_of_all() -> float:
    """Return the CPU time of this process and of all that come of it, since it began to ask.

    A process that has ended counts with what it had when it was seen last: no parent tells, since some leave their
    children to the kernel. Linux alone: nothing else tells of processes that a JVM has started.
    """
    parents: dict[int, int] = {}
    found: dict[int, tuple[str, int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # it has ended meanwhile
            continue
        fields = text.rpartition(")")[2].split()
        pid = int(stat.parent.name)
        parents[pid], found[pid] = int(fields[1]), (fields[19], int(fields[11]) + int(fields[12]))
    own = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= more
    for pid in own:
        started, ticks = found[pid]
        _ticks[pid, started] = ticks
    return sum(_ticks.values()) / os.sysconf("SC_CLK_TCK")


def in_turn(sides: Sides, pairs: int) -> dict[str, list[Run]]:
    """Run every side once in each of ``pairs`` rounds, and return the runs of each in the order of the rounds.

    Every second round has the opposite order: a machine that becomes faster or slower meanwhile favours none.
    """
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    for number in range(pairs):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            runs[name].append(sides[name]())
    return runs


def compared(runs: Mapping[str, Sequence[Run]], ratios: Ratios) -> dict[str, float]:
    """Return the ratios whose sides have both run, and what each side took.

    A ratio is that of two runs of one round, ``over`` ÷ ``under``: its median and range (`spread`). With ``_by_cpu``
    behind its name it is that of their CPU times, ``under`` ÷ ``over``, where both are known, so that more is better in
    either. ``records_per_s_…`` and ``cpu_us_…`` are the medians of each side.
    """
    found: dict[str, float] = {}
    for name, (over, under) in ratios.items():
        if over not in runs or under not in runs:
            continue
        pairs = list(zip(runs[over], runs[under], strict=True))
        found |= spread(name, [ours.rate / theirs.rate for ours, theirs in pairs])
        if all(ours.cpu_us and theirs.cpu_us for ours, theirs in pairs):
            found |= spread(f"{name}_by_cpu", [theirs.cpu_us / ours.cpu_us for ours, theirs in pairs])
    for name, each in runs.items():
        found[f"records_per_s_{name}"] = statistics.median(run.rate for run in each)
        if any(run.cpu_us for run in each):
            found[f"cpu_us_{name}"] = statistics.median(run.cpu_us for run in each)
    return found


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the median under ``name``, and the range as ``…_lowest`` and ``…_highest``."""
    return {name: statistics.median(values), f"{name}_lowest": min(values), f"{name}_highest": max(values)}


@contextmanager
def scratch() -> Iterator[Path]:
    """Give a new directory on a disk: where temporary files live in memory, a sync costs nothing."""
    base = Path(tempfile.gettempdir())
    if _in_memory(base):
        base = Path.cwd()
        note(f"the directory for temporary files is in memory: measured in {base}")
    with tempfile.TemporaryDirectory(prefix="ftlayer-bench-", dir=base) as name:
        yield Path(name)


def cpu_seconds_of(pid: int) -> float:
    """Return the CPU time of a process so far; Linux alone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def quiet_median(samples: Iterable[float]) -> float:
    """Return the median of the faster half of timings, in seconds.

    On a shared machine noise only ever adds time; the very best sample is luck, the plain median the
    neighbours' load.
    """
    ordered = sorted(samples)
    return statistics.median(ordered[: (len(ordered) + 1) // 2])


def machine() -> dict[str, Any]:
    """Describe where the figures come from."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
        **{name: importlib.metadata.version(name) for name in _VERSIONS_OF},
    }


def report(name: str, metrics: dict[str, float], targets: dict[str, Target]) -> None:
    """Print metrics beside their targets."""
    table = Table(title=f"bench {name}", title_justify="left")
    table.add_column("metric")
    table.add_column("value", justify="right")
    table.add_column("range", justify="right")
    table.add_column("unit")
    table.add_column("target", justify="right")
    table.add_column("")
    for metric, value in metrics.items():
        if metric.removesuffix("_lowest").removesuffix("_highest") != metric:
            continue
        target = targets.get(metric)
        mark = "" if target is None else "[green]✓[/]" if target.is_met(value) else "[red]✗[/]"
        unit = "" if target is None else target.unit
        bound = "" if target is None else str(target)
        table.add_row(metric, readable(value), _range(metric, metrics), unit, bound, mark)
    for metric in targets.keys() - metrics.keys():
        table.add_row(metric, "skipped", "", targets[metric].unit, str(targets[metric]), "–")
    console = Console()
    console.print(table)
    for text in _notes:
        console.print(f"note: {text}", markup=False)


def write_json(path: Path, name: str, facts: dict[str, Any], metrics: dict[str, float], quick: bool) -> None:
    """Write the figures with where they come from."""
    content = {"name": name, "quick": quick, "machine": facts, "metrics": metrics, "notes": _notes, **_kept}
    path.write_text(json.dumps(content, indent=2) + "\n")


def readable(value: float) -> str:
    """Return a number in three to four digits: 74.2 M, 8.81 M, 3.4, 0.012."""
    for limit, suffix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{suffix}"
    return f"{value:.3g}"


def _range(metric: str, metrics: dict[str, float]) -> str:
    ends = [metrics.get(f"{metric}_{end}") for end in ("lowest", "highest")]
    return " to ".join(readable(end) for end in ends if end is not None)


def _in_memory(path: Path) -> bool:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    holding = [mount for mount in mounts if path.resolve().is_relative_to(mount[1])]
    return bool(holding) and max(holding, key=lambda mount: len(mount[1]))[2] in ("tmpfs", "ramfs")


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
