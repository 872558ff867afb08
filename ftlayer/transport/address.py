"""Where a Flight server is: a host and its port, or a Unix socket of this machine."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace

from ftlayer.common.checks import check_text, shown
from ftlayer.common.printable import shown_url
from ftlayer.errors import ConfigError

MAX_PORT = (1 << 16) - 1

MAX_SOCKET_PATH_BYTES = 103
"""The system keeps 104 bytes for the path of a socket (macOS) or 108 (Linux), the last of them a zero."""

FORMS = "grpc://host:port, grpc+tls://host:port or grpc+unix:///path/of/a/socket"

# What an address in text carries as it is.
_SOCKET_PATH = re.compile(r"/[A-Za-z0-9/._~+@:,=-]*[A-Za-z0-9._~+@:,=-]")
_UNIX = "unix:"


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port, with TLS or without; or the ``path`` of a Unix socket. As a text it is a Flight location."""

    host: str = ""
    port: int = 0
    path: str = ""
    tls: bool = False

    def __str__(self) -> str:
        if self.path:
            return f"grpc+unix://{self.path}"
        return f"grpc{'+tls' if self.tls else ''}://{self._host_and_port}"

    @property
    def listen(self) -> str:
        """The text by which `parse_listen` gives it back."""
        return f"{_UNIX}{self.path}" if self.path else self._host_and_port

    @property
    def is_here(self) -> bool:
        """Whether processes of this machine alone reach it."""
        return bool(self.path) or is_loopback(self.host)

    def of_server(self, port: int, *, tls: bool) -> Address:
        """Return where a server is that was to listen here, and got ``port``."""
        return self if self.path else replace(self, port=port, tls=tls)

    @property
    def _host_and_port(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def parse_address(text: str, option: str) -> Address:
    """Read an address that clients are given, in one of `FORMS`; `ConfigError` naming ``option`` otherwise."""
    check_text(text, option, FORMS)
    scheme, _, rest = text.partition("://")
    if scheme == "grpc+unix":
        return Address(path=_checked_path(rest, option))
    if scheme not in ("grpc", "grpc+tcp", "grpc+tls"):
        raise ConfigError(
            f"{option}: expected {FORMS}, got {shown(shown_url(text) if '@' in text else text)}"
        )
    host, port = split_address(rest, option)
    return Address(host, port, tls=scheme == "grpc+tls")


def parse_listen(text: str, option: str) -> Address:
    """Read where a server listens: ``host:port`` or ``unix:/path``; `ConfigError` naming ``option`` otherwise."""
    check_text(text, option, "'host:port' or 'unix:/path'")
    if text.startswith(_UNIX):
        return Address(path=_checked_path(text.removeprefix(_UNIX), option))
    host, port = split_address(text, option)
    return Address(host, port)


def is_socket_path(path: str) -> bool:
    return len(path) <= MAX_SOCKET_PATH_BYTES and _SOCKET_PATH.fullmatch(path) is not None


def split_address(address: str, option: str) -> tuple[str, int]:
    """Split ``"host:port"`` (``"[v6]:port"``); `ConfigError` naming ``option`` if it is not of this form."""
    check_text(address, option, "'host:port'")
    if "@" in address:
        raise ConfigError(f"{option}: an address has no user; the vertex's token is an option of its own")
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"{option}: write an IPv6 address in brackets, '[::1]:7077', got {shown(address)}")
    is_number = port.isascii() and port.isdigit() and len(port) <= 5
    if not colon or not host or not is_number or int(port) > MAX_PORT:
        raise ConfigError(
            f"{option}: expected 'host:port' with a port from 0 to {MAX_PORT}, got {shown(address)}"
        )
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this machine only: ``localhost``, 127.0.0.0/8 or ::1."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _checked_path(path: str, option: str) -> str:
    if not is_socket_path(path):
        raise ConfigError(
            f"{option}: expected the absolute path of a socket, {MAX_SOCKET_PATH_BYTES} bytes at most, of letters, "
            f"digits and / . _ ~ + @ : , = -, got {shown(path)}"
        )
    return path
