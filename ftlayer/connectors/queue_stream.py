"""A queue as a stream reader of a Python Data Source, for plain Structured Streaming and wrapped queries."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import msgpack
import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from ftlayer import __version__
from ftlayer.checkpoint.storage.files import open_files
from ftlayer.checkpoint.storage.layout import check_location, normal
from ftlayer.common.checks import check_text
from ftlayer.common.printable import shown_url
from ftlayer.connectors.from_json import JSON_OPTIONS, MessageReader, with_schema
from ftlayer.errors import CheckpointDamagedError, ConfigError, SourceChangedError, SourceError, other_format
from ftlayer.functions import data_sources
from ftlayer.topology.checks import WAITING
from ftlayer.topology.operators import Fetched, Member, Queue, QueueReader

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


# Which messages of a queue come a second time: by their names, and by what is durable of them.
#
# Rules alone. A queue numbers nothing that lasts: a message that is delivered again is known by the name that its
# sender gave it. A delivery waits for a *turn*, the number of a fetch: it may be acknowledged when that fetch is
# durable.


NAME_BYTES = 8
"""Of a name's hash. Two of a window of 20,000 are alike once in 10^10 windows."""

_BEFORE = 0
"""The turn of what a reader was opened with."""


def short(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=NAME_BYTES).digest()


class RedeliveryWindow:
    """The messages that were fetched last, by the hashes of their names, and what may be acknowledged of a channel."""

    def __init__(self, names: bytes, size: int, *, stored: bool) -> None:
        """Begin behind what an earlier reader fetched.

        Args:
            names: what its last `packed` returned.
            size: of how many messages the names are remembered, at least.
            stored: whether those are durable.
        """
        cut = [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]
        self._turns: dict[bytes, int] = dict.fromkeys(cut, _BEFORE)
        # Hashes in the order in which they came, and how many of them came with each turn.
        self._names = bytearray(names)
        self._counts: deque[tuple[int, int]] = deque([(_BEFORE, len(cut))])
        self._size = size
        self.turn = _BEFORE
        """The number of the last fetch: the receipt for it."""
        self._durable = _BEFORE if stored else _BEFORE - 1
        # Of the channel that is open: up to which tag, and the turn that those wait for.
        self._waiting: deque[tuple[int, int]] = deque()
        self._acknowledged = 0

    @property
    def unacknowledged(self) -> int:
        return self._waiting[-1][0] - self._acknowledged if self._waiting else 0

    def take(self, deliveries: Iterable[tuple[int, str | None, bool]]) -> list[bool]:
        """Number a fetch; return which of its deliveries are new.

        Each is a tag, one higher than that before, a name, and whether the server says that it may have been delivered
        before. One without a name is always new.
        """
        self.turn = mine = self.turn + 1
        turns, waiting = self._turns, self._waiting
        are_new: list[bool] = []
        new_names: list[bytes] = []
        for tag, name, redelivered in deliveries:
            turn, is_new = mine, True
            if name is not None:
                hashed = short(name)
                if redelivered and hashed in turns:
                    turn, is_new = turns[hashed], False
                else:
                    # The last one is the newest, also where a name is used again.
                    turns[hashed] = mine
                    new_names.append(hashed)
            are_new.append(is_new)
            if waiting and waiting[-1][1] == turn:
                waiting[-1] = (tag, turn)
            else:
                waiting.append((tag, turn))
        self._names += b"".join(new_names)
        self._counts.append((mine, len(new_names)))
        return are_new

    def knows(self, name: str | None) -> bool:
        return name is not None and short(name) in self._turns

    def packed(self) -> bytes:
        """Return the names that a reader behind the last fetch has to know."""
        self._forget()
        return bytes(self._names)

    def durable(self, turns: Sequence[int]) -> None:
        """These fetches are durable, and those before them."""
        self._durable = max([self._durable, *turns])

    def to_acknowledge(self) -> int | None:
        """Return the tag up to which all deliveries may be acknowledged; None if nothing has changed."""
        tag = None
        while self._waiting and self._waiting[0][1] <= self._durable:
            tag, _ = self._waiting.popleft()
        if tag is not None:
            self._acknowledged = tag
        return tag

    def reconnected(self) -> None:
        """There is a new channel: its tags begin anew, and what was not acknowledged is delivered again."""
        self._waiting.clear()
        self._acknowledged = 0

    def _forget(self) -> None:
        """Forget the oldest that are durable, as many as are too many: an acknowledgement may have been lost."""
        spare = len(self._names) // NAME_BYTES - self._size
        while spare > 0 and self._counts and self._counts[0][0] <= self._durable:
            turn, count = self._counts.popleft()
            if count > spare:
                self._counts.appendleft((turn, count - spare))
                count = spare
            spare -= count
            gone = bytes(self._names[: count * NAME_BYTES])
            del self._names[: count * NAME_BYTES]
            for at in range(0, len(gone), NAME_BYTES):
                name = gone[at : at + NAME_BYTES]
                # It may have been used again since then.
                if self._turns.get(name) == turn:
                    del self._turns[name]


