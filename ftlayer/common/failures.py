"""What a user's function raises about the records that it was given, and nothing else in ftlayer does.

`FailException` and its subclasses fail the record that the function was called for; `RowsRejected` sets rows of a sink
aside. `ftlayer.functions.retry_rules` says what becomes of the record.
"""

from __future__ import annotations

from collections.abc import Mapping

from ftlayer.common.checks import Duration, duration_ms, known_options, shown
from ftlayer.errors import ConfigError, FTLayerError


class FailException(FTLayerError):  # noqa: N818 - the name the original design gave it
    """Raised by a user's function to fail the record it was called for."""

    code = "FAIL"
    recoverable = True


class PermanentFailure(FailException):
    """Raised by a user's function: trying this record again is of no use, so it is a dead letter at once."""

    code = "PERMANENT"
    recoverable = False


MAX_RETRY_LATER_MS = 366 * 24 * 3_600_000
"""The longest pause that a `RetryLater` may ask for."""


@known_options
class RetryLater(FailException):
    """Raised by a user's function: try this record again after a pause of its own, whatever `backoff` says.

    The pause is kept exactly: no jitter shortens it. `retry_on` and `dead_on` are not asked.

    Args:
        reason: what is noted as the attempt's failure.
        after: the pause, a duration of up to 366 days; None: as `backoff` says.
        uses_attempt: False: the failure does not count, and the record has as many attempts left as before. It
            is tried without end if its function goes on saying so.

    Raises `ConfigError` for an ``after`` that is no such duration, and for an option that there is not: it fails the
    record as any other error does.
    """

    code = "RETRY_LATER"
    recoverable = True

    def __init__(self, reason: str = "", *, after: Duration | None = None, uses_attempt: bool = True) -> None:
        super().__init__(reason)
        most = MAX_RETRY_LATER_MS
        self.after_ms = None if after is None else duration_ms(after, "RetryLater: after", most=most)
        if not isinstance(uses_attempt, bool):
            raise ConfigError(f"RetryLater: uses_attempt: expected True or False, got {uses_attempt!r}")
        self.uses_attempt = uses_attempt


@known_options
class RowsRejected(Exception):  # noqa: N818 - it sets rows aside, as the failures above do
    """Raised by a sink to set rows aside: just these fail.

    - A function that is the sink of a topology: the rows fail as records do, and all others are taken. (Any other
      exception has it called again, for halves of its rows.)
    - The ``write`` of a stream writer: it is called again for the others. The rows fail as records do in acker mode. In
      barrier mode they need a `FailurePolicy`, and are dead letters at once, of the checkpoint that ``write`` was for.
    - A sink of a wrapped query (`TrackedStream.sink` with ``tagged``): their records fail, and it gets the rest.

    An answer about rows and no `FTLayerError`: it never leaves the process of its sink.

    Args:
        errors: by row, why it cannot be taken: an exception, about which `retry_on` and `dead_on` are asked, or a text.
            A row is its number among those of this call, from 0, and in a wrapped query its ``_ft_row``.

    Raises `ConfigError` for anything else.
    """

    def __init__(self, errors: Mapping[int, Exception | str]) -> None:
        words = "{row: error}, by the rows' _ft_row or numbers an exception or a text each"
        expected = f"RowsRejected: expected {words}"
        if not isinstance(errors, Mapping):
            raise ConfigError(f"{expected}, got {shown(errors)}")
        for row, error in errors.items():
            if not isinstance(error, Exception | str):
                raise ConfigError(f"{expected}, got {shown(error)} for row {shown(row)}")
        super().__init__(errors)
        self.errors = dict(errors)

    def __str__(self) -> str:
        if not self.errors:
            return "no rows"
        row, error = next(iter(self.errors.items()))
        return f"{len(self.errors)} rows, for example {row!r}: {error}"
