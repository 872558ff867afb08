"""A batch's report on records that other queries handed on: kept from its seal until the next batch begins.

The query sends the events itself, behind its commit: their roots may be another shard's. They are kept because a crash
in between must not lose them, and a run of the batch again could say something else.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ftlayer.errors import StoreDamagedError
from ftlayer.records.failure_columns import from_columns, to_columns
from ftlayer.store import batches
from ftlayer.store.kv import ReadTransaction, WriteTransaction
from ftlayer.vertex.calls import Fail, Failure, Report, Xor
from ftlayer.vertex.calls.event_ids import plain_event_ids, stored_event_ids
from ftlayer.vertex.rules.seals import stored_failure


def keep_report(txn: WriteTransaction, query: int, batch: int, report: Report) -> None:
    """Store what a batch will report, in the place of what it would have reported before."""
    if report.done or report.failed:
        batches.put_report(txn, query, batch, _plain(report))
    else:
        batches.delete_report(txn, query, batch)


def kept_report(txn: ReadTransaction, query: int, batch: int) -> Report:
    """Return what a batch is to report; nothing if no record of it was resumed."""
    values = batches.get_report(txn, query, batch)
    if values is None:
        return Report()
    try:
        return _stored(values)
    except (ValueError, TypeError) as error:
        raise StoreDamagedError(f"the report of batch {batch} cannot be read: {error}") from error


def _plain(report: Report) -> list[Any]:
    done = [
        [event.roots.tobytes(), event.values.tobytes(), event.incarnation, plain_event_ids(event.ids)]
        for event in report.done
    ]
    failed = [
        [to_columns(stored_failure(failure) for failure in fail.failures), fail.incarnation]
        for fail in report.failed
    ]
    return [done, failed]


def _stored(values: list[Any]) -> Report:
    done, failed = values
    return Report(
        tuple(
            Xor(
                np.frombuffer(roots, np.uint64),
                np.frombuffer(xors, np.uint64),
                incarnation,
                hold=True,
                ids=stored_event_ids(ids),
            )
            for roots, xors, incarnation, ids in done
        ),
        tuple(
            Fail(tuple(Failure(*row) for row in from_columns(columns)), incarnation, hold=True)
            for columns, incarnation in failed
        ),
    )
