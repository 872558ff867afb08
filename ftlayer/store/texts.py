"""Long texts that failed records share: each is stored once, with the number of records that hold it.

A batch that fails in one place leaves 100,000 records with the same traceback; two of them with 2 KiB of it each
fill a page.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from ftlayer.errors import StoreDamagedError
from ftlayer.store.kv import ReadTransaction, WriteTransaction
from ftlayer.store.rows import History, pack, unpack

SHARED_FROM = 256
"""Texts of fewer characters are not worth an entry of their own."""

_PREFIX = b"text/"
_DIGEST_BYTES = 16


class TextChanges:
    """References that the calls of one transaction hold and release, written down in one go by `write`."""

    def __init__(self) -> None:
        self._changes: dict[bytes, int] = {}
        self._texts: dict[bytes, str] = {}
        self._digests: dict[str, bytes] = {}

    def hold(self, text: str) -> bytes:
        """Count one more attempt that has ``text``; return the digest to `read` it by."""
        digest = self._digests.get(text)
        if digest is None:
            digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
            self._digests[text], self._texts[digest] = digest, text
        self._changes[digest] = self._changes.get(digest, 0) + 1
        return digest

    def hold_all(self, history: History, known: Mapping[bytes, str]) -> None:
        """Count the texts of a record's attempts again; ``known`` has them by their digests."""
        for attempt in history:
            if attempt.frames:
                self._texts[attempt.frames] = known[attempt.frames]
                self._changes[attempt.frames] = self._changes.get(attempt.frames, 0) + 1

    def release_all(self, history: History) -> None:
        """Count the texts of a record's attempts, which is no failed one any more, once less."""
        for attempt in history:
            if attempt.frames:
                self._changes[attempt.frames] = self._changes.get(attempt.frames, 0) - 1

    def of_all(self, txn: ReadTransaction, histories: Iterable[History]) -> dict[bytes, str]:
        """Return the texts of attempts by digest; those that are released in this transaction can still be read."""
        digests = {attempt.frames for history in histories for attempt in history} - {b""}
        return {
            digest: self._texts[digest] if digest in self._texts else read(txn, digest) for digest in digests
        }

    def write(self, txn: WriteTransaction) -> None:
        """Store the counts; a text that no record has any more is deleted.

        Raises `StoreDamagedError` when a text is released that the store lacks.
        """
        for digest, change in self._changes.items():
            if not change:
                continue
            stored = txn.get("meta", _PREFIX + digest)
            count, text = (0, self._texts.get(digest)) if stored is None else _decode(digest, stored)
            if text is None or count + change < 0:
                raise _missing(digest)
            if count + change:
                txn.put("meta", _PREFIX + digest, pack([count + change, text]))
            else:
                txn.delete("meta", _PREFIX + digest)
        self._changes.clear()


def read(txn: ReadTransaction, digest: bytes) -> str:
    """Return the text of ``digest``, "" for b"". `StoreDamagedError` when the store lacks it."""
    if not digest:
        return ""
    stored = txn.get("meta", _PREFIX + digest)
    if stored is None:
        raise _missing(digest)
    return _decode(digest, stored)[1]


def _decode(digest: bytes, value: bytes | memoryview) -> tuple[int, str]:
    try:
        count, text = unpack(value)
        return int(count), str(text)
    except (ValueError, TypeError) as error:
        raise StoreDamagedError(f"the text {digest.hex()} cannot be read: {error}") from error


def _missing(digest: bytes) -> StoreDamagedError:
    return StoreDamagedError(f"the store lacks the text {digest.hex()} of records it holds")
