"""A call that is sent again has its effect once.

Each client numbers its calls from 1. What is kept of a client is which numbers were seen, and replies:

- a number that was not seen is executed, in whatever order numbers arrive (later ones overtake at the intake limit);
- a number that was seen gets the reply of the first time, or `ProtocolError` if that is no longer kept;
- of numbers skipped, the latest `GAPS` ranges may still arrive; older ones are refused as if seen.

Calls with a durable effect are noted in the transaction of their effect; the `REPLIES` with the highest
numbers are kept, and after a restart a number below these counts as seen. Calls whose effect dies with the
incarnation (`Xor`, `Touch`, `Fail`, `Recall`, `TakeReplays`) are noted in memory, the latest `REPLIES` of them:
a new incarnation refuses all but the last, and takes replays anew, since all that was taken before is due again.
Clients that did not call for `IDLE_MS`, and the longest idle ones of more than `CLIENTS`, are forgotten; a
call they send again after that is taken for a new one.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

from ftlayer.errors import ProtocolError, StoreDamagedError
from ftlayer.vertex import calls
from ftlayer.vertex.store.key_value import ReadTransaction, WriteTransaction
from ftlayer.vertex.store.streams import all_replies, delete_reply, put_reply

REPLIES = 256
GAPS = 256
CLIENTS = 10_000
IDLE_MS = 24 * 3_600_000
# Replies with records are large, and clients do not pipeline them deeply.
_RECORD_REPLIES = 4

_DURABLE: dict[type[Any], tuple[str, ...]] = {
    calls.Accepted: ("rows",),
    calls.QueryOpened: ("epoch", "incarnation", "last_sealed", "last_committed", "shard", "shards"),
    calls.Sealed: ("waiting", "dead"),
    calls.Committed: ("again",),
    calls.Changed: ("count",),
    calls.Cursor: ("position",),
    calls.JobClaimed: ("previous",),
}
_KINDS = tuple(_DURABLE)


@dataclass(slots=True)
class _Client:
    """One client's sequence; ``unseen`` are inclusive ranges of sequences below ``highest``."""

    used_ms: int
    highest: int = 0
    unseen: list[tuple[int, int]] = field(default_factory=list)
    durable: dict[int, calls.Reply] = field(default_factory=dict)
    durable_order: list[int] = field(default_factory=list)  # a heap
    passing: OrderedDict[int, calls.Reply] = field(default_factory=OrderedDict)
    with_records: list[int] = field(default_factory=list)

    def has_seen(self, sequence: int) -> bool:
        return sequence <= self.highest and not any(a <= sequence <= b for a, b in self.unseen)

    def reply(self, sequence: int) -> calls.Reply | None:
        return self.durable.get(sequence) or self.passing.get(sequence)

    def mark(self, sequence: int) -> None:
        if sequence > self.highest:
            if sequence > self.highest + 1:
                self.unseen.append((self.highest + 1, sequence - 1))
                del self.unseen[:-GAPS]
            self.highest = sequence
            return
        gaps = []
        for first, last in self.unseen:
            parts = (
                [(first, sequence - 1), (sequence + 1, last)]
                if first <= sequence <= last
                else [(first, last)]
            )
            gaps += [part for part in parts if part[0] <= part[1]]
        self.unseen = gaps

    def keep_durable(self, sequence: int, reply: calls.Reply) -> None:
        self.mark(sequence)
        self.durable[sequence] = reply
        heapq.heappush(self.durable_order, sequence)

    def keep_passing(self, sequence: int, reply: calls.Reply) -> None:
        self.mark(sequence)
        self.passing[sequence] = reply
        if len(self.passing) > REPLIES:
            self.passing.popitem(last=False)
        if isinstance(reply, calls.RecordBatches):
            self.with_records.append(sequence)
            if len(self.with_records) > _RECORD_REPLIES:
                self.passing.pop(self.with_records.pop(0), None)

    def drop_surplus(self) -> list[int]:
        """Forget the lowest durable replies that are too many; return their sequences."""
        dropped = []
        while len(self.durable_order) > REPLIES:
            dropped.append(heapq.heappop(self.durable_order))
            del self.durable[dropped[-1]]
        return dropped


