"""Which shard is in charge: of a root by its top bits, of a stream by the query or job it belongs to."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

from ftlayer.errors import ProtocolError, StoreDamagedError
from ftlayer.vertex.rules.owners import INGEST


class Router:
    """Owners (queries, jobs, ingests) → shard, always the same.

    An owner goes where its CRC-32 says, except a query that reads an ingest: it goes where that ingest
    is, so that a batch of it is one transaction. Such choices are written to ``path`` before they count.
    """

    def __init__(self, path: Path, shards: int) -> None:
        """Read the choices made so far; `StoreDamagedError` if the file cannot be read as such."""
        self._path = path
        self._shards = shards
        self._pinned: dict[str, int] = {}
        if path.exists():
            try:
                pinned = json.loads(path.read_text("utf-8"))
                self._pinned = {str(owner): int(shard) for owner, shard in pinned.items()}
            except (ValueError, AttributeError, TypeError) as error:
                raise StoreDamagedError(f"{path}: not a routing table ({error})") from error

    def shard_of(self, owner: str) -> int:
        """Return the shard of a query, a job or an ingest (``"ingest/<name>"``)."""
        pinned = self._pinned.get(owner)
        return zlib.crc32(owner.encode("utf-8", "surrogatepass")) % self._shards if pinned is None else pinned

    def open_query(self, query: str, streams: tuple[str, ...]) -> int:
        """Choose the shard of a query by the ingests it reads, once and for all.

        Raises `ProtocolError` when its ingests are on different shards, or elsewhere than it is already.
        """
        if self._shards == 1:
            return 0
        wanted = {stream: self.shard_of(stream) for stream in streams if stream.startswith(INGEST)}
        if len(set(wanted.values())) > 1:
            raise ProtocolError(
                f"query {query!r} reads {', '.join(wanted)}, which are on different shards: "
                "read one ingest a query, or use a vertex with shards=1"
            )
        shard = next(iter(wanted.values()), self.shard_of(query))
        if self._pinned.get(query, shard) != shard:
            raise ProtocolError(
                f"query {query!r} is on shard {self._pinned[query]}, {next(iter(wanted))} on shard {shard}: "
                "an ingest can be added to a running query only on the same shard; give the query a new name"
            )
        if query not in self._pinned:
            self._write(self._pinned | {query: shard})
        return shard

    def _write(self, pinned: dict[str, int]) -> None:
        temporary = self._path.with_suffix(".new")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(pinned, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self._path)
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        self._pinned = pinned
