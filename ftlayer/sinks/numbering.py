"""Numbers of what a writer has written: a table remembers one of them for each writer, and not each of them."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from typing import Any


class WriterNumbers:
    """Gives a number to each message of one copy of a writer. A copy of this object begins again, as another writer.

    Messages of a writer are committed in the order of their numbers, as long as one subtask has it, so the highest
    one that is committed says nearly all.
    """

    def __init__(self) -> None:
        self.writer = secrets.token_hex(8)
        self._numbers: Iterator[int] = itertools.count(1)

    def next(self) -> int:
        return next(self._numbers)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
