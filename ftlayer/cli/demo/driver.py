"""The driver of the demo: ``python -m ftlayer.cli.demo.driver DIRECTORY KIND``, started by the screen.

What it runs (`ftlayer.cli.demo.programs`) looks like a user's own program: nothing in it knows that it is going to be
killed. It prints events; everything else goes to the log.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ftlayer.cli.demo.choices import Kill, Kind, Victim, doomed
from ftlayer.cli.demo.ledger import DeadLine, HandChanges, split_record

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Starting:
    """The driver has begun to start ``what``; what it had begun before is up."""

    what: str


@dataclass(frozen=True)
class Started:
    """Spark is up and the query or topology runs."""


@dataclass(frozen=True)
class Writing:
    """The query's sink was called for a batch: its verdict is sealed, its rows are not written yet."""

    batch: int


@dataclass(frozen=True)
class BatchDone:
    """A batch is through. ``again``: it had been sealed by a driver that did not live to commit it.

    ``rows_in`` counts source rows and replays, ``delivered`` the replays among them; ``waiting`` and ``dead``
    those that failed; ``seconds`` is the time since the batch before, or the start.
    """

    batch: int
    again: bool
    rows_in: int
    waiting: int
    dead: int
    delivered: int
    seconds: float


@dataclass(frozen=True)
class Progress:
    """Where a topology is.

    Attributes:
        lines: of the input that have been read, by any driver so far.
        files: that its sinks have committed since this driver started.
        pids: of its slots' processes, 0 where there is none now.
        figures: what else is to be shown, by name.
    """

    lines: int
    files: int
    pids: list[int]
    figures: dict[str, int]


@dataclass(frozen=True)
class Restarted:
    failure: str


@dataclass(frozen=True)
class Finished:
    """Everything is done; what the ledger needs is written down."""


Event = Starting | Started | Writing | BatchDone | Progress | Restarted | Finished

_TYPES = {kind.__name__: kind for kind in get_args(Event)}


def to_line(event: Event) -> str:
    return json.dumps({"event": type(event).__name__, **dataclasses.asdict(event)}) + "\n"


def from_line(line: str) -> Event | None:
    """Read a line; None for one that was cut off by a kill."""
    if not line.endswith("\n"):
        return None
    values = json.loads(line)
    event: Event = _TYPES[values.pop("event")](**values)
    return event


@dataclass
class KillPlan:
    """Kills that are still to come, and at which progress: (victim, batch or line) in order."""

    left: list[tuple[Victim, int]]

    @classmethod
    def of(cls, kind: Kind, kill: Kill, total: int) -> KillPlan:
        """Plan for a run of ``total`` batches or lines. Raises `ConfigError` as `doomed` does."""
        return cls([(victim, int(total * share)) for victim, share in doomed(kind, kill)])

    def due(self, progress: int) -> Victim | None:
        if self.left and progress >= self.left[0][1]:
            return self.left.pop(0)[0]
        return None


MAX_ATTEMPTS = 3
BACKOFF = ("200ms", "500ms")

Columns = dict[str, list[Any]]


class RunDirectory:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.input = root / "input"
        self.output = root / "output"
        """The sink: of a query, one directory a batch; of a topology, files."""
        self.dead_letters = root / "dead-letters"
        self.checkpoint = root / "checkpoint"
        self.checkpoints = root / "checkpoints"
        self.savepoints = root / "savepoints"
        self.checkpoint_list = root / "checkpoints.json"
        self.marks = root / "marks"
        self.store = root / "ft"
        self.service = root / "service"
        """How often the pretended service has failed each line."""
        self.scratch = root / "scratch"
        self.log = root / "driver.log"
        self.dead = root / "dead.jsonl"
        self.changes = root / "changes.json"

    def batch_output(self, batch: int) -> Path:
        """The rows of one batch of the query; written again, they replace what was there."""
        return self.output / f"batch={batch:05}"

    def sink_batches(self) -> Iterator[tuple[int, Columns]]:
        for path in sorted(self.output.glob("batch=*")):
            for columns in _columns(path):
                yield int(path.name.removeprefix("batch=")), columns

    def committed_files(self) -> int:
        return sum(1 for _ in self.output.glob("part-*.parquet"))

    def sink_files(self) -> Iterator[Columns]:
        return _columns(self.output)

    def dead_lines(self) -> Iterator[DeadLine]:
        with self.dead.open(encoding="utf-8") as file:
            for line in file:
                values = json.loads(line)
                yield DeadLine(values["line"], values["reason"], values["attempts"], values["edited"])

    def hand_changes(self) -> HandChanges:
        return HandChanges(**json.loads(self.changes.read_text("utf-8")))

    def dead_lines_in_files(self) -> Iterator[DeadLine]:
        for columns in _columns(self.dead_letters):
            letters = (columns[name] for name in ("record", "reason", "attempts"))
            for record, reason, attempts in zip(*letters, strict=True):
                line, _ = split_record(json.loads(record)["value"])
                yield DeadLine(line, reason, attempts)


def _columns(directory: Path) -> Iterator[Columns]:
    # Late: the screen must be up before the second that this import takes.
    import pyarrow.parquet as parquet

    for part in sorted(directory.glob("part-*.parquet")):
        yield parquet.ParquetFile(part).read().to_pydict()


SHORT_RUN = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""A run of a minute on two cores: what Java's second compiler costs it never gives back (1.5 s a batch, 1.0
without it)."""

Tell = Callable[[Event], None]


def main(directory: RunDirectory, kind: Kind) -> None:
    tell = _event_channel()
    tell(Starting("Spark"))
    programs = import_module("ftlayer.cli.demo.programs")
    spark = _session(directory)
    getattr(programs, f"run_{kind}")(spark, directory, tell)
    spark.stop()
    tell(Finished())


def _session(directory: RunDirectory) -> SparkSession:
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return (
        SparkSession.builder.master("local[2]")
        .appName("ftlayer demo")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "WARN")
        .config("spark.driver.extraJavaOptions", SHORT_RUN)
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.local.dir", str(directory.scratch))
        .config("spark.sql.warehouse.dir", str(directory.scratch / "warehouse"))
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )


def _event_channel() -> Tell:
    """Keep stdout for events: what Spark's JVM and others print goes to the log."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lock = threading.Lock()

    def tell(event: Event) -> None:
        with lock:
            events.write(to_line(event))
            events.flush()

    return tell


def _end_with_screen() -> None:
    """End when stdin does: the screen is gone, and this run would go unseen."""
    while os.read(0, 4_096):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_screen, name="demo-screen", daemon=True).start()
    main(RunDirectory(Path(sys.argv[1])), Kind(sys.argv[2]))
