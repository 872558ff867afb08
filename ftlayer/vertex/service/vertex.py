"""The vertex: one shard or several, and which call goes to which."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ftlayer.errors import (
    FTLayerError,
    MalformedRequestError,
    ProtocolError,
    StaleIncarnationError,
    StoreDamagedError,
    VertexUnavailableError,
)
from ftlayer.records.ids import ids_of, shard_of
from ftlayer.vertex import calls
from ftlayer.vertex.rules.operating import ShardPulse
from ftlayer.vertex.rules.state import check_incarnation
from ftlayer.vertex.rules.streams import INGEST, owner_of
from ftlayer.vertex.service.directory import ROUTES
from ftlayer.vertex.service.shard import Answer, Shard, ShardParts


class Router:
    """Owners (queries, jobs, ingests) → shard, always the same: by CRC-32.

    But a query goes where the ingest is that it reads, for one transaction a batch: ``path`` has that before it counts.
    """

    def __init__(self, path: Path, shards: int) -> None:
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
        """Choose a query's shard by its ingests, once and for all; `ProtocolError` where these are on several."""
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
        try:
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
        except OSError as error:
            # Callers may hold all descriptors for a while, or the disk is full: the call comes again.
            raise VertexUnavailableError(f"{self._path} cannot be written now: {error.strerror}") from error
        self._pinned = pinned


# A share of one thing is no share of another, nor are ages added: of these the largest tells the most.
_LARGEST = ("used_share", "oldest_seconds")


class Gather:
    """Takes ``parts`` answers from any threads and gives one: their sum, or the first error, which undoes nothing."""

    def __init__(self, parts: int, answer: Answer, add: Callable[[Any, Any], Any]) -> None:
        self._left = parts
        self._answer = answer
        self._add = add
        self._lock = threading.Lock()
        self._sum: calls.Reply | FTLayerError | None = None

    def __call__(self, answer: calls.Reply | FTLayerError) -> None:
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


def late_if_stale(part: calls.Xor, answer: Answer) -> Answer:
    """Return ``answer`` for one shard's part of the events: a shard that was made anew meanwhile has late ones.

    Slots send again what the vertex refuses as stale, and the other shards have taken their parts: an XOR that is
    folded in twice is as none.
    """

    def counted(reply: calls.Reply | FTLayerError) -> None:
        stale = isinstance(reply, StaleIncarnationError)
        answer(calls.Xored(0, len(part.roots)) if stale else reply)

    return counted


def changed(answer: Answer, kind: type[calls.R], change: Callable[[calls.R], calls.R]) -> Answer:
    """Return ``answer`` for replies of this kind that are changed on their way; what else there is stays as it is."""
    return lambda reply: answer(change(reply) if isinstance(reply, kind) else reply)


Counts = TypeVar("Counts", calls.Xored, calls.Touched, calls.Failed, calls.Changed)


def add_counts(a: Counts, b: Counts) -> Counts:
    return type(a)(*map(operator.add, dataclasses.astuple(a), dataclasses.astuple(b)))


def add_streams(a: calls.StreamList, b: calls.StreamList) -> calls.StreamList:
    return calls.StreamList(tuple(sorted(a.streams + b.streams, key=lambda stream: stream.stream)))


def add_jobs(a: calls.JobList, b: calls.JobList) -> calls.JobList:
    jobs = sorted((*a.jobs, *b.jobs), key=lambda announced: announced.job.since_ms, reverse=True)
    return calls.JobList(tuple(jobs))


def add_groups(a: calls.GroupList, b: calls.GroupList) -> calls.GroupList:
    """Put the groups of two shards in one order; of the shares that are counted the smaller."""
    groups = sorted((*a.groups, *b.groups), key=lambda group: -group.count)
    return calls.GroupList(tuple(groups), min(a.indexed, b.indexed), a.left_out + b.left_out)


SHARD_BYTES = 2
"""The shard in front of a record's key, of which the stream and the time follow."""

_TIME_AT = SHARD_BYTES + 4


def position_of(key: bytes) -> tuple[bytes, bytes]:
    """Return where a dead letter is among those of all shards, by its key: by time, and of one moment by shard."""
    return key[_TIME_AT:], key[:SHARD_BYTES]


