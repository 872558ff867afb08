"""`SelectRecords` and `ListRecords`: records of any state by what they are, in bounded steps."""

from __future__ import annotations

from collections.abc import Iterator

from ftlayer.records.sought import says
from ftlayer.store.kv import ReadTransaction
from ftlayer.vertex.calls import (
    MAX_EXAMINED,
    MAX_PAGE_BYTES,
    ListRecords,
    RecordInfo,
    RecordList,
    RecordPage,
    SelectRecords,
)
from ftlayer.vertex.rules.names import belongs_to
from ftlayer.vertex.rules.state import ShardState
from ftlayer.vertex.rules.walked import Record
from ftlayer.vertex.rules.walking import NEVER_MS, PASSED_AT_ONCE, PassedRows, Span, Walks


def select(state: ShardState, txn: ReadTransaction, call: SelectRecords) -> RecordPage:
    """Return a page: it ends with the limit, with `MAX_EXAMINED` records, or with `MAX_PAGE_BYTES` of payload."""
    span = _span(state, call)
    wanted = _Wanted(call, span)
    keys: list[bytes] = []
    infos: list[RecordInfo] = []
    size = 0
    last = b""
    examined = passed = 0
    for record in _candidates(state, txn, call, span):
        if examined + passed >= MAX_EXAMINED or len(keys) == call.limit or size >= MAX_PAGE_BYTES:
            return RecordPage(tuple(infos), tuple(keys), examined, last)
        last = record.key
        if isinstance(record, PassedRows):
            passed += PASSED_AT_ONCE
            continue
        examined += 1
        if not wanted(record):
            continue
        keys.append(record.key)
        if not call.keys_only:
            info = record.info()
            infos.append(info)
            size += info.payload.nbytes + sum(len(each.traceback) for each in info.history)
    return RecordPage(tuple(infos), tuple(keys), examined, b"")


def listed(state: ShardState, txn: ReadTransaction, call: ListRecords) -> RecordList:
    """Return a page of all records in a state: it ends as that of `select` does."""
    page = select(state, txn, SelectRecords(call.state, call.stream, limit=call.limit, after=call.after))
    return RecordList(page.records, page.more)


class _Wanted:
    """What a call asks of single records."""

    def __init__(self, call: SelectRecords, span: Span) -> None:
        self._span = span
        self._operator = call.operator
        self._root = call.root
        self._text = call.text
        self._bytes = call.text.encode()

    def __call__(self, record: Record) -> bool:
        if record.stream.number not in self._span.numbers:
            return False
        if not self._span.since_ms <= record.time_ms < self._span.until_ms:
            return False
        if self._root and self._root not in (record.root, record.origin):
            return False
        if self._operator and record.last_failure[1] != self._operator:
            return False
        return not self._text or self._says(record)

    def _says(self, record: Record) -> bool:
        reason, operator = record.last_failure
        if self._text in reason or self._text in operator:
            return True
        return record.may_say(self._bytes) and says(record.payload(), self._bytes)


def _span(state: ShardState, call: SelectRecords) -> Span:
    streams = [
        stream
        for _, stream in sorted(state.numbers.items())
        if not call.stream or belongs_to(stream, call.stream)
    ]
    is_picky = bool(call.operator or call.text or call.root)
    most = MAX_EXAMINED if is_picky else min(call.limit, MAX_EXAMINED) + 1
    return Span(streams, call.after, most, call.since_ms, call.until_ms or NEVER_MS)


def _candidates(
    state: ShardState, txn: ReadTransaction, call: SelectRecords, span: Span
) -> Iterator[Record | PassedRows]:
    """Return the records that can be wanted, in the fewest steps that lead to them."""
    walks = Walks(state, txn)
    if call.keys:
        return walks.at_keys(call.state, [key for key in call.keys if key > call.after])
    if call.state == "dead":
        return _dead_candidates(state, walks, call, span)
    if call.state == "pending" and call.root and not call.after:
        tracked = list(walks.pending_root(call.root))
        if tracked:
            return iter(tracked)
    return walks.records(call.state, span)


def _dead_candidates(
    state: ShardState, walks: Walks, call: SelectRecords, span: Span
) -> Iterator[Record | PassedRows]:
    if call.group >= 0:
        stream = state.find_stream(call.stream)
        return (
            iter(()) if stream is None else walks.dead_of_group(span, stream, call.group, newest=call.newest)
        )
    if call.root and state.dead_index.is_built:
        return walks.dead_of_root(call.root, call.after)
    return walks.newest_dead(span) if call.newest else walks.records("dead", span)
