"""Orders to try it with: `python -m my_project.sample 1000` prints a thousand, each hundredth one broken."""

from __future__ import annotations

import json
import sys

CUSTOMERS = ("ada", "bob", "eve", "kim", "lee")


def line(number: int) -> str:
    """Return an order as JSON, always the same one for a number."""
    if number % 100 == 99:
        return f"order {number} is no JSON"
    customer = CUSTOMERS[number % len(CUSTOMERS)]
    order = {"order_id": f"o-{number}", "customer": customer, "cents": 100 + number % 900}
    return json.dumps(order)


def main(count: int, first: int = 0) -> None:
    """Print as many orders, beginning with this number."""
    for number in range(first, first + count):
        print(line(number))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
