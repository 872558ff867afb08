"""Looking into the store of a vertex without the vertex: what ``ftlayer inspect`` shows.

Works beside a live vertex too, on one snapshot of each shard. What only that vertex knows (records it has
in flight and has not written down as done) then looks as it would after a crash.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ftlayer.common.clock import system_now
from ftlayer.errors import ConfigError
from ftlayer.monitor.rules.names import JobNames
from ftlayer.monitor.rules.plans import LetterGroup, LetterGroups, Selection, whole_groups
from ftlayer.vertex import calls
from ftlayer.vertex.rules.layer import FTLayerCore
from ftlayer.vertex.rules.state import LayerOptions
from ftlayer.vertex.store.directory import DATA_FILE, holder_of
from ftlayer.vertex.store.key_value import TABLES
from ftlayer.vertex.store.lmdb_store import LmdbStore

PAGE = 1_000


@dataclass(frozen=True, slots=True)
class TableReport:
    """One table: the number of its entries, and the bytes of their values."""

    entries: int
    value_bytes: int


@dataclass(frozen=True, slots=True)
class StoreReport:
    """A store.

    ``incarnation`` is that of its last vertex; ``holder`` the process id of the one that is live, None
    when it is not open, 0 when the holder's id cannot be read. ``used_bytes`` counts pages, so it
    exceeds the sum of the values.
    """

    path: Path
    format_version: int
    incarnation: int
    holder: int | None
    max_bytes: int
    used_bytes: int
    used_share: float
    file_bytes: int
    tables: dict[str, TableReport]


def inspect_store(path: str | os.PathLike[str]) -> StoreReport:
    """Report on the store in the directory ``path``, from one snapshot; reads keys, and no large values.

    Raises what `LmdbStore.open` does for reading: `StorePathError`, `StoreVersionError`,
    `StoreDamagedError`, and `StoreError` when this very process has the store open.
    """
    holder = holder_of(Path(path)) if Path(path).is_dir() else None
    with closing(LmdbStore.open(path, read_only=True)) as store:
        with store.read() as transaction:
            tables = {
                name: TableReport(transaction.count(name), sum(transaction.sizes(name))) for name in TABLES
            }
        about = store.path, store.format_version, store.incarnation, holder
        sizes = store.max_bytes, store.used_bytes, store.used_share, store.file_bytes
        return StoreReport(*about, *sizes, tables)


@dataclass(frozen=True)
class ShardReport:
    """One shard: its store, and how many records it holds that wait, are on their way, or are dead.

    What was in flight is counted as waiting: a vertex that opens this store replays it. ``streams`` says the same by
    stream, ``groups`` counts the dead letters by kind of reason.
    """

    store: StoreReport
    waiting: int
    delivery: int
    dead: int
    streams: tuple[calls.StreamDetails, ...] = ()
    groups: tuple[LetterGroup, ...] = ()


def shard_paths(path: Path) -> list[Path]:
    """Return the stores of the vertex at ``path`` (or ``path`` itself, if it is a shard's store).

    Raises `ConfigError` when there is neither.
    """
    if (path / DATA_FILE).exists():
        return [path]
    shards = sorted(path.glob("shard-*"))
    if not shards:
        what = "is no directory" if path.exists() else "is not there"
        what = "holds no store of a vertex" if path.is_dir() else what
        raise ConfigError(f"{path} {what}; name the directory given to FTLayer.embedded or to ftlayer serve")
    return shards


def inspect_vertex(path: Path) -> list[ShardReport]:
    """Report on each shard of a vertex's store; raises what `inspect_store` does."""
    reports = []
    shards = shard_paths(path)
    for number, shard in enumerate(shards):
        report = inspect_store(shard)
        with _layer(shard, number, len(shards)) as (store, layer):
            values = _read(store, layer, calls.Stats()).values
            waiting, delivery = int(values["waiting"]), int(values["in_delivery"])
            streams, groups = (
                _read(store, layer, calls.ListStreams()).streams,
                _groups(store, layer, path.name),
            )
            reports.append(
                ShardReport(report, waiting, delivery, int(values["dead_letters"]), streams, groups)
            )
    return reports


def _read(store: LmdbStore, layer: FTLayerCore, call: calls.AnsweredBy[calls.R]) -> calls.R:
    assert isinstance(call, calls.ReadingCall)
    with store.read() as transaction:
        return call.expected(layer.read(transaction, call, system_now()))


def _groups(store: LmdbStore, layer: FTLayerCore, vertex: str) -> tuple[LetterGroup, ...]:
    """Count the dead letters by group: as the index has it, or one by one where that does not have all of them."""
    reply = _read(store, layer, calls.DeadGroups())
    if reply.indexed >= 1 and not reply.left_out:
        return tuple(whole_groups(Selection(vertex), JobNames([]), 0, reply.groups) or ())
    counted = LetterGroups()
    for letter in _listed(store, layer, "dead"):
        counted.add(vertex, letter)
    return tuple(counted.groups())


def stored_records(path: Path, state: str) -> Iterator[calls.RecordInfo]:
    """Yield the records in a `ListRecords.state`, shard by shard, under the keys a vertex gives them."""
    shards = shard_paths(path)
    for number, shard in enumerate(shards):
        with _layer(shard, number, len(shards)) as (store, layer):
            for record in _listed(store, layer, state):
                yield dataclasses.replace(record, key=number.to_bytes(2, "big") + record.key)


def _listed(store: LmdbStore, layer: FTLayerCore, state: str) -> Iterator[calls.RecordInfo]:
    reply = None
    while reply is None or reply.more:
        after = b"" if reply is None else reply.more
        reply = _read(store, layer, calls.ListRecords(state, "", PAGE, after))
        yield from reply.records


@contextmanager
def _layer(shard: Path, number: int, shards: int) -> Iterator[tuple[LmdbStore, FTLayerCore]]:
    """Open a shard's store for reading and recover its rules from it: they only read at their start."""
    with closing(LmdbStore.open(shard, read_only=True)) as store:
        yield store, FTLayerCore(store, LayerOptions(shard=number, shards=shards), system_now())
