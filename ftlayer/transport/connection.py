"""What `Exchange` needs of a client's stream of frames, whatever carries it."""

from __future__ import annotations

from typing import Protocol


class Connection(Protocol):
    """A stream of frames, both ways. One thread reads, another writes; `cancel` is of any thread.

    Methods raise one of `ftlayer.transport.failures.TRANSPORT_ERRORS` when the stream is broken or cancelled, and the
    `ftlayer.errors.FTLayerError` that the server has ended it with.
    """

    def open(self) -> None:
        """Connect, and begin the stream; comes first, and once."""

    def read(self) -> bytes | None:
        """Wait for the next frame; None when the server has ended the stream in order."""

    def write(self, frame: bytes) -> None:
        """Write a frame; waits while the server does not read."""

    def end(self) -> None:
        """Tell the server that no frame comes behind those written."""

    def cancel(self) -> None:
        """Break the stream: a thread that waits in a method is freed. May come before `open`, and repeatedly."""

    def close(self) -> None:
        """Free everything; comes last, when no other thread uses the stream any more."""
