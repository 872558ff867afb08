"""From options to a vertex: directories, stores, rules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ftlayer.checks import duration_ms
from ftlayer.config import VertexOptions
from ftlayer.store.lmdb_store import Durability, LmdbStore
from ftlayer.vertex.rules.layer import FTLayerCore
from ftlayer.vertex.rules.options import LayerOptions
from ftlayer.vertex.service.directory import fix_shards, prepare_vertex
from ftlayer.vertex.service.rules import ShardParts
from ftlayer.vertex.service.vertex import Vertex


def open_vertex(options: VertexOptions, on_fatal: Callable[[Exception], None]) -> Vertex:
    """Open (or make) the stores of a vertex, and recover what they hold.

    Raises what is wrong with the directory or a store (`StoreError`), and `ConfigError` for another number
    of shards than the store was made with.
    """
    path = Path(options.path)
    prepare_vertex(path)
    fix_shards(path, options.shards)
    return Vertex(path, [_parts(options, path, shard) for shard in range(options.shards)], on_fatal)


def _parts(options: VertexOptions, path: Path, shard: int) -> ShardParts:
    durability: Durability = "batch"
    sync_every_ms = None
    if options.durability == "none":
        durability = "none"
    elif options.durability != "batch":
        durability = sync_every_ms = duration_ms(options.durability, "durability")
    layer_options = LayerOptions(
        shard=shard, shards=options.shards, tracker=options.tracker, buckets=options.timeout_buckets
    )
    return ShardParts(
        open_store=lambda: LmdbStore.open(
            path / f"shard-{shard:03}",
            max_store_bytes=options.max_store_bytes // options.shards,
            durability=durability,
        ),
        make_layer=lambda store, now: FTLayerCore(store, layer_options, now),
        persist_timeout_ms=options.persist_timeout_ms,
        sync_every_ms=sync_every_ms,
        flush_ms=layer_options.flush_ms,
    )
