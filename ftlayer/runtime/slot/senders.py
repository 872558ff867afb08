"""The streams by which the other slots send, whatever carries them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

import pyarrow as pa

from ftlayer.errors import PeerRefusedError
from ftlayer.runtime.slot.events import Event, FrameCame
from ftlayer.runtime.slot.roster import Roster, StreamHeader
from ftlayer.transport.failures import TRANSPORT_ERRORS
from ftlayer.transport.writer import WriterThread

logger = logging.getLogger(__name__)


class Senders:
    """Takes the frames of those that the roster knows, and gives credit back."""

    def __init__(self, roster: Roster, admit_timeout_s: float, post: Callable[[Event], None]) -> None:
        """``post`` puts into the loop's mailbox; who is unknown waits for ``admit_timeout_s``."""
        self._roster = roster
        self._admit_timeout_s = admit_timeout_s
        self._post = post
        self._lock = threading.Lock()
        self._open: dict[int, tuple[str, WriterThread[bytes]]] = {}

    def serve(self, command: bytes, frames: Iterable[pa.Buffer], write: Callable[[bytes], None]) -> None:
        """Hand over all frames of a stream that begins with ``command``; credit goes back by ``write``.

        Raises `PeerRefusedError` for one whose sender does not count, `CodecError` for a command that is no header.
        """
        header = StreamHeader.unpack(command)
        self._roster.admit(header, self._admit_timeout_s)
        # The loop must not wait for a slow reader.
        credits: WriterThread[bytes] = WriterThread(f"ftlayer-credit-{header.sender}")
        credits.start(write, _credit_lost)
        with self._lock:
            self._open[header.sender] = header.instance, credits
        try:
            for frame in frames:
                if not self._roster.is_current(header.sender, header.instance):
                    raise PeerRefusedError(f"instance {header.instance} was replaced")
                self._post(FrameCame(header.sender, header.instance, frame))
        except TRANSPORT_ERRORS as error:
            # Its sender is gone or will say so itself: who is lost is the coordinator's to tell.
            logger.info("the stream from slot %s broke: %s", header.sender, error)
        finally:
            with self._lock:
                if self._open.get(header.sender) == (header.instance, credits):
                    del self._open[header.sender]
            # Nothing may be written to the stream after this has returned.
            credits.finish()
            credits.join()

    def grant(self, slot: int, grants: bytes) -> None:
        """Send credit back to the slot whose stream is open; never waits. Lost if there is none."""
        with self._lock:
            found = self._open.get(slot)
        if found is not None:
            found[1].put(grants)

    def finish(self, timeout_s: float) -> None:
        """Write the credit that waits, and admit no one any more: a sender ends when it has all its credit back."""
        with self._lock:
            writers = [credits for _, credits in self._open.values()]
        for credits in writers:
            credits.finish()
            credits.join(timeout_s)
        self._roster.close()


def _credit_lost(error: BaseException) -> None:
    logger.info("credit could not be sent: %s", error)
