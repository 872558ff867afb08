"""Dead letters are told to a callback in the driver: each at least once, in the order of their death.

How far the callback has come is kept in the vertex, behind each page of letters and not before: a driver that is lost
in between tells those of the page again. A callback that raises is called again with the same letter, after a pause
that grows: no letter is passed over, and the letters themselves stay where they are.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ftlayer.checkpoint.dead_letters.letter import DeadLetter, letter_of, letters_behind
from ftlayer.common.checks import check_ran
from ftlayer.common.printable import described
from ftlayer.errors import FTLayerError
from ftlayer.vertex.calls import GetCursor, PutCursor
from ftlayer.vertex.client.client import VertexClient

READER = "on_dead"
PAGE = 100
POLL_S = 1.0
"""How often the vertex is asked for letters."""
LONGEST_PAUSE_S = 60.0
"""The pause behind failures of the callback: it begins with `POLL_S` and doubles up to this."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StreamTeller:
    """Tells the letters of one stream; ``failures``: how often in a row that has failed. Not for several threads."""

    client: VertexClient
    stream: str
    tell: Callable[[DeadLetter], object]
    failures: int = 0
    last_failure: str = ""
    _position: bytes | None = None
    _noted: bytes = field(default=b"")

    def step(self) -> bool:
        """Tell a page of letters; return whether there may be more at once. Failures are counted and logged."""
        try:
            more = self._page()
        except BaseException as error:
            self.failures += 1
            self.last_failure = described(error)
            if isinstance(error, FTLayerError):
                logger.warning("on_dead: the letters of %r cannot be read now: %s", self.stream, error)
            else:
                logger.exception("on_dead failed for a letter of %r; it is called again with it", self.stream)
            return False
        self.failures, self.last_failure = 0, ""
        return more

    @property
    def pause_s(self) -> float:
        return min(POLL_S * float(2 ** min(self.failures, 10)), LONGEST_PAUSE_S)

    def _page(self) -> bool:
        if self._position is None:
            self._position = self._noted = self.client.call(GetCursor(self.stream, READER)).position
        letters = letters_behind(self.client, self.stream, self._position, PAGE)
        try:
            for info in letters:
                check_ran(self.tell(letter_of(info)), "on_dead")
                self._position = info.key
        finally:
            if self._position != self._noted:
                self.client.call(PutCursor(self.stream, READER, self._position))
                self._noted = self._position
        return len(letters) == PAGE


class Announcer:
    """A thread that tells a callback the dead letters of the streams that this program works on."""

    def __init__(self, client: VertexClient, tell: Callable[[DeadLetter], object]) -> None:
        """``client`` is the announcer's own: it is closed at the end."""
        self._client = client
        self._tell = tell
        self._lock = threading.Lock()
        self._tellers: dict[str, tuple[StreamTeller, threading.Thread]] = {}
        self._closing = threading.Event()

    def watch(self, stream: str) -> None:
        """Tell the letters of a stream too, those first that were there before and were never told."""
        with self._lock:
            if stream in self._tellers or self._closing.is_set():
                return
            teller = StreamTeller(self._client, stream, self._tell)
            thread = threading.Thread(target=self._run, args=(teller,), name=f"on-dead-{stream}", daemon=True)
            self._tellers[stream] = teller, thread
            thread.start()

    def failures(self) -> dict[str, str]:
        with self._lock:
            tellers = [teller for teller, _ in self._tellers.values()]
        return {teller.stream: teller.last_failure for teller in tellers if teller.last_failure}

    def close(self, timeout_s: float = 10.0) -> None:
        """Tell what is there, and end. What a callback fails on is the next start's."""
        self._closing.set()
        with self._lock:
            threads = [thread for _, thread in self._tellers.values()]
        for thread in threads:
            thread.join(timeout_s)
        self._client.close()

    def _run(self, teller: StreamTeller) -> None:
        while not self._closing.wait(teller.pause_s):
            while teller.step() and not self._closing.is_set():
                pass
        while teller.step():
            pass
