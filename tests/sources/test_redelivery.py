"""Which messages come a second time, and what may be acknowledged of them."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.connectors.queue_stream import NAME_BYTES, RedeliveryWindow


def take(
    window: RedeliveryWindow, names: list[str | None], first_tag: int = 1, redelivered: bool = True
) -> list[bool]:
    return window.take((first_tag + place, name, redelivered) for place, name in enumerate(names))


def test_what_was_stored_is_known_and_acknowledged_at_once() -> None:
    first = RedeliveryWindow(b"", 10, stored=True)
    assert take(first, ["a", "b"], redelivered=False) == [True, True]
    second = RedeliveryWindow(first.packed(), 10, stored=True)
    assert take(second, ["a", "b", "c"]) == [False, False, True]
    assert second.to_acknowledge() == 2
    assert second.to_acknowledge() is None


def test_what_was_taken_over_is_acknowledged_with_the_next_that_is_durable() -> None:
    first = RedeliveryWindow(b"", 10, stored=True)
    take(first, ["a"], redelivered=False)
    second = RedeliveryWindow(first.packed(), 10, stored=False)
    assert take(second, ["a", "b"]) == [False, True]
    assert second.to_acknowledge() is None
    second.durable([second.turn])
    assert second.to_acknowledge() == 2


def test_a_name_that_a_sender_uses_again_is_a_message_of_its_own() -> None:
    window = RedeliveryWindow(b"", 10, stored=True)
    assert take(window, ["a", "a"], redelivered=False) == [True, True]


def test_messages_without_a_name_are_new_each_time() -> None:
    window = RedeliveryWindow(b"", 10, stored=True)
    assert take(window, [None, None]) == [True, True]
    window.reconnected()
    assert take(window, [None, None]) == [True, True]
    assert len(window.packed()) == 0


def test_names_that_are_durable_are_forgotten_when_there_are_too_many() -> None:
    window = RedeliveryWindow(b"", 2, stored=True)
    for tag, name in enumerate("abcd", 1):
        take(window, [name], tag, redelivered=False)
    assert len(window.packed()) == 4 * NAME_BYTES, "none is durable"
    window.durable([3])
    assert len(window.packed()) == 2 * NAME_BYTES
    window.reconnected()
    assert take(window, ["a", "c", "d"]) == [True, False, False]


class Broker:
    """Delivers in order, again when the connection is lost; may lose acknowledgements of the connection's end."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self.delivered = 0
        self.sent: set[str] = set()

    def deliver(self, count: int) -> list[tuple[str, bool]]:
        piece = self.kept[self.delivered : self.delivered + count]
        self.delivered += len(piece)
        again = [(name, name in self.sent) for name in piece]
        self.sent.update(piece)
        return again


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 5)),
        st.tuples(st.just("fetch"), st.integers(1, 5)),
        st.tuples(st.just("store"), st.integers(1, 3)),
        st.tuples(st.sampled_from(["reconnect", "takeover", "crash"]), st.integers(0, 4)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_each_message_is_read_once_and_is_acknowledged_behind_its_storing(steps: list[Any]) -> None:
    """Storing keeps a prefix of what was fetched; a crash goes back to it."""
    broker, window = Broker(), RedeliveryWindow(b"", 1_000, stored=True)
    put = 0
    # Pieces whose reader is no more have no turn: it was told when they are stored.
    fetched: list[tuple[list[str], bytes, int | None]] = []
    stored: list[str] = []
    stored_position = last_position = b""
    acknowledged = 0  # of broker.kept, in this connection; it gets there when the connection ends or is used

    def acknowledge() -> None:
        nonlocal acknowledged
        if (tag := window.to_acknowledge()) is not None:
            assert set(broker.kept[:tag]) <= set(stored), "only what is durable"
            acknowledged = tag

    def lose(unsent: int) -> None:
        nonlocal acknowledged
        del broker.kept[: max(0, acknowledged - unsent)]
        broker.delivered = acknowledged = 0

    for what, number in [*steps, ("crash", 0), *[("fetch", 1_000)] * 2, ("store", 1_000)]:
        if what == "put":
            broker.kept += [str(put + each) for each in range(number)]
            put += number
        elif what == "fetch":
            first = broker.delivered + 1
            deliveries = broker.deliver(number)
            are_new = window.take((first + at, name, again) for at, (name, again) in enumerate(deliveries))
            names = [name for (name, _), new in zip(deliveries, are_new, strict=True) if new]
            if names:
                last_position = window.packed()
                fetched.append((names, last_position, window.turn))
            acknowledge()
        elif what == "store":
            for names, position, turn in fetched[:number]:
                stored += names
                stored_position = position
                if turn is not None:
                    window.durable([turn])
            del fetched[:number]
            acknowledge()
        elif what == "reconnect":
            lose(number)
            window.reconnected()
        elif what == "takeover":
            lose(number)
            window = RedeliveryWindow(last_position, 1_000, stored=False)
            fetched = [(names, position, None) for names, position, _ in fetched]
        else:
            lose(number)
            fetched.clear()
            last_position = stored_position
            window = RedeliveryWindow(stored_position, 1_000, stored=True)
    assert stored == [str(each) for each in range(put)]
