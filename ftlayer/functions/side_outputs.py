"""Side outputs, from the records that a function gave to `Context.output` to record batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from ftlayer.functions.conversion import Form, concat, schema_text, text_of, to_batch
from ftlayer.functions.failures import RowFailure, failure_of
from ftlayer.functions.outcome import I64, SideOutput
from ftlayer.functions.prepared import Processing


def take_side_outputs(
    step: Processing, form: Form, parents: I64, failures: list[RowFailure]
) -> list[SideOutput]:
    """Convert what has been put out since the last time; what does not fit its schema is added to ``failures``.

    ``parents`` gives the input row of each place.
    """
    schemas = dict(step.side)
    return [
        _converted(step.uid, tag, schemas[tag], form, records, parents[places], failures)
        for tag, (records, places) in step.context.take_side().items()
    ]


def _converted(
    uid: str,
    tag: str,
    schema: pa.Schema,
    form: Form,
    records: list[Any],
    parents: I64,
    failures: list[RowFailure],
) -> SideOutput:
    try:
        return SideOutput(tag, to_batch(records, schema, form), parents)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - anything may be among what a user's function gave
        good = []
        for record, parent in zip(records, parents.tolist(), strict=True):
            try:
                good.append((to_batch([record], schema, form), parent))
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - as above
                misfit = TypeError(
                    f"what {uid!r} put out to {tag!r} does not fit its schema ({schema_text(schema)}): "
                    f"{text_of(error)}"
                )
                failures.append(failure_of(parent, uid, misfit))
        batch = concat([batch for batch, _ in good], schema)
        return SideOutput(tag, batch, np.array([parent for _, parent in good], dtype=np.int64))
