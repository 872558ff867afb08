from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.runtime.barrier_mode.slot.rules.slot_half import FIRST_WINDOW_MS, WINDOW_MS, Debloater
from ftlayer.runtime.slot.rules.credit import SendWindow

LEAST = 4 << 10
MOST = 2 << 20
TARGET_MS = 1_000


@dataclass
class Model:
    """A task with several channels whose senders always have more, and a clock of its own.

    Frames are at most ``frame`` bytes, and as small as limits ask for.
    """

    channels: int
    frame: int
    now_ms: float = 0.0
    windows: list[SendWindow] = field(default_factory=list)
    inbox: deque[tuple[int, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.windows = [SendWindow(LEAST) for _ in range(self.channels)]
        self.debloater = Debloater(TARGET_MS / self.channels, LEAST, MOST)

    @property
    def in_flight(self) -> int:
        return sum(window.in_flight for window in self.windows)

    def send(self) -> None:
        for number, window in enumerate(self.windows):
            while True:
                if window.has_room:
                    window.put(bytes(min(self.frame, window.limit)))
                sent = window.take()
                if sent is None:
                    break
                self.inbox.append((number, len(sent)))

    def work(self, bytes_a_ms: float) -> int:
        """Take one frame, and be busy with it; returns its bytes."""
        self.send()
        assert self.inbox, "there is always room for one batch"
        number, size = self.inbox.popleft()
        if self.debloater.taken(size, int(self.now_ms)):
            for window in self.windows:
                window.limit = self.debloater.limit
        self.windows[number].granted(size)
        self.now_ms += size / bytes_a_ms
        return size


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 8), st.integers(2_000, 300_000), st.lists(st.floats(1, 1_000), min_size=1, max_size=4))
def test_what_is_in_flight_follows_the_speed(channels: int, frame: int, speeds: list[float]) -> None:
    model = Model(channels, frame)
    for speed in speeds:
        began, frames = model.now_ms, 0
        while model.now_ms - began < 12 * WINDOW_MS or frames < 12:
            model.work(speed)
            frames += 1
        # What was let in at an earlier speed has to be worked off.
        while model.in_flight > model.channels * model.debloater.limit:
            model.work(speed)
        # A frame on each channel may have been made for an earlier limit.
        for _ in range(3 * channels):
            model.work(speed)
        model.send()
        wanted = speed * TARGET_MS
        least = channels * LEAST
        assert model.in_flight <= max(1.5 * wanted, least)
        assert model.debloater.limit >= min(0.6 * wanted / channels, MOST) or model.debloater.limit == MOST
        assert LEAST <= model.debloater.limit <= MOST


def test_an_idle_task_keeps_its_limit_and_a_quick_one_gets_more() -> None:
    debloater = Debloater(TARGET_MS / 4, LEAST, MOST)
    assert debloater.limit == LEAST
    now = 0
    for _ in range(4):
        debloater.taken(100_000, now)
        now += 1_000
    assert debloater.limit == 25_000
    debloater.rested(now)
    now += 3_600_000
    assert not debloater.rested(now), "an hour without records is no hour of work"
    for _ in range(20_000):
        debloater.taken(1_000, now)
        # Done at once, and then nothing for a while: a task that starves.
        debloater.rested(now)
        now += 1
    assert debloater.limit == MOST


def test_a_task_that_takes_nothing_though_it_has_something_to_do_wants_as_little_as_possible() -> None:
    debloater = Debloater(TARGET_MS, LEAST, MOST)
    for now in range(0, 6_000, 100):
        debloater.taken(200_000, now)
    assert debloater.limit > 1_900_000
    # From here on it has no room for what it would send.
    changed = [debloater.stuck(now) for now in range(6_000, 12_000, 50)]
    assert debloater.limit == LEAST
    assert sum(changed) <= 3
    # It goes on, and gets more again, as one that has just begun.
    for now in range(12_000, 30_000, 100):
        debloater.taken(200_000, now)
    assert debloater.limit > 1_500_000


@given(st.lists(st.tuples(st.sampled_from(["taken", "stuck", "rested"]), st.integers(1, 2_500)), max_size=60))
def test_a_window_without_any_taken_counts_only_while_the_task_is_busy(events: list[tuple[str, int]]) -> None:
    """Whatever comes in which order: 2 s of being stuck end at the minimum, any time of rest changes nothing."""
    debloater, now = Debloater(TARGET_MS, LEAST, MOST), 0
    for event, pause in events:
        if event == "taken":
            debloater.taken(500_000, now)
        else:
            getattr(debloater, event)(now)
        assert LEAST <= debloater.limit <= MOST
        now += pause
    debloater.rested(now)
    limit = debloater.limit
    for _ in range(5):
        now += 10_000
        debloater.stuck(now)
        debloater.rested(now)
    assert debloater.limit == limit
    debloater.taken(1, now)
    for _ in range(4 * WINDOW_MS // 100):
        now += 100
        debloater.stuck(now)
    assert debloater.limit == LEAST


def test_a_limit_is_not_told_for_little() -> None:
    debloater = Debloater(TARGET_MS, LEAST, MOST)
    changes = 0
    now = 0
    for i in range(200):
        changes += debloater.taken(100_000 + (i % 2) * 10_000, now)
        now += 1_000
    assert changes == 1
    assert Debloater(TARGET_MS, LEAST, 2_048).limit == 2_048


def test_the_first_measurement_comes_soon() -> None:
    debloater = Debloater(TARGET_MS, LEAST, MOST)
    debloater.taken(20_000, 0)
    assert not debloater.taken(20_000, FIRST_WINDOW_MS - 1)
    assert debloater.taken(20_000, FIRST_WINDOW_MS)
    assert debloater.limit == 200_000
    assert not debloater.taken(1, 2 * FIRST_WINDOW_MS), "from here on a window is longer"
