"""The acker table: XORs a second at three sizes, whole roots a second, memory, and pauses of growth.

All of it is work of a single thread, timed by that thread's CPU time, here and in the Java peer (whose garbage
collector's threads therefore cost it nothing).
"""

from __future__ import annotations

import gc
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.harness import Target, cpu_seconds, note, quiet_median
from ftlayer.vertex.acker import AckerTable, warm_up

TARGETS = {
    "xor_per_s_10k": Target(at_least=150e6, unit="XOR/s"),
    "xor_per_s_1m": Target(at_least=70e6, unit="XOR/s"),
    "xor_per_s_10m": Target(at_least=50e6, unit="XOR/s"),
    "vs_java_1m": Target(at_least=20, unit="times"),
    "roots_per_s": Target(at_least=8e6, unit="roots/s"),
    "bytes_per_root": Target(at_most=48, unit="bytes"),
    "growth_pause_ms": Target(at_most=10, unit="ms"),
}

U64 = npt.NDArray[np.uint64]

_BATCH = 65_536
_BATCHES = 16
_GROWTH_BATCH = 4_096
_JAVA_SOURCE = Path(__file__).parent / "java" / "RotatingMapsAcker.java"


def run(quick: bool) -> dict[str, float]:
    """Measure; ``quick`` repeats less often."""
    warm_up()
    rng = np.random.default_rng(20)
    repeats = 6 if quick else 30
    metrics: dict[str, float] = {}
    for name, pending in (("10k", 10_000), ("1m", 1_000_000), ("10m", 10_000_000)):
        roots = _ids(rng, pending)
        events = [(roots[rng.integers(0, pending, _BATCH)], _ids(rng, _BATCH)) for _ in range(_BATCHES)]
        rate = _xor_per_second(roots, events, repeats)
        if name == "1m":
            java = _java_xor_per_second(roots, events, repeats)
            # Once more, so that the peer's turn lies between two of ours: the neighbours' load changes.
            rate = statistics.mean([rate, _xor_per_second(roots, events, repeats)])
            if java is not None:
                metrics["java_xor_per_s_1m"] = java
                metrics["vs_java_1m"] = rate / java
        metrics[f"xor_per_s_{name}"] = rate
    metrics["roots_per_s"] = _roots_per_second(rng, 1_000_000, repeats)
    metrics |= _growth(rng, 10_000_000, 3 if quick else 5)
    return metrics


def _ids(rng: np.random.Generator, count: int) -> U64:
    return rng.integers(1, 2**64, count, dtype=np.uint64)


def _filled(roots: U64) -> AckerTable:
    table = AckerTable()
    for start in range(0, roots.size, _BATCH):
        part = roots[start : start + _BATCH]
        table.register(part, part, bucket=1)
    return table


def _xor_per_second(roots: U64, events: list[tuple[U64, U64]], repeats: int) -> float:
    """XORs of random live roots; none completes, as a random value is never 0."""
    table = _filled(roots)
    return _BATCH / quiet_median(
        cpu_seconds(lambda batch=batch, values=values: table.xor(batch, values))  # type: ignore[misc]
        for _ in range(repeats)
        for batch, values in events
    )


def _roots_per_second(rng: np.random.Generator, pending: int, repeats: int) -> float:
    """Register a batch, XOR each root twice (the second time in another order), and so complete it."""
    table = _filled(_ids(rng, pending))
    samples = []
    for _ in range(4 * repeats):
        roots, first, second = (_ids(rng, _BATCH) for _ in range(3))
        order = rng.permutation(_BATCH)
        shuffled, last = roots[order], second[order]
        emitted = first ^ second
        start = time.thread_time()
        table.register(roots, emitted, locations=roots, bucket=1)
        table.xor(roots, first)
        done = table.xor(shuffled, last)
        samples.append(time.thread_time() - start)
        assert done.roots.size == _BATCH
    return _BATCH / quiet_median(samples)


def _growth(rng: np.random.Generator, pending: int, repeats: int) -> dict[str, float]:
    """Grow an empty table by small batches, a few times over, and look at each call.

    A pause is the longest call of all these growths by its CPU time, page faults included; beside it
    stands the longest call by the wall clock in the growth that was disturbed least (on a busy machine
    that is a wait for a core). Memory is what the process takes more, or what the table says it uses if
    that is more.
    """
    roots = _ids(rng, pending)
    longest, longest_cpu, typical, sizes = [], [], [], []
    for _ in range(repeats):
        gc.collect()
        before = _resident_bytes()
        table = AckerTable()
        calls, cpu = [], []
        for start in range(0, pending, _GROWTH_BATCH):
            part = roots[start : start + _GROWTH_BATCH]
            begin, cpu_begin = time.perf_counter(), time.thread_time()
            table.register(part, part, locations=part, bucket=1)
            calls.append(time.perf_counter() - begin)
            cpu.append(time.thread_time() - cpu_begin)
        sizes.append(max(table.nbytes, _resident_bytes() - before) / pending)
        longest.append(max(calls))
        longest_cpu.append(max(cpu))
        typical.append(statistics.median(calls))
        del table
    return {
        "bytes_per_root": max(sizes),
        "growth_pause_ms": max(longest_cpu) * 1e3,
        "growth_pause_wall_ms": min(longest) * 1e3,
        "growth_call_typical_ms": statistics.median(typical) * 1e3,
    }


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _java_xor_per_second(roots: U64, events: list[tuple[U64, U64]], repeats: int) -> float | None:
    """Run the same events through rotating Java hash maps; None (and a note) without a JDK."""
    java, javac = shutil.which("java"), shutil.which("javac")
    if java is None or javac is None:
        note("vs_java_1m was skipped: it needs javac and java on the PATH (a JDK)")
        return None
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([javac, "-d", scratch, str(_JAVA_SOURCE)], check=True)
        roots_file, events_file = Path(scratch) / "roots", Path(scratch) / "events"
        roots.astype("<u8").tofile(roots_file)
        np.concatenate([np.column_stack(batch).ravel() for batch in events]).astype("<u8").tofile(events_file)
        command = [java, "-Xms3g", "-Xmx3g", "-XX:+UseParallelGC", "-cp", scratch, _JAVA_SOURCE.stem]
        arguments = [str(roots_file), str(events_file), str(_BATCH), str(repeats)]
        run = subprocess.run([*command, *arguments], check=True, capture_output=True, text=True)
    return _BATCH / quiet_median(float(line) * 1e-9 for line in run.stdout.split())
