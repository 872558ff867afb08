"""Several shards as one: which is in charge of a query, a job or an ingest, and one answer out of those of several."""

from __future__ import annotations

import json
import math
import os
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftlayer.errors import FTLayerError, ProtocolError, StaleIncarnationError, StoreDamagedError
from ftlayer.vertex.calls import (
    Failed,
    GroupList,
    Hour,
    JobList,
    RecordPage,
    Reply,
    StatsReply,
    StreamList,
    Touched,
    Xor,
    Xored,
)
from ftlayer.vertex.rules.owners import INGEST
from ftlayer.vertex.service.rules import Answer


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


# A share of one thing is no share of another, nor are ages added: of these the largest tells the most.
_LARGEST = ("used_share", "oldest_seconds")


class Gather:
    """Takes ``parts`` answers from any threads and gives one: their sum, or the first error.

    An error of one shard does not undo what the others did; the call sent again is new to it alone.
    """

    def __init__(self, parts: int, answer: Answer, add: Callable[[Any, Any], Any]) -> None:
        self._left = parts
        self._answer = answer
        self._add = add
        self._lock = threading.Lock()
        self._sum: Reply | FTLayerError | None = None

    def __call__(self, answer: Reply | FTLayerError) -> None:
        with self._lock:
            if self._sum is None or isinstance(answer, FTLayerError):
                if not isinstance(self._sum, FTLayerError):
                    self._sum = answer
            elif not isinstance(self._sum, FTLayerError):
                self._sum = self._add(self._sum, answer)
            self._left -= 1
            if self._left or self._sum is None:
                return
        self._answer(self._sum)


def late_if_stale(part: Xor, answer: Answer) -> Answer:
    """Return ``answer`` for one shard's part of the events: a shard that was made anew meanwhile has late ones.

    Slots send again what the vertex refuses as stale, and the other shards have taken their parts: an XOR that is
    folded in twice is as none.
    """

    def counted(reply: Reply | FTLayerError) -> None:
        stale = isinstance(reply, StaleIncarnationError)
        answer(Xored(0, len(part.roots)) if stale else reply)

    return counted


def add_xored(a: Xored, b: Xored) -> Xored:
    """Add what two shards completed."""
    return Xored(a.completed + b.completed, a.unknown + b.unknown)


def add_touched(a: Touched, b: Touched) -> Touched:
    return Touched(a.touched + b.touched)


def add_failed(a: Failed, b: Failed) -> Failed:
    return Failed(a.waiting + b.waiting, a.dead + b.dead, a.unknown + b.unknown, a.held + b.held)


def add_streams(a: StreamList, b: StreamList) -> StreamList:
    """Put the streams of two shards in one order."""
    return StreamList(tuple(sorted(a.streams + b.streams, key=lambda stream: stream.stream)))


def add_jobs(a: JobList, b: JobList) -> JobList:
    """List the jobs of two shards together, the latest first."""
    jobs = sorted((*a.jobs, *b.jobs), key=lambda announced: announced.job.since_ms, reverse=True)
    return JobList(tuple(jobs))


def add_groups(a: GroupList, b: GroupList) -> GroupList:
    """Put the groups of two shards in one order; of the shares that are counted the smaller."""
    groups = sorted((*a.groups, *b.groups), key=lambda group: -group.count)
    return GroupList(tuple(groups), min(a.indexed, b.indexed), a.left_out + b.left_out)


SHARD_BYTES = 2
"""The shard in front of a record's key, of which the stream and the time follow."""

_TIME_AT = SHARD_BYTES + 4


def position_of(key: bytes) -> tuple[bytes, bytes]:
    """Return where a dead letter is among those of all shards, by its key: by time, and of one moment by shard."""
    return key[_TIME_AT:], key[:SHARD_BYTES]


def newest_first(limit: int) -> Callable[[RecordPage, RecordPage], RecordPage]:
    """Return what makes one page of two of the latest letters; their keys have their shard in front.

    A page ends where one of the two did that has more: what the other one has behind that is for the next page.
    """

    def add(a: RecordPage, b: RecordPage) -> RecordPage:
        ends = [page.more for page in (a, b) if page.more]
        end = max(ends, key=position_of, default=b"")
        keys = sorted((*a.keys, *b.keys), key=position_of, reverse=True)
        if end:
            keys = [key for key in keys if position_of(key) >= position_of(end)]
        if len(keys) > limit:
            keys, end = keys[:limit], keys[limit - 1]
        infos = {info.key: info for info in (*a.records, *b.records)}
        records = tuple(infos[key] for key in keys if key in infos)
        return RecordPage(records, tuple(keys), a.examined + b.examined, end)

    return add


def add_stats(a: StatsReply, b: StatsReply) -> StatsReply:
    """Add counters and gauges; of shares the larger."""
    values = dict(a.values)
    for name, value in b.values.items():
        values[name] = _add_value(name, values[name], value) if name in values else value
    circuits = {
        name: {**a.circuits.get(name, {}), **b.circuits.get(name, {})}
        for name in {**a.circuits, **b.circuits}
    }
    return StatsReply(values, circuits)


def add_hours(a: Hour, b: Hour) -> Hour:
    """Add the points of two shards step by step; where one has none, the other's count.

    Asked around the end of a step, one of them may be a step ahead: what both have is given.
    """
    if a.end_ms > b.end_ms:
        a, b = b, a
    ahead = round((b.end_ms - a.end_ms) / a.step_ms)
    series = dict(a.series)
    for name, points in b.series.items():
        shifted = (*(math.nan,) * ahead, *points[: len(points) - ahead])
        mine = series.get(name, (math.nan,) * len(points))
        series[name] = tuple(_add_point(name, x, y) for x, y in zip(mine, shifted, strict=True))
    return Hour(a.step_ms, a.end_ms, series)


def _add_point(name: str, x: float, y: float) -> float:
    if math.isnan(x) or math.isnan(y):
        return y if math.isnan(x) else x
    return _add_value(name, x, y)


def _add_value(name: str, x: float, y: float) -> float:
    return max(x, y) if name in _LARGEST else x + y
