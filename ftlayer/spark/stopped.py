"""A batch that is given up because its query was told to stop: an end in order, which no log should call a fault."""

from __future__ import annotations

import logging

# Spark logs what a stopped query raises as an error unless it finds this in the text (`StreamExecution`).
_SIGN = (
    "py4j.protocol.Py4JJavaError: An error occurred while calling the batch: java.lang.InterruptedException"
)


class StoppedError(Exception):
    """Raised to Spark, and to no user, in place of whatever a batch of a query that was told to stop has raised."""

    def __init__(self, query: str) -> None:
        super().__init__(f"{query} was told to stop, and its batch is given up ({_SIGN})")


class _Stops(logging.Filter):
    """Keeps what Py4J logs of a call that ended with `StoppedError` out of its log."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is to be logged."""
        return not (record.exc_info and isinstance(record.exc_info[1], StoppedError))


_STOPS = _Stops()


def hide_stops() -> None:
    """Have Py4J, which logs each exception that goes back to the JVM as an error, pass over `StoppedError`."""
    logging.getLogger("py4j.clientserver").addFilter(_STOPS)
