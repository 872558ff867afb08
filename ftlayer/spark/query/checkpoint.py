"""The mark ftlayer leaves in a Spark checkpoint: which query of the vertex it belongs to.

The query's name in the vertex is drawn when the checkpoint is new and lives in it, so a new checkpoint is
a new query: were names reused, batch 0 of a new checkpoint would pass for the old one's and be skipped.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftlayer import __version__
from ftlayer.errors import CheckpointMismatchError, SourceChangedError, other_format
from ftlayer.spark.sessions import DELIVERIES
from ftlayer.topology.checks import lies_before
from ftlayer.vertex.calls import QueryStatus

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# When a query is drained: all that its source had when it was asked for is through, and no record waits.
#
# The vertex alone cannot say it: of rows that Spark has not read, or has in a batch without a verdict, it knows
# nothing. Rules only; Spark and the vertex are given.


@dataclass(frozen=True, slots=True)
class LogEnds:
    """The ends of the two logs in Spark's checkpoint: the last batch planned, the last one committed (-1: none)."""

    planned: int
    committed: int


class Drain:
    """The progress of a drain since it was asked for, or waited for."""

    def __init__(self) -> None:
        self._last: int | None = None

    @property
    def source_read(self) -> bool:
        return self._last is not None

    def source_ended(self, log: LogEnds) -> None:
        """Spark has asked the source for more, and it had none: all that it had is in the batches planned by now.

        Spark says so by a run that ends by itself, or by `processAllAvailable` of one that goes on.
        """
        if self._last is None:
            self._last = log.planned

    def reached(self, log: LogEnds, records: QueryStatus) -> bool:
        """Whether those batches are committed, and no record of the query waits, is in delivery or pending.

        Rows that the source has got since do not count.
        """
        return self._last is not None and log.committed >= self._last and records.drained


MARK = "ftlayer.json"
FORMAT_VERSION = 1

LOGS = ("offsets", "commits")
TEMPORARY = re.compile(r"\.\d+\..*\.tmp")
"""What Spark names a file of its logs until it is complete (`CheckpointFileManager`)."""


@dataclass(frozen=True)
class CheckpointMark:
    query: str
    source: str

    def to_json(self) -> str:
        own = {"format": FORMAT_VERSION, "query": self.query, "source": self.source}
        return json.dumps({**own, "ftlayer": __version__})

    @classmethod
    def from_json(cls, text: str, where: str) -> CheckpointMark:
        """Read the file's text; `CheckpointMismatchError` if it is damaged or newer."""
        try:
            values = json.loads(text)
            version, query, source = values["format"], values["query"], values["source"]
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointMismatchError(
                f"{where}: not ftlayer's mark of a checkpoint ({error!r})"
            ) from error
        if version != FORMAT_VERSION:
            raise CheckpointMismatchError(other_format(where, version, FORMAT_VERSION, values.get("ftlayer")))
        return cls(query, source)


