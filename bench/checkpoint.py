"""Checkpoints of a continuous topology: what they cost, how long they take, and how soon a lost slot is back.

The job is that of `bench.keyed_count`, with a checkpoint a second unless it says otherwise. The peers are Flink in Java
with the same interval, and Bytewax with its SQLite recovery at one second, on the same job.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench import large_state
from bench.harness import Run, Sides, Target, compared, in_turn, note
from bench.jobs import SLOTS, session, wait_until
from bench.keyed_count import (
    COUNTED,
    ID,
    KEYED,
    Build,
    CheckpointedJobs,
    Discard,
    count,
    ids,
    none_yet,
    python_job,
)
from bench.large_state import blob, no_blob
from bench.peers.flink_java import flink_java
from bench.peers.functions import last, with_key
from bench.sides import RATIOS, sides
from bench.topology import (
    PACE_S,
    PACED_PER_S,
    STAMPED,
    STAMPED_COUNT,
    Delays,
    count_stamped,
    last_stamped,
    no_stamp,
    read_delays,
    stamp,
)
from ftlayer import ProcessFunction, current_record

TARGETS = {
    "throughput_on_off_heap": Target(at_least=0.9),
    "throughput_on_off_lmdb": Target(at_least=0.92),
    "records_per_s_barriers": Target(at_least=1e6),
    "vs_bare_loop": Target(at_least=0.45),
    "vs_flink_java_checkpointed": Target(at_least=1.0),
    "vs_bytewax_recovery": Target(at_least=3),
    "checkpoint_ms_10k_keys": Target(at_most=100),
    "sync_ms": Target(at_most=5),
    "state_1gib_heap": Target(at_least=0.95),
    "state_1gib_lmdb": Target(at_least=0.95),
    "state_file_ratio": Target(at_most=2.5),
    "incremental_bytes": Target(at_most=0.03),
    "unaligned_vs_aligned": Target(at_most=0.1),
    "debloat_checkpoint_s": Target(at_most=6),
    "recovery_s": Target(at_most=1.5),
    "failures_on_off_heap": Target(at_least=0.95),
    "failures_on_off_lmdb": Target(at_least=0.95),
    "failing_1pct": Target(at_least=0.75),
    "process_function_rollback": Target(at_least=0.85),
}

WANTED = {
    "bare_loop",
    "untracked",
    "flink_java",
    "barriers_lmdb",
    "barriers",
    "flink_java_checkpointed",
    "bytewax_recovery",
}

EXCHANGES = 5
SLOW_S = 0.000_5
"""What the sink of a back-pressured job takes for a record …"""

SLOW_ROWS = 256
"""… in batches of so many."""


# ---------------------------------------------------------------- what runs in the slots


def endless(first: int) -> Iterator[int]:
    """Ids without end."""
    return itertools.count(first, SLOTS)


def steady(begin: float, first: int, seconds: float) -> Iterator[int]:
    """Yield the times (ns) at which records are due, `PACED_PER_S` / `SLOTS` a second; those that are past at once."""
    due = begin + first / PACED_PER_S
    while due < begin + seconds:
        wait = due - time.monotonic()
        if wait > 0:
            time.sleep(wait + PACE_S)
        yield int(due * 1e9)
        due += SLOTS / PACED_PER_S


def phased(folder: str, first: int, keys: int, later: int) -> Iterator[int]:
    """Each of ``keys`` once; then the first ``later`` of them again and again, while a file `go` names the round."""
    rounds = 0
    yield from range(first, keys, SLOTS)
    Path(folder, f"filled-{first}").touch()
    while not Path(folder, "stop").exists():
        if Path(folder, f"go-{rounds}").exists():
            yield from range(first, later, SLOTS)
            Path(folder, f"done-{rounds}-{first}").touch()
            rounds += 1
        time.sleep(0.005)


class TwoValues(ProcessFunction):
    """A process function that keeps a count and the latest id of each key."""

    def open(self, ctx: Any) -> None:
        self._count, self._latest = ctx.value("count", 0), ctx.value("latest", 0)

    def process(self, record: Any, ctx: Any) -> Any:
        count = self._count.get() + 1
        self._count.set(count)
        self._latest.set(max(self._latest.get(), record[0]))
        return [(record[1], count)]


def count_or_fail(each: int, aggregate: tuple[Any, int], record: tuple[int, str]) -> tuple[str, int]:
    """Count; one record of ``each`` fails at its first attempt."""
    if record[0] % each == 0 and current_record().attempt == 1:
        raise ValueError(record[0])
    return count(aggregate, record)


def passing(number: int) -> int:
    return number


class Slow:
    """A sink that takes its time for every record."""

    def __call__(self, batch: Any) -> None:
        time.sleep(SLOW_S * batch.num_rows)


# ---------------------------------------------------------------- measuring


class Bench(CheckpointedJobs):
    """A Spark session, and a fresh folder for each job."""

    def incremental(self, keys: int) -> float:
        """Return bytes written for 1 % of the keys ÷ bytes of a full checkpoint."""
        from ftlayer import partitions

        folder = self.folder()
        env = self.environment(folder, interval=None, backend="lmdb", incremental=True)
        parts = [partial(phased, str(folder), first, keys, keys // 100) for first in range(SLOTS)]
        source = env.source(partitions(*parts), "id bigint").key_by("id")
        source.aggregate(no_blob, blob, "id bigint, blob binary").sink(Discard(str(folder)))
        job = env.execute_async()
        wait_until(lambda: job.status().counters.get("records_out", 0) >= keys, 120)
        job.checkpoint(timeout=120)
        (folder / "go-0").touch()
        changed = keys + keys // 100
        wait_until(lambda: job.status().counters.get("records_out", 0) >= changed)
        job.checkpoint(timeout=120)
        second, first = job.checkpoints()[:2]
        (folder / "stop").touch()
        job.wait()
        shutil.rmtree(folder)
        return float(second.total.written_bytes / first.total.written_bytes)

    def back_pressured(self, **config: Any) -> float:
        """Return how long a checkpoint takes, in seconds, through five exchanges in front of a slow sink."""
        folder = self.folder()
        # A function cannot be interrupted within a batch: a barrier waits for the one that is being worked on.
        env = self.environment(folder, {"batch_rows": SLOW_ROWS}, interval=None, timeout="5m", **config)
        slow_job(env)
        job = env.execute_async()
        wait_until(lambda: bool(job.status().counters.get("records_out")))
        time.sleep(8)  # until everything between is full
        took = []
        for _ in range(2):
            job.checkpoint(timeout=300)
            took.append(job.checkpoints()[0].duration_ms / 1_000)
        job.cancel()
        shutil.rmtree(folder)
        return statistics.median(took)

    def recovery(self, seconds: float) -> float:
        """Kill a slot; return seconds until its successor's first record."""
        folder = self.folder()
        env = self.environment(folder)
        steady_job(env, folder, time.monotonic() + 1, seconds)
        job = env.execute_async()
        wait_until(lambda: len(read_delays(folder)) == SLOTS)
        time.sleep(seconds / 3)
        before = set(read_delays(folder))
        victim = next(slot.pid for slot in job.status().slots if slot.pid in before)
        killed = time.monotonic_ns()
        os.kill(victim, signal.SIGKILL)
        job.wait()
        firsts = [rows[0, 1] for pid, rows in read_delays(folder).items() if pid not in before and len(rows)]
        shutil.rmtree(folder)
        return float((min(firsts) - killed) / 1e9)


