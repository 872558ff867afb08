"""Words of log lines, counted, into files and PostgreSQL, while records fail: ``python failing_logs.py JOB.json``.

lines → parse → words → by key → count → `FileSink`, and `PostgresSink`, which refuses some rows. As a script it is a
driver that may be killed at any moment; it goes on from the latest checkpoint there is, and exits with 0 at the end.
`recount` says what has to come of it, and needs nothing of that.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from ftlayer import (
    CheckpointConfig,
    Context,
    FailurePolicy,
    FixedDelay,
    ProcessFunction,
    RowsRejected,
    StreamEnvironment,
    current_record,
    partitions,
)
from ftlayer.checkpoint.storage.dead_letters import stored_letters
from ftlayer.records.ipc import read_one_batch
from ftlayer.sinks import FileSink, PostgresMessage, PostgresSink

LINE = pa.schema([("place", pa.int64()), ("line", pa.string())])
WORD = pa.schema([("word", pa.string()), ("place", pa.int64()), ("number", pa.int64())])
COUNTED = pa.schema([*WORD, ("count", pa.int64())])
WORDS_A_LINE = 5
SOURCES = 2

Word = tuple[str, int, int]


@dataclass(frozen=True)
class LogJob:
    """What is run, by whichever driver.

    ``pace_s``: the first time they are read, so long passes over 100 lines. ``kills`` is the seed of kills of slots.
    """

    directory: str
    dsn: str
    count: int
    table: str = "counted_words"
    pace_s: float = 0.0
    kills: int | None = None
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def gate(self) -> Path:
        """Once it is there, the sources come to their end, and all counts are shown."""
        return Path(self.directory) / "gate"

    @property
    def lines(self) -> list[str]:
        """All lines there are; they come again and again."""
        return (Path(self.directory) / "lines.txt").read_text("ascii").splitlines()

    @property
    def checkpoints(self) -> str:
        return f"{self.directory}/checkpoints"


# ---------------------------------------------------------------- what fails


def fate(where: str, *record: Any) -> str:
    """Return what becomes of a record at a place: 2 in 100 fail once, some always."""
    draw = zlib.crc32(repr((where, *record)).encode()) % 1_000
    return "dies" if draw < 4 else "stumbles" if draw < 24 else "passes"


def meet(where: str, *record: Any) -> None:
    """Raise, if it is the record's fate."""
    its = fate(where, *record)
    if its == "dies" or (its == "stumbles" and current_record().attempt < 2):
        raise ValueError(f"{where}: {record} {its}")


# ---------------------------------------------------------------- what runs in the slots


def read(job: LogJob, source: int) -> Iterator[Any]:
    """The lines of a source; behind the gate, the first one shows each word there is, in a line of its own."""
    lines, begun = job.lines, Path(job.directory) / "begun"
    if not begun.exists():
        begun.touch()
    begun_s = begun.stat().st_mtime
    for place in range(source, job.count, SOURCES):
        wait_s = begun_s + place * job.pace_s / 100 - time.time() if job.pace_s else 0.0
        if wait_s > 0:
            time.sleep(wait_s)
        yield place, lines[place % len(lines)]
    while not job.gate.exists():
        time.sleep(0.02)
    if source == 0:
        words = {word for line in lines for word in line.split()[:WORDS_A_LINE]}
        yield from ((-1, word) for word in sorted(words))


def parse(record: Any) -> Any:
    if record[0] >= 0:
        meet("parse", record[0])
    return record


def words(record: Any) -> Iterator[Word]:
    """The words of a line; it may raise behind the first one."""
    place, line = record
    for number, word in enumerate(line.split()[:WORDS_A_LINE]):
        yield word, place, number
        if place >= 0 and number == 0:
            meet("words", place)


class Counting(ProcessFunction):
    """Counts a word twice, which has to come to the same; what shows a word's counts leaves them as they are."""

    def process(self, record: Any, ctx: Context) -> Iterator[Any]:
        count, places = ctx.value("count", 0), ctx.map("places")
        word, place, number = record
        if place < 0:
            if count.get() != sum(places.values()):
                raise AssertionError(f"{word!r}: {count.get()} times, and in {sum(places.values())} places")
            yield word, place, count.get(), count.get()
            return
        count.set(count.get() + 1)
        places[place % 7] = places.get(place % 7, 0) + 1
        yield word, place, number, count.get()
        meet("count", place, number)


