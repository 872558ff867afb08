"""Positions of queues: whose they are."""

from __future__ import annotations

import pytest

from ftlayer.connectors.queue_stream import pack_position, unpack_position
from ftlayer.errors import ConfigError

MINE = ("amqp", "orders")


def test_a_position_gives_back_what_it_was_made_of() -> None:
    assert unpack_position(pack_position(MINE, b"a", b""), MINE, "queue", (bytes, bytes)) == [b"a", b""]


@pytest.mark.parametrize(
    "position",
    [
        b"",
        b"\x07",
        b"\xc1",
        pack_position(("redis", "orders"), b"a"),
        pack_position(("amqp", "others"), b"a"),
        pack_position(MINE),
        pack_position(MINE, b"a", b"b"),
        pack_position((*MINE, "text")),
    ],
)
def test_positions_of_another_source_are_refused_by_name(position: bytes) -> None:
    with pytest.raises(ConfigError, match=r"queue: .* give the new one a uid of its own"):
        unpack_position(position, MINE, "queue")
