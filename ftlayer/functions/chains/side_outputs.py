"""Side outputs, from the records that a function gave to `Context.output` to record batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from ftlayer.functions.chains.fused import Processing
from ftlayer.functions.conversion import Form
from ftlayer.functions.failures import I64, SideOutput
from ftlayer.functions.keyed import convert, misfit_of
from ftlayer.records.failures import RowFailure


def take_side_outputs(
    step: Processing, form: Form, parents: I64, refuse: Callable[[RowFailure], None]
) -> list[SideOutput]:
    """Convert what has been put out since the last time; ``refuse`` takes what does not fit its schema.

    ``parents`` gives the input row of each place.
    """
    schemas = dict(step.side)
    return [
        _converted(step, tag, schemas[tag], form, records, parents[places], refuse)
        for tag, (records, places) in step.context._take_side().items()
    ]


def _converted(
    step: Processing,
    tag: str,
    schema: pa.Schema,
    form: Form,
    records: list[Any],
    parents: I64,
    refuse: Callable[[RowFailure], None],
) -> SideOutput:
    def misfit(place: int, error: BaseException) -> None:
        gave = f"put out to {tag!r}"
        refuse(misfit_of(int(parents[place]), step.uid, gave, schema, error, step.rules))

    batch, kept = convert(records, [1] * len(records), schema, form, misfit, lax=step.rules.lax)
    return SideOutput(tag, batch, np.repeat(parents, kept))
