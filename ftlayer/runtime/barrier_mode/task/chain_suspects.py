"""Which rows of a chain with a failure policy are noted before they run, and which are kept from it.

They are known by digests of their values, the same wherever in a batch a row lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import pyarrow as pa

from ftlayer.functions.conversion import VALUES, records_in_form
from ftlayer.records.ipc import may_share, row_alone
from ftlayer.runtime.protocol.messages import Conviction
from ftlayer.runtime.task.contract import DIGEST_BYTES, RecordNotes, Suspects

CHECKPOINTS_ARMED = 2
"""Rows are noted until so many checkpoints are complete in which sources have read on, since the first that was
complete: all that was on its way at the loss has passed by then. (A source may skip first what it had read.)"""


class ChainSuspects(Suspects):
    def __init__(
        self, chain: str, *, armed: bool, convictions: Iterable[Conviction], notes: RecordNotes
    ) -> None:
        """``armed``: rows are noted. ``convictions`` may be of other chains too."""
        self._chain = chain
        self._notes = notes
        self._checkpoints_left = CHECKPOINTS_ARMED if armed else 0
        self._read: int | None = None  # in the first checkpoint
        self._convictions = {each.digest: each for each in convictions if each.chain == chain}
        self._held_since: dict[bytes, int] = {}  # the first checkpoint whose snapshot has it, 0 before that

    @property
    def one_at_a_time(self) -> bool:
        return self._checkpoints_left > 0

    def convicted(self, payload: pa.RecordBatch, input: int = 0) -> Sequence[tuple[int, Conviction]]:
        if not self._convictions:
            return ()
        digests = row_digests(payload, input)
        found = [
            (row, self._convictions[each]) for row, each in enumerate(digests) if each in self._convictions
        ]
        for _, conviction in found:
            self._held_since.setdefault(conviction.digest, 0)
        return found

    def about_to(self, payload: pa.RecordBatch, row: int = 0, input: int = 0) -> None:
        self._notes.about_to(self._chain, row_digests(payload.slice(row, 1), input)[0])

    @property
    def looks_at_timers(self) -> bool:
        return self.one_at_a_time or bool(self._convictions)

    def fires(self, operator: str, kind: str, key: Any, time_ms: int) -> Conviction | None:
        digest = timer_digest(operator, kind, key, time_ms)
        conviction = self._convictions.get(digest)
        if conviction is not None:
            self._held_since.setdefault(digest, 0)
        elif self.one_at_a_time:
            self._notes.about_to(self._chain, digest)
        return conviction

    def over(self) -> None:
        self._notes.over()

    # ------------------------------------------------------------ checkpoints

    def snapshot(self, checkpoint: int) -> tuple[bytes, ...]:
        self._held_since = {digest: since or checkpoint for digest, since in self._held_since.items()}
        return tuple(self._held_since)

    def completed(self, checkpoint: int, read: int) -> None:
        """See `Suspects`: who is dead in it need not be kept from the chain any more, nor who is like it."""
        for digest in [digest for digest, since in self._held_since.items() if 0 < since <= checkpoint]:
            del self._held_since[digest], self._convictions[digest]
        self._read = read if self._read is None else self._read
        self._checkpoints_left = max(self._checkpoints_left - (read > self._read), 0)


# ---------------------------------------------------------------- digests


def row_digests(rows: pa.RecordBatch, input: int) -> list[bytes]:
    """Return the digest of each row; ``input`` is the chain's that they came by.

    Rows of one schema whose values Python shows alike have the same. (Arrow's own bytes do not serve: what lies below
    a null, or beside a slice, may be anything.) A row that Python cannot hold goes by its bytes, so that two equal ones
    may have different digests.
    """
    records = records_in_form(rows, VALUES)
    salt = input.to_bytes(4, "little")
    digests = []
    for place, record in enumerate(records):
        unreadable = isinstance(record, Exception)
        data = _bytes_of(rows, place) if unreadable else repr(record).encode("utf-8", "surrogatepass")
        digests.append(blake2b(data, digest_size=DIGEST_BYTES, salt=salt, person=b"ftlayer row").digest())
    return digests


def timer_digest(operator: str, kind: str, key: Any, time_ms: int) -> bytes:
    data = repr((operator, kind, key, time_ms)).encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=DIGEST_BYTES, person=b"ftlayer timer").digest()


def _bytes_of(rows: pa.RecordBatch, place: int) -> bytes:
    alone = row_alone(rows, place, shares=may_share(rows.schema))
    data: bytes = alone.serialize().to_pybytes()
    return data
