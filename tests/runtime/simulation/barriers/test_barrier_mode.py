"""Whole jobs in barrier mode, whatever happens in whatever order: exactly once, and no end that never comes."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from draws import every_other, seeds

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.snapshots import Checkpoint
from ftlayer.common.clock import Now
from ftlayer.runtime.barrier_mode.slot.shell import BarrierSlotShell
from ftlayer.runtime.barrier_mode.task.mode import ChainCheckpoints
from ftlayer.runtime.protocol.messages import MAX_TIME_MS, Deploy

NAMES = ("counting", "union", "co", "side", "windows", "forward", "reader")
MODES = ("aligned", "at-least-once", "unaligned", "turning")
ACTS = ("kill", "kill-all", "freeze", "driver", "savepoint", "stop")
CAMPAIGN = int(os.environ.get("FTLAYER_SEEDS", "3000"))


@pytest.mark.usefixtures("markers")
@every_other("name, mode", NAMES, MODES)
def test_nothing_fails(runs: Any, name: str, mode: str) -> None:
    run = runs.Run(runs.Plan(name, seed=1, config=runs.MODES[mode])).run()
    assert run.world.driver.checkpoints.checkpoint_counts.completed > 1
    graph, status = run.world.driver.graph, run.world.driver.job.status()
    markers = [details for part, details in status.histograms.items() if part.startswith("end_to_end|")]
    sinks = {part.split("|")[2] for part in status.histograms if part.startswith("end_to_end|")}
    assert sinks == {
        vertex.operators[-1].uid for vertex in graph.vertices if not graph.edges_from(vertex.uid)
    }
    assert all(sum(details.counts) > 1 for details in markers)


@pytest.mark.usefixtures("markers")
@every_other("name, mode", ["union", "forward"], MODES)
def test_everything_fails_once(runs: Any, name: str, mode: str) -> None:
    events = tuple((120 * (place + 1), what) for place, what in enumerate(runs.ARMED))
    plan = runs.Plan(name, seed=2, events=events, config={**runs.MODES[mode], "interval": "10ms"}, count=200)
    fired = runs.Run(plan).run().outside.fired
    # One may wait for another, which the job comes to an end before.
    assert len(fired) >= 5


@every_other("act, mode", ACTS, MODES)
def test_one_thing_happens(runs: Any, act: str, mode: str) -> None:
    # Each of them early, in the middle and late.
    move = (50, 300, 500)[(ACTS.index(act) + MODES.index(mode)) % 3]
    runs.Run(runs.Plan("counting", seed=move, events=((move, act),), config=runs.MODES[mode])).run()


@seeds(range(3), range(3, 8))
def test_what_another_region_wrote_is_not_aborted(runs: Any, seeds: range) -> None:
    """Its subtasks go on, and their next checkpoint holds it."""
    for seed in seeds:
        events = ((80 + 13 * seed, "die-in-write"),)
        runs.Run(
            runs.Plan("forward", seed, parallelism=3, events=events, config={"interval": "20ms"}, parts=3)
        ).run()


@seeds(range(3), range(3, 8))
def test_a_checkpoint_behind_a_failed_commit_waits_for_it(runs: Any, seeds: range) -> None:
    """Else its messages, some of which are committed, would be committed under two ids."""
    config = {"interval": "5ms", "max_concurrent": 3}
    for seed in seeds:
        runs.Run(runs.Plan("counting", seed, events=((150, "commit-middle"),), config=config)).run()


@seeds(range(4), range(4, 12))
def test_the_end_of_a_source_that_is_reset_does_not_count(runs: Any, seeds: range) -> None:
    """Between a loss and the reset of the survivors their sources may come to their end, and begin again."""
    for seed in seeds:
        plan = runs.Plan(
            "counting",
            seed,
            parallelism=3,
            events=((0, "others-die"),),
            config={"interval": "60ms"},
            count=30,
            parts=3,
        )
        runs.Run(plan).run()


@seeds(range(4), range(4, 16))
def test_timers_that_a_barrier_interrupts(runs: Any, seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are left are in snapshots, and fire behind a restore: all is in the sink once."""
    left: set[int] = set()  # checkpoints with timers that are due, of the run
    restored = 0
    snapshot, begin = ChainCheckpoints.snapshot, BarrierSlotShell.open

    def look(checkpoints: Any, barrier: Barrier, now: Now) -> Any:
        stages = checkpoints._chain._pipeline.stages
        if any((stage.chain.next_event_ms or MAX_TIME_MS) <= stage.watermark_ms for stage in stages):
            left.add(barrier.checkpoint)
        return snapshot(checkpoints, barrier, now)

    def begin_with(shell: BarrierSlotShell, deploy: Deploy) -> Any:
        nonlocal restored
        restored += deploy.restore is not None and deploy.restore.checkpoint in left
        return begin(shell, deploy)

    def completed(case: Any, checkpoint: Checkpoint, letters: int, key: bytes) -> None:
        if checkpoint.checkpoint in left:
            case.outside.armed[("function", "die-in-function")[checkpoint.checkpoint % 2]] += 1

    monkeypatch.setattr(ChainCheckpoints, "snapshot", look)
    monkeypatch.setattr(BarrierSlotShell, "open", begin_with)
    monkeypatch.setattr(runs.Case, "completed", completed)
    for seed in seeds:
        left.clear()
        config = {**runs.MODES["unaligned"], "interval": "2ms", "backend": ("heap", "lmdb")[seed % 2]}
        events = ((150 + 50 * seed, "driver"),)
        runs.Run(runs.Plan("windows", seed, 1 + seed % 3, events, config, count=120)).run()
    assert restored > 2


