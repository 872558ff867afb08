"""Dead letters of jobs in barrier mode: they come from completed checkpoints; requeued ones go back into the job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ftlayer.common.clock import Now
from ftlayer.errors import ProtocolError
from ftlayer.vertex import calls
from ftlayer.vertex.rules.owners import owner_of
from ftlayer.vertex.rules.retry import MAX_HISTORY, shortened, stored_attempt
from ftlayer.vertex.rules.state import ShardState
from ftlayer.vertex.rules.streams import Stream
from ftlayer.vertex.rules.walk import RecordContents
from ftlayer.vertex.store import dead_index as failed
from ftlayer.vertex.store import key_value as kept
from ftlayer.vertex.store.dead_index import FailedRecord, FailedTable, KeptName
from ftlayer.vertex.store.key_value import INTAKE_SHARE, KeyValueStore, ReadTransaction, WriteTransaction
from ftlayer.vertex.store.rows import History


class BarrierLetters:
    """`KeepLetters`, `ForgetLetters`, `GetRequeued`, `Readmitted` and `ReturnLetters`.

    A requeued letter is in the table of waiting records. It is no replay: `Replays` passes it over.
    """

    def __init__(self, state: ShardState, store: KeyValueStore) -> None:
        self._state = state
        self._store = store

    @calls.handles(calls.KeepLetters)
    def keep(self, txn: WriteTransaction, call: calls.KeepLetters, now: Now) -> calls.LettersKept:
        """Put the letters of one part of a file among the dead, once."""
        state = self._state
        state.owners.check([call.stream], call.owner)
        stream = state.stream(call.stream)
        job = owner_of(call.stream)
        if kept.is_kept(txn, job, call.file, call.part):
            return calls.LettersKept(0)
        if self._store.used_share >= INTAKE_SHARE:
            raise ProtocolError(
                f"the store has used {self._store.used_share:.0%} of its {self._store.max_bytes} bytes, and takes no "
                "letters in: purge some, or wait until records complete"
            )
        kept.put_kept(txn, job, call.file, call.part)
        roots = state.fresh_roots(len(call.letters))
        for root, letter in zip(roots.tolist(), call.letters, strict=True):
            row = state.payloads.rows(txn, letter.payload)
            record = FailedRecord(
                root=root,
                origin=root,
                attempt=letter.attempts[-1].number,
                key_hashes=None,
                flat_hashes=False,
                history=self._history(letter.attempts),
                digest=row.digest,
                body=row.body(0),
                kept=KeptName(letter.letter, letter.facts),
            )
            self._put_dead(txn, stream, record, now)
            stream.counters.dead += 1
        return calls.LettersKept(len(call.letters))

    @calls.handles(calls.ForgetLetters)
    def forget(self, txn: WriteTransaction, call: calls.ForgetLetters, now: Now) -> calls.LettersKept:
        self._state.owners.check([call.job], call.owner)
        return calls.LettersKept(kept.forget_kept(txn, call.job, call.file))

    @calls.handles(calls.GetRequeued)
    def requeued(self, txn: ReadTransaction, call: calls.GetRequeued, now: Now) -> calls.RequeuedLetters:
        """Return a page of letters that were requeued, and are in no checkpoint of their job yet."""
        self._state.owners.check([call.job], call.owner)
        contents = RecordContents(self._state, txn)
        found: list[calls.RequeuedLetter] = []
        size = 0
        for key, record in self._waiting(txn, call.job, call.after):
            if len(found) == call.limit or size >= calls.MAX_PAGE_BYTES:
                return calls.RequeuedLetters(tuple(found), found[-1].key)
            assert record.kept is not None
            stream = self._state.numbers[failed.stream_of(key)].name
            payload = contents.payload_of(record)
            attempts = contents.attempts(record.history)
            found.append(
                calls.RequeuedLetter(key, stream, *record.kept, payload, attempts, edited=record.is_edited)
            )
            size += payload.nbytes + sum(len(each.traceback) for each in attempts)
        return calls.RequeuedLetters(tuple(found), b"")

    @calls.handles(calls.Readmitted)
    def readmitted(self, txn: WriteTransaction, call: calls.Readmitted, now: Now) -> calls.Changed:
        self._state.owners.check([call.job], call.owner)
        return calls.Changed(sum(self._take(txn, call.job, key) is not None for key in call.keys))

    @calls.handles(calls.ReturnLetters)
    def give_back(self, txn: WriteTransaction, call: calls.ReturnLetters, now: Now) -> calls.Changed:
        self._state.owners.check([call.job], call.owner)
        count = 0
        for key in call.keys:
            taken = self._take(txn, call.job, key, with_texts=False)
            if taken is not None:
                stream, record = taken
                self._put_dead(txn, stream, self._with_reason(record, call.reason, now), now)
                count += 1
        return calls.Changed(count)

    # ------------------------------------------------------------ small ones

    def _put_dead(self, txn: WriteTransaction, stream: Stream, record: FailedRecord, now: Now) -> None:
        stream.died_ms = max(stream.died_ms, now.wall_ms)
        key = failed.key_of(stream.number, stream.died_ms, self._state.new_serial())
        failed.put(txn, FailedTable.DEAD, key, record)
        self._state.dead_index.add(txn, key, record)
        stream.dead += 1

    def _history(self, attempts: Sequence[calls.Attempt]) -> History:
        if len(attempts) > MAX_HISTORY:
            attempts = (*attempts[:1], *attempts[1 - MAX_HISTORY :])
        hold = self._state.group.texts.hold
        return tuple(
            stored_attempt(
                each.number,
                each.at_ms,
                calls.Failure(0, each.reason, each.operator, each.traceback, place=each.place),
                hold,
            )._replace(requeued_ms=each.requeued_ms, requeued_by=each.requeued_by)
            for each in attempts
        )

    def _with_reason(self, record: FailedRecord, reason: str, now: Now) -> FailedRecord:
        texts = self._state.group.texts
        earlier = shortened(record.history)
        # What is left out of the middle is held no more.
        texts.release_all(tuple(each for each in record.history if each not in earlier))
        last = record.history[-1]
        again = stored_attempt(last.number, now.wall_ms, calls.Failure(0, reason, last.operator), texts.hold)
        return replace(record, history=(*earlier, again), attempt=last.number)

    def _take(
        self, txn: WriteTransaction, job: str, key: bytes, *, with_texts: bool = True
    ) -> tuple[Stream, FailedRecord] | None:
        """Take a requeued letter of a job out of the waiting records; None where it is gone."""
        record = failed.get(txn, FailedTable.WAITING, key)
        stream = self._state.numbers.get(failed.stream_of(key))
        if record is None or record.kept is None or stream is None or owner_of(stream.name) != job:
            return None
        txn.delete(FailedTable.WAITING, key)
        stream.waiting -= 1
        if with_texts:
            self._state.group.texts.release_all(record.history)
        return stream, record

    def _waiting(self, txn: ReadTransaction, job: str, after: bytes) -> Iterator[tuple[bytes, FailedRecord]]:
        streams = sorted(
            stream.number
            for stream in self._state.numbers.values()
            if stream.waiting and owner_of(stream.name) == job
        )
        for number in streams:
            for found, value in failed.scan(txn, FailedTable.WAITING, number):
                key = bytes(found)
                if key > after and (record := failed.decode(value)).kept is not None:
                    yield key, record