def pack_position(source: Sequence[str], *state: Any) -> bytes:
    """Return a position of a source, which a few texts name: the system's name, and what is read of it."""
    packed: bytes = msgpack.packb([*source, *state], unicode_errors="surrogateescape")
    return packed


def unpack_position(
    position: bytes, source: Sequence[str], place: str, kinds: Sequence[type] = (bytes,)
) -> list[Any]:
    """Return the state in a position, parts of these ``kinds``. ``place`` is how errors name the source.

    Raises `ConfigError` for a position of something else.
    """
    try:
        found = msgpack.unpackb(position, unicode_errors="surrogateescape")
    except (ValueError, msgpack.UnpackException):
        found = None
    if isinstance(found, list) and found[: len(source)] == list(source):
        state = found[len(source) :]
        if len(state) == len(kinds) and all(map(isinstance, state, kinds)):
            return state
    raise ConfigError(
        f"{place}: the positions stored under this uid are of another source; give the new one a uid of its own"
    )


# A directory that holds a queue's messages until a streaming query of Spark's has committed them.
#
# ```
# <url>/00000000000000000017.arrow      a file of rows; its metadata has the positions behind them
# ```
#
# Spark notes how far a batch goes before it reads the batch, and reads it again after a crash. A queue cannot give the
# same messages again, so they lie here first: they are acknowledged when their file is durable. Files are numbered
# without gaps, and are never changed; the last one that is committed is replaced by one without rows, since its
# positions are needed.


_SUFFIX = ".arrow"
_POSITIONS = b"ftlayer_positions"
_FORMAT_KEY, _WRITER_KEY = b"ftlayer_spool", b"ftlayer_version"
_FORMAT = 1


class Spool:
    """The spool of one query. One process at a time puts and forgets; any may read."""

    def __init__(self, url: str) -> None:
        """``url``: a directory, a path or any URL of fsspec's; made if missing. `ConfigError` for an unreadable one."""
        check_location(url, "spool")
        self._files = open_files(normal(url))
        self._url = url

    def numbers(self) -> range:
        found = sorted(
            int(entry.path.removesuffix(_SUFFIX))
            for entry in self._files.walk()
            if entry.path.endswith(_SUFFIX) and entry.path.removesuffix(_SUFFIX).isdecimal()
        )
        if not found:
            return range(0)
        if found[-1] - found[0] + 1 != len(found):
            raise SourceError(
                f"spool {shown_url(self._url)}: files are missing between {found[0]} and {found[-1]}"
            )
        return range(found[0], found[-1] + 1)

    def put(self, number: int, rows: pa.RecordBatch, positions: Mapping[int, bytes]) -> None:
        """Make rows durable, with the positions behind them. Raises `CheckpointStorageError`."""
        schema = rows.schema.with_metadata(
            {
                _FORMAT_KEY: str(_FORMAT).encode(),
                _WRITER_KEY: __version__.encode(),
                _POSITIONS: msgpack.packb(dict(positions)),
            }
        )
        out = pa.BufferOutputStream()
        with pa.ipc.new_file(out, schema) as writer:
            writer.write_batch(rows.replace_schema_metadata(schema.metadata))
        self._files.publish(_name(number), out.getvalue().to_pybytes())

    def read(self, number: int) -> pa.Table:
        """Return the rows of a file. Raises `SourceError` if it is not there, or of another format."""
        try:
            data = self._files.read(_name(number))
        except CheckpointDamagedError as error:
            raise SourceError(
                f"spool {shown_url(self._url)}: file {number} is not there: it was removed, "
                "or tasks do not reach this directory"
            ) from error
        with pa.ipc.open_file(pa.BufferReader(data)) as reader:
            said = reader.schema.metadata or {}
            if (found := int(said.get(_FORMAT_KEY, 0))) != _FORMAT:
                where = f"spool {shown_url(self._url)}: file {number}"
                raise SourceError(other_format(where, found, _FORMAT, said.get(_WRITER_KEY)))
            return reader.read_all()

    def positions(self, number: int) -> dict[int, bytes]:
        metadata = self.read(number).schema.metadata or {}
        found: dict[int, bytes] = msgpack.unpackb(metadata[_POSITIONS], strict_map_key=False)
        return found

    def forget(self, end: int) -> None:
        """Remove all rows of files below ``end``; again does no harm."""
        numbers = self.numbers()
        last = end - 1
        if last not in numbers:
            return
        kept = self.read(last)
        if kept.num_rows:
            empty = pa.RecordBatch.from_pylist([], schema=kept.schema.remove_metadata())
            self.put(last, empty, self.positions(last))
        for number in range(numbers.start, last):
            self._files.delete(_name(number))


