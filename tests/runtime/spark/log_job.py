"""A topology over log files that grow while it runs: ``python log_job.py CONFIG.json`` is a driver to be killed.

lines of files → parse → words → key_by → count → journal. Whatever has to outlive a kill is in files of the job's
directory; `expected` is the recount to compare with, and needs neither Spark nor a vertex.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

LINE = "file string, place bigint, line string"
WORD = "file string, place bigint, number int, word string"
COUNTED = "file string, place bigint, number int, word string, n bigint"
WORDS_A_LINE = 5
RANGE_BYTES = 32_768
MAX_ATTEMPTS = 3
WAIT_S = 600.0

Line = tuple[str, int, str]
WordKey = tuple[str, int, int, str]
LineKey = tuple[str, int]


# ---------------------------------------------------------------- what runs in the slots


class Tail(DataSourceStreamReader):
    """The lines of all ``*.log`` of a directory; offsets are bytes of each. A range is `RANGE_BYTES` of a file at most.

    ``read`` and ``commit`` leave notes in the directory: what was begun to be read, and up to where is committed.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = str(directory)

    def initialOffset(self) -> dict[str, int]:
        return {}

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:
        ends = {}
        for path in sorted(Path(self.directory).glob("*.log")):
            begin = start.get(path.name, 0)
            with path.open("rb") as file:
                file.seek(begin)
                ends[path.name] = begin + file.read(RANGE_BYTES).rfind(b"\n") + 1
        return ends

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [
            InputPartition((name, start.get(name, 0), end[name]))
            for name in sorted(end)
            if end[name] > start.get(name, 0)
        ]

    def read(self, partition: InputPartition) -> Iterator[Line]:
        name, begin, end = partition.value
        note(Path(self.directory), "reads", [partition.value])
        with (Path(self.directory) / name).open("rb") as file:
            file.seek(begin)
            for line in file.read(end - begin).splitlines(keepends=True):
                yield name, begin, line.decode().rstrip("\n")
                begin += len(line)

    def commit(self, end: dict[str, int]) -> None:
        note(Path(self.directory), "commits", [end])


class Parse:
    """Lets lines through; some it cannot parse, and some it cannot at first (over all processes)."""

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)

    def __call__(self, line: Line) -> Line:
        check(line)
        if crc(line) % 17 == 3 and first_time(f"{self._directory}/at-first-{crc(line)}"):
            raise RuntimeError("at first")
        return line


def crc(record: tuple[Any, ...]) -> int:
    return zlib.crc32(repr(record).encode())


def check(line: Line) -> None:
    if crc(line) % 29 == 7:
        raise ValueError(f"no log line: {line[2][:20]}")


def first_time(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def words(line: Line) -> list[WordKey]:
    file, place, text = line
    return [(file, place, number, word) for number, word in enumerate(text.split()[:WORDS_A_LINE])]


def none_yet() -> tuple[Any, ...]:
    return ("", 0, 0, "", 0)


def count(aggregate: tuple[Any, ...], word: WordKey) -> tuple[Any, ...]:
    return (*word, aggregate[4] + 1)


class FailOnce:
    """Fails for some words when they come first: their line is replayed, and its other words come again."""

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)

    def __call__(self, word: tuple[Any, ...]) -> tuple[Any, ...]:
        if crc(word[:4]) % 101 == 3 and first_time(f"{self._directory}/late-{crc(word[:4])}"):
            raise RuntimeError("late")
        return word


class Journal:
    """A sink that writes down all its rows, a file a process."""

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)

    def __call__(self, batch: pa.RecordBatch) -> None:
        rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
        note(Path(self._directory), "out", list(rows))


