"""What a customer has ordered so far: the state that checkpoints keep exactly."""

from __future__ import annotations

from .functions import ORDER, Order

Total = tuple[str, str, int, int]
"""The last order's id, the customer, its price, and the sum of all orders of this customer up to it, in cents."""

TOTAL = f"{ORDER}, total long"


def nothing() -> Total:
    """Return the total before a customer's first order."""
    return "", "", 0, 0


def add(total: Total, order: Order) -> Total:
    """Return the total with one more order."""
    order_id, customer, cents = order
    return order_id, customer, cents, total[3] + cents