class RefusingSink(PostgresSink):
    """Some rows it does not take, whatever comes with them."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PostgresMessage:
        batches = list(iterator)
        rows = [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
        refused = {place: "not this one" for place, row in enumerate(rows) if is_refused(row)}
        if refused:
            raise RowsRejected(refused)
        return super().write(iter(batches))


def is_refused(row: Any) -> bool:
    _, place, number, _ = row
    return place >= 0 and fate("postgres", place, number) == "dies"


def build(env: StreamEnvironment, job: LogJob) -> None:
    """Write the topology down."""
    counted = (
        env.source(partitions(*(partial(read, job, source) for source in range(SOURCES))), LINE, uid="lines")
        .map(parse, LINE, uid="parse")
        .flat_map(words, WORD, uid="words")
        .key_by("word")
        .process(Counting(), COUNTED, uid="count")
    )
    counted.sink(FileSink(f"{job.directory}/out"), uid="files")
    counted.sink(RefusingSink(job.dsn, job.table), uid="postgres")


def environment(spark: Any, job: LogJob) -> StreamEnvironment:
    """The environment of each life."""
    config: dict[str, Any] = {
        "interval": "200ms",
        "directory": job.checkpoints,
        "state_directory": f"{job.directory}/local",
        "retention": "retain-on-cancellation",
        "failures": FailurePolicy(max_attempts=2, backoff="50ms"),
        **job.config,
    }
    return StreamEnvironment(
        spark,
        name="failing-logs",
        parallelism=2,
        restart=FixedDelay(attempts=1_000, delay="10ms"),
        checkpointing=CheckpointConfig(**config),
    )


# ---------------------------------------------------------------- what has to come of it


@dataclass
class Recount:
    """What comes of the lines where nothing is killed. ``dead``: operators and the place of each record."""

    rows: set[Word] = field(default_factory=set)
    dead: set[tuple[str, int, int]] = field(default_factory=set)

    @property
    def counts(self) -> Counter[str]:
        return Counter(word for word, _, _ in self.rows)

    @property
    def refused(self) -> set[Word]:
        return {row for row in self.rows if is_refused((*row, 0))}


def recount(job: LogJob) -> Recount:
    """Go through the lines, one after another."""
    found, lines = Recount(), job.lines
    for place in range(job.count):
        if (
            where := next((each for each in ("parse", "words") if fate(each, place) == "dies"), None)
        ) is not None:
            found.dead.add((where, place, -1))
            continue
        for number, word in enumerate(lines[place % len(lines)].split()[:WORDS_A_LINE]):
            if fate("count", place, number) == "dies":
                found.dead.add(("count", place, number))
            else:
                found.rows.add((word, place, number))
    found.dead |= {("postgres", place, number) for _, place, number in found.refused}
    return found


class Ledger:
    """What sinks and dead letters hold. ``query`` asks the database."""

    def __init__(self, job: LogJob, query: Callable[[str], list[Any]]) -> None:
        self._job, self._query = job, query
        self.expected = recount(job)

    def in_database(self) -> int:
        """How many rows of lines are to be seen there."""
        ((found,),) = self._query(f"SELECT count(*) FROM {self._job.table} WHERE place >= 0")
        return int(found)

    def is_all_there(self) -> bool:
        return self.in_database() >= len(self.expected.rows) - len(self.expected.refused)

    def check(self) -> None:
        """Sinks, state and dead letters are those of the recount, each of them once."""
        table = ds.dataset(f"{self._job.directory}/out", format="parquet").to_table()
        files = list(zip(*(table[name].to_pylist() for name in COUNTED.names), strict=True))
        database = [
            tuple(row) for row in self._query(f"SELECT word, place, number, count FROM {self._job.table}")
        ]
        lines = self._check_rows(files)
        assert Counter(row for row in files if not is_refused(row)) == Counter(database)
        self._check_letters({row for row in lines if is_refused(row)})

    def _check_rows(self, files: Iterable[Any]) -> set[Any]:
        """Check what one of the sinks holds; returns the rows that are of lines."""
        shown = {word: count for word, place, _, count in files if place < 0}
        lines = [row for row in files if row[1] >= 0]
        assert len(lines) == len({row[:3] for row in lines}), "some are doubled"
        assert {row[:3] for row in lines} == self.expected.rows
        counts = self.expected.counts
        assert shown == {word: counts[word] for word in shown}
        assert set(counts) <= set(shown)
        by_word: dict[str, list[int]] = {}
        for word, _, _, count in lines:
            by_word.setdefault(word, []).append(count)
        assert {word: sorted(its) for word, its in by_word.items()} == {
            word: list(range(1, total + 1)) for word, total in counts.items()
        }
        return set(lines)

    def _check_letters(self, refused: set[Any]) -> None:
        (stored,) = stored_letters(self._job.checkpoints)
        letters = [(letter, read_one_batch(letter.payload).to_pylist()[0]) for _, letter in stored.letters()]
        dead = [(letter.operator, row["place"], row.get("number", -1)) for letter, row in letters]
        assert len(dead) == len(set(dead)), f"{len(dead) - len(set(dead))} letters are doubled"
        assert set(dead) == self.expected.dead
        assert {tuple(row.values()) for letter, row in letters if letter.operator == "postgres"} == refused
        # What was killed uses up no attempt.
        assert {len(letter.attempts) for letter, _ in letters if letter.operator != "postgres"} == {2}


# ---------------------------------------------------------------- drivers


def kill_slots(running: Any, draw: random.Random) -> None:
    """Kill slots until the job is over: one or two, at random moments behind the first checkpoint of a deployment."""
    completed = 0
    while not running.over(0.05):
        status = running.status()
        if status.checkpoints.completed <= completed:
            continue
        # (Behind a restart the source comes back to where it was first, and then there are new rows.)
        if running.over(draw.uniform(0.0, 6.0)):
            return
        slots = [slot.pid for slot in running.status().slots if slot.pid]
        for pid in draw.sample(slots, draw.randint(1, len(slots)) if slots else 0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        completed = running.status().checkpoints.completed


def main(job: LogJob) -> None:
    """Run one life."""
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master("local[2,4]")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    env = environment(spark, job)
    build(env, job)
    running = env.execute_async(restore_from="latest")
    if job.kills is not None:
        kill_slots(running, random.Random(job.kills))
    running.wait()
    spark.stop()


def save(job: LogJob) -> Path:
    """Write a job down for `main`; returns where."""
    path = Path(job.directory) / "job.json"
    path.write_text(json.dumps(asdict(job)))
    return path


if __name__ == "__main__":
    main(LogJob(**json.loads(Path(sys.argv[1]).read_text())))
