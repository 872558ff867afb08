from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ftlayer.runtime.protocol.messages import MAX_TIME_MS, MIN_TIME_MS, EndOfStream, Idle, Watermark
from ftlayer.runtime.task.event_time import StatusWatermarkValve
from ftlayer.topology.job_graph import Channel

A, B, REPLAY = Channel(0, 0, 0), Channel(0, 1, 0), Channel(7, 0, 0)


def test_the_slowest_channel_holds_the_watermark():
    gate = StatusWatermarkValve([A, B])
    gate.watermark(A, 10)
    assert gate.time_ms == MIN_TIME_MS
    gate.watermark(B, 4)
    assert gate.time_ms == 4


def test_an_idle_channel_does_not_hold_it_until_its_next_watermark():
    gate = StatusWatermarkValve([A, B])
    gate.become_idle(B)
    gate.watermark(A, 10)
    assert gate.time_ms == 10
    gate.watermark(B, 3)
    gate.watermark(A, 20)
    assert gate.time_ms == 10
    gate.watermark(B, 12)
    assert gate.time_ms == 12


def test_all_idle_is_idle_at_the_highest_time():
    gate = StatusWatermarkValve([A, B])
    gate.watermark(A, 5)
    gate.become_idle(A)
    assert not gate.idle
    assert gate.time_ms == MIN_TIME_MS
    gate.become_idle(B)
    assert gate.idle
    assert gate.time_ms == 5


@st.composite
def facts_of_a_channel(draw: st.DrawFn) -> list[object]:
    facts: list[object] = list(map(Watermark, sorted(draw(st.lists(st.integers(0, 400), max_size=3)))))
    last = ([], [Idle()], [EndOfStream()], [Idle(), EndOfStream()], [Watermark(MAX_TIME_MS), EndOfStream()])
    return facts + draw(st.sampled_from(last))


@given(st.lists(facts_of_a_channel(), min_size=1, max_size=4), st.data())
def test_the_time_depends_on_the_last_words_and_not_on_their_order(facts, data):
    found = []
    for _ in range(2):
        gate = StatusWatermarkValve(Channel(0, place, 0) for place in range(len(facts)))
        turns = data.draw(st.permutations([place for place, own in enumerate(facts) for _ in own]))
        left = [list(own) for own in facts]
        for place in turns:
            gate.mark(Channel(0, place, 0), left[place].pop(0))
        found.append((gate.time_ms, gate.idle, gate.ended))
    assert found[0] == found[1]


@pytest.mark.parametrize("ends_first", [False, True])
def test_an_ended_channel_beside_an_idle_one_has_come_as_far_as_it_said(ends_first):
    gate = StatusWatermarkValve([A, B])
    gate.watermark(B, 3_900)
    gate.watermark(A, 398_900)
    if ends_first:
        gate.end(A)
    gate.become_idle(B)
    if not ends_first:
        gate.end(A)
    assert gate.time_ms == 398_900


def test_an_end_beside_an_idle_channel_does_not_make_everything_late():
    gate = StatusWatermarkValve([A, B])
    gate.watermark(A, 5)
    gate.watermark(B, 5)
    gate.become_idle(B)
    gate.end(A)
    assert gate.time_ms == 5
    assert gate.idle
    gate.end(B)
    assert gate.time_ms == MAX_TIME_MS
    assert gate.ended


def test_replay_channels_have_no_say_but_in_the_end():
    gate = StatusWatermarkValve([A, REPLAY], replays={7})
    gate.watermark(REPLAY, 1)
    gate.become_idle(REPLAY)
    gate.watermark(A, 9)
    assert gate.time_ms == 9
    gate.end(A)
    assert gate.sources_ended
    assert not gate.ended
    assert gate.time_ms == MAX_TIME_MS
    gate.end(REPLAY)
    assert gate.ended


def test_a_replaced_sender_begins_afresh():
    gate = StatusWatermarkValve([A, REPLAY], replays={7})
    gate.watermark(A, 9)
    gate.end(REPLAY)
    gate.end(A)
    assert gate.ended
    gate.reset(A)
    gate.reset(REPLAY)
    assert not gate.sources_ended
    assert gate.time_ms == MAX_TIME_MS
    gate.end(A)
    assert not gate.ended
    gate.end(REPLAY)
    assert gate.ended


