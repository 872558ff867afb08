"""Listeners of wrapped queries: told of each batch what Spark's own listeners cannot see."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from ftlayer.vertex.calls import BatchDetails

logger = logging.getLogger(__name__)

OBSERVATION = "ftlayer"
"""The name, in ``observedMetrics`` of Spark's progress, of what is counted on the streaming plan."""


class TrackedQueryListener(StreamingQueryListener):
    """Told of each batch of the wrapped queries that it is given to (`TrackedWriter.listener`).

    It is a listener of Spark's too: given to ``spark.streams.addListener`` as well, it is told of starts, progress and
    ends of all queries. Override what you want to know.
    """

    def on_batch(self, report: BatchDetails) -> None:
        """Take note of a batch that is committed, or was before it was run again.

        Called on the thread of the batch, which waits for it. What it raises is logged, and the query goes on.
        """

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Take note of a query's start (Spark's event)."""

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Take note of a query's progress (Spark's event)."""

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Take note that a query has nothing to do (Spark's event)."""

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Take note of a query's end (Spark's event)."""


def tell_batch(listeners: Iterable[TrackedQueryListener], report: BatchDetails) -> None:
    for listener in listeners:
        try:
            listener.on_batch(report)
        except Exception:
            logger.exception(
                "on_batch of %r failed for batch %d of %r; the query goes on",
                listener,
                report.batch,
                report.query,
            )
