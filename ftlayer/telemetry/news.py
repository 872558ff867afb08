"""What the log says of a collector: once that it takes nothing, and once that it does again.

The SDK's exporter says four lines for each push that fails. They are kept out of the log where the push is ours, and
stay in it for what else of the program uses that exporter.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NOISY = (
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.common.http",
    "urllib3.connectionpool",
)

_pushing = threading.local()

logger = logging.getLogger(__name__)


class CollectorNews:
    """Says what changes. For one thread at a time."""

    def __init__(self, what: str, where: str) -> None:
        """``what`` goes to the collector at ``where``."""
        self._what = what
        self._where = where
        self._was_taken = True

    def note(self, *, is_taken: bool) -> None:
        if self._was_taken and not is_taken:
            logger.warning(
                "%s are not taken at %s; it is tried again, and nothing else waits for it",
                self._what,
                self._where,
            )
        elif is_taken and not self._was_taken:
            logger.info("%s are taken at %s again", self._what, self._where)
        self._was_taken = is_taken


@contextmanager
def pushing() -> Iterator[None]:
    """Keep out of the log what the SDK's exporter says in this thread, for as long as the ``with`` block runs."""
    for name in _NOISY:
        logging.getLogger(name).addFilter(_is_of_others)  # the same one again is no second one
    _pushing.now = True
    try:
        yield
    finally:
        _pushing.now = False


def _is_of_others(record: logging.LogRecord) -> bool:
    return not getattr(_pushing, "now", False)
