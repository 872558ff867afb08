"""What becomes of an order: pure functions, without Spark, files or a clock. Tests call them as they are."""

from __future__ import annotations

import json
from typing import Any

Order = tuple[str, str, int]
"""The order's id, the customer, the price in cents."""

COLUMNS = ("order_id", "customer", "cents")
ORDER = "order_id string, customer string, cents long"

UNREADABLE = (KeyError, TypeError, ValueError)
"""What another attempt does not mend: such an order is a dead letter at once. All else is tried again."""


def parse(text: str | bytes) -> Order:
    """Read an order from JSON: `{"order_id": "o-1", "customer": "ada", "cents": 1250}`.

    What it raises fails this order, and no other.
    """
    fields = json.loads(text)
    return checked(fields["order_id"], fields["customer"], fields["cents"])


def checked(order_id: Any, customer: Any, cents: Any) -> Order:
    """Return an order that makes sense. Raises `ValueError`."""
    if not isinstance(order_id, str) or not isinstance(customer, str) or not order_id or not customer:
        raise ValueError(f"expected texts as id and customer, got {order_id!r} and {customer!r}")
    if not isinstance(cents, int) or cents <= 0:
        raise ValueError(f"order {order_id}: expected a price in cents above 0, got {cents!r}")
    return order_id, customer, cents
