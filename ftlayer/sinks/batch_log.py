"""Which files belong to which batch of a streaming query: a batch that is run again must not add others.

```
<path>/_ftlayer-commits/<query>/<batch>.json
```

An entry is published before the first file gets its name, and from then on the batch consists of these files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from ftlayer.checkpoint.storage.files import Files
from ftlayer.checkpoint.storage.layout import join, part
from ftlayer.errors import UncommittableError

DIRECTORY = "_ftlayer-commits"
KEPT = 100
"""Entries of so many batches are kept; Spark runs only the last one again."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that waits for its commit: where it is, where it goes, how large it is."""

    temporary: str
    target: str
    size: int


class BatchLog:
    def __init__(self, files: Files, query: str) -> None:
        self._files = files
        self._directory = join(DIRECTORY, part(query))

    def find(self, batch: int) -> list[WrittenFile] | None:
        """Return the files of a batch; None: it was never committed."""
        path = self._path(batch)
        return None if self._files.size(path) is None else _read(self._files, path)

    def put(self, batch: int, written: Iterable[WrittenFile]) -> None:
        """Say which files a batch consists of."""
        rows = [[one.temporary, one.target, one.size] for one in written]
        self._files.publish(self._path(batch), json.dumps(rows).encode())
        self._files.delete(self._path(batch - KEPT))

    def _path(self, batch: int) -> str:
        return join(self._directory, f"{batch}.json")


def all_logged(files: Files) -> set[str]:
    """Return the temporary names of all files in all logs."""
    entries = [entry.path for entry in files.walk(DIRECTORY) if entry.path.endswith(".json")]
    return {written.temporary for path in entries for written in _read(files, path)}


def _read(files: Files, path: str) -> list[WrittenFile]:
    try:
        return [WrittenFile(*row) for row in json.loads(files.read(path))]
    except (ValueError, TypeError) as error:
        raise UncommittableError(
            f"{join(files.url, path)} was damaged after it was written ({error}); it says which files a batch has"
        ) from error
