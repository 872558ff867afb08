"""The table ``meta`` of a store: its queries, its topologies, and the clients that have called.

Of a query: who runs it, and how far it has come. Of a topology: which run has claimed it. Of a client: the reply to
each of its latest calls, an entry each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ftlayer.errors import StoreDamagedError
from ftlayer.vertex.store.key_value import ReadTransaction, WriteTransaction
from ftlayer.vertex.store.rows import pack, unpack

_QUERY, _JOB, _CLIENT = b"query/", b"job/", b"client/"
_TAIL_BYTES = 9  # behind a client: a slash and the sequence, whatever the name contains


@dataclass(frozen=True, slots=True)
class QueryRecord:
    """A query. Batch ids are -1 where there was none yet; ``title`` is what people call it, "" if that is unknown."""

    number: int
    epoch: int
    run: str
    streams: tuple[str, ...]
    last_sealed: int = -1
    last_committed: int = -1
    title: str = ""


def get_query(txn: ReadTransaction, name: str) -> QueryRecord | None:
    value = txn.get("meta", _QUERY + name.encode())
    return None if value is None else _decode_query(value)


def put_query(txn: WriteTransaction, name: str, record: QueryRecord) -> None:
    values = [
        record.number,
        record.epoch,
        record.run,
        record.streams,
        record.last_sealed,
        record.last_committed,
        record.title,
    ]
    txn.put("meta", _QUERY + name.encode(), pack(values))


def all_queries(txn: ReadTransaction) -> Iterator[tuple[str, QueryRecord]]:
    for key, value in txn.scan("meta", _QUERY, b"query0"):  # "0" comes after "/"
        yield bytes(key)[len(_QUERY) :].decode(), _decode_query(value)


def _decode_query(value: bytes | memoryview) -> QueryRecord:
    try:
        number, epoch, run, streams, sealed, committed, title = unpack(value)
        return QueryRecord(number, epoch, run, tuple(streams), sealed, committed, title)
    except (ValueError, TypeError) as error:
        raise StoreDamagedError(f"a query of the store cannot be read: {error}") from error


def put_job(txn: WriteTransaction, name: str, run: str) -> None:
    txn.put("meta", _JOB + name.encode(), run.encode())


def all_jobs(txn: ReadTransaction) -> Iterator[tuple[str, str]]:
    for key, value in txn.scan("meta", _JOB, b"job0"):  # "0" comes after "/"
        try:
            yield bytes(key)[len(_JOB) :].decode(), bytes(value).decode()
        except UnicodeDecodeError as error:
            raise StoreDamagedError(f"the run of a topology in the store cannot be read: {error}") from error


def put_reply(txn: WriteTransaction, client: str, sequence: int, reply: list[object]) -> None:
    txn.put("meta", _client_key(client, sequence), pack(reply))


def delete_reply(txn: WriteTransaction, client: str, sequence: int) -> None:
    txn.delete("meta", _client_key(client, sequence))


def all_replies(txn: ReadTransaction) -> Iterator[tuple[str, int, list[object]]]:
    for key, value in txn.scan("meta", _CLIENT, b"client0"):  # "0" comes after "/"
        name, sequence = bytes(key)[len(_CLIENT) : -_TAIL_BYTES], bytes(key)[1 - _TAIL_BYTES :]
        try:
            yield name.decode(), int.from_bytes(sequence, "big"), unpack(value)
        except UnicodeDecodeError as error:
            raise StoreDamagedError(f"key {bytes(key).hex()} of the store is no client's: {error}") from error


def _client_key(client: str, sequence: int) -> bytes:
    return _CLIENT + client.encode() + b"/" + sequence.to_bytes(8, "big")
