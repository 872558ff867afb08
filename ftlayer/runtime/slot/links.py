"""The streams to and from the other slots, as the loop sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ftlayer.records.ids import U64Array
from ftlayer.runtime.protocol.channel_frames import roots_in
from ftlayer.runtime.protocol.messages import Deploy, Peer, PeersUp
from ftlayer.runtime.slot.events import Event
from ftlayer.runtime.slot.peer import PeerLink
from ftlayer.runtime.slot.roster import Roster, StreamHeader
from ftlayer.runtime.slot.server import ChannelServer
from ftlayer.topology.job_graph import JobGraph
from ftlayer.transport.client import Endpoint


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
        """The slots there is a stream to."""
        return tuple(self._links)

    def deploy(self, deploy: Deploy) -> None:
        """Open the streams to the slots there are."""
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
        """Whether what comes of this instance counts."""
        return self._roster.is_current(slot, instance)

    def transmit(self, slot: int, frame: bytes) -> None:
        """Send an element."""
        self._links[slot].send(frame)

    def grant(self, slot: int, grants: bytes) -> None:
        """Give credit back."""
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
    """Return the slots that tasks of ``slot`` send to."""
    return {
        graph.slot_of(edge.target, channel.receiver)
        for edge in graph.edges
        for channel in graph.channels(edge)
        if graph.slot_of(edge.source, channel.sender) == slot
    }
