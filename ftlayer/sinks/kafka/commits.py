"""The rules by which messages are committed, each once: what a transaction holds, and what its mark says.

No I/O but by `Transactions`. The order is always this: fence off all others, read the marks, then produce what they do
not have, with new marks, in one transaction. What became of a transaction that was not answered is not asked of the
broker: it is begun anew with the fence, and the marks say it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ftlayer.errors import SinkError, UncommittableError
from ftlayer.sinks.kafka.marks import CommitMarks, Fate
from ftlayer.sinks.kafka.messages import KafkaMessage


@dataclass(frozen=True, slots=True)
class Mark:
    """An offset that is committed for a consumer group, with a text. Of two of a group the higher offset is newer."""

    offset: int
    text: str = ""


class Transactions(Protocol):
    """A transactional producer. Its errors are `SinkError`: what it was asked for may have come about or not."""

    def fence(self) -> None:
        """Become the one that may produce. What others have begun is aborted, and theirs fail from now on."""

    def read(self, group: str) -> Mark | None:
        """Return a group's newest mark; None: it has none."""

    def run(self, written: Sequence[KafkaMessage], marks: Mapping[str, Mark]) -> None:
        """Produce rows and write marks, in one transaction.

        Raises `UncommittableError` if rows are gone; nothing has happened then.
        """


class KafkaCommits:
    """Commits messages of the sink ``name``.

    The marks of an execution's messages are those of the groups ``ftlayer-<name>-<execution>``, ``…-1``, ``…-2`` and so
    on; that of a query is the group ``ftlayer-<name>-<query>``, whose offset is the number of its next batch.
    """

    def __init__(self, name: str, transactions: Transactions, remember_ms: int) -> None:
        """``remember_ms``: for how long brokers keep marks at least."""
        self._name = name
        self._transactions = transactions
        self._remember_ms = remember_ms

    def commit_messages(self, written: Iterable[KafkaMessage], now_ms: int) -> None:
        """Commit messages, but for those that are. Raises `UncommittableError`, and `SinkError`: it is unknown then."""
        self._transactions.fence()
        by_execution: dict[str, list[KafkaMessage]] = {}
        for message in written:
            by_execution.setdefault(message.execution, []).append(message)
        todo: list[KafkaMessage] = []
        marks: dict[str, Mark] = {}
        for execution, messages in by_execution.items():
            known, commits = self._known(execution)
            new = []
            for message in messages:
                if self._is_open(message, known, now_ms):
                    known.add(message.writer, message.number)
                    new.append(message)
            if new:
                todo += new
                texts = known.texts()
                groups = [self._group(execution, part) for part in range(len(texts))]
                marks |= {group: Mark(commits + 1, text) for group, text in zip(groups, texts, strict=True)}
        self._run(todo, marks)

    def commit_batch(self, query: str, batch: int, written: Sequence[KafkaMessage]) -> None:
        """Commit a batch of a query, if it was not. One that is run again has other messages, of the same rows."""
        self._transactions.fence()
        mark = self._transactions.read(self._group(query))
        if mark is None or mark.offset <= batch:
            self._run(written, {self._group(query): Mark(batch + 1)})

    def _run(self, written: Sequence[KafkaMessage], marks: Mapping[str, Mark]) -> None:
        if not written:
            return
        self._transactions.run(written, marks)
        for group, mark in marks.items():
            # A broker that has lost the transaction while it was restarted may answer that it is committed.
            if self._transactions.read(group) != mark:
                raise SinkError(
                    f"group {group!r}: the mark of a transaction is not there, though it was committed"
                )

    def _known(self, execution: str) -> tuple[CommitMarks, int]:
        """Return what is committed of an execution's messages, and the highest offset of its marks."""
        found: list[Mark] = []
        while (mark := self._transactions.read(self._group(execution, len(found)))) is not None:
            found.append(mark)
        try:
            known = CommitMarks(mark.text for mark in found)
        except ValueError as error:
            raise UncommittableError(
                f"group {self._group(execution)!r} has a mark that no KafkaSink has written: {error}"
            ) from error
        return known, max((mark.offset for mark in found), default=0)

    def _is_open(self, message: KafkaMessage, known: CommitMarks, now_ms: int) -> bool:
        """Whether it is to be produced. Raises `UncommittableError` if that cannot be said."""
        if message.sink != self._name:
            raise UncommittableError(
                f"{message.rows:,} rows were written by a sink with the name {message.sink!r}, and this one has "
                f"{self._name!r}: what is committed is known by the name, so keep it"
            )
        fate = known.fate(message.writer, message.number)
        if fate is Fate.FORGOTTEN or (fate is Fate.OPEN and now_ms - message.written_ms > self._remember_ms):
            raise UncommittableError(
                f"{message.rows:,} rows were written {(now_ms - message.written_ms) / 3_600_000:,.0f} hours ago, and "
                "it is not known any more whether they were committed (remember)"
            )
        return fate is Fate.OPEN

    def _group(self, owner: str, part: int = 0) -> str:
        return f"ftlayer-{self._name}-{owner}" + (f"-{part}" if part else "")
