"""Orders on a board: from their askers to the runs that they name, and what becomes of them."""

from __future__ import annotations

from ftlayer.clock import Now
from ftlayer.errors import ProtocolError, UnknownJobError
from ftlayer.store import board as tables
from ftlayer.store.kv import KeyValueStore, WriteTransaction
from ftlayer.vertex.calls import ORDER_EXPIRES_MS, JobOrder, OrderAnswer, OrderRecord, OrderState
from ftlayer.vertex.rules import audit
from ftlayer.vertex.rules.board.entries import JobEntry, OrderEntry, order_values

MAX_ORDERS = 100
KEEP_ORDERS_MS = 600_000
"""An order that has come to its end is known for so long at least."""

# Above 0.95 a store on disk takes deletes alone, and memory would be lost with each announcement.
_FULL_SHARE = 0.94
_NEVER_MS = 1 << 62
_NOT_TAKEN = "run {} has ended without taking it"
_UNKNOWN = "run {} had taken it and has ended without a word of it: it may be carried out or not"


class BoardOrders:
    """The orders of all jobs. They are entries of their jobs; times are Unix ms."""

    def __init__(self, store: KeyValueStore, started_ms: int) -> None:
        """No job could take an order before ``started_ms``, since there was no board."""
        self._store = store
        self._started_ms = started_ms
        # Jobs with orders that have not come to their end, and perhaps some more. What there is to do is asked often.
        self._asked: dict[str, JobEntry] = {}

    def recover(self, job: JobEntry) -> None:
        """Take the orders of a job that the store has."""
        if job.orders:
            job.orders = dict(sorted(job.orders.items(), key=lambda item: item[1].asked_ms))
            self._asked[job.details.owner] = job

    def forget(self, owner: str) -> None:
        """A job is not known any more."""
        self._asked.pop(owner, None)

    def known(self, txn: WriteTransaction, job: JobEntry, order: JobOrder, now: Now) -> OrderRecord | None:
        """Return what has become of an order, None for a new one. `ProtocolError` for an id that another one has."""
        entry = job.orders.get(order.id)
        if entry is None:
            return None
        if entry.order != order:
            raise ProtocolError(f"order {order.id!r} of {order.owner!r} is another one: draw a new id")
        self._expire(txn, job, now)
        return entry.record

    def ask(self, txn: WriteTransaction, job: JobEntry, order: JobOrder, now: Now) -> OrderRecord:
        """Take a new order to a job.

        Raises `UnknownJobError` for a job that has ended, `ProtocolError` for one with `MAX_ORDERS` younger than
        `KEEP_ORDERS_MS`.
        """
        if job.details.final:
            raise UnknownJobError(
                f"job {order.owner!r} has ended ({job.details.state}): nothing can be asked of it"
            )
        self._make_room(txn, job, now)
        entry = OrderEntry(order, OrderAnswer(order.id, OrderState.WAITING, "", now.wall_ms), now.wall_ms)
        if order.run != job.details.run:
            text = f"it is for run {order.run}, and run {job.details.run} is what {order.owner!r} is now"
            entry.end(OrderState.REFUSED, text, now.wall_ms)
        job.orders[order.id] = entry
        self._asked[order.owner] = job
        self._write(txn, job, entry, now)
        return entry.record

    def take_answers(
        self, txn: WriteTransaction, job: JobEntry, answers: tuple[OrderAnswer, ...], now: Now
    ) -> None:
        """Take what a run says of its orders; those that have come to their end stay as they are."""
        self._expire(txn, job, now)
        for answer in answers:
            entry = job.orders.get(answer.id)
            if entry is None or entry.ended or entry.answer.state is answer.state:
                continue
            entry.answer = answer
            self._write(txn, job, entry, now)

    def under_way(self, txn: WriteTransaction, job: JobEntry, now: Now) -> tuple[JobOrder, ...]:
        """Return the orders of a job that have not come to their end."""
        self._expire(txn, job, now)
        return tuple(entry.order for entry in job.orders.values() if not entry.ended)

    def end_run(self, txn: WriteTransaction, job: JobEntry, now: Now) -> None:
        """Bring all orders of a job to their end, since another run takes its place."""
        for entry in job.orders.values():
            if entry.answer.state is OrderState.WAITING:
                entry.end(OrderState.EXPIRED, _NOT_TAKEN.format(entry.order.run), now.wall_ms)
                self._write(txn, job, entry, now)
            elif entry.answer.state is OrderState.TAKEN:
                entry.end(OrderState.FAILED, _UNKNOWN.format(entry.order.run), now.wall_ms)
                self._write(txn, job, entry, now)

    def tick(self, txn: WriteTransaction, now: Now) -> None:
        """End the orders whose time is over."""
        for job in list(self._asked.values()):
            self._expire(txn, job, now)

    def next_tick_ms(self) -> int:
        """Return when (Unix ms) `tick` has something to do."""
        return min(
            (
                self._deadline_ms(job, entry)
                for job in self._asked.values()
                for entry in job.orders.values()
                if not entry.ended
            ),
            default=_NEVER_MS,
        )

    def _expire(self, txn: WriteTransaction, job: JobEntry, now: Now) -> None:
        """End the orders of a job whose time is over: no run has taken them, or the run that had has ended since."""
        for entry in job.orders.values():
            if entry.ended or now.wall_ms < self._deadline_ms(job, entry):
                continue
            if entry.answer.state is OrderState.TAKEN:
                entry.end(OrderState.FAILED, _UNKNOWN.format(entry.order.run), now.wall_ms)
            elif job.details.final:
                entry.end(OrderState.EXPIRED, _NOT_TAKEN.format(entry.order.run), now.wall_ms)
            else:
                seconds = ORDER_EXPIRES_MS // 1_000
                entry.end(OrderState.EXPIRED, f"its run has not taken it within {seconds} s", now.wall_ms)
            self._write(txn, job, entry, now)
        if all(entry.ended for entry in job.orders.values()):
            self._asked.pop(job.details.owner, None)

    def _deadline_ms(self, job: JobEntry, entry: OrderEntry) -> int:
        since_ms = max(entry.asked_ms, self._started_ms)
        if entry.answer.state is OrderState.WAITING:
            return job.heard_ms if job.details.final else since_ms + ORDER_EXPIRES_MS
        if not job.details.final:
            return _NEVER_MS  # a savepoint may take an hour, and its driver be away for some of it
        return max(since_ms, job.heard_ms) + ORDER_EXPIRES_MS

    def _make_room(self, txn: WriteTransaction, job: JobEntry, now: Now) -> None:
        """Forget the oldest order that has ended, if there are too many for one more."""
        if len(job.orders) < MAX_ORDERS:
            return
        for entry in job.orders.values():
            if entry.ended and now.wall_ms - entry.asked_ms >= KEEP_ORDERS_MS:
                del job.orders[entry.order.id]
                tables.delete_order(txn, entry.order.owner, entry.order.id)
                return
        raise ProtocolError(
            f"job {job.details.owner!r} was given {MAX_ORDERS} orders within {KEEP_ORDERS_MS // 60_000} minutes: "
            "wait until some of them are older"
        )

    def _write(self, txn: WriteTransaction, job: JobEntry, entry: OrderEntry, now: Now) -> None:
        """Store an order, and write its line of the audit log where it was asked just now or has come to its end."""
        if is_full(self._store) or not job.is_stored:
            return
        order, answer = entry.order, entry.answer
        tables.put_order(txn, order.owner, order.id, order_values(entry))
        if answer.state is OrderState.TAKEN:
            return
        state = "asked" if answer.state is OrderState.WAITING else str(answer.state)
        audit.note(
            txn,
            now,
            who=order.by,
            what=str(order.action),
            which=f"{order.owner}, run {order.run}",
            count=1,
            outcome=f"{state}: {answer.text}" if answer.text else state,
        )


def is_full(store: KeyValueStore) -> bool:
    """Whether a store may soon take deletes alone: then what is said of jobs stays in memory."""
    return store.used_share >= _FULL_SHARE
