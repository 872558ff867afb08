"""Storage that fails when that is armed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ftlayer.checkpoint.snapshots import Piece
from ftlayer.errors import CheckpointStorageError


class FaultySlotStorage:
    """A slot's storage whose writers fail when that is armed."""

    def __init__(self, outside: Any, inner: Any) -> None:
        self._outside, self._inner = outside, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def writer(self, barrier: Any) -> Any:
        return FaultyWriter(self._outside, self._inner.writer(barrier))

    def log_writer(self) -> Any:
        return FaultyLogWriter(self._outside, self._inner.log_writer())


class FaultyWriter:
    def __init__(self, outside: Any, inner: Any) -> None:
        self._outside, self._inner = outside, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, chunks: Iterable[bytes], *args: Any) -> Piece:
        if self._outside.strikes("snapshot"):
            raise CheckpointStorageError("meant to fail: a snapshot cannot be written")
        # Here, and not below, where locks are held.
        gathered = []
        for chunk in chunks:
            gathered.append(chunk)
            self._outside.pause()
        piece = self._inner.write(gathered, *args)
        self._outside.pause()
        return piece

    def sync(self) -> None:
        self._fail()
        self._inner.sync()

    def close(self) -> None:
        self._fail()
        self._inner.close()

    def _fail(self) -> None:
        if self._outside.strikes("sync"):
            raise CheckpointStorageError("meant to fail: a snapshot cannot be synced")


class FaultyLogWriter:
    """Writes without a pause: the changelog's locks are held meanwhile."""

    def __init__(self, outside: Any, inner: Any) -> None:
        self._outside, self._inner = outside, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def sync(self) -> None:
        if self._outside.strikes("log"):
            raise CheckpointStorageError("meant to fail: a changelog cannot be synced")
        self._inner.sync()


class FaultyFiles:
    """The driver's files, whose metadata cannot be written, or not be removed, when that is armed."""

    def __init__(self, outside: Any, inner: Any) -> None:
        self._outside, self._inner = outside, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def publish(self, path: str, data: bytes) -> None:
        if self._outside.strikes("publish"):
            raise CheckpointStorageError("meant to fail: the metadata cannot be written")
        self._outside.die("die-before-publish")
        self._inner.publish(path, data)
        self._outside.die("die-after-publish")
        if self._outside.strikes("publish-after"):
            if self._outside.strikes("unpublish"):
                self._outside.stuck.add(f"{self.url}/{path}")
            raise CheckpointStorageError("meant to fail: the metadata may have been written")
        if self._outside.strikes("publish-odd"):
            raise ZeroDivisionError("meant to fail: in an unforeseen way")

    def delete(self, path: str) -> None:
        if f"{self.url}/{path}" in self._outside.stuck:
            raise CheckpointStorageError("meant to fail: the metadata cannot be removed")
        self._inner.delete(path)


class WatchedStorage:
    """The driver's storage; notes when a checkpoint that could not be published may be there all the same."""

    def __init__(self, world: Any, inner: Any) -> None:
        self._world, self._inner = world, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def undecided(self) -> Any:
        found = self._inner.undecided()
        self._world.was_undecided |= bool(found)
        return found
