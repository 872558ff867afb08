"""A slot's stream to one other slot, whose other end is that slot's `ChannelServer`: elements out, credit back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pyarrow import flight

from ftlayer.runtime.protocol.messages import Peer
from ftlayer.runtime.slot.events import CreditCame, Event, LinkBroke
from ftlayer.runtime.slot.nearest import NearestConnection
from ftlayer.runtime.slot.roster import StreamHeader
from ftlayer.transport.client import Endpoint
from ftlayer.transport.exchange import Exchange

CLOSE_TIMEOUT_S = 2.0


class PeerLink:
    """Sends to one instance of a slot. Credits bound what waits here.

    When the stream breaks, that is told once (`LinkBroke`) and nothing is sent any more: what was on its way is
    lost, or not; only a new instance of the slot begins afresh.
    """

    def __init__(
        self, peer: Peer, endpoint: Endpoint, header: StreamHeader, post: Callable[[Event], None]
    ) -> None:
        """``endpoint`` is the peer's but for the address; connects in a thread of its own."""
        self.peer = peer
        self._post = post
        self._reached = False
        self._connection = NearestConnection(peer, replace(endpoint, address=peer.address), header.pack())
        self._stream: Exchange[bytes] = Exchange(f"ftlayer-to-{peer.slot}", self._connection, _as_it_is)
        self._stream.start(self._credit, self._broke)

    @property
    def transport(self) -> str:
        """What carries the stream (`ftlayer.runtime.slot.nearest`), "" before that is known; any thread."""
        return self._connection.transport

    def send(self, frame: bytes) -> None:
        """Send a frame behind those before it; never waits."""
        self._stream.send(frame)

    def waiting(self) -> list[bytes]:
        """Return the frames that are not written yet; may be called by any thread."""
        return self._stream.waiting()

    def discard(self) -> None:
        """Send nothing more; does not wait for anything."""
        self._stream.discard()

    def close(self) -> None:
        """End the stream behind the frames that wait; waits a little until they are written."""
        self._stream.close(CLOSE_TIMEOUT_S)

    # ------------------------------------------------------------ called by the stream's threads

    def _credit(self, frame: bytes) -> None:
        self._reached = True
        self._post(CreditCame(self.peer.slot, self.peer.instance, frame))

    def _broke(self, error: BaseException | None) -> None:
        reason = "the other slot has ended the stream" if error is None else str(error)
        reached = self._reached or not isinstance(error, flight.FlightUnavailableError)
        self._post(LinkBroke(self.peer.slot, self.peer.instance, reason, reached))


def _as_it_is(frame: bytes) -> bytes:
    return frame