class Dedupe:
    def __init__(self, txn: ReadTransaction, incarnation: int, mono_ms: int) -> None:
        self._clients: dict[str, _Client] = {}
        self._surplus: dict[str, list[int]] = {}
        for name, sequence, values in all_replies(txn):
            client = self._clients.setdefault(name, _Client(mono_ms))
            reply = _decode(values)
            if isinstance(reply, calls.QueryOpened):
                # The caller is to work with the vertex that answers now, not with the one that did the work.
                reply = replace(reply, incarnation=incarnation)
            if not client.durable and sequence > 1:
                client.highest = sequence - 1
            client.keep_durable(sequence, reply)
        for client in self._clients.values():
            lowest = client.durable_order[0]
            if len(client.durable_order) < REPLIES and lowest > 1:
                # Nothing was dropped yet: what is missing at the beginning was never seen.
                client.unseen.insert(0, (1, lowest - 1))

    def reply_to(
        self, envelope: calls.Envelope, staged: dict[calls.Envelope, calls.Reply]
    ) -> calls.Reply | None:
        """Return the reply to a call seen before (or ``staged``), None for a new one; `ProtocolError` if it is gone."""
        if envelope in staged:
            return staged[envelope]
        client = self._clients.get(envelope.client)
        if client is None or not client.has_seen(envelope.sequence):
            return None
        reply = client.reply(envelope.sequence)
        if reply is None:
            raise ProtocolError(
                f"call {envelope.sequence} of client {envelope.client!r} had its effect long ago (it is at "
                f"{client.highest}); replies to the latest {REPLIES} calls are kept"
            )
        return reply

    def stage(self, txn: WriteTransaction, envelope: calls.Envelope, reply: calls.Reply) -> None:
        """Write a call down in the transaction of its effect; `keep_durable` follows when that is committed."""
        values = [_KINDS.index(type(reply)), *(getattr(reply, name) for name in _DURABLE[type(reply)])]
        put_reply(txn, envelope.client, envelope.sequence, values)
        for sequence in self._surplus.get(envelope.client, ()):
            delete_reply(txn, envelope.client, sequence)

    def keep_durable(self, envelope: calls.Envelope, reply: calls.Reply, mono_ms: int) -> None:
        client = self._clients.setdefault(envelope.client, _Client(mono_ms))
        client.used_ms = mono_ms
        client.keep_durable(envelope.sequence, reply)
        # Deleted with the client's next call, and again if that one's transaction fails.
        self._surplus[envelope.client] = client.drop_surplus()

    def keep_passing(self, envelope: calls.Envelope, reply: calls.Reply, mono_ms: int) -> None:
        client = self._clients.setdefault(envelope.client, _Client(mono_ms))
        client.used_ms = mono_ms
        client.keep_passing(envelope.sequence, reply)

    def forget_idle(self, txn: WriteTransaction, mono_ms: int) -> None:
        by_age = sorted(self._clients, key=lambda name: self._clients[name].used_ms)
        surplus = len(by_age) - CLIENTS
        for index, name in enumerate(by_age):
            if index >= surplus and self._clients[name].used_ms + IDLE_MS > mono_ms:
                return
            for sequence in (*self._clients.pop(name).durable_order, *self._surplus.pop(name, ())):
                delete_reply(txn, name, sequence)

    def __len__(self) -> int:
        return len(self._clients)


def _decode(values: list[Any]) -> calls.Reply:
    try:
        reply: calls.Reply = _KINDS[values[0]](*values[1:])
    except (IndexError, TypeError) as error:
        raise StoreDamagedError(f"a stored reply cannot be read: {error}") from error
    return reply
