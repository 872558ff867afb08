"""Dataclasses of plain fields as msgpack, and back; with types of its user's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum
from typing import Any

import msgpack
import pytest

from ftlayer.errors import MalformedRequestError
from ftlayer.transport.codec import Codec, Codecs, plain_codec


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Part:
    name: str
    size: int = 0


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    pair: tuple[int, bytes]
    colour: Colour | None = None
    counts: dict[str, float] = field(default_factory=dict)


WHOLE = Whole((Part("a", 1), Part("b")), (2**64 - 1, b"x"), Colour.RED, {"n": 1.5})


@dataclass(frozen=True)
class Price:
    amount: Decimal


def test_what_was_packed_comes_back() -> None:
    codec = plain_codec(Whole)
    assert codec.unpack(msgpack.unpackb(msgpack.packb(codec.pack(WHOLE))), "whole") == WHOLE
    assert codec.unpack({"parts": [], "pair": [1, b""]}, "whole") == Whole((), (1, b""))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"parts": {}}, r"whole\.parts: expected an array"),
        ({"parts": [{"name": 3}]}, r"whole\.parts\[0\]\.name: expected str, got int 3"),
        ({"parts": [{}]}, r"whole\.parts\[0\]\.name: missing"),
        ({"pair": [1]}, r"whole\.pair: expected an array of 2"),
        ({"pair": [True, b""]}, r"whole\.pair\[0\]: expected an integer"),
        ({"colour": "blue"}, r"whole\.colour: expected one of red"),
        ({"counts": {1: 1.0}}, r"whole\.counts: expected a map with text keys"),
        ({"weight": 1}, r"whole: unknown field 'weight'"),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(change: dict[str, Any], named: str) -> None:
    codec = plain_codec(Whole)
    with pytest.raises(MalformedRequestError, match=named):
        codec.unpack({**codec.pack(WHOLE), **change}, "whole")


def test_types_of_the_users_own() -> None:
    with pytest.raises(TypeError, match=r"no wire form for .*Decimal"):
        plain_codec(Price)
    codecs = Codecs({Decimal: Codec(str, lambda value, where: Decimal(value))})
    codec = codecs.of_dataclass(Price)
    assert codec.unpack(codec.pack(Price(Decimal("1.10"))), "price") == Price(Decimal("1.10"))
    assert codecs.of_dataclass(Price) is codec
