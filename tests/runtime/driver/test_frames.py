"""Frames of the control stream: every message comes back as it was, and nothing else is taken."""

from __future__ import annotations

import typing
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.errors import MalformedRequestError
from ftlayer.runtime.protocol import messages
from ftlayer.runtime.protocol.channel_frames import decode_from_slot, decode_to_slot, encode

small = st.integers(-(2**63), 2**63 - 1)
st.register_type_strategy(int, small)
st.register_type_strategy(float, st.floats(allow_nan=False))  # which is not equal to itself


@given(st.from_type(typing.cast(Any, messages.FromSlot)))
def test_what_slots_say(message: messages.FromSlot) -> None:
    assert decode_from_slot(encode(message)) == message


@given(st.from_type(typing.cast(Any, messages.ToSlot)))
def test_what_slots_are_told(message: messages.ToSlot) -> None:
    assert decode_to_slot(encode(message)) == message


@given(st.binary(max_size=60))
def test_garbage(data: bytes) -> None:
    with pytest.raises(MalformedRequestError, match="control message"):
        decode_from_slot(data)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"message": "Deploy", "fields": {}}, "no message 'Deploy' in this direction"),
        ({"message": 3, "fields": {}}, "no message 3"),
        ({"message": "PeersDropped"}, "'fields' is missing"),
        ({"message": "PeersDropped", "fields": {}}, r"PeersDropped\.epoch: missing"),
        ({"message": "PeersDropped", "fields": {"epoch": "1"}}, r"PeersDropped\.epoch: expected an integer"),
        ({"message": "PeersDropped", "fields": {"epoch": 1, "x": 2}}, "unknown field 'x'"),
        (
            {"message": "Heartbeat", "fields": {"probe": 1, "activity": 1, "quiet": 1}},
            r"quiet: expected bool",
        ),
    ],
)
def test_what_is_wrong_is_named(content: dict[str, Any], words: str) -> None:
    with pytest.raises(MalformedRequestError, match=words):
        decode_from_slot(msgpack.packb(content))
