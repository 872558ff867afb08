"""The undo log of a chain: what takes back the changes that its functions have made to state, the latest first.

It lives until the results of the functions have gone their way, since a record may fail late: where its result becomes
an Arrow column, behind a function a batch at a time, where a partitioner is asked. The chain then begins again
(`ftlayer.functions.undo.log`).

Anchors: undo logs of databases (Mohan et al., ARIES, ACM TODS 17(1), 1992), here of logical operations, in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import numpy as np

from ftlayer.common.printable import described
from ftlayer.errors import StateSerializationError
from ftlayer.functions.failures import I64
from ftlayer.functions.keyed import is_immutable, private_copy
from ftlayer.records.failures import RowFailure

Restore = Callable[[Any, Any], object]
"""``restore(key, old)`` makes what ``key`` names what it was before one change."""


class LateFailure(Exception):  # noqa: N818 - no error: it turns the chain round
    """A record failed, and its changes are mixed with those of records behind it: all are taken back.

    Attributes:
        row: the input row.
    """

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


class Changes(Protocol):
    """Where tables note what functions do: an `UndoLog`, or one without copies.

    Attributes:
        add, entries: see `UndoLog`.
    """

    entries: list[Any]
    add: Callable[[tuple[Restore, Any, Any]], None]

    @property
    def copies(self) -> bool:
        """Whether `read` does anything."""

    def read(self, restore: Restore, key: Any, value: Any, where: Hashable) -> None:
        """See `UndoLog.read`."""


class UndoLog:
    """Changes of state, in their order. One serves all functions of one chain, in one thread.

    Attributes:
        entries: restore, key and old value of each change, one behind the other: so many tuples would keep Python's
            garbage collector busy. Its length is a mark for `fail`. It stays the same list.
        add: takes ``(restore, key, old)``, before the change or right behind it.
        copies: see `Changes`.
        alone: the log is of one record, so that a late failure turns nothing round.
        traced: failures are to have their tracebacks: that a failing record is tried again may be all of it.
    """

    copies = True
    __slots__ = ("_copied", "_is_mixed", "add", "alone", "entries", "traced")

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.add: Callable[[tuple[Restore, Any, Any]], None] = self.entries.extend
        self.alone = False
        self.traced = True
        # Where something lies that can be changed in place, and was copied: the place of the copy in the log.
        self._copied: dict[Hashable, int] = {}
        self._is_mixed = False

    @property
    def has_changes(self) -> bool:
        return bool(self.entries)

    def begin_segment(self) -> None:
        """The functions that share a loop begin: what is in the log now, others have changed."""
        self._is_mixed = self.has_changes

    def read(self, restore: Restore, key: Any, value: Any, where: Hashable) -> None:
        """A function reads ``value``, and may change it in place: the first time in a batch a copy is kept.

        ``where`` names the place of the value, ``restore(key, copy)`` puts the copy there. Raises
        `StateSerializationError` for what cannot be copied.
        """
        if is_immutable(value):
            return
        copied = self._copied.get(where)
        if copied is not None:
            self.add((_read_again, copied, None))
            return
        try:
            copy = private_copy(value)
        except BaseException as error:
            raise StateSerializationError(
                f"the state of the key {key!r:.100} holds a {type(value).__name__} that cannot be copied "
                f"({described(error)}), so what a failing record does to it could not be "
                "taken back; keep values that can be copied, or say in_place=False where the function changes none "
                "in place"
            ) from error
        self._copied[where] = len(self.entries)
        self.add((restore, key, copy))

    def fail(self, mark: int, row: int) -> None:
        """The functions of one loop have failed for ``row``: take its changes back, all behind ``mark``.

        Raises `LateFailure` if it changed something elsewhere too: in an earlier loop, or in place, in what another
        record of the batch had read before.
        """
        mixed = self._is_mixed or self._read_again_behind(mark)
        self._undo(mark)
        if mixed and not self.alone:
            raise LateFailure(row)

    def _read_again_behind(self, mark: int) -> bool:
        """Whether something was read behind ``mark`` whose copy is before it."""
        if not self._copied:
            return False
        kinds, copies = self.entries[mark::3], self.entries[mark + 1 :: 3]
        return any(kind is _read_again and copied < mark for kind, copied in zip(kinds, copies, strict=True))

    def late(self, row: int) -> None:
        """A result of ``row`` is refused behind all loops. Raises `LateFailure` if any record has changed something."""
        if self.has_changes and not self.alone:
            raise LateFailure(row)

    def refused(self, failures: Iterable[RowFailure], parents: I64, *, mixed: bool) -> None:
        """These failed, and changed nothing themselves.

        Raises `LateFailure` if more may have been changed for one of them: by an earlier loop (``mixed``), or as
        ``parents``, what each record of this one comes from, has it twice.
        """
        for failure in () if self.alone else failures:
            if mixed or np.count_nonzero(parents == failure.row) > 1:
                raise LateFailure(failure.row)

    def undo(self) -> None:
        self._undo(0)
        self._is_mixed = False

    def forget(self) -> None:
        self.entries.clear()
        self._copied.clear()
        self._is_mixed = False

    def _undo(self, mark: int) -> None:
        entries = self.entries
        while len(entries) > mark:
            old, key, restore = entries.pop(), entries.pop(), entries.pop()
            restore(key, old)
        copied = self._copied
        while copied and next(reversed(copied.values())) >= mark:
            copied.popitem()


class Uncopied:
    """A log's way in for functions that change no value in place: what they read is not copied."""

    copies = False

    def __init__(self, log: UndoLog) -> None:
        self.entries = log.entries
        self.add = log.add

    def read(self, restore: Restore, key: Any, value: Any, where: Hashable) -> None:
        """See `UndoLog.read`: nothing has to be kept."""


def _read_again(copied: int, _: object) -> None:
    """Stand in the log for one more read of what lies copied at that place in it: nothing to restore."""


# Work that is done in pieces where a part of it fails late, so that the part fails alone.
#
# Behind a late failure nothing is known of the records that came after it: they may have seen what it changed. So all
# is taken back; the records before it run again, then it alone, then the others in pieces that grow. A record that
# does not fail so runs about three times where many fail late, and mostly once; what its functions do outside of
# state is done as often.


FIRST_SIZE = 16
"""Records in the piece behind one that failed late …"""

GROWTH = 4
"""… and how much larger the next one is."""


class PieceOfWork(Protocol):
    @property
    def size(self) -> int:
        """How many records, or timers, it took."""

    @property
    def has_failures(self) -> bool:
        """Whether one of them failed."""


Result = TypeVar("Result", bound=PieceOfWork)


def in_pieces(
    log: UndoLog, size: int, run: Callable[[int, int], Result | None]
) -> Iterator[tuple[int, Result]]:
    """Run so many records together if none fails late; give what comes of each piece, and where it begins.

    ``run(start, most)`` runs up to ``most`` records, and returns None if there are no more. It may raise `LateFailure`
    with the place of a record from ``start`` on. When a piece is given, what its records that failed have changed is
    taken back, and what the others have changed stays.
    """
    start = 0
    culprit: int | None = None
    while True:
        log.alone = size == 1
        try:
            piece = run(start, size)
        except LateFailure as late:
            log.undo()
            culprit = late.row
            size = max(culprit - start, 1)
            continue
        if piece is None:
            log.forget()
            return
        if log.alone and piece.has_failures:
            log.undo()
        log.forget()
        yield start, piece
        start += piece.size
        size = 1 if start == culprit else max(size * GROWTH, FIRST_SIZE)