def test_a_task_of_replays_alone_has_no_more_sources():
    gate = StatusWatermarkValve([REPLAY], replays={7})
    assert gate.sources_ended
    assert not gate.ended


def news(gate: StatusWatermarkValve) -> list:
    found = []
    while (mark := gate.news()) is not None:
        found.append(mark)
    return found


def test_news_are_told_once_and_the_end_of_idleness_is_a_watermark():
    gate = StatusWatermarkValve([A, B])
    assert news(gate) == []
    gate.watermark(A, 5)
    gate.watermark(B, 7)
    assert news(gate) == [Watermark(5)]
    gate.become_idle(A)
    assert news(gate) == [Watermark(7)]
    gate.become_idle(B)
    assert news(gate) == [Idle()]
    gate.become_idle(B)
    assert news(gate) == []
    gate.watermark(A, 6)
    assert news(gate) == [Watermark(7)]
    gate.end(A)
    assert news(gate) == [Idle()]
    gate.reset(B)
    assert news(gate) == [Watermark(7)]
    gate.end(B)
    assert news(gate) == [Watermark(MAX_TIME_MS)]
    gate.reset(B)
    assert news(gate) == []


def test_a_channel_with_no_more_to_say_does_not_speak_for_an_idle_one():
    gate = StatusWatermarkValve([A, B])
    gate.watermark(A, 5)
    gate.become_idle(B)
    gate.watermark(A, MAX_TIME_MS)
    assert news(gate) == [Watermark(5), Idle()]
    assert gate.time_ms == 5
    gate.watermark(B, 9)
    assert news(gate) == [Watermark(9)]
    gate.watermark(B, MAX_TIME_MS)
    assert news(gate) == [Watermark(MAX_TIME_MS)]
    assert not gate.sources_ended


class GateAgainstHistory(RuleBasedStateMachine):
    """The model keeps each channel's elements since its sender began, and reads the rules off them."""

    @initialize(timed=st.integers(1, 4), replays=st.integers(0, 2))
    def begin(self, timed: int, replays: int) -> None:
        self.timed = [Channel(edge, edge, 0) for edge in range(timed)]
        self.replayed = [Channel(9, sender, 0) for sender in range(replays)]
        self.gate = StatusWatermarkValve([*self.timed, *self.replayed], replays={9})
        self.said: dict[Channel, list[object]] = {channel: [] for channel in [*self.timed, *self.replayed]}
        self.best = MIN_TIME_MS

    def _pick(self, data: st.DataObject) -> Channel:
        return data.draw(st.sampled_from([*self.timed, *self.replayed]))

    @rule(
        data=st.data(),
        what=st.one_of(st.integers(0, 20), st.sampled_from([MAX_TIME_MS, "idle", "end", "reset"])),
    )
    def say(self, data: st.DataObject, what: int | str) -> None:
        channel = self._pick(data)
        if what == "reset":
            self.said[channel] = []
            self.gate.reset(channel)
        elif "end" in self.said[channel]:
            return
        else:
            self.said[channel].append(what)
            if what == "idle":
                self.gate.become_idle(channel)
            elif what == "end":
                self.gate.end(channel)
            else:
                self.gate.watermark(channel, what)

    @invariant()
    @precondition(lambda self: hasattr(self, "said"))
    def agrees(self) -> None:
        open_ones = [self.said[channel] for channel in self.timed if "end" not in self.said[channel]]
        going = [said for said in open_ones if MAX_TIME_MS not in said]
        active = [said for said in going if not said or said[-1] != "idle"]
        highest = [max((x for x in said if isinstance(x, int)), default=MIN_TIME_MS) for said in active]
        ever = [
            x for channel in self.timed for x in self.said[channel] if isinstance(x, int) and x < MAX_TIME_MS
        ]
        now = MAX_TIME_MS if not going else min(highest) if active else max(ever, default=MIN_TIME_MS)
        self.best = max(self.best, now)
        assert self.gate.time_ms == self.best
        assert [self.said[channel] for channel in self.timed if channel in self.gate.active] == active
        assert self.gate.idle == (bool(going) and not active)
        assert self.gate.sources_ended == (not open_ones)
        assert self.gate.ended == all("end" in said for said in self.said.values())


GateAgainstHistory.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestGateAgainstHistory = GateAgainstHistory.TestCase
