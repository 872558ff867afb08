from __future__ import annotations

import threading
from collections import deque

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.errors import CodecError
from ftlayer.runtime.protocol.channel_frames import HEADER_BYTES, ElementCodec
from ftlayer.runtime.slot.rules.credit import GrantBook, SendWindow
from ftlayer.runtime.slot.rules.events import Mailbox
from ftlayer.topology.job_graph import Channel

FRAME_SIZES = st.integers(HEADER_BYTES, HEADER_BYTES + 150)
"""Every frame has a header, in which a window looks for barriers."""


@given(st.integers(1, 250), st.lists(st.tuples(st.sampled_from(["put", "take", "grant"]), FRAME_SIZES)))
@example(1, [("put", HEADER_BYTES), ("take", HEADER_BYTES), ("put", HEADER_BYTES), ("take", HEADER_BYTES)])
def test_on_the_way_is_the_credit_or_one_frame(limit: int, moves: list[tuple[str, int]]) -> None:
    window = SendWindow(limit)
    model: deque[int] = deque()
    under_way: deque[int] = deque()
    for move, size in moves:
        if move == "put":
            window.put(bytes(size))
            model.append(size)
        elif move == "take":
            frame = window.take()
            fits = bool(model) and (not under_way or sum(under_way) + model[0] <= limit)
            assert (frame is not None) == fits
            if frame is not None:
                assert len(frame) == model[0]
                under_way.append(model.popleft())
        elif under_way:
            window.granted(under_way.popleft())
        assert window.in_flight == sum(under_way)
        assert window.in_flight <= limit or len(under_way) == 1
        assert window.has_room == (not model and sum(under_way) < limit)
        assert window.is_empty == (not model and not under_way)
        assert [len(frame) for frame in window.waiting()] == list(model)


BARRIER = ElementCodec([]).encode(Channel(0, 0, 0), Barrier(1, 0))


def test_a_barrier_needs_no_credit_and_gives_back_what_it_used() -> None:
    window = SendWindow(10)
    for frame in (bytes(8), BARRIER, bytes(9)):
        window.put(frame)
    assert window.take() == bytes(8)
    assert window.take() == BARRIER
    assert window.take() is None
    assert window.in_flight == 8 + len(BARRIER)
    window.granted(8)
    assert window.take() is None
    window.granted(len(BARRIER))
    assert window.take() == bytes(9)


def test_a_barrier_goes_ahead_of_all_but_other_barriers() -> None:
    window = SendWindow(10)
    window.put(bytes(3))
    window.put(BARRIER)
    window.put(bytes(4))
    earlier, later = bytes([*BARRIER[:-1], 1]), bytes([*BARRIER[:-1], 2])
    window.put_first(earlier)
    window.put_first(later)
    assert window.waiting() == [earlier, later, bytes(3), BARRIER, bytes(4)]
    assert window.pull(BARRIER) == [earlier, later, bytes(3)]
    assert window.waiting() == [earlier, later, bytes(3), bytes(4)]


def test_unused_credit_is_an_error() -> None:
    window = SendWindow(10)
    window.put(b"abc")
    window.take()
    with pytest.raises(CodecError, match="4 bytes of credit came back, 3"):
        window.granted(4)


def test_a_reset_gives_full_credit() -> None:
    window = SendWindow(10)
    for frame in (b"12345678", b"abcdef", b"xyz"):
        window.put(frame)
    window.take()
    assert window.reset() == [b"abcdef", b"xyz"]
    assert window.is_empty
    assert window.has_room


@given(st.integers(1, 64), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40))))
def test_everything_taken_is_given_back_once(limit: int, taken: list[tuple[int, int]]) -> None:
    book: GrantBook[int] = GrantBook(limit)
    given_back = dict.fromkeys(range(4), 0)
    for channel, size in taken:
        if book.taken(channel, size, 7):
            given_back[channel] += book.take(channel)
    assert book.since_ms == (7 if taken else None)
    for channel, size in book.take_all().items():
        assert size < max(1, limit // 4)
        given_back[channel] += size
    assert book.since_ms is None
    for channel in range(4):
        assert given_back[channel] == sum(size for its, size in taken if its == channel)


def test_a_mailbox_wakes_its_owner_for_every_item_of_every_thread() -> None:
    box: Mailbox[int] = Mailbox(lambda number: number % 10_000 == 1_999)

    def put(first: int) -> None:
        for number in range(first, first + 2_000):
            box.put(number)

    threads = [threading.Thread(target=put, args=(first,)) for first in (0, 10_000, 20_000)]
    for thread in threads:
        thread.start()
    got: list[int] = []
    while not box.has_urgent():
        box.wait(None)
    while len(got) < 6_000:
        item = box.take()
        if item is None:
            box.wait(None)  # Without end, if it sleeps through an item.
        else:
            got.append(item)
    for thread in threads:
        thread.join()
    assert not box.has_urgent()
    assert sorted(got) == [n for first in (0, 10_000, 20_000) for n in range(first, first + 2_000)]
    for first in (0, 10_000, 20_000):
        mine = [n for n in got if first <= n < first + 2_000]
        assert mine == sorted(mine)


def test_a_mailbox_waits_no_longer_than_it_was_told() -> None:
    box: Mailbox[int] = Mailbox()
    box.wait(0.001)
    assert box.take() is None
    box.put(1)
    assert box.waiting() == [1]
    box.wait(None)
    assert box.take() == 1
