"""The files of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftlayer.demo.ledger import DeadLetter

MAX_ATTEMPTS = 3
BACKOFF = ("200ms", "500ms")
SINK_COLUMNS = ["line", "place", "word", "kind"]


@dataclass(frozen=True)
class RunDirectory:
    """A run's directory, ``root``."""

    root: Path

    @property
    def input(self) -> Path:
        """The files that the query reads."""
        return self.root / "input"

    @property
    def output(self) -> Path:
        """The sink: one directory a batch."""
        return self.root / "output"

    @property
    def checkpoint(self) -> Path:
        """Spark's checkpoint of the query."""
        return self.root / "checkpoint"

    @property
    def store(self) -> Path:
        """The store of the vertex."""
        return self.root / "ft"

    @property
    def service(self) -> Path:
        """How often the pretended service has failed each line."""
        return self.root / "service"

    @property
    def scratch(self) -> Path:
        """Spark's temporary files."""
        return self.root / "scratch"

    @property
    def log(self) -> Path:
        """What driver and Spark print."""
        return self.root / "driver.log"

    @property
    def dead(self) -> Path:
        """The dead letters, a line of JSON each."""
        return self.root / "dead.jsonl"

    def batch_output(self, batch: int) -> Path:
        """Return where the rows of one batch go; written again, they replace what was there."""
        return self.output / f"batch={batch:05}"

    def sink_batches(self) -> Iterator[tuple[int, dict[str, list[Any]]]]:
        """Yield the rows in the sink, batch by batch, as columns."""
        # Late: the screen must be up before the second that this import takes.
        import pyarrow.parquet as parquet

        for path in sorted(self.output.glob("batch=*")):
            for part in sorted(path.glob("part-*.parquet")):
                table = parquet.ParquetFile(part).read(columns=SINK_COLUMNS)
                yield int(path.name.removeprefix("batch=")), table.to_pydict()

    def dead_letters(self) -> Iterator[DeadLetter]:
        """Yield the dead letters that the driver wrote down."""
        with self.dead.open(encoding="utf-8") as file:
            for line in file:
                values = json.loads(line)
                yield DeadLetter(values["line"], values["reason"], values["attempts"])
