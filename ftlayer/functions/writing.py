"""Writing to sinks: stream writers of Data Sources are called, and rows that fail are found by halves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ftlayer.common.checks import check_methods, check_ran
from ftlayer.common.failures import RowsRejected
from ftlayer.errors import SinkTargetError
from ftlayer.functions.failures import failure_of, raise_signalled, rejections_of
from ftlayer.functions.retry_rules import NO_RULES, RetryRules
from ftlayer.records.failures import RowFailure

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def call_write(writer: Any, batches: Iterable[pa.RecordBatch], schema: StructType) -> Any:
    """Have ``writer`` write the rows; return its commit message.

    An Arrow writer gets the batches, a plain one pyspark's `Row`s. Raises `TypeError` for what is no message,
    None included, and whatever the writer raises.
    """
    from pyspark.sql.datasource import WriterCommitMessage

    from ftlayer.functions.data_sources import DataSourceStreamArrowWriter

    takes_arrow = isinstance(writer, DataSourceStreamArrowWriter)
    message = writer.write(iter(batches) if takes_arrow else _rows_of(batches, schema))
    if not isinstance(message, WriterCommitMessage):
        raise TypeError(
            f"{type(writer).__name__}.write returned a {type(message).__name__}, not a WriterCommitMessage: "
            "commit would not learn what was written"
        )
    return message


def call_commit(writer: Any, messages: Sequence[Any], batch: int) -> None:
    """Have ``writer`` commit; raises `TypeError` if it has not run (`check_ran`), and whatever it raises."""
    check_ran(writer.commit(messages, batch), f"{type(writer).__name__}.commit")


def check_writer(writer: Any, what: str) -> None:
    """Raise `ConfigError` for a stream writer with a method that a call would not run (`check_runs`)."""
    check_methods(writer, ("write", "commit", "abort"), what)


def _rows_of(batches: Iterable[pa.RecordBatch], schema: StructType) -> Iterator[Any]:
    from pyspark.sql.conversion import ArrowTableToRowsConversion

    for batch in batches:
        yield from ArrowTableToRowsConversion.convert(pa.Table.from_batches([batch]), schema)


GIVE_UP_MS = 10_000
GIVE_UP_ROWS = 4
"""A sink is down if it took no row in so long (ms), while so many rows failed that were tried alone. What was
not tried then fails like the last one that was: halving would keep the slot for twice as many tries as there
are rows, each with its own timeout."""


def settle(
    operator: str,
    batch: pa.RecordBatch,
    write: Callable[[pa.RecordBatch], object],
    clock: Callable[[], float] = time.monotonic,
    *,
    rules: RetryRules = NO_RULES,
    takes_the_rest: bool = False,
) -> tuple[RowFailure, ...]:
    """Have ``write`` take all rows of ``batch``, in order and in as few calls as can be; return what failed.

    By `RowsRejected` it says itself which rows fail; ``takes_the_rest``: it has taken the others then, else it is given
    them again. ``rules`` say which
    errors are worth a retry; ``clock`` is in seconds. Raises `ConfigError` for rows that `RowsRejected` cannot mean.
    """
    failures: list[RowFailure] = []
    give_up = clock() + GIVE_UP_MS / 1_000
    todo = [(0, batch.num_rows)]
    alone = 0
    any_written = False
    while todo:
        start, rows = todo.pop()
        if not rows:
            continue
        try:
            write(batch.slice(start, rows))
        except RowsRejected as rejected:
            named = [
                replace(failure, row=start + failure.row)
                for failure in rejections_of(rejected, rows, operator, rules)
            ]
            failures += named
            if takes_the_rest:
                any_written = any_written or len(named) < rows
                continue
            ends = [*(failure.row for failure in named), start + rows]
            firsts = [start, *(failure.row + 1 for failure in named)]
            todo += reversed([(first, end - first) for first, end in zip(firsts, ends, strict=True)])
        except BaseException as error:  # noqa: BLE001 - whatever a sink raises fails its rows
            raise_signalled(error)
            # What is written to is not there, for any row.
            if rows > 1 and not isinstance(error, SinkTargetError):
                half = rows // 2
                todo += [(start + half, rows - half), (start, half)]
                continue
            failure = failure_of(start, operator, error, rules)
            alone += 1
            if not any_written and alone >= GIVE_UP_ROWS and clock() > give_up:
                rows = batch.num_rows - start
                todo.clear()
            failures.extend(replace(failure, row=row) for row in range(start, start + rows))
        else:
            any_written = True
    return tuple(sorted(failures, key=lambda failure: failure.row))
