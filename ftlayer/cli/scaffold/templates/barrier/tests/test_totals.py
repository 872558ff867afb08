"""The totals, by themselves."""

from __future__ import annotations

from my_project.totals import add, nothing


def test_orders_are_added_up() -> None:
    once = add(nothing(), ("o-1", "ada", 100))
    assert once == ("o-1", "ada", 100, 100)
    assert add(once, ("o-2", "ada", 50)) == ("o-2", "ada", 50, 150)
