"""A slot's end of the control stream, whose other end is the coordinator's `ControlServer`: a frame a message."""

from __future__ import annotations

from collections.abc import Callable

from ftlayer.errors import FTLayerError, ProtocolError
from ftlayer.runtime.protocol.control_frames import PROTOCOL, decode_to_slot, encode
from ftlayer.runtime.protocol.messages import FromSlot, ToSlot
from ftlayer.transport.client import Endpoint
from ftlayer.transport.exchange import Exchange
from ftlayer.transport.flight_connection import FlightConnection
from ftlayer.transport.frames import pack

# How long `close` waits until what was sent is written and the coordinator has seen the end of the stream.
CLOSE_TIMEOUT_S = 5.0


class ControlClient:
    """Connects one instance of a slot with the coordinator.

    There is one stream and no second one: when it breaks, the instance is lost to the coordinator, which never
    talks to it again, and it has to end.
    """

    def __init__(self, endpoint: Endpoint, *, job: str, slot: int, instance: str) -> None:
        """Prepare; connects with `start`."""
        self._endpoint = endpoint
        hello = {"protocol": PROTOCOL, "job": job, "slot": slot, "instance": instance}
        connection = FlightConnection(endpoint, pack(hello, "descriptor"))
        self._stream: Exchange[FromSlot] = Exchange("ftlayer-control", connection, _encoded)

    def start(self, on_message: Callable[[ToSlot], None], on_lost: Callable[[str], None]) -> None:
        """Connect, and begin to receive.

        Both functions are called by a thread of this client: ``on_message`` with each message in order,
        ``on_lost`` at most once, with a reason, when the coordinator cannot be reached, the stream breaks, or the
        coordinator ends it or sends what cannot be read; never after `close`. Returns at once.
        """
        self._stream.start(
            lambda frame: on_message(_decoded(frame)),
            lambda error: on_lost(self._reason(error)),
        )

    def send(self, message: FromSlot) -> None:
        """Send ``message``; never waits and never raises: a stream that is broken is reported by ``on_lost``."""
        self._stream.send(message)

    def close(self) -> None:
        """Write what was sent, end the stream in order and give it up; may be called from any thread.

        Waits `CLOSE_TIMEOUT_S` at the longest for a coordinator that does not read.
        """
        self._stream.close(CLOSE_TIMEOUT_S)

    def _reason(self, error: BaseException | None) -> str:
        if error is None:
            return "the coordinator ended the control stream"
        if isinstance(error, FTLayerError):
            return str(error)
        return f"the control stream to {self._endpoint.address} broke: {error}"


def _encoded(message: FromSlot) -> bytes:
    try:
        return encode(message)
    except FTLayerError as error:
        raise ProtocolError(f"a message to the coordinator cannot be written: {error}") from error


def _decoded(frame: bytes) -> ToSlot:
    try:
        return decode_to_slot(frame)
    except FTLayerError as error:
        raise ProtocolError(f"the coordinator sent what cannot be read: {error}") from error
