from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftlayer.demo.functions import split_record
from ftlayer.demo.ledger import DeadLine, HandChanges

MAX_ATTEMPTS = 3
BACKOFF = ("200ms", "500ms")

Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class RunDirectory:
    """A run's directory, ``root``."""

    root: Path

    @property
    def input(self) -> Path:
        return self.root / "input"

    @property
    def output(self) -> Path:
        """The sink: of a query, one directory a batch; of a topology, files."""
        return self.root / "output"

    @property
    def dead_letters(self) -> Path:
        """The sink of the dead letters of a topology with checkpoints."""
        return self.root / "dead-letters"

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoint"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def savepoints(self) -> Path:
        """The savepoints of the topology that somebody asks for."""
        return self.root / "savepoints"

    @property
    def checkpoint_list(self) -> Path:
        """The statistics of the last driver's checkpoints, as JSON."""
        return self.root / "checkpoints.json"

    @property
    def marks(self) -> Path:
        """How far each partition of the input was read."""
        return self.root / "marks"

    @property
    def store(self) -> Path:
        return self.root / "ft"

    @property
    def service(self) -> Path:
        """How often the pretended service has failed each line."""
        return self.root / "service"

    @property
    def scratch(self) -> Path:
        return self.root / "scratch"

    @property
    def log(self) -> Path:
        return self.root / "driver.log"

    @property
    def dead(self) -> Path:
        """The dead letters, a line of JSON each."""
        return self.root / "dead.jsonl"

    @property
    def changes(self) -> Path:
        """What people have done to dead letters, as JSON."""
        return self.root / "changes.json"

    def batch_output(self, batch: int) -> Path:
        """Return where the rows of one batch of the query go; written again, they replace what was there."""
        return self.output / f"batch={batch:05}"

    def sink_batches(self) -> Iterator[tuple[int, Columns]]:
        """Yield the rows in the query's sink, batch by batch, as columns."""
        for path in sorted(self.output.glob("batch=*")):
            for columns in _columns(path):
                yield int(path.name.removeprefix("batch=")), columns

    def committed_files(self) -> int:
        """Return how many files are in the topology's sink."""
        return sum(1 for _ in self.output.glob("part-*.parquet"))

    def sink_files(self) -> Iterator[Columns]:
        """Yield the rows in the topology's sink, file by file, as columns."""
        return _columns(self.output)

    def dead_lines(self) -> Iterator[DeadLine]:
        """Yield the dead letters that the driver wrote down."""
        with self.dead.open(encoding="utf-8") as file:
            for line in file:
                values = json.loads(line)
                yield DeadLine(values["line"], values["reason"], values["attempts"], values["edited"])

    def hand_changes(self) -> HandChanges:
        """Return what people have done to dead letters, as the driver wrote it down."""
        return HandChanges(**json.loads(self.changes.read_text("utf-8")))

    def dead_lines_in_files(self) -> Iterator[DeadLine]:
        """Yield the dead letters in the sink of the topology with checkpoints."""
        for columns in _columns(self.dead_letters):
            for record, reason, attempts in zip(
                columns["record"], columns["reason"], columns["attempts"], strict=True
            ):
                line, _ = split_record(json.loads(record)["value"])
                yield DeadLine(line, reason, attempts)


def _columns(directory: Path) -> Iterator[Columns]:
    # Late: the screen must be up before the second that this import takes.
    import pyarrow.parquet as parquet

    for part in sorted(directory.glob("part-*.parquet")):
        yield parquet.ParquetFile(part).read().to_pydict()
