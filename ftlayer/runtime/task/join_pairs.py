"""The user's function of a join, called for each pair that matches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ftlayer.functions.conversion import VALUES, concat, to_batch
from ftlayer.functions.failures import RowFailure, failure_of, raise_signalled
from ftlayer.printable import text_of
from ftlayer.records.ids import I64Array
from ftlayer.runtime.task.lineages import BoolArray
from ftlayer.topology.operators import Join


@dataclass(frozen=True)
class Paired:
    """The results of pairs.

    Attributes:
        payload: the results of the pairs whose two records are both unharmed, in the order of the pairs.
        pairs: int64[k], which pairs these are.
        failed_left, failed_right: why records failed, by their place among those given; first failures only.
    """

    payload: pa.RecordBatch
    pairs: I64Array
    failed_left: dict[int, RowFailure]
    failed_right: dict[int, RowFailure]


@dataclass(slots=True)
class Calls:
    """How many pairs the function was called for, the one it works on included. Any thread may look."""

    begun: int = 0


def pair_up(
    operator: Join,
    left: Sequence[Any],
    left_of: I64Array,
    right: Sequence[Any],
    right_of: I64Array,
    calls: Calls,
    acknowledged: int | None = None,
) -> Paired:
    """Call the function for ``left[left_of[i]]`` and ``right[right_of[i]]``, for each i, and count in ``calls``.

    Where it raises, or returns what does not fit the schema, both records fail, and no pair of theirs gives a
    result any more; a record that Python cannot hold (an `Exception` in its place) fails alone.

    Records of the side ``acknowledged`` (0: left, 1: right) do not fail: their other pairs give results. With one
    of them that Python cannot hold, no pair gives one, and nothing fails.
    """
    results: list[Any] = []
    pairs: list[int] = []
    failed_left: dict[int, RowFailure] = {}
    failed_right: dict[int, RowFailure] = {}
    function = operator.function

    def fail(a: int, b: int, error: BaseException, *, ours: bool = True, theirs: bool = True) -> None:
        ours, theirs = ours and acknowledged != 0, theirs and acknowledged != 1
        if not (ours or theirs):
            return
        failure = failure_of(0, operator.uid, error, operator.rules)
        if ours:
            failed_left.setdefault(a, failure)
        if theirs:
            failed_right.setdefault(b, failure)

    for pair, (a, b) in enumerate(zip(left_of.tolist(), right_of.tolist(), strict=True)):
        calls.begun += 1
        if a in failed_left or b in failed_right:
            continue
        x, y = left[a], right[b]
        if isinstance(x, Exception):
            fail(a, b, x, theirs=False)
        elif isinstance(y, Exception):
            fail(a, b, y, ours=False)
        else:
            try:
                results.append(function(x, y))
                pairs.append(pair)
            except BaseException as error:  # noqa: BLE001 - whatever a user's function raises fails its records
                fail(a, b, error)

    kept: I64Array = np.array(pairs, np.int64)
    try:
        payload = to_batch(results, operator.schema, VALUES, lax=operator.rules.lax)
    except BaseException as error:  # noqa: BLE001 - anything may be among what a user's function returned
        raise_signalled(error)
        good = []
        fits = np.zeros(len(results), np.bool_)
        for place, (pair, result) in enumerate(zip(pairs, results, strict=True)):
            try:
                good.append(to_batch([result], operator.schema, VALUES, lax=operator.rules.lax))
                fits[place] = True
            except BaseException as error:  # noqa: BLE001 - as above
                raise_signalled(error)
                misfit = TypeError(
                    f"what {operator.uid!r} returned does not fit its schema: {text_of(error)}; "
                    f"{VALUES.expected(operator.schema)}"
                )
                fail(int(left_of[pair]), int(right_of[pair]), misfit)
        payload = concat(good, operator.schema)
        kept = kept[fits]
    if failed_left or failed_right:
        unharmed = ~(_among(left_of[kept], failed_left) | _among(right_of[kept], failed_right))
        payload = payload.filter(pa.array(unharmed))
        kept = kept[unharmed]
    return Paired(payload, kept, failed_left, failed_right)


def without(
    paired: Paired,
    left_of: I64Array,
    right_of: I64Array,
    failures: Sequence[RowFailure],
    acknowledged: int | None = None,
) -> tuple[Paired, BoolArray]:
    """Fail both records of some results (``row`` counts in them); return also which results are left.

    Records of the side ``acknowledged`` do not fail, as in `pair_up`.
    """
    failed_left, failed_right = dict(paired.failed_left), dict(paired.failed_right)
    for failure in failures:
        pair = paired.pairs[failure.row]
        if acknowledged != 0:
            failed_left.setdefault(int(left_of[pair]), failure)
        if acknowledged != 1:
            failed_right.setdefault(int(right_of[pair]), failure)
    kept = ~(_among(left_of[paired.pairs], failed_left) | _among(right_of[paired.pairs], failed_right))
    payload = paired.payload.filter(pa.array(kept))
    return Paired(payload, paired.pairs[kept], failed_left, failed_right), kept


def _among(places: I64Array, failed: dict[int, RowFailure]) -> BoolArray:
    return np.isin(places, np.fromiter(failed, np.int64, len(failed)))