def newest_first(limit: int) -> Callable[[calls.RecordPage, calls.RecordPage], calls.RecordPage]:
    """Return what joins two pages of the latest letters; it ends where one of the two did that has more behind."""

    def add(a: calls.RecordPage, b: calls.RecordPage) -> calls.RecordPage:
        ends = [page.more for page in (a, b) if page.more]
        end = max(ends, key=position_of, default=b"")
        keys = sorted((*a.keys, *b.keys), key=position_of, reverse=True)
        if end:
            keys = [key for key in keys if position_of(key) >= position_of(end)]
        if len(keys) > limit:
            keys, end = keys[:limit], keys[limit - 1]
        infos = {info.key: info for info in (*a.records, *b.records)}
        records = tuple(infos[key] for key in keys if key in infos)
        return calls.RecordPage(records, tuple(keys), a.examined + b.examined, end)

    return add


def add_stats(a: calls.StatsReply, b: calls.StatsReply) -> calls.StatsReply:
    values = dict(a.values)
    for name, value in b.values.items():
        values[name] = _add_value(name, values[name], value) if name in values else value
    circuits = {
        name: {**a.circuits.get(name, {}), **b.circuits.get(name, {})}
        for name in {**a.circuits, **b.circuits}
    }
    return calls.StatsReply(values, circuits)


def add_hours(a: calls.Hour, b: calls.Hour) -> calls.Hour:
    """Add the points of two shards step by step, of those that both have: one may be a step ahead."""
    if a.end_ms > b.end_ms:
        a, b = b, a
    ahead = round((b.end_ms - a.end_ms) / a.step_ms)
    series = dict(a.series)
    for name, points in b.series.items():
        shifted = (*(math.nan,) * ahead, *points[: len(points) - ahead])
        mine = series.get(name, (math.nan,) * len(points))
        series[name] = tuple(_add_point(name, x, y) for x, y in zip(mine, shifted, strict=True))
    return calls.Hour(a.step_ms, a.end_ms, series)


def _add_point(name: str, x: float, y: float) -> float:
    if math.isnan(x) or math.isnan(y):
        return y if math.isnan(x) else x
    return _add_value(name, x, y)


def _add_value(name: str, x: float, y: float) -> float:
    return max(x, y) if name in _LARGEST else x + y


_ADD: dict[type, Callable[[Any, Any], Any]] = {
    calls.Xor: add_counts,
    calls.Touch: add_counts,
    calls.Fail: add_counts,
    calls.Stats: add_stats,
    calls.ListJobs: add_jobs,
    calls.DeadGroups: add_groups,
    calls.ListStreams: add_streams,
    calls.GetHour: add_hours,
}


