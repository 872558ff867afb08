"""Where an instance of a slot listens for the others."""

from __future__ import annotations

import socket
from pathlib import Path

from ftlayer.runtime.slot.shell import Order
from ftlayer.transport.address import Address, parse_address
from ftlayer.transport.sockets import SocketDirectory
from ftlayer.transport.unix_listener import remove_dead_sockets

NO_SOCKET = "channels to slots of this machine go over the network, too"


class ListeningPlaces:
    """The places of one instance, until `close`.

    Attributes:
        address: of its Flight server.
        socket: path of its Unix socket, "" where none can be made.
    """

    def __init__(self, order: Order, instance: str) -> None:
        """Use the job's directory of sockets, or, where there is none, make one of this instance's own.

        What killed processes have left in either is removed.
        """
        self._own: SocketDirectory | None = None
        name = f"{order.slot}-{instance[:12]}"
        if order.sockets:
            remove_dead_sockets(Path(order.sockets), f"{order.slot}-*")
            self.address = Address(path=f"{order.sockets}/{name}")
            self.socket = f"{order.sockets}/{name}-unix"
        else:
            self._own = SocketDirectory.make(NO_SOCKET)
            self.address = Address(order.listen_on or _address_towards(order.coordinator.address))
            self.socket = "" if self._own is None else f"{self._own.path}/{name}"

    def close(self) -> None:
        if self._own is not None:
            self._own.remove()


def _address_towards(text: str) -> str:
    """Return the address of this machine by which it reaches another; sends nothing."""
    address = parse_address(text, "coordinator")
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address.host, address.port))
        own: str = probe.getsockname()[0]
        return own
