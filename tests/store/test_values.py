from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from ftlayer.vertex.store.lmdb_transaction import Inline, Reference, checksum, decode, encode_inline


@given(
    size=st.integers(1, 200_000),
    damage=st.integers(0, 2**64),
    kind=st.sampled_from(["bit", "zeros", "noise", "cut", "key"]),
)
def test_a_checksum_notices_damage(size: int, damage: int, kind: str) -> None:
    rng = random.Random(damage)
    value = rng.randbytes(size)
    key, bad = b"key", bytearray(value)
    at = rng.randrange(size)
    if kind == "bit":
        bad[at] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del bad[at:]
    elif kind == "key":
        key = b"kez"
    else:
        piece = slice(at, at + 4_096)
        bad[piece] = bytes(len(bad[piece])) if kind == "zeros" else rng.randbytes(len(bad[piece]))
    if bytes(bad) != value or kind == "key":
        assert checksum(b"key", value) != checksum(key, bytes(bad))
    assert checksum(b"key", value) == checksum(b"key", memoryview(b"?" + value)[1:])


def test_equal_blocks_do_not_hide_each_other() -> None:
    value = random.Random(1).randbytes(4_096) * 20
    assert checksum(b"k", value) != checksum(b"k", bytes(8_192) + value[8_192:])


@given(key=st.binary(max_size=9), value=st.binary(max_size=50))
def test_an_inline_entry_is_read_back(key: bytes, value: bytes) -> None:
    assert decode(key, encode_inline(7, value)) == Inline(7, value)


@given(key=st.binary(max_size=9), at=st.integers(1, 24), flip=st.integers(1, 255))
def test_a_changed_reference_is_none(key: bytes, at: int, flip: int) -> None:
    reference = Reference(checksum=5, number=2**40, length=123_456)
    entry = bytearray(reference.encode(key))
    assert decode(key, bytes(entry)) == reference
    assert decode(key + b"x", bytes(entry)) is None
    entry[at] ^= flip
    assert decode(key, bytes(entry)) is None


@given(entry=st.binary(max_size=30))
def test_anything_can_be_decoded(entry: bytes) -> None:
    assert decode(b"k", entry) is None or entry[0] in (0, 1)
