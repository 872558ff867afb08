"""What is committed, in the table's own properties: they change in the commit that adds the rows.

| property | value |
| --- | --- |
| ``ftlayer.commits.<writer>`` | when the last was, and which numbers are committed: ``1795443368603 1-57,60`` |
| ``ftlayer.commits.query-<id>`` | when it was, the last batch, and its messages: ``1795443368603 12 a-1,b-1`` |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ftlayer.errors import UncommittableError
from ftlayer.sinks.iceberg.message import IcebergMessage

PREFIX = "ftlayer.commits."
HOUR_MS = 3_600_000
"""Clocks of slots and driver are at most so far apart."""

_WRITER = re.compile(r"(\d+) (\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)")
_QUERY = re.compile(r"(\d+) (\d+) (\S*)")


class Commits:
    """What the properties of a table say, and what they are to say."""

    def __init__(self, properties: Mapping[str, str], remember_ms: int, now_ms: int, place: str) -> None:
        """Read them. ``remember_ms``: for how long a writer, or a query, is known behind its last commit."""
        self._properties = {name: value for name, value in properties.items() if name.startswith(PREFIX)}
        self._remember_ms = remember_ms
        self._now_ms = now_ms
        self._place = place

    def is_committed(self, message: IcebergMessage) -> bool:
        """Whether a message of a topology is committed; `UncommittableError` if that is forgotten."""
        name = _writer_name(message.writer)
        known = self._numbers(name) if name in self._properties else []
        if any(first <= message.number <= last for first, last in known):
            return True
        # What is forgotten was committed long ago, so it was written before.
        if message.written_ms < self._now_ms - self._remember_ms + HOUR_MS:
            raise UncommittableError(
                f"{self._place}: rows were staged longer ago than remember says, so whether they are committed is not "
                "known any more; give the sink a longer time before you take checkpoints to keep"
            )
        return False

    def batch_of(self, query: str) -> int | None:
        """Return the last batch of a query that is committed."""
        value = self._properties.get(_query_name(query))
        return None if value is None else int(self._read(_QUERY, _query_name(query))[2])

    def is_batch_with(self, message: IcebergMessage) -> bool:
        """Whether the last batch of the message's query has this message."""
        name = _query_name(message.query)
        return name in self._properties and message.id in self._read(_QUERY, name)[3].split(",")

    def with_messages(self, messages: Iterable[IcebergMessage], batch: int) -> dict[str, str]:
        """Return the properties that change when these are committed."""
        numbers: dict[str, set[int]] = {}
        batches: dict[str, list[str]] = {}
        for message in messages:
            if message.query:
                batches.setdefault(_query_name(message.query), []).append(message.id)
            else:
                numbers.setdefault(_writer_name(message.writer), set()).add(message.number)
        changed = {name: f"{self._now_ms} {batch} {','.join(ids)}" for name, ids in batches.items()}
        for name, more in numbers.items():
            known = self._numbers(name) if name in self._properties else []
            changed[name] = f"{self._now_ms} {_spelled([*known, *((one, one) for one in more)])}"
        return changed

    def forgotten(self) -> list[str]:
        """Return the names of properties that are to be removed."""
        horizon_ms = self._now_ms - self._remember_ms - HOUR_MS
        return [
            name for name, value in self._properties.items() if int(value.partition(" ")[0] or 0) < horizon_ms
        ]

    def _numbers(self, name: str) -> list[tuple[int, int]]:
        found = []
        for span in self._read(_WRITER, name)[2].split(","):
            first, _, last = span.partition("-")
            found.append((int(first), int(last or first)))
        return found

    def _read(self, pattern: re.Pattern[str], name: str) -> re.Match[str]:
        match = pattern.fullmatch(self._properties[name])
        if match is None:
            raise UncommittableError(
                f"{self._place}: the property {name!r}, which says what is committed, was changed to "
                f"{self._properties[name]!r}"
            )
        return match


def _spelled(spans: Iterable[tuple[int, int]]) -> str:
    joined: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in joined)


def _writer_name(writer: str) -> str:
    return f"{PREFIX}{writer}"


def _query_name(query: str) -> str:
    return f"{PREFIX}query-{query}"
