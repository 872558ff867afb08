"""The streams to and from the other slots, as the loop sees them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import msgpack
import pyarrow as pa
from pyarrow import flight

from ftlayer.errors import CodecError, FTLayerError, PeerRefusedError
from ftlayer.records.ids import U64Array
from ftlayer.runtime.protocol.channel_frames import roots_in
from ftlayer.runtime.protocol.messages import Deploy, Peer, PeersUp
from ftlayer.runtime.slot.rules.events import CreditCame, Event, FrameCame, LinkBroke
from ftlayer.topology.job_graph import JobGraph
from ftlayer.transport.address import Address
from ftlayer.transport.flight_connection import (
    TRANSPORT_ERRORS,
    Connection,
    Endpoint,
    Exchange,
    FlightConnection,
    TokenServer,
    WriterThread,
    failure_text,
    flight_error,
    frames_of,
)
from ftlayer.transport.frames import unpack
from ftlayer.transport.unix_connection import UnixConnection, UnixListener, UnixStream

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamHeader:
    """What a sender says when it opens its stream: of which job, from which instance, to which, and when.

    ``epoch`` is the latest that the sender has heard of.
    """

    job: str
    sender: int
    instance: str
    receiver: str
    epoch: int

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb([self.job, self.sender, self.instance, self.receiver, self.epoch])
        return packed

    @classmethod
    def unpack(cls, data: bytes) -> StreamHeader:
        try:
            fields = unpack(data)
        except ValueError as error:
            raise CodecError(f"a stream's header is not readable ({error})") from None
        kinds = (str, int, str, str, int)
        if not isinstance(fields, list) or tuple(map(type, fields)) != kinds:
            raise CodecError("a stream's header has not the fields job, sender, instance, receiver, epoch")
        return cls(*fields)


class Roster:
    def __init__(self, job: str, instance: str) -> None:
        self._job, self._instance = job, instance
        self._changed = threading.Condition()  # guards what follows
        self._deployed_in: int | None = None
        self._current: dict[int, str] = {}
        self._dropped: set[str] = set()
        self._closed = False
        self.epoch = 0

    def deploy(self, epoch: int, peers: Iterable[Peer]) -> None:
        with self._changed:
            self._deployed_in = epoch
        self.up(epoch, peers)

    def up(self, epoch: int, peers: Iterable[Peer]) -> None:
        with self._changed:
            self.epoch = max(self.epoch, epoch)
            for peer in peers:
                self._drop(peer.slot, unless=peer.instance)
                self._current[peer.slot] = peer.instance
            self._changed.notify_all()

    def drop(self, epoch: int, slots: Iterable[int]) -> None:
        with self._changed:
            self.epoch = max(self.epoch, epoch)
            for slot in slots:
                self._drop(slot)
            self._changed.notify_all()

    def is_current(self, slot: int, instance: str) -> bool:
        return self._current.get(slot) == instance

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def admit(self, header: StreamHeader, timeout_s: float) -> None:
        """Return when the sender counts; waits for one of whom the coordinator has told only the others yet.

        Raises:
            PeerRefusedError: another job, another receiver, an instance that was dropped or that is older than
                this one, or it was not announced in time.
        """
        if (header.job, header.receiver) != (self._job, self._instance):
            raise PeerRefusedError("the stream is for another job, or for an earlier instance of this slot")
        with self._changed:
            self._changed.wait_for(lambda: self.verdict(header) is not None, timeout_s)
            if not self.verdict(header):
                raise PeerRefusedError(
                    f"instance {header.instance} of slot {header.sender} does not count: it was replaced, or "
                    "the coordinator has not told of it"
                )

    def verdict(self, header: StreamHeader) -> bool | None:
        if self._closed or header.instance in self._dropped:
            return False
        if self._current.get(header.sender) == header.instance:
            return True
        # An instance that was lost before this one was deployed opened its stream in an earlier epoch.
        if self._deployed_in is not None and header.epoch < self._deployed_in:
            return False
        return None

    def _drop(self, slot: int, unless: str = "") -> None:
        instance = self._current.get(slot)
        if instance is not None and instance != unless:
            del self._current[slot]
            self._dropped.add(instance)


# Where a slot takes elements of the others: a Unix socket for those of its machine, an Arrow Flight server for all.
#
# Either has a stream a sender, which begins with a `StreamHeader`: a ``DoExchange`` with it as its descriptor, or a
# connection with it as its command. Elements come as frames (`ftlayer.runtime.protocol.channel_frames`), credit goes
# back. Who has not the job's token is refused (`ftlayer.transport.flight_connection`, `ftlayer.transport.sockets`).


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


UNIX, FLIGHT = "unix", "flight"


class NearestConnection:
    """A `Connection` to a slot's Unix socket if that slot is met there, and to its Flight server if not.

    Names of hosts and paths prove nothing: containers share them. What counts is that this very slot answers at the
    socket (`ftlayer.transport.sockets`). Once it has, there is no other way to it.

    Attributes:
        transport: `UNIX` or `FLIGHT`, "" before it is known.
    """

    def __init__(self, peer: Peer, endpoint: Endpoint, command: bytes) -> None:
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
        reason = "the other slot has ended the stream" if error is None else failure_text(error)
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
