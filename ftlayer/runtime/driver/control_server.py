"""The coordinator's end of the control streams: a Flight server with one ``DoExchange`` for each instance of a slot.

The stream's descriptor is a msgpack map with protocol, job, slot, instance; then frames go both ways as metadata
(`ftlayer.runtime.protocol.channel_frames`). What cannot be read ends the stream with a Flight error that says why.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable

from pyarrow import flight

from ftlayer.errors import FTLayerError, MalformedRequestError, ProtocolError
from ftlayer.runtime.protocol.channel_frames import PROTOCOL, decode_from_slot, encode
from ftlayer.runtime.protocol.messages import Cancel, FromSlot, Hello, SlotFailed, ToSlot
from ftlayer.transport.address import Address
from ftlayer.transport.flight_connection import (
    TRANSPORT_ERRORS,
    TokenServer,
    WriterThread,
    failure_text,
    flight_error,
    frames_of,
)
from ftlayer.transport.frames import unpack_map
from ftlayer.transport.sockets import SocketDirectory

# A message is a heartbeat with its counters at the most; splits go the other way.
MAX_FRAME_BYTES = 16 << 20

EXIT_WAIT_S = 30.0
"""How long the end of the program waits for slots that are still connected."""

OnMessage = Callable[[int, str, FromSlot], None]
OnLost = Callable[[int, str, str], None]

logger = logging.getLogger(__name__)


class ControlServer(TokenServer):
    """Listens from the moment it is made, at ``address``.

    ``on_message(slot, instance, message)`` is called with each message of an instance in order; the first one is a
    Hello, or the SlotFailed that says what kept it from saying Hello. ``on_lost(slot, instance, reason)`` is called
    once, after the last. Both are called by threads of this server.
    """

    def __init__(
        self,
        *,
        listen: Address,
        token: str,
        job: str,
        slots: int,
        certificate: tuple[bytes, bytes] | None,
        on_message: OnMessage,
        on_lost: OnLost,
        sockets: SocketDirectory | None = None,
    ) -> None:
        """Listen (port 0: on a free one); ``certificate`` is the PEM of (chain, key) for TLS.

        ``sockets`` are removed when all slots have left after `close`. Raises `pyarrow.ArrowException` or OSError when
        the address cannot be listened on.
        """
        self._job, self._slots = job, slots
        self._on_message, self._on_lost = on_message, on_lost
        self._sockets = sockets
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._closing: threading.Thread | None = None
        self._streams: dict[str, WriterThread[ToSlot]] = {}
        self._seen: set[str] = set()
        # All processes of a job show each other its certificate.
        client_ca = None if certificate is None else certificate[0]
        super().__init__(listen, token=token, certificate=certificate, client_ca=client_ca)
        # Behind Flight's own, so that it is called before that, which waits without end for those connected.
        atexit.register(self._end_with_program)

    def send(self, instance: str, message: ToSlot) -> None:
        """Never waits. To an instance that is not connected (any more) nothing is sent."""
        with self._lock:
            outbox = self._streams.get(instance)
        if outbox is not None:
            outbox.put(message)

    def close(self) -> None:
        """Stop listening. Slots that are still connected are waited for by the program's end (`EXIT_WAIT_S`)."""
        with self._lock:
            if self._closing is None:
                self._closing = threading.Thread(
                    target=self._shut_down, name="ftlayer-control-close", daemon=True
                )
                self._closing.start()

    def _shut_down(self) -> None:
        self.shutdown()
        if self._sockets is not None:
            self._sockets.remove()
        atexit.unregister(self._end_with_program)

    def _end_with_program(self) -> None:
        """Have all streams ended before the interpreter is.

        They are served by threads of gRPC's. One that comes back into Python behind the interpreter's end aborts the
        process, and a `shutdown` that is under way is no protection: Flight's own finalizer does not wait for it.
        """
        with self._lock:
            for outbox in self._streams.values():
                outbox.put(Cancel("the driver's program has ended"))
            if not self._left.wait_for(lambda: not self._streams, EXIT_WAIT_S):
                logger.warning(
                    "job %s: %d slots are still connected at the end of the program",
                    self._job,
                    len(self._streams),
                )
            closing = self._closing
        if closing is not None:
            closing.join(EXIT_WAIT_S)

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        self.admitted(context)
        try:
            self._serve(descriptor, reader, writer)
        except FTLayerError as error:
            raise flight_error(error) from error

    def _serve(
        self,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        slot, instance = self._caller(descriptor)
        outbox = self._admit(instance)
        outbox.start(lambda message: writer.write_metadata(encode(message)), _left_early)
        reason = "it has ended, and nothing here says how (SIGKILL leaves no word)"
        try:
            self._receive(slot, instance, reader)
        except FTLayerError as error:
            reason = f"it sent what cannot be read: {error}"
            raise
        except TRANSPORT_ERRORS as error:
            reason = f"its control stream broke: {failure_text(error)}"
        finally:
            with self._lock:
                del self._streams[instance]
                self._left.notify_all()
            self._on_lost(slot, instance, reason)
            # The writer is Flight's, and gone once this returns.
            outbox.finish()
            outbox.join()

    def _receive(self, slot: int, instance: str, reader: flight.MetadataRecordBatchReader) -> None:
        greeted = False
        for frame in frames_of(reader):
            if frame.size > MAX_FRAME_BYTES:
                raise MalformedRequestError(f"control message: {frame.size} bytes; {MAX_FRAME_BYTES} at most")
            message = decode_from_slot(frame)
            if isinstance(message, SlotFailed) and not greeted:
                self._on_message(slot, instance, message)
                continue
            if isinstance(message, Hello) == greeted:
                raise ProtocolError("expected Hello as the first message of a stream, and only there")
            if isinstance(message, Hello) and (message.slot, message.instance) != (slot, instance):
                raise ProtocolError(f"Hello names slot {message.slot}, the stream slot {slot}")
            greeted = True
            self._on_message(slot, instance, message)

    def _caller(self, descriptor: flight.FlightDescriptor) -> tuple[int, str]:
        head = unpack_map(descriptor.command or b"", "descriptor", ("protocol", "job", "slot", "instance"))
        if head["protocol"] != PROTOCOL:
            raise ProtocolError(
                f"the slot speaks protocol {head['protocol']!r} and the driver {PROTOCOL}: the same ftlayer has "
                "to be installed on all machines"
            )
        if head["job"] != self._job:
            raise ProtocolError(f"job {head['job']!r} is not the one that runs here")
        slot, instance = head["slot"], head["instance"]
        if type(slot) is not int or not 0 <= slot < self._slots:
            raise MalformedRequestError(f"descriptor.slot: expected 0 to {self._slots - 1}, got {slot!r}")
        if type(instance) is not str or not instance:
            raise MalformedRequestError("descriptor.instance: expected a name")
        return slot, instance

    def _admit(self, instance: str) -> WriterThread[ToSlot]:
        with self._lock:
            if instance in self._seen:
                raise ProtocolError(f"instance {instance} has been connected before; it cannot come back")
            self._seen.add(instance)
            outbox = self._streams[instance] = WriterThread[ToSlot]("ftlayer-control-write")
            return outbox


def _left_early(error: BaseException) -> None:
    # The thread that reads sees the same end of the stream, and reports it.
    logger.info("a slot left before it got a message: %s", error)
