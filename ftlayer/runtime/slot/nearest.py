"""A stream to another slot by the shortest way there is: the machine's own, or the network."""

from __future__ import annotations

import logging
import threading

from ftlayer.errors import FTLayerError
from ftlayer.runtime.protocol.messages import Peer
from ftlayer.transport.client import Endpoint
from ftlayer.transport.connection import Connection
from ftlayer.transport.flight_connection import FlightConnection
from ftlayer.transport.unix_connection import UnixConnection

UNIX, FLIGHT = "unix", "flight"

logger = logging.getLogger(__name__)


class NearestConnection:
    """A `Connection` to a slot's Unix socket if that slot is met there, and to its Flight server if not.

    Names of hosts and paths prove nothing: containers share them. What counts is that this very slot answers at the
    socket (`ftlayer.transport.meeting`). Once it has, there is no other way to it.

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
