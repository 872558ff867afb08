"""Who has changed what: a line for each change that somebody asked for, written in the transaction of the change."""

from __future__ import annotations

from ftlayer.clock import Now
from ftlayer.errors import StoreDamagedError
from ftlayer.store import audit as table
from ftlayer.store.kv import ReadTransaction, WriteTransaction
from ftlayer.vertex.calls import AuditEntry, AuditPage, ListAudit

KEEP = 100_000
KEEP_MS = 90 * 24 * 3_600_000
TRIM_AT_ONCE = 1_000
MAX_TEXT = 500
"""Characters of ``which`` and ``outcome``."""


def note(
    txn: WriteTransaction, now: Now, *, who: str, what: str, which: str, count: int, outcome: str
) -> None:
    """Write a line; see `AuditEntry`."""
    table.put(txn, now.wall_ms, [who, what, which[:MAX_TEXT], count, outcome[:MAX_TEXT]])


def page(txn: ReadTransaction, call: ListAudit) -> AuditPage:
    """Return entries, the latest first."""
    entries: list[AuditEntry] = []
    for key, values in table.latest(txn, call.after):
        if len(entries) == call.limit:
            return AuditPage(tuple(entries), entries[-1].key)
        try:
            who, what, which, count, outcome = values
        except ValueError as error:
            raise StoreDamagedError(f"an entry of the audit log cannot be read: {error}") from error
        entries.append(AuditEntry(table.time_of(key), who, what, which, count, outcome, key))
    return AuditPage(tuple(entries), b"")


def trim(txn: WriteTransaction, now: Now) -> None:
    """Delete some of the entries that are too old or too many."""
    table.trim(txn, now.wall_ms - KEEP_MS, KEEP, TRIM_AT_ONCE)
