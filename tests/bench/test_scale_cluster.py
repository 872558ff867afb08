"""The model of a cluster: what its parts add up to, and what bounds it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.scale.cluster.measured import a_batch, frame_of, of_record, one_more
from bench.scale.cluster.messages import heartbeat_us, message_us, part_us, record_bytes
from bench.scale.cluster.model import Cluster, Costs, frames_a_second, predicted, slot_us
from ftlayer import TopologyOptions

OPTIONS = TopologyOptions()
MODES = ("untracked", "tracked", "barriers")
COSTS = Costs(
    record={"untracked": 0.5, "tracked": 0.8, "barriers": 0.6},
    vertex_record={"tracked": 0.5},
    frame=500,
    part=5,
    message=20,
    heartbeat=50,
    heartbeat_peer=1,
    record_bytes=36,
)


def test_one_slot_has_no_channels_and_nothing_but_records_and_its_batches() -> None:
    found = predicted("untracked", replace(COSTS, part=0), Cluster(1))
    assert found["records_per_s"] == pytest.approx(2e6)
    assert found["records_share"] == 1
    assert found["channels"] == found["channels_mib"] == found["network_used"] == 0


@pytest.mark.parametrize(
    ("rows", "slots", "cores", "barriers", "frames"),
    [
        (16_384 * 100, 2, 1.0, False, 100),  # full
        (16_384 * 10, 2, 1.0, False, 50),  # paid for by CPU time
        (16_384 * 10, 16, 1.0, False, 50),
        (16_384 * 10, 101, 1.0, False, 100),  # the oldest: one a second on each channel
        (16_384 * 10, 16, 0.125, False, 15),
        (16_384 * 10, 16, 0.125, True, 30),  # a barrier each half second
        (0, 16, 1.0, False, 0),
    ],
)
def test_frames_leave_when_full_or_paid_for_or_old_or_before_a_barrier(
    rows: float, slots: int, cores: float, barriers: bool, frames: float
) -> None:
    cluster = Cluster(slots, cores_a_slot=cores, interval_s=0.5)
    assert frames_a_second(rows, cluster, OPTIONS, barriers) == pytest.approx(frames)


@given(slots=st.integers(1, 500), mode=st.sampled_from(MODES), cores=st.floats(0.05, 1))
def test_a_rate_keeps_to_the_cpu_time_of_slots_and_vertex_and_uses_one_of_them(
    slots: int, mode: str, cores: float
) -> None:
    cluster = Cluster(slots, cores_a_slot=cores)
    found = predicted(mode, COSTS, cluster)
    assert max(found["slot_used"], found["vertex_used"]) == pytest.approx(1, abs=1e-4)
    assert sum(value for name, value in found.items() if name.endswith("_share")) == pytest.approx(1)
    taken = slot_us(found["records_per_s"] / slots, mode, COSTS, cluster, OPTIONS)
    assert sum(taken.values()) == pytest.approx(found["slot_used"] * cores * 1e6)
    assert found["cpu_us"] * found["records_per_s"] == pytest.approx(sum(taken.values()) * slots)


@given(slots=st.integers(2, 400), mode=st.sampled_from(MODES))
def test_another_slot_makes_a_record_no_cheaper_than_the_records_own_cost(slots: int, mode: str) -> None:
    assert predicted(mode, COSTS, Cluster(slots))["cpu_us"] > COSTS.record[mode]


def test_a_topology_has_one_shard_and_its_vertex_bounds_all_slots_together() -> None:
    rates = [predicted("tracked", COSTS, Cluster(slots))["records_per_s"] for slots in (8, 100, 400)]
    assert rates == pytest.approx([2e6] * 3)


def test_channels_heartbeats_and_memory_grow_as_they_do() -> None:
    few, many = (predicted("untracked", COSTS, Cluster(slots)) for slots in (100, 200))
    assert (few["channels"], many["channels"]) == (9_900, 39_800)
    assert (few["channels_mib"], many["channels_mib"]) == (198, 398)
    assert few["coordinator_used"] == pytest.approx(100 * (50 + 99) / 1e6)
    assert many["coordinator_used"] == pytest.approx(200 * (50 + 199) / 1e6)


def test_a_cost_for_each_batch_is_found_again_in_runs_of_two_sizes() -> None:
    frame, part, record = 900.0, 5.0, 0.5
    keyed = [record + (300 + frame / 2) / rows for rows in (16_384, 1_024)]
    forward = [0.2 + 300 / rows for rows in (16_384, 1_024)]
    assert frame_of(a_batch(*keyed), a_batch(*forward), 20) == pytest.approx(frame)
    assert frame_of(100, 300, 20) == 20
    assert of_record(0.5 + (frame / 2 + 2 * part) / 16_384, frame, part) == pytest.approx(0.5)


def test_a_start_is_no_part_of_a_records_cost() -> None:
    assert one_more(0.5 + 2.0 / 4, 0.5 + 2.0) == pytest.approx(0.5)


def test_costs_are_read_again_from_what_is_written() -> None:
    assert Costs.read(json.loads(json.dumps(COSTS.written()))) == COSTS


def test_messages_and_parts_cost_something_and_a_heartbeat_more_with_more_slots() -> None:
    assert message_us(50) > 0
    assert part_us(2) >= 0
    assert 0 < heartbeat_us(1, 20) < heartbeat_us(400, 20)
    assert 28 <= record_bytes() < 64
