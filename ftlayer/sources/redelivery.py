"""Which messages of a queue come a second time: by their names, and by what is durable of them.

Rules alone. A queue numbers nothing that lasts: a message that is delivered again is known by the name that its sender
gave it. A delivery waits for a *turn*, the number of a fetch: it may be acknowledged when that fetch is durable.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence

NAME_BYTES = 8
"""Of a name's hash. Two of a window of 20,000 are alike once in 10^10 windows."""

_BEFORE = 0
"""The turn of what a reader was opened with."""


def short(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=NAME_BYTES).digest()


class RedeliveryWindow:
    """The messages that were fetched last, by the hashes of their names, and what may be acknowledged of a channel."""

    def __init__(self, names: bytes, size: int, *, stored: bool) -> None:
        """Begin behind what an earlier reader fetched.

        Args:
            names: what its last `packed` returned.
            size: of how many messages the names are remembered, at least.
            stored: whether those are durable.
        """
        cut = [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]
        self._turns: dict[bytes, int] = dict.fromkeys(cut, _BEFORE)
        # Hashes in the order in which they came, and how many of them came with each turn.
        self._names = bytearray(names)
        self._counts: deque[tuple[int, int]] = deque([(_BEFORE, len(cut))])
        self._size = size
        self._turn = _BEFORE
        self._durable = _BEFORE if stored else _BEFORE - 1
        # Of the channel that is open: up to which tag, and the turn that those wait for.
        self._waiting: deque[tuple[int, int]] = deque()
        self._acknowledged = 0

    @property
    def unacknowledged(self) -> int:
        """How many deliveries of this channel were taken, and wait for their turn."""
        return self._waiting[-1][0] - self._acknowledged if self._waiting else 0

    def take(self, deliveries: Iterable[tuple[int, str | None, bool]]) -> list[bool]:
        """Number a fetch; return which of its deliveries are new.

        Each is a tag, one higher than that before, a name, and whether the server says that it may have been delivered
        before. One without a name is always new.
        """
        self._turn = mine = self._turn + 1
        turns, waiting = self._turns, self._waiting
        are_new: list[bool] = []
        new_names: list[bytes] = []
        for tag, name, redelivered in deliveries:
            turn, is_new = mine, True
            if name is not None:
                hashed = short(name)
                if redelivered and hashed in turns:
                    turn, is_new = turns[hashed], False
                else:
                    # The last one is the newest, also where a name is used again.
                    turns[hashed] = mine
                    new_names.append(hashed)
            are_new.append(is_new)
            if waiting and waiting[-1][1] == turn:
                waiting[-1] = (tag, turn)
            else:
                waiting.append((tag, turn))
        self._names += b"".join(new_names)
        self._counts.append((mine, len(new_names)))
        return are_new

    def knows(self, name: str | None) -> bool:
        return name is not None and short(name) in self._turns

    @property
    def turn(self) -> int:
        """The number of the last fetch: the receipt for it."""
        return self._turn

    def packed(self) -> bytes:
        """Return the names that a reader behind the last fetch has to know."""
        self._forget()
        return bytes(self._names)

    def durable(self, turns: Sequence[int]) -> None:
        """These fetches are durable, and those before them."""
        self._durable = max(self._durable, *turns)

    def to_acknowledge(self) -> int | None:
        """Return the tag up to which all deliveries may be acknowledged; None if nothing has changed."""
        tag = None
        while self._waiting and self._waiting[0][1] <= self._durable:
            tag, _ = self._waiting.popleft()
        if tag is not None:
            self._acknowledged = tag
        return tag

    def reconnected(self) -> None:
        """There is a new channel: its tags begin anew, and what was not acknowledged is delivered again."""
        self._waiting.clear()
        self._acknowledged = 0

    def _forget(self) -> None:
        """Forget the oldest that are durable, as many as are too many: an acknowledgement may have been lost."""
        spare = len(self._names) // NAME_BYTES - self._size
        while spare > 0 and self._counts and self._counts[0][0] <= self._durable:
            turn, count = self._counts.popleft()
            if count > spare:
                self._counts.appendleft((turn, count - spare))
                count = spare
            spare -= count
            gone = bytes(self._names[: count * NAME_BYTES])
            del self._names[: count * NAME_BYTES]
            for at in range(0, len(gone), NAME_BYTES):
                name = gone[at : at + NAME_BYTES]
                # It may have been used again since then.
                if self._turns.get(name) == turn:
                    del self._turns[name]
