"""Dead letters by group: those of one stream whose last attempt failed in one operator for one kind of reason.

A reason's *kind* is the reason without what differs from letter to letter: quoted text, numbers, ids. The index follows
each letter that dies or goes, in the same transaction. An index that is not there yet, or was made by other rules, is
built by ticks, beside the work: what dies or goes meanwhile is counted if it is in front of the mark that they have
reached, and found by them if it is behind.
"""

from __future__ import annotations

import functools
import re

from ftlayer.common.clock import Now
from ftlayer.errors import StoreDamagedError
from ftlayer.vertex.calls import DeadGroup, GroupList
from ftlayer.vertex.store import dead_index
from ftlayer.vertex.store import dead_index as failed
from ftlayer.vertex.store.dead_index import FailedRecord, FailedTable, GroupRecord, IndexState
from ftlayer.vertex.store.key_value import ReadTransaction, WriteTransaction

RULES = 1
"""The rules of `kind_of`: an index that was made by others is made anew."""

MAX_GROUPS = 2_000
"""So many groups has a stream; what comes beyond is in one more, "(other)"."""

MAX_SHOWN = 2_000
"""So many groups, the largest, are in an answer."""

MAX_KIND = 160

# Calls wait for a tick: 12 ms for these.
BUILD_AT_ONCE = 500
BUILD_EVERY_MS = 50

_OTHER = 0
_OTHER_KIND = "(other)"
_LEFT_OUT = "…"

_PART = re.compile(
    r"""(?<!\w)'[^']*'|"[^"]*"|`[^`]*`"""
    r"|\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
    r"|\b[^\W\d]*\d\w*"
)
_RUN = re.compile(f"{_LEFT_OUT}(?:[-.:,/+]{_LEFT_OUT})+")
_NUMBERED = re.compile(r"([^\W\d]+)\d+")
_HEX = re.compile(r"[0-9a-fA-F]{8,}")


@functools.lru_cache(4_096)
def kind_of(reason: str) -> str:
    """Return a reason without quoted text, numbers and ids (``worker-7`` keeps ``worker``), `MAX_KIND` characters."""
    return _RUN.sub(_LEFT_OUT, _PART.sub(_general, " ".join(reason.split())))[:MAX_KIND]


def _general(match: re.Match[str]) -> str:
    part = match.group()
    numbered = _NUMBERED.fullmatch(part)
    return numbered.group(1) + _LEFT_OUT if numbered and not _HEX.fullmatch(part) else _LEFT_OUT


