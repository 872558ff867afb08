"""What is stored beside the payload of rows."""

from __future__ import annotations

import numpy as np
import pytest

from ftlayer.errors import StoreDamagedError
from ftlayer.vertex.store.rows import decode_info, encode_info, first_attempts

LAST = 2**64 - 1


@pytest.mark.parametrize(
    "roots", [[], [5], [5, 6], [LAST - 2, LAST - 1, LAST], [LAST, 0], [6, 5], [5, 6, 8], [5, 5], [1, 3, 2, 4]]
)
def test_roots_are_read_back_be_they_consecutive_or_not(roots: list[int]) -> None:
    info = first_attempts(np.array(roots, np.uint64), None)
    read = decode_info(encode_info(info))
    assert read.roots.tolist() == read.origins.tolist() == roots


def test_consecutive_roots_take_no_room() -> None:
    stored = encode_info(first_attempts(np.arange(7, 1_007, dtype=np.uint64), None))
    assert stored[1] == [7, 1_000]


def test_another_format_is_damage() -> None:
    stored = encode_info(first_attempts(np.array([7], np.uint64), None))
    with pytest.raises(StoreDamagedError, match="format 9"):
        decode_info([9, *stored[1:]])
