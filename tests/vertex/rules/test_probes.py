"""What probes answer, by phase and by how the writers are."""

from __future__ import annotations

import dataclasses

import pytest

from ftlayer.vertex.rules.operating import STUCK_AFTER_MS, Phase, ShardPulse, liveness, readiness

NOW = 1_000_000
WELL = ShardPulse(NOW - 20, is_recovering=False, is_over=False, intake_waits_for="", used_share=0.2)
STUCK = dataclasses.replace(WELL, turned_ms=NOW - STUCK_AFTER_MS - 1)


def test_a_vertex_that_serves_is_live_and_ready() -> None:
    for probe in (liveness, readiness):
        result = probe(Phase.SERVING, [WELL, WELL], NOW)
        assert result.passes
        assert result.facts() == {"status": "ok", "phase": "serving", "reasons": (), "notes": ()}


@pytest.mark.parametrize("phase", [Phase.OPENING, Phase.STOPPING])
def test_before_and_after_it_is_live_and_not_ready(phase: Phase) -> None:
    """A restart would begin the recovery anew, and the end comes by itself."""
    shards = [] if phase is Phase.OPENING else [WELL]
    assert liveness(phase, shards, NOW).passes
    (reason,) = readiness(phase, shards, NOW).reasons
    assert phase.value in ("opening", "stopping")
    assert ("opened" if phase is Phase.OPENING else "stopping") in reason


@pytest.mark.parametrize("phase", list(Phase))
def test_a_writer_that_does_not_come_round_is_named(phase: Phase) -> None:
    for probe in (liveness, readiness):
        result = probe(phase, [WELL, STUCK], NOW)
        assert not result.passes
        assert result.reasons[0].startswith("shard 1: its writer has not come round for 30 s")
        assert "shard 0" not in " ".join(result.reasons)


def test_the_limit_itself_is_no_fault() -> None:
    at_limit = dataclasses.replace(WELL, turned_ms=NOW - STUCK_AFTER_MS)
    assert liveness(Phase.SERVING, [at_limit], NOW).passes


def test_a_shard_that_recovers_is_live_however_long_it_takes_and_not_ready() -> None:
    recovering = dataclasses.replace(STUCK, is_recovering=True)
    assert liveness(Phase.SERVING, [WELL, recovering], NOW).passes
    (reason,) = readiness(Phase.SERVING, [WELL, recovering], NOW).reasons
    assert reason.startswith("shard 1: memory was lost")


def test_a_writer_that_has_ended_is_a_fault_unless_the_vertex_stops() -> None:
    over = dataclasses.replace(STUCK, is_over=True)
    assert liveness(Phase.STOPPING, [over], NOW).passes
    for probe in (liveness, readiness):
        assert probe(Phase.SERVING, [WELL, over], NOW).reasons == (
            "shard 1: its writer has ended; the log tells why",
        )


def test_a_full_store_is_ready_and_says_so() -> None:
    """What empties it comes from the clients that readiness lets in."""
    full = dataclasses.replace(WELL, used_share=0.93)
    held = dataclasses.replace(WELL, intake_waits_for="the disk is full")
    result = readiness(Phase.SERVING, [WELL, full, held], NOW)
    assert result.passes
    of_full, of_held = result.notes
    assert of_full.startswith("shard 1: its store is 93% full")
    assert of_held == "shard 2: intake waits: the disk is full"