class DeadIndex:
    """The index of a shard's dead letters: its groups in memory, its letters in the store, by `write`."""

    def __init__(self) -> None:
        self._state = IndexState(RULES, _OTHER + 1, None)
        self._is_stored = False
        self._groups: dict[int, dict[tuple[str, str], GroupRecord]] = {}
        self._dirty: dict[tuple[int, int], GroupRecord] = {}
        # Groups whose example was taken away.
        self._without_example: set[tuple[int, int]] = set()
        self._built_ms = 0
        self._new = dead_index.NewLetters()

    def recover(self, txn: ReadTransaction) -> None:
        state = dead_index.get_state(txn)
        self._is_stored = state is not None
        if state is not None:
            self._state = state
        elif txn.count(FailedTable.DEAD):
            self._state = IndexState(RULES, _OTHER + 1, b"")
        if self._state.rules == RULES:
            for group in dead_index.all_groups(txn):
                self._of(group.stream)[group.operator, group.kind] = group

    @property
    def is_built(self) -> bool:
        return self._state.rules == RULES and self._state.built is None

    def add(self, txn: WriteTransaction, key: bytes, record: FailedRecord) -> None:
        """Follow a letter that died, if the index has come to its place."""
        if self._covers(key):
            self._add(txn, key, record)

    def remove(self, txn: WriteTransaction, key: bytes, record: FailedRecord) -> None:
        if not self._covers(key):
            return
        self._new.write(txn)
        stream = failed.stream_of(key)
        group = self._of(stream).get(_group_name(record))
        if group is None or not dead_index.delete_letter(txn, stream, group.number, key, record):
            # It died when there were too many groups for one of its own.
            group = self._of(stream)["", _OTHER_KIND]
            dead_index.delete_letter(txn, stream, _OTHER, key, record)
        group.count -= 1
        self._dirty[stream, group.number] = group
        if record.history[-1].reason == group.example:
            self._without_example.add((stream, group.number))

    def write(self, txn: WriteTransaction) -> None:
        if not self._dirty:
            return
        self._new.write(txn)
        if not self._is_stored:
            self._put_state(txn, self._state)
        for (stream, number), group in self._dirty.items():
            if group.count:
                first = next(dead_index.letters_of_group(txn, stream, number))
                last = next(dead_index.letters_of_group(txn, stream, number, reverse=True))
                group.first_ms, group.last_ms = failed.time_of(first), failed.time_of(last)
                if (stream, number) in self._without_example:
                    group.example = _reason_of(txn, first)
                dead_index.put_group(txn, group)
            else:
                del self._of(stream)[group.operator, group.kind]
                dead_index.delete_group(txn, stream, number)
        self._dirty.clear()
        self._without_example.clear()

    def _covers(self, key: bytes) -> bool:
        if self._state.rules != RULES:
            return False
        return self._state.built is None or key <= self._state.built

    def _add(self, txn: WriteTransaction, key: bytes, record: FailedRecord) -> None:
        stream = failed.stream_of(key)
        group = self._group_for(txn, stream, record)
        group.count += 1
        self._new.add(stream, group.number, key, record)
        self._dirty[stream, group.number] = group

    def _group_for(self, txn: WriteTransaction, stream: int, record: FailedRecord) -> GroupRecord:
        groups, name = self._of(stream), _group_name(record)
        group = groups.get(name)
        if group is not None:
            return group
        number = self._state.next_group
        # The numbers of groups that are gone are not given out again: a tool may still name one.
        if len(groups) >= MAX_GROUPS:
            name, number = ("", _OTHER_KIND), _OTHER
        else:
            self._put_state(txn, IndexState(RULES, number + 1, self._state.built))
        return groups.setdefault(name, GroupRecord(stream, number, *name, record.history[-1].reason))

    def _of(self, stream: int) -> dict[tuple[str, str], GroupRecord]:
        return self._groups.setdefault(stream, {})

    def tick(self, txn: WriteTransaction, now: Now) -> None:
        due_ms = self.next_tick_ms(now)
        if due_ms is None or due_ms > now.mono_ms:
            return
        self._built_ms = now.mono_ms
        if self._state.rules != RULES:
            if dead_index.clear(txn, BUILD_AT_ONCE):
                self._put_state(txn, IndexState(RULES, self._state.next_group, b""))
            return
        assert self._state.built is not None
        built = self._state.built
        letters = 0
        for found, value in txn.scan(FailedTable.DEAD, built + b"\0"):
            if letters == BUILD_AT_ONCE:
                break
            built = bytes(found)
            self._add(txn, built, failed.decode(value))
            letters += 1
        self._put_state(
            txn, IndexState(RULES, self._state.next_group, built if letters == BUILD_AT_ONCE else None)
        )

    def next_tick_ms(self, now: Now) -> int | None:
        """Return the monotone time (ms) at which `tick` has something to do; None when it is built."""
        return None if self.is_built else min(self._built_ms + BUILD_EVERY_MS, now.mono_ms + BUILD_EVERY_MS)

    def _put_state(self, txn: WriteTransaction, state: IndexState) -> None:
        self._state, self._is_stored = state, True
        dead_index.put_state(txn, state)

    def groups(self, txn: ReadTransaction, streams: dict[int, str]) -> GroupList:
        """Return the groups of streams, given by number and name: the largest first."""
        groups = [group for stream in streams for group in self._groups.get(stream, {}).values()]
        groups.sort(key=lambda group: (-group.count, group.stream, group.number))
        dead = txn.count(FailedTable.DEAD)
        indexed = sum(group.count for each in self._groups.values() for group in each.values())
        return GroupList(
            tuple(_shown(group, streams[group.stream]) for group in groups[:MAX_SHOWN]),
            1.0 if self.is_built else indexed / max(dead, 1),
            max(len(groups) - MAX_SHOWN, 0),
        )


def _reason_of(txn: ReadTransaction, key: bytes) -> str:
    record = failed.get(txn, FailedTable.DEAD, key)
    if record is None:
        raise StoreDamagedError(f"the index of dead letters names {key.hex()}, and there is no such letter")
    return record.history[-1].reason


def _group_name(record: FailedRecord) -> tuple[str, str]:
    last = record.history[-1]
    return last.operator, kind_of(last.reason)


def _shown(group: GroupRecord, stream: str) -> DeadGroup:
    return DeadGroup(
        stream,
        group.number,
        group.operator,
        group.kind,
        group.example,
        group.count,
        group.first_ms,
        group.last_ms,
    )
