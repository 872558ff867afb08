"""Clients in a store: the reply to each of a client's latest calls, an entry each."""

from __future__ import annotations

from collections.abc import Iterator

from ftlayer.errors import StoreDamagedError
from ftlayer.store.kv import ReadTransaction, WriteTransaction
from ftlayer.store.rows import pack, unpack

_CLIENT = b"client/"
_TAIL_BYTES = 9  # a slash and the sequence, whatever the name contains


def put_reply(txn: WriteTransaction, client: str, sequence: int, reply: list[object]) -> None:
    """Store the reply (plain values) to a client's call."""
    txn.put("meta", _key(client, sequence), pack(reply))


def delete_reply(txn: WriteTransaction, client: str, sequence: int) -> None:
    """Forget a client's call."""
    txn.delete("meta", _key(client, sequence))


def all_replies(txn: ReadTransaction) -> Iterator[tuple[str, int, list[object]]]:
    """Iterate over all stored calls: (client, sequence, reply)."""
    for key, value in txn.scan("meta", _CLIENT, b"client0"):  # "0" comes after "/"
        name, sequence = bytes(key)[len(_CLIENT) : -_TAIL_BYTES], bytes(key)[1 - _TAIL_BYTES :]
        try:
            yield name.decode(), int.from_bytes(sequence, "big"), unpack(value)
        except UnicodeDecodeError as error:
            raise StoreDamagedError(f"key {bytes(key).hex()} of the store is no client's: {error}") from error


def _key(client: str, sequence: int) -> bytes:
    return _CLIENT + client.encode() + b"/" + sequence.to_bytes(8, "big")
