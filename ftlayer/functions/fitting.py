"""Results to Arrow, where some of them may not fit the schema: halves are tried, so that just the culprits fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from ftlayer.functions.conversion import Form, concat, to_batch
from ftlayer.functions.failures import raise_signalled


def convert(
    rows: Sequence[Any],
    counts: Sequence[int],
    schema: pa.Schema,
    form: Form,
    fail: Callable[[int, BaseException], None],
    *,
    lax: bool = False,
) -> tuple[pa.RecordBatch, Sequence[int]]:
    """Convert ``rows``, of which ``counts`` says how many belong together; one that does not fit fails its like.

    ``lax`` as for `to_batch`. Calls ``fail(place in counts, error)`` for them, in ascending order. Returns what fits,
    and ``counts`` with 0 for what does not.
    """
    try:
        return to_batch(rows, schema, form, lax=lax), counts
    except BaseException as error:  # noqa: BLE001 - anything may be among what a user's function returned
        raise_signalled(error)
        search = _Search(schema, form, fail, lax=lax)
        search.halves(rows, counts, 0)
        return concat(search.good, schema), search.kept


class _Search:
    """The search for what does not fit."""

    def __init__(
        self, schema: pa.Schema, form: Form, fail: Callable[[int, BaseException], None], *, lax: bool
    ) -> None:
        self.good: list[pa.RecordBatch] = []
        self.kept: list[int] = []
        self._schema = schema
        self._form = form
        self._fail = fail
        self._lax = lax

    def halves(self, rows: Sequence[Any], counts: Sequence[int], first: int) -> None:
        half = (len(counts) + 1) // 2
        cut = sum(counts[:half])
        self._part(rows[:cut], counts[:half], first)
        if half < len(counts):
            self._part(rows[cut:], counts[half:], first + half)

    def _part(self, rows: Sequence[Any], counts: Sequence[int], first: int) -> None:
        try:
            self.good.append(to_batch(rows, self._schema, self._form, lax=self._lax))
            self.kept += counts
        except BaseException as error:  # noqa: BLE001 - as above
            raise_signalled(error)
            if len(counts) > 1:
                self.halves(rows, counts, first)
            else:
                self._fail(first, error)
                self.kept.append(0)