class Vertex:
    """Shards behind one face, for any thread; keys of records begin with two bytes for the shard.

    Its incarnation is the sum of its shards', so that it changes when any of them was made anew.
    """

    def __init__(
        self, path: Path, parts: Sequence[ShardParts], on_fatal: Callable[[Exception], None]
    ) -> None:
        """Open all shards; ``path`` is for the routing table. Raises what opening them raises."""
        self._router = Router(path / ROUTES, len(parts))
        self._routing = threading.Lock()
        self._own = calls.registered_in(self)
        self._shards: list[Shard] = []
        try:
            for index, part in enumerate(parts):
                self._shards.append(Shard(part, f"shard-{index:03}", on_fatal))
        except BaseException:
            self.close()
            raise

    @property
    def shards(self) -> int:
        return len(self._shards)

    @property
    def incarnation(self) -> int:
        return sum(shard.incarnation for shard in self._shards)

    @property
    def exact(self) -> bool:
        return self._shards[0].exact

    def pulses(self) -> list[ShardPulse]:
        """Return how each shard's writer is, without waiting for any."""
        return [shard.pulse() for shard in self._shards]

    def shard_of_stream(self, stream: str) -> int:
        return self._router.shard_of(owner_of(stream))

    def close(self) -> None:
        for shard in self._shards:
            shard.close()

    def submit(self, call: calls.Call, envelope: calls.Envelope | None, answer: Answer) -> None:
        """Run ``call``; ``answer`` gets the reply or the error, on whatever thread."""
        try:
            self._route(call, envelope, answer)
        except FTLayerError as error:
            answer(error)

    def _route(self, call: calls.Call, envelope: calls.Envelope | None, answer: Answer) -> None:
        own = self._own.get(type(call))
        if own is not None:
            own(envelope, call, answer)
            return
        owner = getattr(call, call.route.value, "")
        if owner:
            self._shard_for(call, owner).submit(call, envelope, answer)
        else:
            self._everywhere([(at, call) for at in range(self.shards)], envelope, answer, _ADD[type(call)])

    def _shard_for(self, call: calls.Call, owner: str) -> Shard:
        is_stream = call.route is calls.Route.STREAM
        return self._shards[self.shard_of_stream(owner) if is_stream else self._router.shard_of(owner)]

    @calls.handles(calls.Persist)
    def _persist(self, envelope: calls.Envelope | None, call: calls.Persist, answer: Answer) -> None:
        shard = self.shard_of_stream(call.stream)
        self._check_roots(call.roots, shard, "Persist.roots")
        self._shards[shard].submit(call, envelope, answer)

    @calls.handles(calls.TakeOver, calls.OpenStream)
    def _open_stream(
        self, envelope: calls.Envelope | None, call: calls.TakeOver | calls.OpenStream, answer: Answer
    ) -> None:
        shard = self._shards[self.shard_of_stream(call.stream)]
        shard.submit(call, envelope, self._with_own_incarnation(answer))

    @calls.handles(calls.OpenQuery)
    def _open_query(self, envelope: calls.Envelope | None, call: calls.OpenQuery, answer: Answer) -> None:
        with self._routing:
            shard = self._router.open_query(call.query, call.streams)
        self._check_streams(call.streams, shard, "OpenQuery.streams")
        self._shards[shard].submit(call, envelope, self._with_own_incarnation(answer))

    @calls.handles(calls.Explain)
    def _explain(self, envelope: calls.Envelope | None, call: calls.Explain, answer: Answer) -> None:
        (shard,) = shard_of(np.array([call.root], np.uint64), self.shards).tolist()
        self._shards[shard].submit(call, envelope, answer)

    def _everywhere(
        self,
        parts: Sequence[tuple[int, calls.Call]],
        envelope: calls.Envelope | None,
        answer: Answer,
        add: Callable[[Any, Any], Any],
    ) -> None:
        if len(parts) == 1:
            shard, part = parts[0]
            self._shards[shard].submit(part, envelope, answer)
            return
        gather = Gather(len(parts), answer, add)
        for shard, part in parts:
            one = late_if_stale(part, gather) if isinstance(part, calls.Xor) else gather
            self._shards[shard].submit(part, envelope, one)

    @calls.handles(calls.Xor, calls.Touch, calls.Fail)
    def _split(
        self, envelope: calls.Envelope | None, call: calls.Xor | calls.Touch | calls.Fail, answer: Answer
    ) -> None:
        if self.shards == 1:
            self._shards[0].submit(call, envelope, answer)
            return
        check_incarnation(call.incarnation, self.incarnation)
        parts: list[tuple[int, calls.Call]] = []
        if isinstance(call, calls.Fail):
            where = shard_of(np.array([failure.root for failure in call.failures], np.uint64), self.shards)
        else:
            where = shard_of(call.roots, self.shards)
        for index in np.unique(where).tolist() or [0]:
            parts.append((index, self._part_for(call, index, where == index)))
        self._everywhere(parts, envelope, answer, _ADD[type(call)])

    def _part_for(self, call: calls.Xor | calls.Touch | calls.Fail, index: int, mine: Any) -> calls.Call:
        incarnation = self._shards[index].incarnation
        if isinstance(call, calls.Fail):
            failures = tuple(call.failures[position] for position in np.flatnonzero(mine).tolist())
            return dataclasses.replace(call, failures=failures, incarnation=incarnation)
        if isinstance(call, calls.Touch):
            return dataclasses.replace(call, roots=call.roots[mine], incarnation=incarnation)
        return dataclasses.replace(
            call,
            roots=call.roots[mine],
            values=None if call.values is None else call.values[mine],
            incarnation=incarnation,
            ids=None if call.ids is None else call.ids.take(np.flatnonzero(mine)),
        )

    @calls.handles(calls.Register, calls.AskRanges, calls.StoreRows)
    def _of_ranges(
        self,
        envelope: calls.Envelope | None,
        call: calls.Register | calls.AskRanges | calls.StoreRows,
        answer: Answer,
    ) -> None:
        shard = self.shard_of_stream(call.stream)
        if isinstance(call, calls.Register):
            self._check_roots(call.roots, shard, "Register.roots")
        check_incarnation(call.incarnation, self.incarnation)
        call = dataclasses.replace(call, incarnation=self._shards[shard].incarnation)
        self._shards[shard].submit(call, envelope, answer)

    @calls.handles(calls.Recall, calls.StreamStatusCall)
    def _of_one_job(
        self, envelope: calls.Envelope | None, call: calls.Recall | calls.StreamStatusCall, answer: Answer
    ) -> None:
        owners = sorted({owner_of(stream) for stream in call.streams})
        if len(owners) > 1:
            raise MalformedRequestError(
                f"{type(call).__name__}.streams: expected streams of one job (or one ingest), got those of "
                f"{', '.join(map(repr, owners))}; make a call for each"
            )
        shard = self._shards[self._router.shard_of(owners[0])]
        if isinstance(call, calls.Recall):
            check_incarnation(call.incarnation, self.incarnation)
            call = dataclasses.replace(call, incarnation=shard.incarnation)
        shard.submit(call, envelope, answer)

    def _with_own_incarnation(self, answer: Answer) -> Answer:
        def translated(reply: calls.Reply | FTLayerError) -> None:
            if isinstance(reply, (calls.StreamOpened, calls.QueryOpened, calls.TakenOver)):
                reply = dataclasses.replace(reply, incarnation=self.incarnation)
            answer(reply)

        return translated

    def _check_roots(self, roots: calls.RowRoots, shard: int, where: str) -> None:
        if self.shards == 1:
            return
        foreign = np.flatnonzero(shard_of(ids_of(roots), self.shards) != shard)
        if len(foreign):
            index = int(foreign[0])
            raise MalformedRequestError(
                f"{where}[{index}]: its top bits do not name shard {shard} of {self.shards}, where the stream is"
            )

    def _check_streams(self, streams: Sequence[str], shard: int, where: str) -> None:
        for stream in streams:
            if self.shard_of_stream(stream) != shard:
                raise MalformedRequestError(
                    f"{where}: {stream!r} is not on shard {shard}, where the query is; "
                    "a query's sources are named '<query>/<source>'"
                )

    @calls.handles(calls.Seal, calls.Reseal)
    def _seal(self, envelope: calls.Envelope | None, call: calls.Seal | calls.Reseal, answer: Answer) -> None:
        shard, where = self._router.shard_of(call.query), type(call).__name__
        if isinstance(call, calls.Seal):
            self._check_streams(list(call.delivered), shard, f"{where}.delivered")
        for part, name in [(part, "failed") for part in call.failed] + [
            (part, "emitted") for part in call.emitted
        ]:
            self._check_streams([part.stream], shard, f"{where}.{name}")
            self._check_roots(part.roots, shard, f"{where}.{name}.roots")
        self._shards[shard].submit(call, envelope, answer)

    @calls.handles(calls.ListRecords)
    def _list(self, envelope: calls.Envelope | None, call: calls.ListRecords, answer: Answer) -> None:
        """List one shard after the other; a page ends where a shard's does."""
        index, after = self._split_key(call.after, "ListRecords.after") if call.after else (0, b"")
        if call.stream:
            index = self.shard_of_stream(call.stream)

        def with_shard(found: calls.RecordList) -> calls.RecordList:
            more = self._more(index, found.more, call.stream)
            return calls.RecordList(_with_shard(index, found.records), more)

        part = dataclasses.replace(call, after=after)
        self._shards[index].submit(part, None, changed(answer, calls.RecordList, with_shard))

    @calls.handles(calls.SelectRecords)
    def _select(self, envelope: calls.Envelope | None, call: calls.SelectRecords, answer: Answer) -> None:
        if call.newest and not call.stream and self.shards > 1:
            self._select_newest(call, answer)
            return
        index, after = self._split_key(call.after, "SelectRecords.after") if call.after else (0, b"")
        if call.stream:
            index = self.shard_of_stream(call.stream)
        keys = [self._split_key(key, f"SelectRecords.keys[{at}]") for at, key in enumerate(call.keys)]
        mine = tuple(key for shard, key in keys if shard == index)

        def with_shard(found: calls.RecordPage) -> calls.RecordPage:
            return _page_of_shard(index, found, self._more(index, found.more, call.stream))

        if keys and not mine:
            answer(with_shard(calls.RecordPage((), (), 0, b"")))
            return
        part = dataclasses.replace(call, after=after, keys=mine)
        self._shards[index].submit(part, None, changed(answer, calls.RecordPage, with_shard))

    def _select_newest(self, call: calls.SelectRecords, answer: Answer) -> None:
        last, after = self._split_key(call.after, "SelectRecords.after") if call.after else (0, b"")
        gather = Gather(self.shards, answer, newest_first(call.limit))
        for index in range(self.shards):
            # Of the moment where the page before ended, shards before its last one have not had their turn.
            behind = after + b"\0" if after and index < last else after
            part = dataclasses.replace(call, after=behind)
            with_shard = partial(_page_of_shard, index)
            self._shards[index].submit(part, None, changed(gather, calls.RecordPage, with_shard))

    def _more(self, index: int, more: bytes, stream: str) -> bytes:
        if more:
            return _key(index, more)
        return b"" if stream or index + 1 == self.shards else _key(index + 1, b"")

    @calls.handles(calls.ChangeDead)
    def _change_dead(self, envelope: calls.Envelope | None, call: calls.ChangeDead, answer: Answer) -> None:
        by_shard: dict[int, list[bytes]] = {}
        for position, key in enumerate(call.keys):
            index, rest = self._split_key(key, f"{type(call).__name__}.keys[{position}]")
            by_shard.setdefault(index, []).append(rest)
        parts = [(index, dataclasses.replace(call, keys=tuple(keys))) for index, keys in by_shard.items()]
        self._everywhere(parts or [(0, call)], envelope, answer, add_counts)

    @calls.handles(calls.EditAndRequeue)
    def _edit_dead(self, envelope: calls.Envelope | None, call: calls.EditAndRequeue, answer: Answer) -> None:
        by_shard: dict[int, list[calls.Edit]] = {}
        for position, edit in enumerate(call.edits):
            index, rest = self._split_key(edit.key, f"EditAndRequeue.edits[{position}].key")
            by_shard.setdefault(index, []).append(calls.Edit(rest, edit.payload))
        parts = [(index, dataclasses.replace(call, edits=tuple(edits))) for index, edits in by_shard.items()]
        self._everywhere(parts or [(0, call)], envelope, answer, add_counts)

    @calls.handles(calls.ListAudit)
    def _list_audit(self, envelope: calls.Envelope | None, call: calls.ListAudit, answer: Answer) -> None:
        """Put the logs of all shards in one order: by time, and of one moment by shard, the last first."""
        after = call.after[:-SHARD_BYTES]
        last = int.from_bytes(call.after[-SHARD_BYTES:], "big")
        latest = changed(answer, calls.AuditPage, partial(_latest, call.limit))
        gather = Gather(self.shards, latest, _add_audit)
        for index in range(self.shards):
            # Of the moment where the page before ended, shards before its last one have not had their turn.
            behind = after + b"\0" if after and index < last else after
            part = dataclasses.replace(call, after=behind)
            with_shard = partial(_audit_of_shard, index)
            self._shards[index].submit(part, None, changed(gather, calls.AuditPage, with_shard))

    def _split_key(self, key: bytes, where: str) -> tuple[int, bytes]:
        index = int.from_bytes(key[:SHARD_BYTES], "big")
        if len(key) < SHARD_BYTES or index >= self.shards:
            raise MalformedRequestError(
                f"{where}: not a key that this vertex has given out: dead letters and records are listed with theirs"
            )
        return index, key[SHARD_BYTES:]


