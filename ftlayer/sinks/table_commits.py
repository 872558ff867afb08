"""Commits and aborts of tables of files: tried again, also when other writers were faster."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import TypeVar

from ftlayer.checkpoint.storage.files import StoragePool
from ftlayer.errors import SinkError, UncommittableError
from ftlayer.printable import hidden

logger = logging.getLogger(__name__)

TRIES = 4
"""How often a commit or abort is tried that fails; each has its effect once."""
CONFLICTS = 20
"""How often a commit is tried that others were faster than."""
TRY_AGAIN_S = 0.2

Item = TypeVar("Item")
Result = TypeVar("Result")


def tried(work: Callable[[], Result], conflict: type[BaseException], secrets: Sequence[str]) -> Result:
    """Do what raises `SinkError`, again if it fails: each try looks first what is committed.

    ``conflict`` is what causes the error if another writer was faster; the log does not tell ``secrets``.
    An error without a cause is final.
    """
    failures = conflicts = 0
    while True:
        try:
            return work()
        except UncommittableError:
            raise
        except SinkError as error:
            is_conflict = isinstance(error.__cause__, conflict)
            conflicts, failures = conflicts + is_conflict, failures + (not is_conflict)
            if error.__cause__ is None or failures >= TRIES or conflicts >= CONFLICTS:
                raise
            logger.warning("%s; it is tried again", hidden(error, secrets))
            time.sleep(TRY_AGAIN_S * random.uniform(0.5, 1.5) * (1 << min(failures, 4)))


def for_all(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    with closing(StoragePool()) as crew:
        return crew.map(work, items)
