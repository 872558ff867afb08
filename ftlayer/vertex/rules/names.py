"""Whose a stream is, and what people call that."""

from __future__ import annotations

from dataclasses import dataclass

from ftlayer.store.kept import ReadTransaction
from ftlayer.store.meta import get_query
from ftlayer.vertex.calls import JobKind
from ftlayer.vertex.rules.owners import INGEST, owner_of
from ftlayer.vertex.rules.state import ShardState
from ftlayer.vertex.rules.streams import Stream


@dataclass(frozen=True, slots=True)
class StreamNames:
    """What a stream belongs to: ``owner`` and ``kind`` ("" and None for an ingest that no query reads).

    ``title`` is what people call its owner, ``source`` the stream within it.
    """

    owner: str
    kind: JobKind | None
    title: str
    source: str


def names_of(state: ShardState, txn: ReadTransaction, stream: Stream) -> StreamNames:
    owner, kind = _owner(state, stream)
    query = get_query(txn, owner) if kind is JobKind.QUERY else None
    title = owner if query is None else query.title or owner
    return StreamNames(owner, kind, title, stream.name.removeprefix(f"{owner}/"))


def belongs_to(stream: Stream, name: str) -> bool:
    """Whether ``name`` is that of a stream or of its owner."""
    return name in (stream.name, stream.query, owner_of(stream.name))


def _owner(state: ShardState, stream: Stream) -> tuple[str, JobKind | None]:
    if stream.query:
        return stream.query, JobKind.QUERY
    if stream.name.startswith(INGEST):
        return "", None
    owner = owner_of(stream.name)
    return owner, JobKind.TOPOLOGY if state.owners.run_of(owner) else None
