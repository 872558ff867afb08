"""Where a job's dead letters go: files and a vertex that fail when that is armed, and what they hold at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from rules_client import RulesClient

from ftlayer.checkpoint.letters import ChainLetter, payload_of
from ftlayer.checkpoint.storage.dead_letters import LettersInMemory, StoredLetters
from ftlayer.errors import CheckpointStorageError, VertexUnavailableError
from ftlayer.vertex.calls import KeepLetters, ListRecords, RecordInfo, Requeue

LETTER_FAULTS = (
    "letters",
    "letters-after",
    "die-before-letters",
    "die-after-letters",
    "die-before-empty",
    "die-after-empty",
    "vertex-away",
    "vertex-deaf",
    "die-before-keep",
    "die-after-keep",
)
"""Faults that happen where the code comes to them next."""

Content = tuple[str, str]
"""A letter's chain, and its row."""


class FaultyLetterFiles:
    """The files of letters, which cannot be written, or of which nobody hears that they were, when that is armed."""

    def __init__(self, outside: Any, inner: Any) -> None:
        self._outside, self._inner = outside, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def publish_new(self, path: str, data: bytes) -> bool:
        self._outside.die("die-before-letters")
        if self._outside.strikes("letters"):
            raise CheckpointStorageError("meant to fail: letters cannot be written")
        is_new: bool = self._inner.publish_new(path, data)
        self._outside.die("die-after-letters")
        if self._outside.strikes("letters-after"):
            raise CheckpointStorageError("meant to fail: letters may have been written")
        return is_new

    def publish(self, path: str, data: bytes) -> None:
        self._outside.die("die-before-empty")
        self._inner.publish(path, data)
        self._outside.die("die-after-empty")


class FaultyVertex:
    """A vertex that outlives the job; its answers may be lost."""

    def __init__(self, world: Any) -> None:
        self._outside = world.outside
        self._inner = RulesClient(lambda: world.now)

    def call(self, call: Any) -> Any:
        outside, keeps = self._outside, isinstance(call, KeepLetters)
        if outside.strikes("vertex-away"):
            raise VertexUnavailableError("meant to fail: it does not hear")
        if keeps:
            outside.die("die-before-keep")
        reply = self._inner.call(call)
        if keeps:
            outside.die("die-after-keep")
        if outside.strikes("vertex-deaf"):
            raise VertexUnavailableError("meant to fail: its answer is lost")
        return reply

    def requeue_all(self) -> int:
        """A user sends back all there are; returns how many."""
        keys = tuple(info.key for info in self._inner.dead())
        if keys:
            self._inner.call(Requeue(keys))
        return len(keys)

    def dead(self) -> Counter[Content]:
        return Counter(map(_content, self._inner.dead()))

    def requeued(self) -> Counter[Content]:
        """Letters that were sent back, and of which it has not heard that the job has them."""
        return Counter(map(_content, self._inner.call(ListRecords("waiting")).records))


def content_of(letter: ChainLetter) -> Content:
    """Return what a letter is about, as the vertex shows it too."""
    return letter.chain, str(payload_of(letter).to_pylist())


def in_files(files: StoredLetters | LettersInMemory) -> Counter[Content]:
    """Return what the files of a job hold."""
    names = [file.name for file in files.found() if file.letters]
    return Counter(content_of(letter) for name in names for part in files.read(name) for letter in part)


def _content(info: RecordInfo) -> Content:
    return info.stream.partition("/")[2], str(info.payload.to_pylist())


class StepEvent:
    """`threading.Event` of who waits for letters at a job's end: their workers go on meanwhile, or time passes."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float) -> bool:
        if not self._is_set:
            todo = [worker.step for worker in self._world.workers if worker.todo]
            step: Callable[[], None] = (
                todo[0] if todo else lambda: self._world.pass_time(round(timeout * 1_000))
            )
            step()
        return self._is_set
