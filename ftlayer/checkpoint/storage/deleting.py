"""Many deletions at once, each tried, what went wrong told once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ftlayer.checkpoint.storage.files import Files
from ftlayer.errors import CheckpointStorageError

THREADS = 8
"""Deletions and look-ups under way at a time: their time is the way to the storage and back."""

NAMED = 5
"""Of many errors, so many are told."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class StoragePool:
    """A few threads for what waits for the storage."""

    def __init__(self) -> None:
        # Threads are made with the first work, and end with the interpreter.
        self._pool = ThreadPoolExecutor(THREADS, "checkpoint-storage")

    def map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Do it for all items; raises the first error when all are done."""
        futures = [self._pool.submit(work, item) for item in items]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]

    def delete(self, files: Files, paths: Iterable[str]) -> list[CheckpointStorageError]:
        """Remove files, and return what could not be done."""

        def delete(path: str) -> CheckpointStorageError | None:
            try:
                files.delete(path)
            except CheckpointStorageError as error:
                return error
            return None

        return [error for error in self.map(delete, paths) if error is not None]

    def close(self) -> None:
        """End the threads; nothing can be done afterwards."""
        self._pool.shutdown(wait=True)


def raise_together(errors: list[CheckpointStorageError], what: str) -> None:
    """Raise one error for all of them; none: do nothing."""
    if not errors:
        return
    named = "; ".join(str(error) for error in errors[:NAMED])
    more = f"; and {len(errors) - NAMED} more" if len(errors) > NAMED else ""
    raise CheckpointStorageError(f"{what}: {len(errors)} could not be removed: {named}{more}") from errors[0]
