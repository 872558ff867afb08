"""What a query reports of the records it resumed, against roots that know the ids they wait for."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.spark.batch.runner import SparkRunner, resumed_events
from ftlayer.spark.stages.pages import CARRIER_DTYPE
from ftlayer.spark.stages.run import Verdict
from ftlayer.vertex.calls import Fail, Failure, Report, Xor

Carrier = tuple[int, int, int]  # root, id, incarnation


def verdict_of(carriers: list[Carrier], emitted: list[tuple[int, int]]) -> Verdict:
    """``emitted``: (id of a resumed record, id of a record handed on for it), in any order and pages."""
    return Verdict(
        carriers=np.array(carriers, CARRIER_DTYPE),
        emitted_roots=np.array([id_ for id_, _ in emitted], np.uint64),
        emitted_values=np.array([child for _, child in emitted], np.uint64),
    )


ids = st.integers(1, 2**64 - 1)


@st.composite
def worlds(draw: Any) -> tuple[list[Carrier], set[int], list[tuple[int, int]], set[int]]:
    """(all carriers handed out, the ids read, (id, child) handed on in turn, the ids that failed)."""
    records = draw(
        st.lists(st.tuples(st.integers(1, 5), ids, st.integers(1, 2)), max_size=14, unique_by=lambda r: r[1])
    )
    carriers = [(root * 1_000 + incarnation, id_, incarnation) for root, id_, incarnation in records]
    known = [id_ for _, id_, _ in carriers]
    some = st.sets(st.sampled_from(known)) if known else st.just(set())
    read, failed = draw(some), draw(some)
    children = draw(st.lists(ids, max_size=10, unique=True))
    parents = st.sampled_from(sorted(read)) if read else st.nothing()
    handed_on = [(draw(parents), child) for child in children] if read else []
    return carriers, read, handed_on, failed & read


@settings(max_examples=150, deadline=None)
@given(worlds(), st.randoms())
def test_roots_are_left_with_just_the_ids_that_are_still_out(world: Any, random: Any) -> None:
    carriers, read, handed_on, failed = world
    waits: dict[tuple[int, int], set[int]] = {}
    for root, id_, incarnation in carriers:
        waits.setdefault((root, incarnation), set()).add(id_)
    given_in = [carrier for carrier in carriers if carrier[1] in read]
    given_in += random.choices(given_in, k=3) if given_in else []  # read twice
    random.shuffle(given_in)
    failures = {id_: Failure(id_, f"reason {id_}", "op", "trace", id_ % 2 == 0) for id_ in failed}

    acks = {key: int(np.bitwise_xor.reduce(np.array(sorted(out), np.uint64))) for key, out in waits.items()}
    ended: dict[tuple[int, int], Failure] = {}
    for event in resumed_events(verdict_of(given_in, handed_on), failures):
        if isinstance(event, Fail):
            for failure in event.failures:
                assert (failure.root, event.incarnation) not in ended
                ended[failure.root, event.incarnation] = failure
        else:
            assert isinstance(event, Xor)
            # The query that handed them on may not have committed yet.
            assert event.hold
            assert event.roots.dtype == event.values.dtype == np.uint64
            for root, value in zip(event.roots.tolist(), event.values.tolist(), strict=True):
                acks[root, event.incarnation] ^= value

    for (root, incarnation), out in waits.items():
        bad = out & failed
        assert ((root, incarnation) in ended) == bool(bad)
        if bad:
            failure = ended[root, incarnation]
            source = next(failures[id_] for id_ in bad if failures[id_].reason == failure.reason)
            assert (failure.operator, failure.traceback, failure.fatal) == ("op", "trace", source.fatal)
            continue
        out -= read
        out |= {child for id_, child in handed_on if (root, id_, incarnation) in carriers}
        left = int(np.bitwise_xor.reduce(np.array(sorted(out), np.uint64))) if out else 0
        assert acks[root, incarnation] == left


def test_failures_of_an_earlier_run_are_reported_though_the_rows_were_left_out() -> None:
    verdict = verdict_of([(1, 10, 3), (2, 20, 3)], [])
    events = list(resumed_events(verdict, {10: Failure(10, "first run")}))
    assert events[0] == Fail((Failure(1, "first run"),), 3, hold=True)
    assert isinstance(events[1], Xor)
    assert (events[1].roots.tolist(), events[1].values.tolist()) == ([2], [20])


def test_a_report_made_again_after_a_crash_has_the_names_of_the_first() -> None:
    one = np.ones(1, np.uint64)
    report = Report((Xor(one, one, 8, hold=True),), (Fail((Failure(1, "no"),), 7),))
    said: list[list[tuple[str, Any]]] = []
    for _ in range(2):
        said.append([])
        runner = SparkRunner(
            *[Mock()] * 6, query="q", run_id="r", call_once=lambda event, name: said[-1].append((name, event))
        )
        runner.report(3, report)
    names = [[name for name, _ in events] for events in said]
    assert names == [["q/3/Fail/7", "q/3/Xor/8"]] * 2


def test_nothing_resumed_nothing_said() -> None:
    assert list(resumed_events(verdict_of([], []), {})) == []


def test_one_event_of_each_kind_for_each_incarnation() -> None:
    carriers = [(1, 10, 1), (1, 11, 1), (2, 20, 1), (3, 30, 2), (4, 40, 2)]
    failures = {id_: Failure(id_, "r") for id_ in (10, 11, 40)}
    events = list(resumed_events(verdict_of(carriers, []), failures))
    assert [(type(event).__name__, event.incarnation) for event in events] == [
        ("Fail", 1),
        ("Xor", 1),
        ("Fail", 2),
        ("Xor", 2),
    ]