def two_values_job(env: Any, folder: Path, records: int) -> None:
    """The job of `bench.keyed_count` with a process function in the place of the aggregate."""
    from ftlayer import partitions

    parts = [partial(ids, str(folder), first, records) for first in range(SLOTS)]
    keyed = env.source(partitions(*parts), ID).map(with_key, KEYED).key_by("key")
    keyed.process(TwoValues(), COUNTED).sink(Discard(str(folder)))


def failing_job(env: Any, folder: Path, records: int, *, each: int) -> None:
    """The job of `bench.keyed_count`, where one record of ``each`` fails behind the aggregate at its first attempt."""
    from ftlayer import partitions

    parts = [partial(ids, str(folder), first, records) for first in range(SLOTS)]
    keyed = env.source(partitions(*parts), ID).map(with_key, KEYED).key_by("key")
    counted = keyed.aggregate(none_yet, partial(count_or_fail, each), COUNTED)
    counted.map(last, COUNTED).sink(Discard(str(folder)))


def steady_job(env: Any, folder: Path, begin: float, seconds: float) -> None:
    """10,000 records a second, which are the same ones when they are read again."""
    from ftlayer import partitions

    parts = [partial(steady, begin, first, seconds) for first in range(SLOTS)]
    keyed = env.source(partitions(*parts), "sent bigint").map(stamp, STAMPED).key_by("key")
    counted = keyed.aggregate(no_stamp, count_stamped, STAMPED_COUNT)
    counted.map(last_stamped, STAMPED_COUNT).sink(Delays(str(folder)))