class CheckpointDirectory:
    """A Spark checkpoint on any file system that Spark can reach (through Spark's own Hadoop classes)."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self.path = path
        jvm: Any = spark._jvm
        self._root = jvm.org.apache.hadoop.fs.Path(path)
        self._files = self._root.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())
        self._jvm = jvm
        self._planned: tuple[int, dict[Any, Any]] = (-1, {})

    def claim(self, source: str) -> CheckpointMark:
        """Return the checkpoint's mark; makes one if the checkpoint is new.

        Raises `CheckpointMismatchError` for a checkpoint of a plain query, or of another source.
        """
        mark = self.mark()
        if mark is None:
            if self.used:
                raise CheckpointMismatchError(
                    f"checkpoint {self.path} was written without ftlayer (or with FTStatus.OFF), and "
                    "Spark cannot add a source to it: let the plain query finish, then start the wrapped one "
                    "with a new checkpoint directory and the source's starting position set to its end"
                )
            mark = CheckpointMark(uuid.uuid4().hex, source)
            self._write(MARK, mark.to_json())
        elif mark.source != source:
            raise CheckpointMismatchError(
                f"checkpoint {self.path} belongs to source {mark.source!r}, this query reads {source!r}: "
                "names of sources must stay the same over restarts; give the source its former name, or the query "
                "a checkpoint directory of its own"
            )
        return mark

    def refuse_mark(self) -> None:
        """With fault tolerance off, refuse a checkpoint written with it on (`CheckpointMismatchError`)."""
        if self.mark() is not None and self.used:
            raise CheckpointMismatchError(
                f"checkpoint {self.path} was written with ftlayer on, and Spark cannot take a source away "
                "from it: drain the wrapped query, then start the plain one (FTStatus.OFF) with a new checkpoint "
                "directory and the source's starting position set to its end"
            )

    @property
    def used(self) -> bool:
        return bool(self._files.exists(self._child("offsets")))

    @property
    def last_commit(self) -> int:
        return self._last("commits")

    @property
    def last_planned(self) -> int:
        """The last batch in Spark's offset log, -1 if there is none; it is there before the batch runs."""
        return self._last("offsets")

    def log(self) -> LogEnds:
        # In this order: a batch that is planned in between does not look committed.
        committed = self.last_commit
        return LogEnds(self.last_planned, committed)

    def check_goes_on(self, batch: int) -> None:
        """Raise `SourceChangedError` for a batch that Spark has planned back, behind a source that has become shorter.

        One file is read a batch; sources of the JVM look to that themselves, or were told not to.
        """
        before = self._planned[1] if self._planned[0] == batch - 1 else self._offsets(batch - 1)
        now = self._offsets(batch)
        for source in before.keys() & now.keys():
            start, end = before[source], now[source]
            if lies_before(end, start):
                raise SourceChangedError(
                    f"checkpoint {self.path}: the source was read up to {json.dumps(start)}, and its reader says that "
                    f"it ends at {json.dumps(end)} now: it was cut, or made anew. Start the query with another "
                    f"checkpoint, which begins at its initialOffset; or give it back what it had, and remove "
                    f"offsets/{batch}"
                )
        self._planned = batch, now

    def _offsets(self, batch: int) -> dict[Any, Any]:
        """Return the offsets of all sources but that of deliveries behind a batch, by their places or names."""
        path = self._child(f"offsets/{batch}")
        if batch < 0 or not self._files.exists(path):
            return {}
        version, _metadata, *lines = self._read(path).splitlines()
        texts: dict[Any, str] = dict(enumerate(lines[:-1]))
        if version != "v1":
            texts = dict(line.split(":", 1) for line in lines)
            texts.pop(DELIVERIES, None)
        return {
            source: json.loads(text) if text[:1] in '{["0123456789' else text
            for source, text in texts.items()
        }

    def remove_torn_offsets(self) -> None:
        """Remove what a stop in the middle of the first batch's offsets left, before a run starts.

        Spark (from 4.1) refuses a checkpoint without a planned batch whose logs are not empty, and its own temporary
        files count: a query that is stopped, or killed, while it writes its first offsets could never start again.
        """
        if self.last_planned >= 0:
            return
        for log in LOGS:
            for path in self._content(log):
                if TEMPORARY.fullmatch(path.getName()):
                    self._files.delete(path, False)

    def _last(self, log: str) -> int:
        names = [path.getName() for path in self._content(log)]
        return max((int(name) for name in names if name.isdigit()), default=-1)

    def _content(self, log: str) -> list[Any]:
        folder = self._child(log)
        listed = self._files.listStatus(folder) if self._files.exists(folder) else ()
        return [status.getPath() for status in listed]

    def mark(self) -> CheckpointMark | None:
        path = self._child(MARK)
        if not self._files.exists(path):
            return None
        return CheckpointMark.from_json(self._read(path), f"{self.path}/{MARK}")

    def _read(self, path: Any) -> str:
        stream = self._files.open(path)
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def _write(self, name: str, text: str) -> None:
        """Write to a temporary name and rename, so that a half-written mark is never read."""
        self._files.mkdirs(self._root)
        temporary = self._child(f".{name}.{uuid.uuid4().hex}")
        stream = self._files.create(temporary)
        try:
            stream.write(text.encode())
        finally:
            stream.close()
        if not self._files.rename(temporary, self._child(name)):
            self._files.delete(temporary, False)
            raise CheckpointMismatchError(
                f"{self.path}/{name} could not be written: does another query start with this checkpoint?"
            )

    def _child(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._root, name)
