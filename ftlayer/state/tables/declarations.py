"""Which states an operator declares, and which of a checkpoint's it has given up or renamed.

A function declares a state when it asks for it in `open`. A checkpoint says of each state whether the program that took
it declared it. A restore compares the two when all functions are open, before the first record: a declared state that
the program declares no more is gone, and is not left behind without a word.

A state that `process` asks for first is not declared. It may be asked for with the first record, or next year, so
that nothing follows from what was asked for so far: it is kept in every checkpoint, and a restore never ends for its
sake. The price: one that was renamed begins empty, with a warning.
"""

from __future__ import annotations

from collections.abc import Callable


class StateDeclarations:
    """The names of one operator's states in one subtask: those restored, and those asked for.

    The states of a program that asks for the same ones at each `open` are never `gone` from its own checkpoints.
    """

    def __init__(self) -> None:
        self._restored: dict[str, bool] = {}
        self._asked: set[str] = set()
        self._declared: set[str] = set()
        self._opened = False
        self._warned = False

    def restored(self, name: str, declared: bool) -> None:
        """A snapshot of the checkpoint holds it; of a state in several, all have to say that it was declared."""
        self._restored[name] = declared and self._restored.get(name, True)

    def ask(self, name: str) -> None:
        if name not in self._asked:
            self._asked.add(name)
            if not self._opened:
                self._declared.add(name)

    def opened(self) -> None:
        """All functions are open: what they ask for from now on is not declared."""
        self._opened = True

    @property
    def declared(self) -> frozenset[str]:
        """The states that functions have asked for until `opened`."""
        return frozenset(self._declared)

    @property
    def held(self) -> frozenset[str]:
        return frozenset(self._restored)

    def is_restored(self, name: str) -> bool:
        return name in self._restored

    def is_declared(self, name: str) -> bool:
        """What the next checkpoint says of it: as the one before did, as long as nothing has asked for the state."""
        if name in self._asked:
            return name in self._declared
        return self._restored.get(name, False)

    def new(self) -> list[str]:
        """The states that were asked for and that the checkpoint does not hold."""
        return sorted(self._asked - self._restored.keys())

    def gone(self, has_entries: Callable[[str], bool]) -> list[str]:
        """The states with entries that the checkpoint's program declared, and this one, behind `opened`, does not."""
        return sorted(
            name
            for name, declared in self._restored.items()
            if declared and name not in self._declared and has_entries(name)
        )

    @property
    def waits(self) -> bool:
        """Whether a state of the checkpoint was not asked for yet, and `maybe_renamed` has found none so far."""
        return not self._warned and not self._restored.keys() <= self._asked

    def maybe_renamed(self, has_entries: Callable[[str], bool]) -> tuple[list[str], list[str]] | None:
        """The states begun anew and those with entries not asked for yet, the first time that there are both."""
        new = self.new()
        if not self.waits or not new:
            return None
        idle = sorted(name for name in self._restored.keys() - self._asked if has_entries(name))
        self._warned = bool(idle)
        return (new, idle) if idle else None
