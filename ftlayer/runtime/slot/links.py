"""The streams to and from the other slots, as the loop sees them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

from pyarrow import flight

from ftlayer.errors import FTLayerError
from ftlayer.records.ids import U64Array
from ftlayer.runtime.protocol.channel_frames import roots_in
from ftlayer.runtime.protocol.messages import Deploy, Peer, PeersUp
from ftlayer.runtime.slot.events import CreditCame, Event, LinkBroke
from ftlayer.runtime.slot.roster import Roster, StreamHeader
from ftlayer.runtime.slot.server import ChannelServer
from ftlayer.topology.job_graph import JobGraph
from ftlayer.transport.connection import Connection, Endpoint
from ftlayer.transport.exchange import Exchange
from ftlayer.transport.flight_connection import FlightConnection
from ftlayer.transport.unix_connection import UnixConnection

logger = logging.getLogger(__name__)


UNIX, FLIGHT = "unix", "flight"


class NearestConnection:
    """A `Connection` to a slot's Unix socket if that slot is met there, and to its Flight server if not.

    Names of hosts and paths prove nothing: containers share them. What counts is that this very slot answers at the
    socket (`ftlayer.transport.sockets`). Once it has, there is no other way to it.

    Attributes:
        transport: `UNIX` or `FLIGHT`, "" before it is known.
    """

    def __init__(self, peer: Peer, endpoint: Endpoint, command: bytes) -> None:
        """``endpoint`` is that of the peer's Flight server; both servers are shown its token."""
        self._slot = peer.slot
        self._unix = UnixConnection(peer.socket, endpoint.token, command) if peer.socket else None
        self._flight = FlightConnection(endpoint, command)
        self._lock = threading.Lock()
        self._cancelled = False
        self._used: Connection = self._flight if self._unix is None else self._unix
        self.transport = ""

    def open(self) -> None:
        if self._unix is not None and self._meet(self._unix):
            self.transport = UNIX
            return
        self._flight.open()
        self.transport = FLIGHT

    def read(self) -> bytes | None:
        return self._used.read()

    def write(self, frame: bytes) -> None:
        self._used.write(frame)

    def end(self) -> None:
        self._used.end()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            self._used.cancel()

    def close(self) -> None:
        self._used.close()

    def _meet(self, unix: UnixConnection) -> bool:
        try:
            unix.open()
        except (FTLayerError, OSError) as error:
            unix.close()
            with self._lock:
                if self._cancelled:
                    raise
                self._used = self._flight
            logger.info("slot %s is not met on this machine (%s): Flight goes there", self._slot, error)
            return False
        logger.info("slot %s is met on this machine: its Unix socket is used", self._slot)
        return True


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
        """What carries the stream (`ftlayer.runtime.slot.links`), "" before that is known; any thread."""
        return self._connection.transport

    def send(self, frame: bytes) -> None:
        self._stream.send(frame)

    def waiting(self) -> list[bytes]:
        """Return the frames that are not written yet; may be called by any thread."""
        return self._stream.waiting()

    def discard(self) -> None:
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


class SlotLinks:
    """One stream to every slot that this one sends to. Nothing here waits, save `close`."""

    def __init__(
        self,
        job: str,
        slot: int,
        instance: str,
        endpoint: Endpoint,
        server: ChannelServer,
        roster: Roster,
        receivers: Iterable[int],
        post: Callable[[Event], None],
    ) -> None:
        """``endpoint`` is a peer's but for the address; ``receivers`` are the slots to be sent to."""
        self._job, self._slot, self._instance = job, slot, instance
        self._endpoint = endpoint
        self._server = server
        self._roster = roster
        self._receivers = frozenset(receivers) - {slot}
        self._post = post
        self._links: dict[int, PeerLink] = {}

    @property
    def reached(self) -> tuple[int, ...]:
        return tuple(self._links)

    def deploy(self, deploy: Deploy) -> None:
        self._roster.deploy(deploy.epoch, deploy.peers)
        for peer in deploy.peers:
            self._connect(peer)

    def up(self, message: PeersUp) -> list[int]:
        """Open streams to new instances; returns which slots can be reached anew."""
        self._roster.up(message.epoch, message.peers)
        return [peer.slot for peer in message.peers if self._connect(peer)]

    def drop(self, epoch: int, slots: Iterable[int]) -> None:
        """Take nothing any more from these slots' instances, and send nothing more to them."""
        self._roster.drop(epoch, slots)
        for slot in slots:
            link = self._links.pop(slot, None)
            if link is not None:
                link.discard()

    def counts(self, slot: int, instance: str) -> bool:
        return self._roster.is_current(slot, instance)

    def transmit(self, slot: int, frame: bytes) -> None:
        self._links[slot].send(frame)

    def grant(self, slot: int, grants: bytes) -> None:
        self._server.grant(slot, grants)

    def address_of(self, slot: int) -> str:
        """Return where a slot was to be reached, "" if unknown."""
        link = self._links.get(slot)
        return "" if link is None else link.peer.address

    def transports(self) -> dict[str, str]:
        """Return what carries the stream to each slot there is one to (`Heartbeat.transports`); any thread."""
        links = list(self._links.items())
        return {str(slot): link.transport for slot, link in links if link.transport}

    def roots(self) -> list[U64Array]:
        """Return the roots of what is not written yet; may be called by any thread."""
        return [roots_in(frame) for link in list(self._links.values()) for frame in link.waiting()]

    def close(self) -> None:
        """End all streams; waits a little until what was sent is written."""
        for link in self._links.values():
            link.close()

    def _connect(self, peer: Peer) -> bool:
        known = self._links.get(peer.slot)
        if peer.slot not in self._receivers or (known is not None and known.peer == peer):
            return False
        if known is not None:
            known.discard()
        header = StreamHeader(self._job, self._slot, self._instance, peer.instance, self._roster.epoch)
        self._links[peer.slot] = PeerLink(peer, self._endpoint, header, self._post)
        return True


def receivers_of(graph: JobGraph, slot: int) -> set[int]:
    return {
        graph.slot_of(edge.target, channel.receiver)
        for edge in graph.edges
        for channel in graph.channels(edge)
        if graph.slot_of(edge.source, channel.sender) == slot
    }
