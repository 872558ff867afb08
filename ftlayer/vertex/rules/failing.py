"""Rows that fail leave their segment: to wait for a replay, or dead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ftlayer.common.clock import Now
from ftlayer.common.rules.restart import next_attempt
from ftlayer.records.failures import Failure
from ftlayer.vertex.rules.source_ranges import EndedRow, LiveSegment, by_segment
from ftlayer.vertex.rules.state import ShardState
from ftlayer.vertex.rules.streams import Stream, held, shortened, stored_attempt
from ftlayer.vertex.store import dead_index as failed
from ftlayer.vertex.store.dead_index import FailedRecord, FailedTable
from ftlayer.vertex.store.key_value import WriteTransaction
from ftlayer.vertex.store.rows import I64, U64, History, RowInfo, SingleRows
from ftlayer.vertex.store.streams import put_asked_pause_ms


@dataclass(slots=True)
class Moved:
    """Where rows went: keys of those ``waiting``, by root, roots of the ``dead``, how many holders are asked for."""

    waiting: dict[int, bytes] = field(default_factory=dict)
    dead: list[int] = field(default_factory=list)
    wanted: int = 0


class Failing:
    def __init__(self, state: ShardState) -> None:
        self._state = state

    def move_tracked(
        self,
        txn: WriteTransaction,
        roots: U64,
        locations: U64,
        causes: Sequence[Failure],
        now: Now,
        *,
        timed_out: bool = False,
    ) -> Moved:
        """Move rows of tracked segments, or want them of their holder; ``roots`` are of the attempts that ended."""
        moved = Moved()
        for segment, rows, positions in by_segment(locations):
            live = self._state.live.get(segment)
            if live is not None and live.source is not None:
                of_these = [causes[at] for at in positions]
                moved.wanted += self._want(live, rows, roots[positions], of_these, now, timed_out=timed_out)
                continue
            new = self._state.live.finish(segment, rows)
            if live is None or not new.any():
                continue
            rows, positions = rows[new], positions[new]
            live.stream.in_flight -= len(rows)
            if timed_out:
                live.stream.counters.timed_out += len(rows)
            else:
                live.stream.counters.failed_explicit += len(rows)
            taken = self._state.segments.rows(txn, segment, rows).with_roots(roots[positions])
            of_these = self._causes(live.stream, roots[positions], [causes[at] for at in positions], now)
            bodies = self._state.payloads.rows(txn, taken.payload)
            keys = [
                self.move(txn, live.stream, taken.info, bodies, row, cause, now)
                for row, cause in enumerate(of_these)
            ]
            for position, key in zip(positions.tolist(), keys, strict=True):
                if key is None:
                    moved.dead.append(int(roots[position]))
                else:
                    moved.waiting[int(roots[position])] = key
            if self._state.followed is not None:
                is_dead = [key is None for key in keys]
                self._state.followed.failed(roots[positions], of_these, is_dead, now)
            self._state.live.write_segment(txn, segment)
        return moved

    def _want(
        self, live: LiveSegment, rows: I64, roots: U64, causes: list[Failure], now: Now, *, timed_out: bool
    ) -> int:
        assert live.source is not None
        source = live.source
        new = [
            at for at, row in enumerate(rows.tolist()) if not source.done[row] and not source.is_wanted(row)
        ]
        if not timed_out:
            for row in rows.tolist():
                source.fail_timed_out(row)
        told = self._causes(live.stream, roots[new], [causes[at] for at in new], now)
        for at, cause in zip(new, told, strict=True):
            source.end(int(rows[at]), EndedRow(int(roots[at]), cause, timed_out))
        if timed_out:
            live.stream.counters.timed_out += len(new)
        else:
            live.stream.counters.failed_explicit += len(new)
        return len(new)

    def _causes(self, stream: Stream, roots: U64, causes: list[Failure], now: Now) -> list[Failure]:
        if not self._state.circuits.ended(stream, roots.tolist(), causes, now.mono_ms):
            return causes
        return [held(cause) for cause in causes]

    def _history(self, info: RowInfo, row: int, cause: Failure, now: Now) -> History:
        """Return the attempts of a record that has failed once more, whose tracebacks are held from here on."""
        texts = self._state.group.texts
        earlier = shortened(info.history(row))
        if earlier:
            texts.hold_all(earlier, info.texts)
        number = earlier[-1].number + 1 if earlier else 1
        return (*earlier, stored_attempt(number, now.wall_ms, cause, texts.hold))

    def move(
        self,
        txn: WriteTransaction,
        stream: Stream,
        info: RowInfo,
        bodies: SingleRows,
        row: int,
        cause: Failure,
        now: Now,
        *,
        body_row: int | None = None,
    ) -> bytes | None:
        """Store one failed row by itself; return its key if it waits, None if it is dead.

        ``row`` is its place in ``info``, and in ``bodies`` where ``body_row`` does not say otherwise.
        """
        origin, attempt = int(info.origins[row]), int(info.attempts[row])
        retry = next_attempt(stream.options, origin, attempt, cause, wall_ms=now.wall_ms)
        hashes, flat = failed.hashes_of(info.key_hashes, row)
        record = FailedRecord(
            root=int(info.roots[row]),
            origin=origin,
            attempt=retry.attempt if retry else attempt,
            key_hashes=hashes,
            flat_hashes=flat,
            history=self._history(info, row, cause, now),
            digest=bodies.digest,
            body=bodies.body(row if body_row is None else body_row),
            edit=info.edit(row),
        )
        if retry and (cause.after_ms or 0) > stream.longest_pause_ms:
            stream.asked_pause_ms = cause.after_ms or 0
            put_asked_pause_ms(txn, stream.number, stream.asked_pause_ms)
        if retry is None:
            stream.died_ms = max(stream.died_ms, now.wall_ms)
        time_ms = retry.not_before_ms if retry else stream.died_ms
        key = failed.key_of(stream.number, time_ms, self._state.new_serial())
        if retry is None:
            failed.put(txn, FailedTable.DEAD, key, record)
            self._state.dead_index.add(txn, key, record)
            stream.dead += 1
            stream.counters.dead += 1
            return None
        failed.put(txn, FailedTable.WAITING, key, record)
        stream.waiting += 1
        return key
