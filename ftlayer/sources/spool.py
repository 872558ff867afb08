"""A directory that holds a queue's messages until a streaming query of Spark's has committed them.

```
<url>/00000000000000000017.arrow      a file of rows; its metadata has the positions behind them
```

Spark notes how far a batch goes before it reads the batch, and reads it again after a crash. A queue cannot give the
same messages again, so they lie here first: they are acknowledged when their file is durable. Files are numbered
without gaps, and are never changed; the last one that is committed is replaced by one without rows, since its
positions are needed.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgpack
import pyarrow as pa

from ftlayer import __version__
from ftlayer.checkpoint.storage.file_systems import open_files
from ftlayer.checkpoint.storage.layout import check_location, normal
from ftlayer.errors import CheckpointDamagedError, SourceError, newer_format
from ftlayer.printable import shown_url

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
        """Return the numbers of the files that are there."""
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
        """Return the rows of a file. Raises `SourceError` if it is not there, or of a newer ftlayer's format."""
        try:
            data = self._files.read(_name(number))
        except CheckpointDamagedError as error:
            raise SourceError(
                f"spool {shown_url(self._url)}: file {number} is not there: it was removed, "
                "or tasks do not reach this directory"
            ) from error
        with pa.ipc.open_file(pa.BufferReader(data)) as reader:
            said = reader.schema.metadata or {}
            if (found := int(said.get(_FORMAT_KEY, _FORMAT))) > _FORMAT:
                where = f"spool {shown_url(self._url)}: file {number}"
                raise SourceError(newer_format(where, found, _FORMAT, said.get(_WRITER_KEY)))
            return reader.read_all()

    def positions(self, number: int) -> dict[int, bytes]:
        """Return the positions behind the rows of a file. Raises `SourceError` if it is not there."""
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