def note(directory: Path, kind: str, rows: list[Any]) -> None:
    """Append rows to this process's notes of a kind, at once."""
    file = os.open(directory / f"{kind}-{os.getpid()}.notes", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    try:
        os.write(file, "".join(json.dumps(row) + "\n" for row in rows).encode())
    finally:
        os.close(file)


def build(env: Any, directory: Path, *, late: bool = False, replay: str = "store") -> None:
    """Write the topology down. With ``late`` some records fail behind the shuffle, and words come twice."""
    read = env.source(Tail(directory), LINE, uid="lines", replay=replay)
    lines = read.map(Parse(directory), LINE, uid="parse")
    keyed = lines.flat_map(words, WORD, uid="words").key_by("word")
    counted = keyed.aggregate(none_yet, count, COUNTED, volatile_state=True, uid="count")
    if late:
        counted = counted.map(FailOnce(directory), COUNTED, uid="late")
    counted.sink(Journal(directory), uid="out")


# ---------------------------------------------------------------- what is left behind


class Notes:
    """What processes have noted of a kind, read as it grows. A note that a kill has cut off is none."""

    def __init__(self, directory: Path, kind: str) -> None:
        self._directory, self._kind = directory, kind
        self._read: dict[Path, int] = {}
        self._rows: list[Any] = []

    def rows(self) -> list[Any]:
        for path in self._directory.glob(f"{self._kind}-*.notes"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self._read[path] = self._read.get(path, 0) + whole
            for line in data[:whole].splitlines():
                # Another slot of the same worker process may go on behind a cut-off one.
                self._rows.append(json.loads(line))
        return self._rows


def lines_of(directory: Path) -> list[Line]:
    """Return all lines of all files, named as `Tail` names them."""
    found = []
    for path in sorted(directory.glob("*.log")):
        place = 0
        for line in path.read_bytes().splitlines(keepends=True):
            found.append((path.name, place, line.decode().rstrip("\n")))
            place += len(line)
    return found


def expected(directory: Path) -> tuple[Counter[WordKey], set[LineKey]]:
    """Return the sink's rows without their counts, and the lines that are dead letters, of a run without faults."""
    rows: Counter[WordKey] = Counter()
    dead = set()
    for line in lines_of(directory):
        try:
            check(line)
        except ValueError:
            dead.add(line[:2])
        else:
            rows.update(words(line))
    return rows, dead


class Ledger:
    """What has become of a job's lines so far."""

    def __init__(self, directory: Path, layer: Any, name: str) -> None:
        self._directory, self._layer, self._name = directory, layer, name
        self._out = Notes(directory, "out")

    def sink(self) -> Counter[WordKey]:
        return Counter((row[0], row[1], row[2], row[3]) for row in self._out.rows())

    def counts(self) -> Counter[tuple[str, int]]:
        return Counter((row[3], row[4]) for row in self._out.rows())

    def letters(self) -> list[Any]:
        from ftlayer.spark.facade import list_records

        return [
            letter
            for letter in list_records(self._layer.client, "dead")
            if letter.stream == f"{self._name}/lines"
        ]

    def dead(self) -> Counter[LineKey]:
        return Counter(
            (row[0][0].as_py(), row[1][0].as_py()) for row in (it.payload for it in self.letters())
        )

    def all_there(self) -> bool:
        """Whether every line of the files has come to its end."""
        rows, dead = expected(self._directory)
        return self.sink().keys() >= rows.keys() and self.dead().keys() >= dead

    def check(self, *, exact: bool) -> None:
        """Compare with the recount: nothing lost, and with ``exact`` nothing twice."""
        rows, dead = expected(self._directory)
        assert dead, "lines that fail for good belong to the test"
        sink = self.sink()
        assert not rows.keys() - sink.keys(), f"lost: {len(rows.keys() - sink.keys())}"
        assert not sink.keys() - rows.keys(), f"invented: {list(sink.keys() - rows.keys())[:3]}"
        assert self.dead() == Counter(dead)
        # What was killed uses up no attempt.
        assert {len(letter.history) for letter in self.letters()} == {MAX_ATTEMPTS}
        assert {letter.operator for letter in self.letters()} == {"parse"}
        attempts = [attempt for letter in self.letters() for attempt in letter.history]
        nowhere = [it.reason for it in attempts if not re.fullmatch(r"slot \d on .+, pid \d+", it.place)]
        # What timed out did so nowhere.
        assert all(reason.startswith("timed out") for reason in nowhere), nowhere
        if exact:
            assert sink == rows
            by_word = Counter(word for _, _, _, word in rows.elements())
            assert self.counts() == Counter((w, n + 1) for w, total in by_word.items() for n in range(total))


class GrowingLogs:
    """Files that get lines of real logs, some at a time."""

    def __init__(self, directory: Path, lines: list[str], files: int = 3) -> None:
        self.directory = directory
        self._lines = lines
        self._paths = [directory / f"{number}.log" for number in range(files)]
        self._next = 0

    def grow(self, lines: int) -> None:
        for _ in range(lines):
            self._next += 1
            with self._paths[self._next % len(self._paths)].open("a", encoding="utf-8") as file:
                file.write(f"{self._lines[self._next % len(self._lines)]}\n")


def until(job: Any, holds: Callable[[], Any], meanwhile: Callable[[], Any] | None = None) -> Any:
    """Wait until it is so, and return what it gave; meanwhile, do something now and then."""
    deadline = time.monotonic() + WAIT_S
    while not (found := holds()):
        job.wait(0.02)
        assert not job.state.is_final, job.status()
        assert time.monotonic() < deadline, job.status()
        if meanwhile is not None:
            meanwhile()
    return found


# ---------------------------------------------------------------- a driver


@dataclass
class DriverJob:
    """``directory`` is that of the logs; it ends once ``finish`` is there and all lines have come to their end."""

    directory: str
    name: str = "logs"
    replay: str = "store"

    def save(self) -> Path:
        file = Path(self.directory) / "driver.json"
        file.write_text(json.dumps(asdict(self)))
        return file


def main(job: DriverJob) -> None:
    from pyspark.sql import SparkSession

    from ftlayer import FTLayer, StreamEnvironment

    directory = Path(job.directory)
    spark = (
        SparkSession.builder.master("local[3]")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "WARN")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.warehouse.dir", str(directory / "warehouse"))
        .getOrCreate()
    )
    layer = FTLayer.embedded(directory / "store", max_attempts=MAX_ATTEMPTS, backoff="20ms", jitter=0)
    env = StreamEnvironment(spark, layer, name=job.name, parallelism=2)
    build(env, directory, late=True, replay=job.replay)
    running = env.execute_async()
    ledger = Ledger(directory, layer, job.name)
    (directory / "started").touch()
    until(running, lambda: (directory / "finish").exists() and ledger.all_there())
    assert running.drain(WAIT_S)
    ledger.check(exact=False)
    status = layer.stats()
    layer.close()
    spark.stop()
    (directory / "result.json").write_text(json.dumps(status))


if __name__ == "__main__":
    os.environ["PYSPARK_PYTHON"] = sys.executable
    main(DriverJob(**json.loads(Path(sys.argv[1]).read_text())))
