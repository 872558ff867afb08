"""Messages between a driver and its vertex process: one line each way."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from ftlayer.config import ServeOptions, VertexOptions


@dataclass(frozen=True)
class ChildOrder:
    """What the vertex process is to do. It has the token, so it travels through a pipe and not in argv."""

    options: ServeOptions

    def to_line(self) -> bytes:
        """Return the order as a line of JSON."""
        fields = dataclasses.asdict(self.options)
        fields["vertex"]["path"] = str(fields["vertex"]["path"])
        for name in ("tls_cert", "tls_key", "tls_client_ca"):
            fields[name] = None if fields[name] is None else fields[name].decode()
        return json.dumps(fields).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> ChildOrder:
        """Read an order."""
        fields = json.loads(line)
        for name in ("tls_cert", "tls_key", "tls_client_ca"):
            fields[name] = None if fields[name] is None else fields[name].encode()
        return cls(ServeOptions(**fields | {"vertex": VertexOptions(**fields["vertex"])}))


@dataclass(frozen=True)
class ChildReport:
    """How the start went: an address, or an error's code and message."""

    address: str = ""
    error: str = ""
    message: str = ""

    def to_line(self) -> str:
        """Return the report as a line of JSON."""
        return json.dumps(dataclasses.asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: bytes) -> ChildReport | None:
        """Read a report; None if the process ended without one."""
        return cls(**json.loads(line)) if line.endswith(b"\n") else None
