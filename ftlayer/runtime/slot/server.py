"""Where a slot takes elements of the others: a Unix socket for those of its machine, an Arrow Flight server for all.

Either has a stream a sender, which begins with a `StreamHeader`: a ``DoExchange`` with it as its descriptor, or a
connection with it as its command. Elements come as frames (`ftlayer.runtime.protocol.channel_frames`), credit goes
back. Who has not the job's token is refused (`ftlayer.transport.flight_connection`, `ftlayer.transport.sockets`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

import pyarrow as pa
from pyarrow import flight

from ftlayer.errors import FTLayerError, PeerRefusedError
from ftlayer.runtime.slot.events import Event, FrameCame
from ftlayer.runtime.slot.roster import Roster, StreamHeader
from ftlayer.transport.address import Address
from ftlayer.transport.exchange import TokenServer
from ftlayer.transport.flight_connection import TRANSPORT_ERRORS, WriterThread, flight_error, frames_of
from ftlayer.transport.unix_connection import UnixListener, UnixStream

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


SHUTDOWN_TIMEOUT_S = 2.0


class ChannelServer:
    """Takes elements; it listens from the moment it is made.

    Attributes:
        address: of the Flight server.
        socket: path of the Unix socket, "" if there is none.
    """

    def __init__(
        self,
        listen: Address,
        *,
        token: str,
        roster: Roster,
        admit_timeout_s: float,
        post: Callable[[Event], None],
        certificate: tuple[bytes, bytes] | None = None,
        socket: str = "",
    ) -> None:
        """Listen (port 0: on any free one); ``certificate`` is the PEM of (chain, key) for TLS.

        ``socket`` is the path of the Unix socket, in a directory that no other user can enter; "": none.
        ``post`` puts into the loop's mailbox; a sender that the ``roster`` does not know waits for
        ``admit_timeout_s``. Raises `pyarrow.ArrowException` or OSError when an address cannot be listened on.
        """
        self._senders = Senders(roster, admit_timeout_s, post)
        self._flight = _FlightChannels(listen, token, self._senders, certificate)
        self._unix: UnixListener | None = None
        self.address = self._flight.address
        self.socket = socket
        if socket:
            try:
                self._unix = UnixListener(socket, token, self._serve)
            except OSError:
                self._flight.stop(SHUTDOWN_TIMEOUT_S)
                raise

    def grant(self, slot: int, grants: bytes) -> None:
        """Send credit back to the slot whose stream is open; never waits. Lost if there is none."""
        self._senders.grant(slot, grants)

    def close(self) -> None:
        """Take nothing any more; waits a little for the senders, which end their streams by themselves."""
        self._senders.finish(SHUTDOWN_TIMEOUT_S)
        if self._unix is not None:
            self._unix.close(SHUTDOWN_TIMEOUT_S)
        self._flight.stop(SHUTDOWN_TIMEOUT_S)

    def _serve(self, command: bytes, stream: UnixStream) -> None:
        self._senders.serve(command, stream.frames(), stream.write)


class _FlightChannels(TokenServer):
    def __init__(
        self, listen: Address, token: str, senders: Senders, certificate: tuple[bytes, bytes] | None
    ) -> None:
        self._senders = senders
        # All processes of a job show each other its certificate.
        client_ca = None if certificate is None else certificate[0]
        super().__init__(listen, token=token, certificate=certificate, client_ca=client_ca)

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        self.admitted(context)
        try:
            self._senders.serve(descriptor.command or b"", frames_of(reader), writer.write_metadata)
        except FTLayerError as error:
            raise flight_error(error) from error