def _name(number: int) -> str:
    return f"{number:020}{_SUFFIX}"


FILE_ROWS = 10_000
"""A file of the spool has this many rows at most: it is what one task reads."""

WAIT_S = 0.1
"""A fetch waits this long for messages."""

FETCH_S = 1.0
"""A batch begins about so long after its first messages at the latest, however many more come."""


def owner_of(spool: str) -> str:
    """Return the owner (see `Member`) that reads for a spool: one for each, the same over restarts."""
    return f"spark/{hashlib.sha256(normal(spool).encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class SpooledFile(InputPartition):
    number: int


class QueueStreamReader(MessageReader):
    """Fetches in the driver, while Spark asks how far the source goes, and reads files of the `Spool` in the tasks.

    A message is acknowledged when its file is durable. Each enters the query once: where the driver was killed
    between the two, the position in the last file says so.
    """

    def __init__(self, queue: Queue, spool: str, max_rows: int) -> None:
        self._queue = queue
        self._url = spool
        self._max_rows = max_rows
        self._spool = Spool(spool)
        self._reader: QueueReader | None = None
        self._end = 0
        self._rows: dict[int, int] = {}  # of files that are not committed
        self._positions: dict[int, bytes] = {}
        self._ends = False

    # ------------------------------------------------------------ in the driver

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Begin with the first file that is there: a query with a new checkpoint takes over what another one left."""
        return {"next": self._spool.numbers().start}

    def getDefaultReadLimit(self) -> data_sources.ReadLimit:  # noqa: N802 - Spark's name
        return data_sources.ReadMaxRows(self._max_rows)

    def reportLatestOffset(self) -> dict[str, int] | None:  # noqa: N802 - Spark's name
        """Return how many messages wait, for Spark's progress; None where the queue cannot say."""
        waiting = self._opened().waiting()
        return None if waiting is None else {"next": self._end, WAITING: waiting}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fetch what waits in the queue now, and no more in this run.

        Where the queue cannot say how much that is, this fetches until nothing comes for a moment.
        """
        reader = self._opened()
        self._fetch_all(reader)
        # A server that is away has more, perhaps: it is waited for, as long as the reader has patience.
        while reader.is_away:
            self._fetch_all(reader)
        self._ends = True

    def _fetch_all(self, reader: QueueReader) -> None:
        waiting = reader.waiting()
        if waiting is None:
            while self._fetch(None, WAIT_S):
                pass
        while waiting and (fetched := self._fetch(waiting)):
            waiting -= fetched

    def latestOffset(self, start: dict[str, int], limit: data_sources.ReadLimit) -> dict[str, int]:  # noqa: N802
        self._opened()
        if self._end < start["next"]:
            raise SourceChangedError(
                f"spool {shown_url(self._url)} ends at file {self._end}, and the query has read up to {start['next']}: "
                "files were removed, or this is another directory. Bring them back; or start with another checkpoint, "
                "which reads what is in this spool"
            )
        most = limit.max_rows if isinstance(limit, data_sources.ReadMaxRows) else None
        end, rows = self._up_to(start["next"], most)
        if not self._ends and end == self._end and (most is None or rows < most):
            self._fetch(None if most is None else most - rows)
            end, _ = self._up_to(start["next"], most)
        return {"next": end}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return [SpooledFile(number) for number in range(start["next"], end["next"])]

    def commit(self, end: dict[str, int]) -> None:
        self._spool.forget(end["next"])
        self._rows = {number: rows for number, rows in self._rows.items() if number >= end["next"]}

    def stop(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _opened(self) -> QueueReader:
        if self._reader is None:
            numbers = self._spool.numbers()
            self._end = numbers.stop
            self._positions = self._spool.positions(numbers[-1]) if numbers else {}
            self._reader = self._queue.open(Member(owner_of(self._url), 0, 1), self._positions, stored=True)
        return self._reader

    def _fetch(self, rows: int | None, wait_s: float = 0.0) -> int:
        """Fetch so many messages (None: all that there are), or what there is; return how many.

        The first are waited for. More than those that are there then are not, but for ``wait_s``.
        """
        reader = self._opened()
        late = time.monotonic() + FETCH_S
        count = 0
        while (rows is None or count < rows) and time.monotonic() < late:
            most = min(FILE_ROWS, self._max_rows)
            file = _fetched(reader, most if rows is None else min(most, rows - count), wait_s, late)
            if not file:
                break
            count += self._keep(reader, file)
        return count

    def _keep(self, reader: QueueReader, file: Sequence[Fetched]) -> int:
        positions = self._positions | {fetched.of: fetched.position for fetched in file}
        rows = pa.concat_batches([fetched.rows for fetched in file])
        self._spool.put(self._end, rows, positions)
        self._rows[self._end] = rows.num_rows
        self._end, self._positions = self._end + 1, positions
        reader.acknowledge([fetched.receipt for fetched in file])
        return int(rows.num_rows)

    def _up_to(self, start: int, most: int | None) -> tuple[int, int]:
        """Return where files end that have so many rows together (one file at least), and how many they have."""
        end, rows = start, 0
        while end < self._end:
            if end not in self._rows:
                self._rows[end] = self._spool.read(end).num_rows
            if most is not None and end > start and rows + self._rows[end] > most:
                break
            rows += self._rows[end]
            end += 1
        return end, rows

    # ------------------------------------------------------------ in the tasks

    def read_messages(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SpooledFile)
        yield from self._spool.read(partition.number).replace_schema_metadata(None).to_batches()

    def __getstate__(self) -> dict[str, Any]:
        # A copy in a task is connected to nothing.
        return {**self.__dict__, "_reader": None}


def _fetched(reader: QueueReader, rows: int, wait_s: float, late: float) -> list[Fetched]:
    """Fetch what goes into one file: ``rows`` at most, and nothing more behind the monotone time ``late`` (s)."""
    found: list[Fetched] = []
    while rows > 0 and (not found or time.monotonic() < late):
        fetched = reader.fetch(rows, wait_s if found else WAIT_S)
        if fetched is None:
            break
        found.append(fetched)
        rows -= fetched.rows.num_rows
    return found


MAX_ROWS = 100_000
"""Of a batch, unless ``maxRowsPerTrigger`` says otherwise."""


class QueueDataSource(data_sources.OptionsDataSource):
    """What the Data Sources of all queues have in common: a reader of ``_queue_class`` with a spool."""

    _queue_class: ClassVar[type[Queue]]

    def source(self, options: data_sources.DataSourceOptions) -> Queue:
        return options.made(self._queue_class)

    def schema(self) -> StructType:
        """Return the schema that the options say. Raises `ConfigError` for an option that is none."""
        options = self.given()
        source = self.source(options)
        _check_spool(options)
        options.know("maxRowsPerTrigger", *JSON_OPTIONS)
        options.check_all_known()
        return data_sources.from_arrow_schema(source.schema)

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802 - Spark's name
        options = self.given()
        source = self.source(options)
        spool, rows = _check_spool(options), options.count("maxRowsPerTrigger", MAX_ROWS)
        reader = with_schema(QueueStreamReader(source, spool, rows), source.schema, schema, options)
        options.check_all_known()
        return options.note_limit(reader)


def _check_spool(options: data_sources.DataSourceOptions) -> str:
    spool = options.get("spool")
    check_text(spool, "spool", "a directory for this query's messages, a path or URL")
    return str(spool)
