"""A slot's stream to one other slot: elements out, credit back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pyarrow as pa
from pyarrow import flight

from ftlayer.runtime.protocol.messages import Peer
from ftlayer.runtime.protocol.order import Door
from ftlayer.runtime.slot.events import CreditCame, Event, LinkBroke
from ftlayer.runtime.slot.mailbox import Mailbox
from ftlayer.runtime.slot.roster import StreamHeader
from ftlayer.transport.address import parse_address
from ftlayer.transport.streams import NO_COLUMNS, end_stream

CLOSE_TIMEOUT_S = 2.0

# Behind the last frame.
_END = b""

_TRANSPORT_ERRORS = (pa.ArrowException, OSError)


class PeerLink:
    """Sends to one instance of a slot. Credits bound what waits here.

    When the stream breaks, that is told once (`LinkBroke`) and nothing is sent any more: what was on its way is
    lost, or not; only a new instance of the slot begins afresh.
    """

    def __init__(self, peer: Peer, door: Door, header: StreamHeader, post: Callable[[Event], None]) -> None:
        """``door`` has the token, and how a certificate is verified; connects in a thread of its own."""
        self.peer = peer
        self._door = door
        self._header = header
        self._post = post
        self._frames: Mailbox[bytes] = Mailbox()
        self._writing = _END
        self._lock = threading.Lock()
        self._over = False  # discarded or broken: nothing more is sent, nothing more is told
        self._ending = False
        self._reached = False
        self._reader: flight.FlightStreamReader | None = None
        self._thread = threading.Thread(target=self._run, name=f"ftlayer-to-{peer.slot}", daemon=True)
        self._thread.start()

    def send(self, frame: bytes) -> None:
        """Send a frame behind those before it; never waits."""
        self._frames.put(frame)

    def waiting(self) -> list[bytes]:
        """Return the frames that are not written yet; may be called by any thread."""
        return [frame for frame in (self._writing, *self._frames.waiting()) if frame]

    def discard(self) -> None:
        """Send nothing more, and forget what waits; does not wait for anything."""
        with self._lock:
            self._over = True
            reader = self._reader
        self._frames.put(_END)
        if reader is not None:
            reader.cancel()

    def close(self) -> None:
        """End the stream behind the frames that wait; waits a little until they are written."""
        with self._lock:
            self._ending = True
        self._frames.put(_END)
        self._thread.join(CLOSE_TIMEOUT_S)

    # ------------------------------------------------------------ threads

    def _run(self) -> None:
        try:
            self._serve()
        except _TRANSPORT_ERRORS as error:
            self._lost_by(error)

    def _serve(self) -> None:
        client = self._connect()
        descriptor = flight.FlightDescriptor.for_command(self._header.pack())
        token = (b"authorization", f"Bearer {self._door.token}".encode())
        writer, reader = client.do_exchange(descriptor, flight.FlightCallOptions(headers=[token]))
        with self._lock:
            self._reader = reader
        reading = threading.Thread(
            target=self._read, args=(reader,), name=f"ftlayer-from-{self.peer.slot}", daemon=True
        )
        reading.start()
        try:
            writer.begin(NO_COLUMNS)
            self._write_all(writer)
            if not self._over:
                end_stream(writer)
                reading.join()
        finally:
            # Frees the thread that reads where the other slot has not ended the stream.
            reader.cancel()
            reading.join()
            # A writer that is not closed complains when it is freed.
            with contextlib.suppress(*_TRANSPORT_ERRORS):
                writer.close()
            client.close()

    def _write_all(self, writer: flight.FlightStreamWriter) -> None:
        while not self._over:
            frame = self._frames.take()
            if frame is None:
                self._frames.wait(None)
            elif frame is _END:
                return
            else:
                self._writing = frame
                writer.write_metadata(pa.py_buffer(frame))
                self._writing = _END

    def _read(self, reader: flight.FlightStreamReader) -> None:
        try:
            while True:
                metadata = reader.read_chunk().app_metadata
                if metadata is not None:
                    self._reached = True
                    self._post(CreditCame(self.peer.slot, self.peer.instance, metadata.to_pybytes()))
        except StopIteration:
            self._lost("the other slot has ended the stream")
        except _TRANSPORT_ERRORS as error:
            self._lost_by(error)

    def _lost_by(self, error: BaseException) -> None:
        self._lost(str(error), nobody=isinstance(error, flight.FlightUnavailableError))

    def _lost(self, reason: str, *, nobody: bool = False) -> None:
        with self._lock:
            was_over, self._over = self._over or self._ending, True
        self._frames.put(_END)
        if not was_over:
            reached = self._reached or not nobody
            self._post(LinkBroke(self.peer.slot, self.peer.instance, reason, reached))

    def _connect(self) -> flight.FlightClient:
        options: list[tuple[str, int]] = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
        ]
        if parse_address(self.peer.address, "peer").is_here:
            options.append(("grpc.enable_http_proxy", 0))
        return flight.FlightClient(
            self.peer.address,
            tls_root_certs=self._door.root_certs,
            cert_chain=self._door.root_certs if self._door.tls_key else None,
            private_key=self._door.tls_key,
            override_hostname=self._door.tls_name or None,
            generic_options=options,
        )
