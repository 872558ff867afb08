"""Options: each bound has an error that names its option."""

from __future__ import annotations

from typing import Any

import pytest

from ftlayer.config import ServeOptions, VertexOptions
from ftlayer.errors import ConfigError

TOKEN = "t" * 32


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("path", ""),
        ("shards", 0),
        ("shards", 3),
        ("shards", 512),
        ("durability", "sometimes"),
        ("max_store_bytes", 1),
        ("max_store_bytes", "1G"),
        ("persist_timeout_ms", 0),
        ("persist_timeout_ms", 120_000),
        ("max_message_bytes", 1),
        ("max_message_bytes", 1 << 40),
        ("tracker", "approximate"),
        ("timeout_buckets", 1),
        ("metrics_port", 70_000),
    ],
)
def test_vertex_options_out_of_bounds_are_named(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=option):
        VertexOptions(**({"path": "x"} | {option: value}))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"token": "short"}, "token"),
        ({"token": "t" * 5_000}, "token"),
        ({"token": "t" * 20 + "\n"}, "token"),
        ({"token": "tökentökentöken!"}, "token"),
        ({"listen": "127.0.0.1"}, "listen"),
        ({"listen": "127.0.0.1:port"}, "listen"),
        ({"listen": "127.0.0.1:99999"}, "listen"),
        ({"listen": "::1:5"}, "brackets"),
        ({"listen": ":5"}, "listen"),
        ({"listen": "unix:relative"}, "absolute path"),
        ({"listen": "unix:/run/" + "x" * 100}, "103 bytes"),
        ({"listen": "unix:/run/x", "tls_cert": b"x", "tls_key": b"x"}, "a Unix socket has no TLS"),
        ({"tls_cert": b"x"}, "tls_key"),
        ({"listen": "0.0.0.0:7077"}, "TLS"),
        ({"listen": "vertex.example:7077"}, "TLS"),
    ],
)
def test_serve_options_out_of_bounds_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ServeOptions(VertexOptions("x"), **({"token": TOKEN} | options))


def test_addresses() -> None:
    assert ServeOptions(VertexOptions("x"), TOKEN).listen is None
    assert ServeOptions(VertexOptions("x"), TOKEN, "localhost:0").listen == "localhost:0"
    assert ServeOptions(VertexOptions("x"), TOKEN, "0.0.0.0:1", b"cert", b"key").listen == "0.0.0.0:1"


def test_secrets_are_not_shown() -> None:
    options = ServeOptions(VertexOptions("x"), TOKEN, "0.0.0.0:1", b"cert", b"the key")
    assert TOKEN not in repr(options)
    assert "the key" not in repr(options)