def slow_job(env: Any) -> None:
    """Source → five exchanges → a slow sink."""
    from ftlayer import partitions

    parts = [partial(endless, first) for first in range(SLOTS)]
    stream = env.source(partitions(*parts), "id bigint")
    for _ in range(EXCHANGES):
        stream = stream.rebalance().map(passing, "id bigint")
    stream.sink(Slow())


def run(quick: bool, pairs: int) -> dict[str, float]:
    """Measure; every ratio is over so many pairs."""
    records = 3_000_000 if quick else 12_000_000
    with session() as (root, spark), flink_java() as flink:
        bench = Bench(root, spark)
        bench.run(python_job, 300_000)
        compares = sides(root, spark, flink, records, WANTED)
        found = _on_and_off(bench, compares, records, pairs)
        return found | _with_policy(bench, records // 2, pairs) | _measured(bench, quick, pairs)


def _on_and_off(bench: Bench, compares: Sides, records: int, pairs: int) -> dict[str, float]:
    """Run the job without checkpoints, with each backend, and in the peers; what heap's checkpoints took."""
    taken: list[Any] = []

    def barriers() -> Run:
        run = bench.run(python_job, records)
        taken.extend(each for each in bench.job.checkpoints() if each.state == "completed" and not each.final)
        return run

    found = compared(in_turn({**compares, "barriers": barriers}, pairs), RATIOS)
    if taken:
        found["checkpoint_ms_10k_keys"] = statistics.median(each.duration_ms for each in taken)
        found["sync_ms"] = max(each.total.sync_ms for each in taken)
    return found


def _with_policy(bench: Bench, records: int, pairs: int) -> dict[str, float]:
    """Run jobs with a policy for failing records and without."""
    from ftlayer import FailurePolicy

    policy = FailurePolicy(backoff=("100ms",))
    none_fails, some_fail = partial(failing_job, each=1 << 60), partial(failing_job, each=100)

    def ratio(
        name: str, build: Build, over: Build, without: FailurePolicy | None = None, **config: Any
    ) -> dict[str, float]:
        runs = {
            f"{name}_under": partial(bench.run, over, records, failures=without, **config),
            name: partial(bench.run, build, records, failures=policy, **config),
        }
        return compared(in_turn(runs, pairs), {name: (name, f"{name}_under")})

    return {
        **ratio("failures_on_off_heap", python_job, python_job),
        **ratio("failures_on_off_lmdb", python_job, python_job, backend="lmdb"),
        **ratio("failing_1pct", some_fail, none_fails, policy),
        **ratio("process_function_rollback", two_values_job, two_values_job),
    }


def _measured(bench: Bench, quick: bool, pairs: int) -> dict[str, float]:
    found = {"incremental_bytes": bench.incremental(20_000 if quick else 200_000)}
    aligned = bench.back_pressured()
    unaligned = bench.back_pressured(unaligned=True)
    found["aligned_s"], found["unaligned_s"] = aligned, unaligned
    found["unaligned_vs_aligned"] = unaligned / aligned
    found["debloat_checkpoint_s"] = bench.back_pressured(debloating=True)
    found["recovery_s"] = bench.recovery(6 if quick else 15)
    if quick:
        note("--quick leaves the state of 1 GiB out")
    else:
        for backend in ("heap", "lmdb"):
            found |= large_state.measured(bench, 1 << 30, backend, pairs)
    return found
