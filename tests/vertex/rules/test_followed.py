"""Attempts of records that are traced: each that began ends once, as it ended in the vertex."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.common.clock import Now
from ftlayer.records.traced import Sampler
from ftlayer.vertex.calls import Failure
from ftlayer.vertex.rules import followed
from ftlayer.vertex.rules.followed import EndedAttempt, FollowedAttempts, Outcome
from ftlayer.vertex.store.rows import RowInfo


def _story(ended: list[EndedAttempt]) -> list[tuple[int, int, str]]:
    return [(each.origin, each.number, str(each.outcome)) for each in ended]


def test_a_record_that_fails_and_is_replayed(kit: Any) -> None:
    vertex = kit.Vertex(traced=1.0)
    vertex.open(max_attempts=3)
    vertex.persist([1, 2], [5, 6])
    vertex.advance(40)
    vertex.xor((2, 6))
    vertex.fail(1)
    vertex.advance(200)
    ((root, origin, attempt, _),) = vertex.take()
    assert (origin, attempt) == (1, 2)
    vertex.xor((root, root))
    ended = vertex.layer.take_attempts()
    assert _story(ended) == [(2, 1, "completed"), (1, 1, "failed"), (1, 2, "completed")]
    failed = ended[1]
    assert (failed.root, failed.stream, failed.ended_ms - failed.began_ms) == (1, "s", 40)
    assert failed.cause is not None
    assert (failed.cause.reason, failed.cause.operator) == ("broken", "op")
    assert ended[2].root == root
    assert vertex.layer.take_attempts() == []


def test_timeouts_deaths_and_losses(kit: Any) -> None:
    vertex = kit.Vertex(traced=1.0)
    vertex.open(max_attempts=2)
    vertex.persist([1, 2, 3])
    vertex.fail(2, fatal=True)
    assert vertex.recall("s") == 2
    taken = vertex.take()
    vertex.advance(3_000, ticks=30)
    vertex.advance(500, ticks=5)
    ended = vertex.layer.take_attempts()
    assert _story(ended)[:3] == [(2, 1, "dead"), (1, 1, "lost"), (3, 1, "lost")]
    assert sorted(_story(ended)[3:]) == [(1, 1, "failed"), (3, 1, "failed")]
    assert {each.root for each in ended[3:]} == {root for root, *_ in taken}
    assert all(each.cause is not None and "timed out" in each.cause.reason for each in ended[3:])


def test_what_is_not_traced_costs_nothing(kit: Any) -> None:
    vertex = kit.Vertex()
    vertex.open()
    vertex.persist([1])
    vertex.fail(1, fatal=True)
    assert vertex.layer.take_attempts() == []


def test_a_share_of_records_is_followed_through_all_their_attempts(kit: Any) -> None:
    vertex = kit.Vertex(traced=0.2)
    vertex.open(max_attempts=2)
    roots = list(range(1, 201))
    wanted = np.array(roots)[Sampler(0.2).mask(kit.u64(roots))].tolist()
    vertex.persist(roots)
    vertex.fail(*roots)
    vertex.advance(200)
    vertex.xor(*((root, root) for root, *_ in vertex.take()))
    ended = vertex.layer.take_attempts()
    assert sorted(_story(ended)) == sorted(
        story for origin in wanted for story in ((origin, 1, "failed"), (origin, 2, "completed"))
    )


STEPS = st.lists(st.tuples(st.sampled_from(["come", "complete", "fail", "out"]), st.integers(0, 9)))


@given(STEPS, st.sampled_from([0.3, 1.0]))
def test_each_attempt_that_began_ends_once(steps: list[tuple[str, int]], ratio: float) -> None:
    sampler = Sampler(ratio)
    attempts = FollowedAttempts(sampler)
    now, fresh = Now(0, 1), iter(range(10_000, 20_000))
    current: dict[
        int, tuple[int, int]
    ] = {}  # origin → root and number of the attempt under way, root 0 for none
    expected = []
    for what, number in steps:
        origin = number + 1
        roots = np.array([origin], np.uint64)
        root, attempt = current.get(origin, (0, 0))
        if what == "come" and not attempt:
            attempts.registered("s", roots, now)
            current[origin] = origin, 1
        elif what == "out" and attempt:
            if root:
                expected.append((origin, attempt, "lost"))
            root = next(fresh)
            info = RowInfo(np.array([root], np.uint64), roots, np.array([attempt + 1], np.int32), None)
            attempts.let_out("s", info, now)
            current[origin] = root, attempt + 1
        elif what in ("complete", "fail") and root:
            ending = np.array([root], np.uint64)
            if what == "complete":
                attempts.completed(ending, now)
            else:
                attempts.failed(ending, [Failure(1, "no")], [False], now)
            expected.append((origin, attempt, f"{what}d".replace("faild", "failed")))
            current[origin] = 0, attempt
    followed_ones = {origin for origin in range(1, 11) if sampler.mask(np.array([origin], np.uint64))[0]}
    assert _story(attempts.take()) == [story for story in expected if story[0] in followed_ones]


def test_there_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed, "MAX_OPEN", 3)
    attempts = FollowedAttempts(Sampler(1.0))
    now, roots = Now(0, 1), np.arange(1, 9, dtype=np.uint64)
    attempts.registered("s", roots, now)
    attempts.completed(roots, now)
    assert [each.root for each in attempts.take()] == [1, 2, 3]
    attempts.registered("s", roots[6:], now)
    attempts.completed(roots, now)
    assert [(each.root, each.outcome) for each in attempts.take()] == [
        (7, Outcome.COMPLETED),
        (8, Outcome.COMPLETED),
    ]
