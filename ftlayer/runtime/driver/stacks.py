"""Stacks of slots on demand: questions on their way, and their answers. Any thread."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future

from ftlayer.runtime.protocol.messages import AskStack, StackTaken


class Stacks:
    """Of one job. An answer that comes too late is dropped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[str]] = {}

    def ask(self) -> tuple[AskStack, Future[str]]:
        """Return a new question, and what becomes of it."""
        answer: Future[str] = Future()
        with self._lock:
            number = next(self._numbers)
            self._asked[number] = answer
        return AskStack(number), answer

    def forget(self, asked: AskStack) -> None:
        """A question is waited for no longer."""
        with self._lock:
            self._asked.pop(asked.number, None)

    def taken(self, answer: StackTaken) -> None:
        """A slot has answered."""
        with self._lock:
            asked = self._asked.pop(answer.number, None)
        if asked is not None:
            asked.set_result(answer.text)
