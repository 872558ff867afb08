"""The functions, by themselves: no Spark, milliseconds."""

from __future__ import annotations

import pytest

from my_project.functions import UNREADABLE, parse
from my_project.sample import line


def test_an_order_is_read() -> None:
    assert parse('{"order_id": "o-1", "customer": "ada", "cents": 1250}') == ("o-1", "ada", 1250)
    assert parse(b'{"order_id": "o-1", "customer": "ada", "cents": 1250}') == ("o-1", "ada", 1250)


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        "[1, 2]",
        b"\xff",
        '{"order_id": "o-1"}',
        '{"order_id": "o-1", "customer": "ada", "cents": 0}',
        '{"order_id": "o-1", "customer": "ada", "cents": "12"}',
        '{"order_id": "", "customer": "ada", "cents": 1}',
    ],
)
def test_what_is_no_order_is_refused(text: str | bytes) -> None:
    with pytest.raises(UNREADABLE):
        parse(text)


def test_the_sample_has_orders_and_broken_ones() -> None:
    assert parse(line(7)) == ("o-7", "eve", 107)
    with pytest.raises(UNREADABLE):
        parse(line(99))
