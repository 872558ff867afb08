"""Which streaming query of Spark's writes, if any."""

from __future__ import annotations


def streaming_query() -> str:
    """Return the id of the Structured Streaming query that this task belongs to; "" for a topology's.

    It stays the same over restarts from the query's checkpoint. Within a query a batch id says what is committed: a
    batch that is run again writes the same rows, with other messages. Without a query the messages say it.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        return ""
    return context.getLocalProperty("sql.streaming.queryId") or ""
