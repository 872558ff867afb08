"""Dead letters that a chain has made, until a checkpoint that holds them is complete."""

from __future__ import annotations

from dataclasses import replace

from ftlayer.checkpoint.letters import ChainLetter


class MadeLetters:
    """The letters of one subtask, and the names of those that came back to it. Not for several threads.

    Attributes:
        made: how many there ever were in this run.
    """

    def __init__(self) -> None:
        self.made = 0
        self._letters: list[ChainLetter] = []
        self._readmitted: dict[bytes, int] = {}

    def add(self, letter: ChainLetter) -> None:
        self.made += 1
        self._letters.append(letter)

    def readmit(self, name: bytes) -> bool:
        """A letter comes back; whether it is not here already."""
        if name in self._readmitted:
            return False
        self._readmitted[name] = 0
        return True

    def take(self) -> list[ChainLetter]:
        """Return, and forget, what was made: it goes on as records."""
        taken, self._letters = self._letters, []
        return taken

    def snapshot(self, checkpoint: int) -> tuple[tuple[ChainLetter, ...], tuple[bytes, ...]]:
        """Return what this checkpoint holds: all letters, and all names, that were not told to be complete."""
        self._letters = [
            letter if letter.checkpoint else replace(letter, checkpoint=checkpoint)
            for letter in self._letters
        ]
        self._readmitted = {name: first or checkpoint for name, first in self._readmitted.items()}
        return tuple(self._letters), tuple(self._readmitted)

    def completed(self, checkpoint: int) -> None:
        """The driver has what this checkpoint holds."""
        self._letters = [letter for letter in self._letters if not 0 < letter.checkpoint <= checkpoint]
        self._readmitted = {
            name: first for name, first in self._readmitted.items() if not 0 < first <= checkpoint
        }
