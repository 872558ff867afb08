"""Where a slot takes elements of the others: an Arrow Flight server with one ``DoExchange`` stream a sender.

The stream's descriptor is a `StreamHeader`. Elements come as frames (`ftlayer.runtime.protocol.channel_frames`), credit
goes back, both as metadata (`ftlayer.transport.streams`). Every request has the header
``authorization: Bearer <token>``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from pyarrow import flight

from ftlayer.errors import FTLayerError, PeerRefusedError
from ftlayer.runtime.slot.events import Event, FrameCame
from ftlayer.runtime.slot.roster import Roster, StreamHeader
from ftlayer.transport.address import Address
from ftlayer.transport.failures import TRANSPORT_ERRORS, flight_error
from ftlayer.transport.server import TokenServer
from ftlayer.transport.streams import frames_of
from ftlayer.transport.writer import WriterThread

SHUTDOWN_TIMEOUT_S = 2.0

logger = logging.getLogger(__name__)


class ChannelServer(TokenServer):
    """Takes elements; it listens from the moment it is made, at ``address``."""

    def __init__(
        self,
        listen: Address,
        *,
        token: str,
        roster: Roster,
        admit_timeout_s: float,
        post: Callable[[Event], None],
        certificate: tuple[bytes, bytes] | None = None,
    ) -> None:
        """Listen (port 0: on any free one); ``certificate`` is the PEM of (chain, key) for TLS.

        ``post`` puts into the loop's mailbox; a sender that the ``roster`` does not know waits for
        ``admit_timeout_s``. Raises `pyarrow.ArrowException` or OSError when the address cannot be listened on.
        """
        self._roster = roster
        self._admit_timeout_s = admit_timeout_s
        self._post = post
        self._lock = threading.Lock()
        self._senders: dict[int, tuple[str, WriterThread[bytes]]] = {}
        # All processes of a job show each other its certificate.
        client_ca = None if certificate is None else certificate[0]
        super().__init__(listen, token=token, certificate=certificate, client_ca=client_ca)

    def grant(self, slot: int, grants: bytes) -> None:
        """Send credit back to the slot whose stream is open; never waits. Lost if there is none."""
        with self._lock:
            found = self._senders.get(slot)
        if found is not None:
            found[1].put(grants)

    def close(self) -> None:
        """Take nothing any more; waits a little for the senders, which end their streams by themselves."""
        with self._lock:
            writers = [credits for _, credits in self._senders.values()]
        for credits in writers:
            # A sender ends when it has all its credit back.
            credits.finish()
            credits.join(SHUTDOWN_TIMEOUT_S)
        self._roster.close()
        self.stop(SHUTDOWN_TIMEOUT_S)

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """Hand over everything that a sender sends."""
        try:
            header = StreamHeader.unpack(descriptor.command or b"")
            self._roster.admit(header, self._admit_timeout_s)
            self._receive(header, reader, writer)
        except FTLayerError as error:
            raise flight_error(error) from error

    def _receive(
        self,
        header: StreamHeader,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        # The loop must not wait for a slow reader.
        credits: WriterThread[bytes] = WriterThread(f"ftlayer-credit-{header.sender}")
        credits.start(writer.write_metadata, _credit_lost)
        with self._lock:
            self._senders[header.sender] = header.instance, credits
        try:
            for frame in frames_of(reader):
                if not self._roster.is_current(header.sender, header.instance):
                    raise PeerRefusedError(f"instance {header.instance} was replaced")
                self._post(FrameCame(header.sender, header.instance, frame))
        except TRANSPORT_ERRORS as error:
            # Its sender is gone or will say so itself: who is lost is the coordinator's to tell.
            logger.info("the stream from slot %s broke: %s", header.sender, error)
        finally:
            with self._lock:
                if self._senders.get(header.sender) == (header.instance, credits):
                    del self._senders[header.sender]
            # The stream's writer may not be used after its handler has returned.
            credits.finish()
            credits.join()


def _credit_lost(error: BaseException) -> None:
    logger.info("credit could not be sent: %s", error)
