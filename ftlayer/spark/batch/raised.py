"""What a run of a query or its sink raised, in words for a user; and what a batch raises that is told to stop."""

from __future__ import annotations

import logging

from ftlayer.errors import FTLayerError, QueryError, error_for_code
from ftlayer.failures import FailException, RetryLater
from ftlayer.printable import text_of
from ftlayer.recovery import lasting

_MAX_CHARS = 4_000

_NO_PAUSE = (
    "a RetryLater of a sink is an error as any other: the batch is tried again as the restart strategy says, whatever "
    "`after` says. To have single records tried again, raise RowsRejected from a sink with tagged=True"
)


def words_of(error: BaseException) -> str:
    """Return class and text of an error, and of Spark's the telling part of the text: without the JVM's stack.

    The texts of ftlayer's own errors say what they are about, save those that a user's function raises.
    """
    text = text_of(error)
    cut = text.find("\n\tat ")
    text = text[: cut if cut > 0 else _MAX_CHARS][:_MAX_CHARS]
    from_spark = type(error).__module__.partition(".")[0] in ("pyspark", "py4j")
    if from_spark or (isinstance(error, FTLayerError) and not isinstance(error, FailException)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def error_of_sink(error: BaseException, sink: str) -> FTLayerError:
    """Return the error to raise from what a sink has raised: it names the sink and the class.

    It is of the same class if that is one of ftlayer's, or derives from one, else a `QueryError`. What starting again
    cannot mend is of the class that says so.
    """
    final = lasting(error)
    raised = error if final is None else final
    said = words_of(raised)
    if not said.startswith(type(raised).__name__):
        said = f"{type(raised).__name__}: {said}"
    note = f" ({_NO_PAUSE})" if isinstance(error, RetryLater) else ""
    kind = error_for_code(raised.code) if isinstance(raised, FTLayerError) else QueryError
    return kind(f"{sink} raised {said}{note}")


# ---------------------------------------------------------------- an end in order, which no log should call a fault


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
