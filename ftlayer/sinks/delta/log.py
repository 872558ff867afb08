"""The log of a Delta table: what is committed by it, and how more is."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from ftlayer.clients.delta import check_can_add, delta_library
from ftlayer.errors import UncommittableError
from ftlayer.sinks.delta.message import DeltaMessage
from ftlayer.sinks.fitting import is_held_by

HOUR_MS = 3_600_000
"""Clocks of slots and driver are at most so far apart, and application transactions are kept for longer."""

PAGES = (100, 1_000, None)
"""How many commits are looked through, newest first, before all that there are."""

RETENTION = "delta.setTransactionRetentionDuration"
ENTRY = "ftlayer"
"""Of the information about a commit: which messages it has, and of which checkpoint or batch."""


class DeltaLog:
    """The log as it was when it was read, or as `refresh` has found it; not for several threads at once.

    A commit for a writer (`WriterNumbers`) has the application transaction ``ftlayer-<writer>``, whose version is the
    highest number committed. A message with a higher one was never committed. One with a number up to it nearly
    always was; the information about commits has the names of their messages and decides.

    Two that commit for the same writer at once conflict: what is looked up here is still so when it is committed
    from here, or the commit fails.
    """

    def __init__(self, url: str, options: dict[str, str], place: str) -> None:
        """Read the log. Raises deltalake's errors."""
        self._table = delta_library().DeltaTable(url, storage_options=options or None, skip_stats=True)
        self._place = place
        self._pages: dict[int | None, list[dict[str, Any]]] = {}
        # Each look-up asks the storage. These hold for this version.
        self._known: dict[str, int | None] = {}
        check_can_add(self._table, place)

    def refresh(self) -> None:
        """Read what was committed since."""
        before = self.version
        self._table.update_incremental()
        if self.version != before:
            self._known = {}
        self._pages = {}
        check_can_add(self._table, self._place)

    @property
    def schema(self) -> pa.Schema:
        """The table's columns."""
        return pa.schema(self._table.schema())

    @property
    def partition_by(self) -> tuple[str, ...]:
        return tuple(self._table.metadata().partition_columns)

    @property
    def version(self) -> int:
        """The last commit that was read."""
        return int(self._table.version())

    def batch_of(self, query: str) -> int | None:
        """Return the last batch of a query that is committed."""
        return self._last(_query_id(query))

    def is_committed(self, message: DeltaMessage) -> bool:
        """Whether a message of a topology is committed; `UncommittableError` if nothing can tell any more."""
        last = self._last(_writer_id(message.writer))
        if (last is None or message.number > last) and not self._may_be_forgotten(message):
            return False
        found = self.has(message)
        if found is None:
            raise UncommittableError(
                f"{self._place}: whether rows that were staged {_days_ago(message)} are committed cannot be told any "
                "more: their files are not in the table, and its log does not reach back so far "
                "(delta.logRetentionDuration)"
            )
        return found

    def has(self, message: DeltaMessage) -> bool | None:
        """Whether a commit has just this message; None: the log does not reach back so far."""
        since = message.written_ms - HOUR_MS
        for most in PAGES:
            commits = self._commits(most)
            for commit in commits:
                if message.id in _messages_of(commit):
                    return True
                if commit.get("timestamp", since) < since:
                    return False
            if commits and commits[-1].get("version") == 0:
                return False
        live = set(self._table.file_uris())
        # What was compacted or deleted since is in neither.
        return True if any(uri.endswith(f"/{message.files[0].path}") for uri in live) else None

    def all_names(self) -> tuple[set[str], int]:
        """Return the names of all messages that the log has, and from when on it has them all (ms since 1970)."""
        commits = self._commits(None)
        names = {name for commit in commits for name in _messages_of(commit)}
        if not commits or commits[-1].get("version") == 0:
            return names, 0
        return names, int(commits[-1].get("timestamp", 1 << 62)) + HOUR_MS

    def check_takes(self, message: DeltaMessage) -> None:
        """Raise `UncommittableError` if the table has changed so that a message's files do not fit it any more."""
        then = pa.ipc.read_schema(pa.py_buffer(message.schema))
        now = {field.name: field for field in self.schema}
        gone = [
            field.name
            for field in then
            if field.name not in now or not is_held_by(field.type, now[field.name].type)
        ]
        if gone or message.partition_by != self.partition_by:
            changed = (
                f"column {gone[0]!r}" if gone else f"how it is partitioned ({', '.join(self.partition_by)})"
            )
            raise UncommittableError(
                f"{self._place} has changed since rows were staged for it: {changed}; change it back to commit them"
            )

    def add(self, messages: Iterable[DeltaMessage], query_batches: dict[str, int], number: int) -> None:
        """Commit messages, all of them or none. Raises deltalake's errors.

        ``number``: of the checkpoint or batch.
        """
        deltalake = delta_library()
        adding = list(messages)
        versions = {_query_id(query): batch for query, batch in query_batches.items()}
        for message in adding:
            if not message.query:
                name = _writer_id(message.writer)
                versions[name] = max(versions.get(name, 0), message.number, self._last(name) or 0)
        now_ms = time.time_ns() // 1_000_000
        self._table.create_write_transaction(
            [
                deltalake.transaction.AddAction(
                    file.path, file.size, dict(file.partition_values), message.written_ms, True, file.stats
                )
                for message in adding
                for file in message.files
            ],
            "append",
            self._table.schema(),
            list(self.partition_by),
            commit_properties=deltalake.CommitProperties(
                custom_metadata={ENTRY: {"number": number, "messages": [message.id for message in adding]}},
                app_transactions=[
                    deltalake.Transaction(name, version, now_ms) for name, version in versions.items()
                ],
            ),
        )
        before, known = self.version, self._known | versions
        self.refresh()
        if self.version == before + 1:  # There is no commit of others.
            self._known = known

    def _last(self, name: str) -> int | None:
        """Return the version of an application transaction; None: there is none."""
        if name not in self._known:
            self._known[name] = self._table.transaction_version(name)
        return self._known[name]

    def _commits(self, most: int | None) -> list[dict[str, Any]]:
        """Return what the log says about the last commits, newest first."""
        if most not in self._pages:
            self._pages[most] = self._table.history(most)
        return self._pages[most]

    def _may_be_forgotten(self, message: DeltaMessage) -> bool:
        # Without this property all application transactions are kept for good.
        has_end = RETENTION in self._table.metadata().configuration
        return has_end and time.time_ns() // 1_000_000 - message.written_ms > HOUR_MS


def _writer_id(writer: str) -> str:
    return f"ftlayer-{writer}"


def _query_id(query: str) -> str:
    return f"ftlayer-query-{query}"


def _messages_of(commit: dict[str, Any]) -> list[str]:
    entry = commit.get(ENTRY)
    messages = entry.get("messages") if isinstance(entry, dict) else None
    return messages if isinstance(messages, list) else []


def _days_ago(message: DeltaMessage) -> str:
    days = (time.time_ns() // 1_000_000 - message.written_ms) / 86_400_000
    return f"{days:,.1f} days ago"
