"""What a connector of a queue plugs into the suite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
from servers import Server, free_port

from ftlayer.topology.operators import Fetched, Member, Queue, QueueReader


class Kit:
    """What a connector of a queue plugs into the suite: one queue of a server, whose messages are numbers."""

    server: Server
    queue: Queue
    name: str
    column: str
    """Where a message has its number."""
    data_source: Any
    """The class of the Data Source, and its options but for the spool."""
    options: dict[str, str]
    has_spool = True
    """Whether the Data Source's reader keeps messages in a spool."""
    is_given_to_one = True
    """Whether a message that was delivered is delivered again to the same member only."""
    parallelism = 2
    """With how many subtasks a message enters a topology once."""
    tells_what_waits = True
    enters_once = True
    """Whether messages enter a topology once though its slots die."""
    lacks: frozenset[str] = frozenset()
    """Tests of the suite that the system has no means for: its connector has others instead."""

    def begin(self, owner: str) -> None:
        """Have the server keep what is put from now on for this owner."""

    def put(self, first: int, end: int) -> None:
        """Send the numbers of a range, in order."""
        raise NotImplementedError

    def numbers(self, fetched: Fetched) -> list[int]:
        """Return which numbers these rows are."""
        raise NotImplementedError

    def pending(self) -> int:
        """Return how many messages were delivered and are not acknowledged."""
        raise NotImplementedError

    def sink(self, name: str) -> Any:
        """Return a sink of another queue of the server; of files where it has none that is exactly once."""
        from ftlayer.sinks import FileSink

        return FileSink(str(self._files(name)))

    @property
    def sink_format(self) -> str:
        """The format by which plain Spark writes to the same, with the `sink_options`."""
        return "parquet"

    def sink_options(self, name: str) -> dict[str, str]:
        return {"path": str(self._files(name))}

    def in_sink(self, name: str) -> list[int]:
        """Return the numbers that the sink has committed, from a column ``number``."""
        directory = self._files(name)
        log = directory / "_spark_metadata"
        if not directory.exists():
            return []
        # Spark's own sink leaves files of a batch that was killed: those of its log count.
        files: Any = sorted(committed_in(log)) if log.exists() else directory
        numbers = pa.schema([("number", pa.int64())])
        read: list[int] = ds.dataset(files, numbers, format="parquet").to_table()["number"].to_pylist()
        return read

    def _files(self, name: str) -> Path:
        return self.server.directory / f"{self.name}-{name}"

    def at(self, port: int, **options: Any) -> Queue:
        """Return the queue with the server at another port, and other options."""
        raise NotImplementedError

    def refused(self) -> Queue:
        """Return the queue with an address at which nobody is, that gives up soon."""
        return self.at(free_port(), reconnect_timeout="50ms")

    def open(
        self,
        subtask: int = 0,
        parallelism: int = 1,
        positions: dict[int, bytes] | None = None,
        *,
        stored: bool = True,
    ) -> QueueReader:
        return self.queue.open(self.member(subtask, parallelism), positions or {}, stored=stored)

    def member(self, subtask: int = 0, parallelism: int = 1) -> Member:
        return Member("job/messages", subtask, parallelism)


def committed_in(log: Path) -> set[str]:
    """Return the files of the batches that Spark's file sink has committed."""
    batches = [path for path in log.iterdir() if path.name.split(".")[0].isdecimal()]
    lines = [line for path in batches for line in path.read_text().splitlines()[1:]]
    return {json.loads(line)["path"].removeprefix("file://") for line in lines}
