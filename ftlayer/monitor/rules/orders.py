"""Which orders of a board a run carries out, and when. No I/O, no threads, no clock.

A board gives a run all orders that have not come to their end, again and again. A new one is announced as taken first;
it is carried out when the reply to that announcement still has it. What the board calls expired was never carried out.
"""

from __future__ import annotations

from collections.abc import Sequence

from ftlayer.vertex.calls.jobs import JobOrder, OrderAction, OrderAnswer, OrderState

KEPT = 1_000
"""So many orders are remembered behind their end: one that is given again is answered again."""

_EXCLUDES = {
    OrderAction.STOP: (OrderAction.STOP, OrderAction.SAVEPOINT),
    OrderAction.DRAIN: (OrderAction.DRAIN,),
    OrderAction.CANCEL: (OrderAction.CANCEL, OrderAction.STOP, OrderAction.DRAIN, OrderAction.SAVEPOINT),
}
"""What cannot be done beside what: a job ends once. Any of them may be cancelled."""


class Orders:
    def __init__(self, run: str) -> None:
        self._run = run
        self._new: dict[str, OrderAnswer] = {}
        self._under_way: dict[str, OrderAnswer] = {}
        self._carried_out: dict[str, JobOrder] = {}  # those under way
        self._ended: dict[str, OrderAnswer] = {}
        self._untold: set[str] = set()

    @property
    def has_news(self) -> bool:
        return bool(self._new or self._untold)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, and the board knows what has become of all orders."""
        return not (self._new or self._under_way or self._untold)

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    def answers(self) -> tuple[OrderAnswer, ...]:
        ended = (answer for id, answer in self._ended.items() if id in self._untold)
        return (*self._new.values(), *self._under_way.values(), *ended)

    def heard(
        self, orders: Sequence[JobOrder], told: Sequence[OrderAnswer], now_ms: int
    ) -> tuple[JobOrder, ...]:
        """Take the orders in the reply to an announcement, which had the answers ``told``; return those to carry out.

        ``now_ms`` is Unix time.
        """
        listed = {order.id: order for order in orders if order.run == self._run}
        said = {answer.id for answer in told}
        # What is not listed any more has expired, or its end has arrived.
        self._new = {id: answer for id, answer in self._new.items() if id in listed}
        self._untold -= {id for id in said if id not in listed}
        begin: list[JobOrder] = []
        for id, order in listed.items():
            if id in self._ended:
                self._untold.add(id)
            elif id in self._new and id in said:
                self._under_way[id] = self._new.pop(id)
                other = self._excluded_by(order)
                self._carried_out[id] = order
                if other is None:
                    begin.append(order)
                else:
                    self.ended(id, OrderState.REFUSED, _is_under_way(other), now_ms)
            elif id not in self._new and id not in self._under_way:
                self._new[id] = OrderAnswer(id, OrderState.TAKEN, "", now_ms)
        return tuple(begin)

    def ended(self, id: str, state: OrderState, text: str, now_ms: int) -> None:
        """An order that was to be carried out has come to its end."""
        del self._under_way[id], self._carried_out[id]
        self._ended[id] = OrderAnswer(id, state, text, now_ms)
        self._untold.add(id)
        while len(self._ended) > KEPT:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            self._untold.discard(oldest)

    def _excluded_by(self, order: JobOrder) -> JobOrder | None:
        """Return the order under way beside which this one cannot be carried out."""
        under_way = self._carried_out.values()
        return next((other for other in under_way if order.action in _EXCLUDES.get(other.action, ())), None)


def _is_under_way(other: JobOrder) -> str:
    what = f"a {other.action} is under way, asked for by {other.by}"
    if other.action is OrderAction.CANCEL:
        return f"{what}: the job ends"
    return f"{what}: wait for it, or cancel the job"
