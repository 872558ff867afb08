"""A slot's end of the control stream: one Flight ``DoExchange`` to the coordinator, a frame a message."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import msgpack
import pyarrow as pa
from pyarrow import flight

from ftlayer.errors import FTLayerError
from ftlayer.runtime.protocol.control_frames import PROTOCOL, decode_to_slot, encode
from ftlayer.runtime.protocol.messages import FromSlot, ToSlot
from ftlayer.runtime.protocol.order import Door
from ftlayer.transport.address import parse_address
from ftlayer.transport.streams import NO_COLUMNS, end_stream

# How long `close` waits until what was sent is written and the coordinator has seen the end of the stream.
CLOSE_TIMEOUT_S = 5.0

_TRANSPORT_ERRORS = (pa.ArrowException, OSError, ValueError)


class ControlClient:
    """Connects one instance of a slot with the coordinator.

    There is one stream and no second one: when it breaks, the instance is lost to the coordinator, which never
    talks to it again, and it has to end.
    """

    def __init__(self, door: Door, *, job: str, slot: int, instance: str) -> None:
        """Prepare; connects with `start`."""
        self._door = door
        self._hello = {"protocol": PROTOCOL, "job": job, "slot": slot, "instance": instance}
        self._outbox: queue.SimpleQueue[FromSlot | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._over = False  # closed by us, or lost: nothing more is reported
        self._threads: list[threading.Thread] = []

    def start(self, on_message: Callable[[ToSlot], None], on_lost: Callable[[str], None]) -> None:
        """Connect, and begin to receive.

        Both functions are called by a thread of this client: ``on_message`` with each message in order,
        ``on_lost`` at most once, with a reason, when the coordinator cannot be reached, the stream breaks, or the
        coordinator ends it or sends what cannot be read; never after `close`. Returns at once.
        """
        self._on_message, self._on_lost = on_message, on_lost
        self._client = self._connect()
        self._threads = [self._start(self._read, "read")]

    def send(self, message: FromSlot) -> None:
        """Send ``message``; never waits and never raises: a stream that is broken is reported by ``on_lost``."""
        self._outbox.put(message)

    def close(self) -> None:
        """Write what was sent, end the stream in order and give it up; may be called from any thread.

        Waits `CLOSE_TIMEOUT_S` at the longest for a coordinator that does not read.
        """
        with self._lock:
            self._over = True
        self._outbox.put(None)
        for thread in reversed(self._threads):
            if thread is not threading.current_thread():
                thread.join(CLOSE_TIMEOUT_S)
        if not any(thread.is_alive() for thread in self._threads):
            self._client.close()

    # ------------------------------------------------------------ the stream

    def _connect(self) -> flight.FlightClient:
        options: list[tuple[str, int]] = [("grpc.use_local_subchannel_pool", 1)]
        if parse_address(self._door.address, "coordinator").is_here:
            options.append(("grpc.enable_http_proxy", 0))
        return flight.FlightClient(
            self._door.address,
            tls_root_certs=self._door.root_certs,
            cert_chain=self._door.root_certs if self._door.tls_key else None,
            private_key=self._door.tls_key,
            override_hostname=self._door.tls_name or None,
            generic_options=options,
        )

    def _start(self, run: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=run, name=f"ftlayer-control-{name}", daemon=True)
        thread.start()
        return thread

    def _read(self) -> None:
        descriptor = flight.FlightDescriptor.for_command(msgpack.packb(self._hello))
        header = (b"authorization", f"Bearer {self._door.token}".encode())
        try:
            self._writer, reader = self._client.do_exchange(
                descriptor, flight.FlightCallOptions(headers=[header])
            )
            self._writer.begin(NO_COLUMNS)
            self._threads.append(self._start(self._write, "write"))
            while True:
                chunk = reader.read_chunk()
                if chunk.app_metadata is not None:
                    self._on_message(decode_to_slot(chunk.app_metadata.to_pybytes()))
        except StopIteration:
            self._lost("the coordinator ended the control stream")
        except FTLayerError as error:
            self._lost(f"the coordinator sent what cannot be read: {error}")
        except _TRANSPORT_ERRORS as error:
            self._lost(f"the control stream to {self._door.address} broke: {error}")

    def _write(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self._writer.write_metadata(pa.py_buffer(encode(message)))
            end_stream(self._writer)
        except FTLayerError as error:
            self._lost(f"a message to the coordinator cannot be written: {error}")
        except _TRANSPORT_ERRORS as error:
            self._lost(f"the control stream to {self._door.address} broke: {error}")

    def _lost(self, reason: str) -> None:
        with self._lock:
            was_over, self._over = self._over, True
        if not was_over:
            self._on_lost(reason)
