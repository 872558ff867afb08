"""What the Flight servers of vertex, slots and coordinator have in common."""

from __future__ import annotations

import os
import threading
import weakref

from pyarrow import flight

from ftlayer.transport.address import Address
from ftlayer.transport.tokens import TokenCheck


class TokenServer(flight.FlightServerBase):  # type: ignore[misc]
    """A Flight server for clients that have its token. It serves from the moment it is made, at ``address``."""

    def __init__(
        self,
        listen: Address,
        *,
        token: str,
        certificate: tuple[bytes, bytes] | None,
        client_ca: bytes | None,
    ) -> None:
        """Listen (port 0: on any free one); ``certificate`` is the PEM of (chain, key) for TLS.

        With ``client_ca``, PEM, a client without a certificate signed by it sends nothing that would be read into
        memory before its token. What calls need has to be there before this: the first may come at once.

        Raises `pyarrow.ArrowException` or OSError when the address cannot be listened on.
        """
        tls = certificate is not None
        super().__init__(
            str(listen.of_server(listen.port, tls=tls)),
            tls_certificates=None if certificate is None else [certificate],
            verify_client=client_ca is not None,
            root_certificates=client_ca,
            middleware={"token": TokenCheck(token)},
        )
        _live.add(self)
        self.address = listen.of_server(self.port, tls=tls)

    def stop(self, timeout_s: float) -> None:
        """Take no more calls; wait for those under way, ``timeout_s`` at the longest: open streams may never end."""
        stopping = threading.Thread(target=self.shutdown, name="ftlayer-shutdown", daemon=True)
        stopping.start()
        stopping.join(timeout_s)


_live: weakref.WeakSet[TokenServer] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Let a forked process end without its parent's servers: Flight would shut them down, and wait without end.

    The threads that serve them are the parent's. What Flight does at the end is a `weakref.finalize` of the server: the
    callback of one of its weak references.
    """
    for server in list(_live):
        for reference in weakref.getweakrefs(server):
            if isinstance(finalizer := reference.__callback__, weakref.finalize):
                finalizer.detach()


os.register_at_fork(after_in_child=_leave_to_parent)
