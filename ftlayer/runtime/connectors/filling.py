"""A batch that one thread collects from an iterator, and that another one may cut off at any time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import pyarrow as pa

from ftlayer.records.kernels import native
from ftlayer.runtime.connectors.rows import Misfit, RowMaker

_NOTHING: dict[None, Any] = {}


class Filling(Protocol):
    """Records that are being collected."""

    @property
    def left(self) -> list[Any]:
        """Return, behind `collect`, records that were read and are not in the batch: they begin the next one."""

    def collect(self, iterator: Iterator[Any]) -> bool:
        """Collect up to the limit, or until `interrupt`; return whether the iterator is known to have ended.

        Raises what the iterator raises; what came before is in.
        """

    def interrupt(self) -> None:
        """Have `collect` come back with the next record; any thread."""

    def cut(self) -> list[pa.RecordBatch | Misfit]:
        """Interrupt it, and take the records that have come, once; any thread."""


class PlainFilling:
    """Records become columns as they come, in C. `collect` ends also before a record that is not plain."""

    def __init__(self, maker: RowMaker, collector: native.RecordCollector) -> None:
        self._maker = maker
        self._collector = collector
        self.left: list[Any] = []

    def collect(self, iterator: Iterator[Any]) -> bool:
        self.left = self._collector.collect(iterator)
        return self._collector.ended

    def interrupt(self) -> None:
        self._collector.interrupt()

    def cut(self) -> list[pa.RecordBatch | Misfit]:
        return [self._maker.collected(self._collector)]


class RecordFilling:
    """Records of any kind, as Python objects.

    The list is filled by one call in C: ``rows.extend(map({}.get, tokens, iterator))`` yields the iterator's items as
    they are, one for each token, and asks for the token first. Without tokens the call comes back.
    """

    def __init__(self, maker: RowMaker, rows: Sequence[Any], limit: int) -> None:
        self._maker = maker
        self._rows = list(rows)
        self._taken = 0
        self._tokens: list[None] = [None] * (limit - len(rows))
        self._room = len(self._tokens)

    @property
    def left(self) -> list[Any]:
        return self._rows[self._taken :] if self._taken else []

    def collect(self, iterator: Iterator[Any]) -> bool:
        before = len(self._rows)
        self._rows.extend(map(_NOTHING.get, iter(self._tokens), iterator))
        return len(self._tokens) == self._room and len(self._rows) - before < self._room

    def interrupt(self) -> None:
        self._tokens.clear()

    def cut(self) -> list[pa.RecordBatch | Misfit]:
        self.interrupt()
        rows = self._rows[:]
        self._taken = len(rows)
        return self._maker.parts(rows)
