"""Addresses as texts and in their parts."""

from __future__ import annotations

import pytest

from ftlayer.errors import ConfigError
from ftlayer.transport.address import Address, parse_address, parse_listen


@pytest.mark.parametrize(
    ("text", "address", "is_here"),
    [
        ("grpc://127.0.0.1:7077", Address("127.0.0.1", 7077), True),
        ("grpc://[::1]:7077", Address("::1", 7077), True),
        ("grpc+tls://vertex.example:1", Address("vertex.example", 1, tls=True), False),
        ("grpc+unix:///run/user/7/a_b-c.d/vertex", Address(path="/run/user/7/a_b-c.d/vertex"), True),
    ],
)
def test_texts(text: str, address: Address, is_here: bool) -> None:
    assert parse_address(text, "address") == address
    assert str(address) == text
    assert address.is_here is is_here
    assert parse_listen(address.listen, "listen") == Address(address.host, address.port, address.path)


def test_the_older_name_of_tcp() -> None:
    assert parse_address("grpc+tcp://localhost:5", "address") == Address("localhost", 5)


def test_where_a_server_is_that_was_given_any_port() -> None:
    assert str(Address("::1").of_server(7, tls=True)) == "grpc+tls://[::1]:7"
    assert str(Address(path="/a").of_server(-1, tls=False)) == "grpc+unix:///a"


@pytest.mark.parametrize(
    "text", ["", "grpc+unix://", "unix:/a", "grpc+unix:///", "grpc+unix:///a b", 7, None]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="address: expected"):
        parse_address(text, "address")
