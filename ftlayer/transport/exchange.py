"""A client's end of a stream whose frames go both ways."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from pyarrow import flight

from ftlayer.errors import FTLayerError
from ftlayer.transport.address import Address
from ftlayer.transport.flight_connection import TRANSPORT_ERRORS, TokenCheck, WriterThread
from ftlayer.transport.sockets import Door


class TokenServer(flight.FlightServerBase):  # type: ignore[misc]
    """A Flight server for clients that have its token. It serves from the moment it is made, at ``address``."""

    def __init__(
        self,
        listen: Address,
        *,
        token: str,
        certificate: tuple[bytes, bytes] | None,
        client_ca: bytes | None,
    ) -> None:
        """Listen (port 0: on any free one); ``certificate`` is the PEM of (chain, key) for TLS.

        With ``client_ca``, PEM, a client without a certificate signed by it sends nothing that would be read into
        memory before its token. What calls need has to be there before this: the first may come at once.

        Raises `pyarrow.ArrowException` or OSError when the address cannot be listened on.
        """
        tls = certificate is not None
        super().__init__(
            str(listen.of_server(listen.port, tls=tls)),
            tls_certificates=None if certificate is None else [certificate],
            verify_client=client_ca is not None,
            root_certificates=client_ca,
            middleware={"token": TokenCheck(token)},
        )
        _live.add(self)
        self.address = listen.of_server(self.port, tls=tls)
        self._door = None if listen.path else Door(self.port)

    def admitted(self, context: flight.ServerCallContext) -> None:
        """Tell that a call has the token: its connection stays. For the beginning of each method."""
        if self._door is not None:
            self._door.shown(context.peer())

    def shutdown(self) -> None:
        if self._door is not None:
            self._door.close()
        super().shutdown()

    def stop(self, timeout_s: float) -> None:
        """Take no more calls; wait for those under way, ``timeout_s`` at the longest: open streams may never end."""
        stopping = threading.Thread(target=self.shutdown, name="ftlayer-shutdown", daemon=True)
        stopping.start()
        stopping.join(timeout_s)


_live: weakref.WeakSet[TokenServer] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Let a forked process end without its parent's servers: Flight would shut them down, and wait without end.

    The threads that serve them are the parent's. What Flight does at the end is a `weakref.finalize` of the server: the
    callback of one of its weak references.
    """
    for server in list(_live):
        for reference in weakref.getweakrefs(server):
            if isinstance(finalizer := reference.__callback__, weakref.finalize):
                finalizer.detach()


os.register_at_fork(after_in_child=_leave_to_parent)


class Connection(Protocol):
    """A stream of frames, both ways. One thread reads, another writes; `cancel` is of any thread.

    Methods raise one of `TRANSPORT_ERRORS` when the stream is broken or
    cancelled, and the `FTLayerError` that the server has ended it with.
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


T = TypeVar("T")


class Exchange(Generic[T]):
    """One stream, and no second one: when it breaks, that is told, and nothing is sent any more.

    What was on its way then is lost, or not.
    """

    def __init__(self, name: str, connection: Connection, encode: Callable[[T], bytes]) -> None:
        """Take what is to be sent; ``encode`` makes a frame of it. The threads are called ``name``."""
        self._name = name
        self._connection = connection
        self._encode = encode
        self._outbox: WriterThread[T] = WriterThread(f"{name}-write")
        self._lock = threading.Lock()
        self._silent = False  # closed, discarded or broken: nothing more is told
        self._thread: threading.Thread | None = None

    def start(
        self, on_frame: Callable[[bytes], None], on_end: Callable[[BaseException | None], None]
    ) -> None:
        """Connect, and begin to send and to receive; returns at once.

        ``on_frame`` is called with each frame that comes, in order, by a thread of this object. ``on_end`` is called
        once: with the error when the server cannot be reached, the stream breaks, or ``on_frame`` or ``encode`` raises
        an `FTLayerError`; with None when the server ends the stream. It is not called after `close` or `discard`.
        """
        self._on_frame, self._on_end = on_frame, on_end
        self._thread = threading.Thread(target=self._run, name=f"{self._name}-read", daemon=True)
        self._thread.start()

    def send(self, item: T) -> None:
        """Send ``item`` behind those before it; never waits and never raises."""
        self._outbox.put(item)

    def waiting(self) -> list[T]:
        """Return what is not written yet; may be called by any thread."""
        return self._outbox.waiting()

    def discard(self) -> None:
        """Send nothing more and tell nothing more; does not wait for anything."""
        with self._lock:
            self._silent = True
        self._outbox.stop()
        self._connection.cancel()

    def close(self, timeout_s: float) -> None:
        """End the stream behind what was sent, and wait for that; may be called by any thread.

        Waits ``timeout_s`` at the longest for a server that does not read, or does not end the stream in turn.
        """
        with self._lock:
            self._silent = True
        self._outbox.finish()
        if self._thread is threading.current_thread():
            self._outbox.join(timeout_s)
        elif self._thread is not None:
            self._thread.join(timeout_s)

    # ------------------------------------------------------------ threads

    def _run(self) -> None:
        try:
            self._converse()
        finally:
            # Frees the thread that writes where the server does not read.
            self._connection.cancel()
            self._outbox.stop()
            self._outbox.join()
            self._connection.close()

    def _converse(self) -> None:
        """Read to the end of the stream, which is told before anything is cleaned up."""
        try:
            self._connection.open()
            self._outbox.start(self._write, self._write_broke, self._connection.end)
            while (frame := self._connection.read()) is not None:
                self._on_frame(frame)
            self._tell(None)
        except (FTLayerError, *TRANSPORT_ERRORS) as error:
            self._tell(error)

    def _write(self, item: T) -> None:
        try:
            frame = self._encode(item)
        except FTLayerError as error:
            self._tell(error)
            self._outbox.stop()
            return
        self._connection.write(frame)

    def _write_broke(self, error: BaseException) -> None:
        self._tell(error)
        self._connection.cancel()

    def _tell(self, error: BaseException | None) -> None:
        with self._lock:
            was_silent, self._silent = self._silent, True
        if not was_silent:
            self._on_end(error)
