"""How recorded steps are cut into stages."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.errors import InvalidTopologyError
from ftlayer.functions.steps import Filter, FlatMap, Map, MapBatches
from ftlayer.spark.stages.task import Repartition, Stage, Transform, check_unique, plan_stages

V = pa.schema([("v", pa.int64())])


def step_of(kind: str, number: int) -> Any:
    uid = f"{kind}{number}"
    return {
        "map": Map(uid, dict, V),
        "flat_map": FlatMap(uid, iter, V),
        "filter": Filter(uid, bool, V),
        "batches": MapBatches(uid, lambda b: b, V, "arrow", False),
        "repartition": Repartition(number + 1, ()),
        "transform": Transform(uid, lambda f: f, False),
    }[kind]


kinds = st.lists(
    st.sampled_from(["map", "flat_map", "filter", "batches", "repartition", "transform"]), max_size=9
)


@given(kinds)
def test_stages_hold_all_steps_in_order(kinds: list[str]) -> None:
    steps = [step_of(kind, number) for number, kind in enumerate(kinds)]
    plan = plan_stages(steps)
    held = [step for stage in plan.stages for step in (*stage.frame_steps, *stage.functions)]
    assert [*held, *plan.before_sink] == steps
    # The first stage gives the rows their roots, so nothing may come before it.
    assert plan.stages[0].frame_steps == ()
    assert all(stage.frame_steps for stage in plan.stages[1:])
    # What comes after the last stage is not counted: only what cannot lose a row.
    assert all(isinstance(step, Repartition) for step in plan.before_sink)
    for stage in plan.stages[1:]:
        assert stage.functions or stage.transforms
    assert plan.keeps_source == (len(plan.stages) > 1)


def kinds_of(*kinds: str) -> Any:
    return [step_of(kind, number) for number, kind in enumerate(kinds)]


def test_no_steps_are_one_stage() -> None:
    assert plan_stages([]).stages == (Stage((), ()),)
    assert not plan_stages([]).keeps_source


def test_neighbouring_functions_are_one_pass() -> None:
    steps = kinds_of("map", "filter", "batches", "flat_map")
    assert plan_stages(steps).stages == (Stage((), tuple(steps)),)


def test_a_repartition_at_the_end_is_left_to_the_sink() -> None:
    steps = kinds_of("map", "repartition")
    plan = plan_stages(steps)
    assert (plan.stages, plan.before_sink) == ((Stage((), (steps[0],)),), (steps[1],))
    assert not plan.keeps_source


def test_a_transform_at_the_end_is_counted_by_a_stage_behind_it() -> None:
    steps = kinds_of("map", "repartition", "transform", "repartition")
    plan = plan_stages(steps)
    assert plan.stages == (Stage((), (steps[0],)), Stage(tuple(steps[1:]), ()))
    assert plan.stages[1].transforms == (steps[2],)
    assert plan.before_sink == ()


def test_a_repartition_first_comes_behind_the_roots() -> None:
    steps = kinds_of("repartition", "map")
    assert plan_stages(steps).stages == (Stage((), ()), Stage((steps[0],), (steps[1],)))


def test_names_must_differ() -> None:
    steps = kinds_of("map", "repartition", "transform")
    check_unique(steps, "other")
    for taken in ("map0", "transform2"):
        with pytest.raises(InvalidTopologyError, match=f"named '{taken}'"):
            check_unique(steps, taken)


def test_transforms_that_allow_different_things_are_judged_apart():
    drops = Transform("drops", lambda f: f, True)
    keeps = Transform("keeps", lambda f: f, False)
    plan = plan_stages([step_of("map", 0), drops, keeps, keeps])
    assert [stage.transforms for stage in plan.stages] == [(), (drops,), (keeps, keeps)]
