"""Files that grow, and are rotated, as a source."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence

import pyarrow as pa

from ftlayer.checkpoint.storage.layout import is_local, normal
from ftlayer.checks import Duration, check_choice, check_int, check_text, check_texts, duration_ms
from ftlayer.config import MIB
from ftlayer.errors import ConfigError
from ftlayer.sources.beside import valid
from ftlayer.sources.lines import line_starts, texts_of
from ftlayer.sources.tail.disk import ROTATED, Disk, LocalDisk
from ftlayer.sources.tail.follower import Chunk, Follower
from ftlayer.sources.tail.place import pack, unpack
from ftlayer.topology.queues import Fetched, Member, Queue

STARTS = ("earliest", "latest")
ROTATIONS = ("rename", "copytruncate")

POLL_S = 0.1
"""Files are looked at so often for something new, while there is nothing …"""

LOOK_S = 0.5
"""… and their directories so often."""


class TailSource(Queue):
    """Follows text files that grow, lines in order, over their rotation: as ``tail -F`` does, from where it was.

    A place in a file is kept with who reads: in the vertex, in a checkpoint, or in a query's spool. A file is known by
    its inode and by the bytes before the place, whatever it is called: one that is renamed is read to its end, and then
    the one that has taken its name.

    It reads files of the machine on which its one subtask runs.
    """

    most_subtasks = 1

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        rotated: Sequence[str] = ROTATED,
        rotation: str = "rename",
        start: str = "earliest",
        quiet: Duration = "1m",
        max_line: int = MIB,
    ) -> None:
        """Nothing is touched before it is read.

        Args:
            path: of a log, which need not be there yet, or a pattern (``/var/log/app/*.log``), or several.
            rotated: how a log is called once it is rotated: patterns with ``{name}`` (``app.log``), ``{stem}``
                (``app``) and ``{suffix}`` (``.log``). Compressed files are left out, whatever they are called.
            rotation: ``"rename"``, or ``"copytruncate"`` where logs are copied and truncated.
            start: where a source begins that has read nothing: with the first line of each file that there is, rotated
                ones too (``"earliest"``), or behind their last ones (``"latest"``).
            quiet: when nothing was written to a rotated file for so long, its last line is complete though it has no
                newline.
            max_line: bytes; a line that is longer may be cut into several.

        Raises `ConfigError` for an option that will not do.
        """
        given = [path] if isinstance(path, str | os.PathLike) else path
        if not isinstance(given, Sequence) or not given:
            raise ConfigError(f"path: expected a path, or several, got {path!r}")
        paths = [os.fspath(one) if isinstance(one, os.PathLike) else one for one in given]
        check_texts(paths, "path", "a path of this machine")
        far = next((one for one in paths if not is_local(one)), None)
        if far is not None:
            raise ConfigError(f"path: expected files of this machine, got {far!r}")
        if isinstance(rotated, str) or not isinstance(rotated, Sequence):
            raise ConfigError(f"rotated: expected a list of patterns, got {rotated!r}")
        for pattern in rotated:
            _check_pattern(pattern)
        check_choice(rotation, "rotation", ROTATIONS)
        check_choice(start, "start", STARTS)
        check_int(max_line, "max_line", least=1_024, most=256 * MIB)
        self.paths = tuple(normal(one) for one in paths)
        self.rotated, self.rotation, self.start = tuple(rotated), rotation, start
        self.quiet_ns = duration_ms(quiet, "quiet") * 1_000_000
        self.max_line = max_line
        self.schema: pa.Schema = pa.schema(
            [
                pa.field("path", pa.string()),
                pa.field("file", pa.int64()),
                pa.field("offset", pa.int64()),
                pa.field("value", pa.string()),
            ]
        )

    def open(self, member: Member, positions: Mapping[int, bytes], *, stored: bool) -> TailReader:
        """See `Queue.open`. One subtask reads; there is nothing to acknowledge."""
        position = positions.get(0)
        if member.subtask:
            return TailReader(self, None, None)
        return TailReader(self, LocalDisk(self.paths, self.rotated), position)


class TailReader:
    """`QueueReader` of the subtask that reads (``disk``), or of another one."""

    def __init__(self, source: TailSource, disk: Disk | None, position: bytes | None) -> None:
        self._schema = source.schema
        self._number, places = (0, []) if position is None else unpack(position)
        self._follower: Follower | None = None
        if disk is not None:
            self._follower = Follower(
                disk,
                places,
                from_end=position is None and source.start == "latest",
                is_copied=source.rotation == "copytruncate",
                quiet_ns=source.quiet_ns,
                max_line=source.max_line,
            )
        self._look_at_s = 0.0
        self._woken = threading.Event()

    def fetch(self, max_rows: int, wait_s: float) -> Fetched | None:
        """See `QueueReader.fetch`. Raises `SourceError` for a file or directory that cannot be read."""
        give_up_s = time.monotonic() + wait_s
        while True:
            chunk = self._read()
            if chunk is not None:
                return self._fetched(chunk, max_rows)
            left_s = give_up_s - time.monotonic()
            if left_s <= 0 or self._woken.wait(min(left_s, POLL_S)):
                self._woken.clear()
                return None

    def acknowledge(self, receipts: Sequence[None]) -> None:
        """See `QueueReader.acknowledge`: files need not know."""

    def waiting(self) -> int | None:
        """See `QueueReader.waiting`: lines that were not read are not counted."""
        return None

    @property
    def is_away(self) -> bool:
        return False

    def wake_up(self) -> None:
        self._woken.set()

    def close(self) -> None:
        if self._follower is not None:
            self._follower.close()

    def _read(self) -> Chunk | None:
        if self._follower is None:
            return None
        now_s = time.monotonic()
        if now_s >= self._look_at_s:
            self._follower.look(time.time_ns())
            self._look_at_s = now_s + LOOK_S
        return self._follower.read(time.time_ns())

    def _fetched(self, chunk: Chunk, max_rows: int) -> Fetched:
        assert self._follower is not None
        starts = line_starts(chunk.data)
        length = len(chunk.data) if len(starts) <= max_rows else int(starts[max_rows])
        self._follower.take(chunk, length)
        starts = starts[:max_rows]
        columns = [
            pa.repeat(pa.scalar(valid(chunk.log)), len(starts)),
            pa.repeat(pa.scalar(_signed(chunk.inode), pa.int64()), len(starts)),
            pa.array(starts + chunk.at),
            texts_of(chunk.data[:length]),
        ]
        rows = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        self._number += 1
        return Fetched(rows, 0, pack(self._number, self._follower.places()), None)


def _signed(inode: int) -> int:
    """Return 64 bits as Spark's long."""
    return inode - (1 << 64) if inode >= 1 << 63 else inode


def _check_pattern(pattern: object) -> None:
    check_text(pattern, "rotated", "a pattern like '{name}.*'")
    assert isinstance(pattern, str)
    try:
        pattern.format(name="", stem="", suffix="")
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"rotated: expected a pattern with {{name}}, {{stem}} and {{suffix}} alone, got {pattern!r}"
        ) from error
    if "/" in pattern:
        raise ConfigError(f"rotated: expected the name of files beside their log, got {pattern!r}")
