"""When a shared file wastes too much room: it is kept for a few of its pieces, and their owner may write them anew."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

from ftlayer.checkpoint.pieces import Piece, Scope


def live_bytes(pieces: Iterable[Piece]) -> dict[str, int]:
    """Return by path what is of use in shared files, in bytes; a piece that is named twice counts once."""
    runs = {
        (piece.path, piece.offset, piece.length)
        for piece in pieces
        if piece.scope is Scope.SHARED and piece.inline is None
    }
    live: dict[str, int] = {}
    for path, _, length in runs:
        live[path] = live.get(path, 0) + length
    return live


def wasteful(pieces: Iterable[Piece], sizes: Mapping[str, int], bound: float) -> set[str]:
    """Return the shared files that are more than ``bound`` times as large as what of them is of use.

    ``pieces``: all that are of use, of everybody who has pieces in these files. ``sizes``: the files' sizes; a file
    that is not in it is none. ``bound`` 0: there is none.
    """
    return _beyond(live_bytes(pieces), sizes, bound)


class Amplification:
    """Which shared files of a slot waste too much, over all who have pieces in them. For several threads at once."""

    def __init__(self, size_of: Callable[[str], int | None], bound: float) -> None:
        self._size_of = size_of
        self._bound = bound
        self._lock = threading.Lock()
        self._live: dict[str, dict[str, int]] = {}

    def report(self, owner: str, pieces: Iterable[Piece]) -> set[str]:
        """Take note of the pieces that ``owner`` needs now; returns those of their files that waste too much.

        With an owner's first report there are none: others that share its files may not have reported yet.
        """
        mine = live_bytes(pieces)
        with self._lock:
            is_first = owner not in self._live
            self._live[owner] = mine
            total = {path: sum(live.get(path, 0) for live in self._live.values()) for path in mine}
        if is_first or not self._bound:
            return set()
        sizes = {path: size for path in total if (size := self._size_of(path)) is not None}
        return _beyond(total, sizes, self._bound)


def _beyond(live: Mapping[str, int], sizes: Mapping[str, int], bound: float) -> set[str]:
    if not bound:
        return set()
    return {path for path, used in live.items() if sizes.get(path, 0) > bound * used}