def _with_shard(index: int, records: Sequence[calls.RecordInfo]) -> tuple[calls.RecordInfo, ...]:
    return tuple(dataclasses.replace(record, key=_key(index, record.key)) for record in records)


def _key(shard: int, key: bytes) -> bytes:
    return shard.to_bytes(SHARD_BYTES, "big") + key


def _page_of_shard(index: int, found: calls.RecordPage, more: bytes | None = None) -> calls.RecordPage:
    # Without ``more`` the page goes on where the shard's does.
    if more is None:
        more = _key(index, found.more) if found.more else b""
    keys = tuple(_key(index, key) for key in found.keys)
    return calls.RecordPage(_with_shard(index, found.records), keys, found.examined, more)


def _add_audit(a: calls.AuditPage, b: calls.AuditPage) -> calls.AuditPage:
    return calls.AuditPage((*a.entries, *b.entries), a.more or b.more)


def _audit_of_shard(index: int, found: calls.AuditPage) -> calls.AuditPage:
    """Give an audit page's keys the shard at their end: they are in order by time first."""
    end = index.to_bytes(SHARD_BYTES, "big")
    entries = tuple(dataclasses.replace(entry, key=entry.key + end) for entry in found.entries)
    return calls.AuditPage(entries, found.more)


def _latest(limit: int, found: calls.AuditPage) -> calls.AuditPage:
    entries = sorted(found.entries, key=lambda entry: entry.key, reverse=True)
    is_over = not found.more and len(entries) <= limit
    return calls.AuditPage(tuple(entries[:limit]), b"" if is_over else entries[limit - 1].key)
