"""What operators ask for: dead letters sent back to work or deleted, and cursors of their readers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import pyarrow as pa

from ftlayer.common.clock import Now
from ftlayer.errors import MalformedRequestError, ProtocolError
from ftlayer.vertex import calls
from ftlayer.vertex.rules import audit
from ftlayer.vertex.rules.state import ShardState
from ftlayer.vertex.rules.streams import Stream
from ftlayer.vertex.rules.walk import names_of
from ftlayer.vertex.store import dead_index as failed
from ftlayer.vertex.store.dead_index import FailedRecord, FailedTable
from ftlayer.vertex.store.key_value import INTAKE_SHARE, KeyValueStore, ReadTransaction, WriteTransaction
from ftlayer.vertex.store.streams import StreamTime, get_cursor, put_cursor, put_ms

# What a vertex answers to probes. A full store stays ready: what empties it comes from the clients that fill it.


STUCK_AFTER_MS = 30_000
"""A writer turns twenty times a second; one sync of a slow disk, or one page of a tool's, may take some seconds."""

FILLING_SHARE = 0.8
"""From here on a store is noted: intake waits that would not fit below `INTAKE_SHARE`, large calls first."""


class Phase(StrEnum):
    OPENING = "opening"
    SERVING = "serving"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class ShardPulse:
    """What a shard shows of itself.

    Attributes:
        turned_ms: when its writer's loop made progress last, on the monotone clock.
        is_recovering: its rules are being made anew from the store.
        intake_waits_for: why the call of the intake waits that has waited longest; "" while none waits.
    """

    turned_ms: int
    is_recovering: bool
    is_over: bool
    intake_waits_for: str
    used_share: float


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The answer to a probe; it passes without ``reasons``, a sentence each. ``notes`` do not fail it."""

    phase: Phase
    reasons: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def passes(self) -> bool:
        return not self.reasons

    def facts(self) -> dict[str, object]:
        return {
            "status": "ok" if self.passes else "failed",
            "phase": self.phase,
            "reasons": self.reasons,
            "notes": self.notes,
        }


def liveness(phase: Phase, shards: Sequence[ShardPulse], now_ms: int) -> ProbeResult:
    """Say whether only a restart can help; recovery, which that would begin anew, may take as long as it takes."""
    return ProbeResult(phase, _what_is_stuck(phase, shards, now_ms), _notes(shards))


def readiness(phase: Phase, shards: Sequence[ShardPulse], now_ms: int) -> ProbeResult:
    """Say whether clients are served: stores recovered, listening, no writer stuck, not stopping."""
    reasons = list(_what_is_stuck(phase, shards, now_ms))
    if phase is Phase.OPENING:
        reasons.append("the stores are being opened, and what they hold recovered")
    if phase is Phase.STOPPING:
        reasons.append("the vertex is stopping")
    reasons += [
        f"shard {index}: memory was lost with a transaction; it recovers from its store"
        for index, shard in enumerate(shards)
        if shard.is_recovering
    ]
    return ProbeResult(phase, tuple(reasons), _notes(shards))


def _what_is_stuck(phase: Phase, shards: Sequence[ShardPulse], now_ms: int) -> tuple[str, ...]:
    reasons = []
    for index, shard in enumerate(shards):
        silent_ms = now_ms - shard.turned_ms
        if shard.is_over:
            if phase is not Phase.STOPPING:
                reasons.append(f"shard {index}: its writer has ended; the log tells why")
        elif not shard.is_recovering and silent_ms > STUCK_AFTER_MS:
            reasons.append(
                f"shard {index}: its writer has not come round for {silent_ms / 1_000:.0f} s; "
                "the disk does not answer, or a call hangs"
            )
    return tuple(reasons)


def _notes(shards: Sequence[ShardPulse]) -> tuple[str, ...]:
    notes = []
    for index, shard in enumerate(shards):
        if shard.used_share >= FILLING_SHARE:
            notes.append(
                f"shard {index}: its store is {shard.used_share:.0%} full; at {INTAKE_SHARE:.0%} intake waits, "
                "commits, requeues and purges go on"
            )
        if shard.intake_waits_for:
            notes.append(f"shard {index}: intake waits: {shard.intake_waits_for}")
    return tuple(notes)


SHOWN_ORIGINS = 3
"""The audit log names so many letters one by one."""


class DeadLetters:
    """Changes of dead letters, each with its line in the audit log. Keys that are gone are passed over."""

    def __init__(self, state: ShardState, store: KeyValueStore) -> None:
        self._state = state
        self._store = store

    @calls.handles(calls.Requeue)
    def requeue(self, txn: WriteTransaction, call: calls.Requeue, now: Now) -> calls.Changed:
        taken = self._take_all(txn, call.keys)
        for stream, record in taken:
            self._wait(txn, stream, record, call.by, now)
        return self._changed(txn, "requeue", call.by, call.keys, taken, now)

    @calls.handles(calls.Purge)
    def purge(self, txn: WriteTransaction, call: calls.Purge, now: Now) -> calls.Changed:
        purged = self._take_all(txn, call.keys)
        for stream, record in purged:
            self._state.group.texts.release_all(record.history)
            stream.counters.purged += 1
        return self._changed(txn, "purge", call.by, call.keys, purged, now)

    @calls.handles(calls.EditAndRequeue)
    def edit(self, txn: WriteTransaction, call: calls.EditAndRequeue, now: Now) -> calls.Changed:
        """Give dead letters other payloads and requeue them. What is refused is refused before anything is changed."""
        if self._store.used_share >= INTAKE_SHARE:
            raise ProtocolError(
                f"the store has used {self._store.used_share:.0%} of its {self._store.max_bytes} bytes, and takes no "
                "edited records in: purge letters, or wait until records complete"
            )
        new = {edit.key: self._new_payload(txn, edit, index) for index, edit in enumerate(call.edits)}
        taken = []
        for key, payload in new.items():
            found = None if payload is None else self._take(txn, key)
            if found is not None:
                stream, record = found
                digest, body = self._state.payloads.write(txn, payload)
                edit = now.wall_ms, call.by
                record = replace(record, digest=digest, body=bytes(body), edit=edit)
                self._wait(txn, stream, record, call.by, now)
                taken.append((stream, record))
        return self._changed(txn, "edit", call.by, tuple(new), taken, now)

    def _new_payload(self, txn: ReadTransaction, edit: calls.Edit, index: int) -> pa.RecordBatch | None:
        record = failed.get(txn, FailedTable.DEAD, edit.key)
        if record is None:
            return None
        schema = self._state.payloads.schema(txn, record.digest)
        return as_stored(edit.payload, schema, f"EditAndRequeue.edits[{index}].payload")

    def _wait(self, txn: WriteTransaction, stream: Stream, record: FailedRecord, by: str, now: Now) -> None:
        key = failed.key_of(stream.number, now.wall_ms, self._state.new_serial())
        *earlier, last = record.history
        history = (*earlier, last._replace(requeued_ms=now.wall_ms, requeued_by=by))
        failed.put(txn, FailedTable.WAITING, key, replace(record, attempt=1, history=history))
        stream.waiting += 1
        stream.counters.requeued += 1

    def _changed(
        self,
        txn: WriteTransaction,
        what: str,
        by: str,
        keys: tuple[bytes, ...],
        taken: Sequence[tuple[Stream, FailedRecord]],
        now: Now,
    ) -> calls.Changed:
        asked = len(keys)
        if not asked:
            return calls.Changed(0)
        outcome = "done" if asked == len(taken) else f"done; {asked - len(taken)} of {asked} were gone"
        which = self._shown(txn, taken) if taken else _shown_keys(keys)
        audit.note(txn, now, who=by, what=what, which=which, count=len(taken), outcome=outcome)
        return calls.Changed(len(taken))

    def _shown(self, txn: ReadTransaction, taken: Sequence[tuple[Stream, FailedRecord]]) -> str:
        """Return whose letters they were, by the names that people gave; of a few letters their origins.

        Of many, the operators and how many failed in each. No reasons: they quote records, which a purge removes.
        """
        origins: dict[str, list[str]] = {}
        operators: dict[str, Counter[str]] = {}
        names: dict[int, str] = {}
        for stream, record in taken:
            if stream.number not in names:
                found = names_of(self._state, txn, self._state.numbers[stream.number])
                names[stream.number] = f"{found.title}/{found.source}"
            name = names[stream.number]
            origins.setdefault(name, []).append(f"{record.origin:016x}")
            operators.setdefault(name, Counter())[record.history[-1].operator or "?"] += 1
        if len(taken) <= SHOWN_ORIGINS:
            return "; ".join(f"{name}: {', '.join(each)}" for name, each in sorted(origins.items()))
        return "; ".join(
            f"{name}: {', '.join(f'{count} of {uid}' for uid, count in sorted(each.items()))}"
            for name, each in sorted(operators.items())
        )

    @calls.handles(calls.PutCursor)
    def put_cursor(self, txn: WriteTransaction, call: calls.PutCursor, now: Now) -> calls.Cursor:
        put_cursor(txn, self._state.stream(call.stream).number, call.reader, call.position)
        return calls.Cursor(call.position)

    @calls.handles(calls.GetCursor)
    def cursor(self, txn: ReadTransaction, call: calls.GetCursor, now: Now) -> calls.Cursor:
        """Return how far a reader has come; of a stream that is not declared, to nothing."""
        stream = self._state.find_stream(call.stream)
        return calls.Cursor(b"" if stream is None else get_cursor(txn, stream.number, call.reader))

    def _take_all(self, txn: WriteTransaction, keys: Sequence[bytes]) -> list[tuple[Stream, FailedRecord]]:
        return [taken for taken in (self._take(txn, key) for key in keys) if taken is not None]

    def _take(self, txn: WriteTransaction, key: bytes) -> tuple[Stream, FailedRecord] | None:
        record = failed.get(txn, FailedTable.DEAD, key)
        if record is None:
            return None
        txn.delete(FailedTable.DEAD, key)
        self._state.dead_index.remove(txn, key, record)
        stream = self._state.numbers[failed.stream_of(key)]
        stream.dead -= 1
        if failed.time_of(key) > stream.gone_ms:
            stream.gone_ms = failed.time_of(key)
            put_ms(txn, StreamTime.DIED, stream.number, stream.gone_ms)
        return stream, record


def _shown_keys(keys: Sequence[bytes]) -> str:
    more = f" and {len(keys) - SHOWN_ORIGINS} more" if len(keys) > SHOWN_ORIGINS else ""
    return f"key{'s' * (len(keys) > 1)} {', '.join(key.hex() for key in keys[:SHOWN_ORIGINS])}{more}"


def as_stored(payload: pa.RecordBatch, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """Return a new payload under its letter's schema; `MalformedRequestError` names a column that does not fit."""
    for index, field in enumerate(schema):
        if index >= payload.num_columns or payload.schema.field(index).name != field.name:
            raise MalformedRequestError(
                f"{where}: column {index} has to be {field.name!r} ({field.type}): give the letter's columns, "
                f"{', '.join(schema.names)}, in their order"
            )
        given = payload.schema.field(index).type
        if given != field.type:
            raise MalformedRequestError(
                f"{where}: column {field.name!r} is {given}, the letter's is {field.type}"
            )
        if not field.nullable and payload.column(index).null_count:
            raise MalformedRequestError(
                f"{where}: column {field.name!r} is null, and the letter's takes no null"
            )
    if payload.num_columns > len(schema):
        extra = payload.schema.field(len(schema)).name
        raise MalformedRequestError(f"{where}: the letter has no column {extra!r}")
    return pa.RecordBatch.from_arrays(payload.columns, schema=schema)