@seeds(range(3), range(3, 6))
def test_an_unforeseen_error_fails_a_checkpoint_like_any_other(runs: Any, seeds: range) -> None:
    """While the rules wait for a checkpoint to be published they begin no other one, and restore none."""
    for seed in seeds:
        at = 80 + 14 * seed
        events = ((at, "publish-odd"), (at + 15, "function"), (at + 80, "publish-odd"), (at + 100, "driver"))
        plan = runs.Plan("counting", seed, parallelism=2, events=events, config={"interval": "10ms"})
        assert not runs.Run(plan).run().outside.armed["publish-odd"]


@seeds(range(3), range(3, 8))
@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_checkpoint_that_was_perhaps_published_is_gone_before_its_rows_are_aborted(
    runs: Any, seeds: range, is_stuck: bool
) -> None:
    """Else a driver that goes on from the latest checkpoint may find it, and commit them. Or nothing is aborted."""
    for seed in seeds:
        at = 80 + 14 * seed
        faults = [(at, "publish-after"), (at + 10, "function"), (at + 60 + 5 * seed, "driver")]
        if is_stuck:
            faults.append((at, "unpublish"))
        config = {"interval": "10ms", "memory_threshold": 0}
        runs.Run(runs.Plan("counting", seed, parallelism=2, events=tuple(faults), config=config)).run()


@seeds(range(3), range(3, 8))
@pytest.mark.parametrize("backend", ["heap", "lmdb"])
def test_changelogs_that_are_materialized_and_cannot_always_be_written(
    runs: Any, seeds: range, backend: str
) -> None:
    for seed in seeds:
        events = tuple(
            (60 * place + 7 * seed, what) for place, what in enumerate(["log", "kill", "log", "driver"])
        )
        config = {
            "interval": "10ms",
            "changelog": True,
            "materialization_interval": "15ms",
            "backend": backend,
        }
        run = runs.Run(runs.Plan("counting", seed, events=events, config=config)).run()
        assert run.world.moves_made["log"] > 5


@seeds(range(4), range(4, 8))
def test_local_copies_that_are_damaged_are_as_good_as_none(runs: Any, seeds: range) -> None:
    for seed in seeds:
        at = 150 + 20 * seed
        events = (
            (at, "damage-copies"),
            (at + 1, "kill"),
            (at + 120, "damage-copies"),
            (at + 121, "function"),
        )
        config = {
            "interval": "5ms",
            "local_recovery": True,
            "memory_threshold": 0,
            "incremental": seed % 2 == 0,
        }
        runs.Run(runs.Plan("union", seed, events=events, config=config)).run()


@seeds(range(4), range(4, 12))
def test_checkpoints_in_the_drivers_memory(runs: Any, seeds: range) -> None:
    for seed in seeds:
        events = ((90 + 17 * seed, "kill"), (200 + 17 * seed, "kill-all"), (300, "stop"))
        runs.Run(runs.Plan("side", seed, events=events, config={"interval": "10ms", "directory": None})).run()


@seeds(range(0, 6, 2), range(6, 18, 2))
def test_readers_that_plan_otherwise_each_time(runs: Any, seeds: range) -> None:
    """What a checkpoint was in the middle of is read on as it was planned, and nothing is read that may be gone."""
    kinds = ("kill", "driver", "plan", "forget", "kill-all", "stop")
    for seed in seeds:
        events = ((100 + 25 * seed, kinds[seed % 6]), (250 + 20 * seed, kinds[(seed + 1) % 6]))
        plan = runs.Plan("reader", seed, 1 + seed % 3, events, {"interval": "5ms"}, count=100)
        assert runs.Run(plan).run().outside.forgotten["a"] == 100


@every_other("name, mode", NAMES, MODES)
def test_a_job_that_is_drained_has_read_up_to_somewhere(runs: Any, name: str, mode: str) -> None:
    seed = NAMES.index(name)
    then = ((), ("kill",), ("driver",))[(seed + MODES.index(mode)) % 3]
    events = ((150, "drain"), *((170 + 5 * seed, what) for what in then))
    runs.Run(runs.Plan(name, seed, events=events, config=runs.MODES[mode], count=200)).run()


@seeds(range(2), range(2, 6))
@pytest.mark.parametrize("end", ["cancel", "fail"])
@pytest.mark.parametrize(
    "retention", ["retain-on-cancellation", "delete-on-cancellation", "no-externalized-checkpoints"]
)
def test_what_is_retained_is_whole_and_what_is_not_is_gone(
    runs: Any, seeds: range, end: str, retention: str
) -> None:
    kept = {
        "cancel": retention == "retain-on-cancellation",
        "fail": retention != "no-externalized-checkpoints",
    }
    for seed in seeds:
        config = {"retention": retention, "interval": "10ms", "retained": 1 + seed % 2, "incremental": True}
        plan = runs.Plan("counting", seed, events=((200 + 30 * seed, end),), config=config, count=200)
        run = runs.Run(plan).run()
        assert run.world.lives == 1 + kept[end]
        assert run.extent is (runs.Extent.WHOLE if kept[end] else runs.Extent.CUT)


@seeds(range(6), range(12))
@pytest.mark.parametrize("then", [(), ("kill",), ("function",), ("commit-middle",)])
def test_a_savepoint_that_the_job_went_on_behind_begins_another_future(
    runs: Any, seeds: range, then: tuple[str]
) -> None:
    """What was there, what it holds, and what comes of it is every record once; the old future changes nothing."""
    went_back = 0
    for seed in seeds:
        events = ((60 + 20 * seed, "savepoint"), *((120 + 40 * seed, what) for what in then))
        config = {"interval": "10ms", "backend": ("heap", "lmdb")[seed % 2], "changelog": seed % 3 == 0}
        run = runs.Run(runs.Plan(NAMES[seed % 6], seed, events=events, config=config)).run_and_go_back()
        went_back += run.went_back
    # Some are given up.
    assert went_back >= 2


@seeds(range(3), range(3, 7))
def test_at_least_once_loses_nothing_and_counts_no_less(runs: Any, seeds: range) -> None:
    for seed in seeds:
        events = tuple(
            (100 + 90 * place + seed, what) for place, what in enumerate(("kill", "driver", "kill-all"))
        )
        config = {**runs.MODES["at-least-once"], "interval": "5ms", "max_concurrent": 1 + 2 * (seed % 2)}
        runs.Run(runs.Plan(NAMES[seed % 7], seed, 3, events, config)).run()


@seeds(range(8), range(8, 20))
def test_anything_happens(runs: Any, seeds: range) -> None:
    for seed in seeds:
        runs.Run(runs.drawn(seed)).run()


@pytest.mark.campaign
@pytest.mark.parametrize("first", range(1_000, 1_000 + CAMPAIGN, 100))
def test_campaign(runs: Any, first: int) -> None:
    for seed in range(first, first + 100):
        runs.Run(runs.drawn(seed)).run()


@seeds(range(6), range(6, 200))
def test_each_timer_fires_once_in_its_turn(runs: Any, seeds: range) -> None:
    """Also where barriers interrupt them, some are deleted meanwhile or set again, and whatever happens."""
    for seed in seeds:
        plan = runs.drawn(seed, names=["timers"])
        interruptible = plan.config.get("unaligned", False)
        runs.Run(replace(plan, config={**plan.config, "interruptible_timers": interruptible})).run()
