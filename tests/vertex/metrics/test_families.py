"""Which samples there are, from what a vertex answers and from what drivers announce."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ftlayer.common.rules.circuit import CircuitState, CircuitStatus
from ftlayer.common.rules.histogram import BATCH_BOUNDS, LATENCY_BOUNDS, Histogram
from ftlayer.vertex.calls import (
    AnnouncedJob,
    HistogramDetails,
    JobKind,
    StatsReply,
    StreamDetails,
    StreamList,
)
from ftlayer.vertex.metrics import catalogue
from ftlayer.vertex.metrics.catalogue import SHOWN_AFTER_END_MS, Families, Metric, add_jobs, add_vertex
from ftlayer.vertex.rules.streams import ShardCounters, StreamCounters

NOW_MS = 1_700_000_000_000
COUNTERS = dict.fromkeys(StreamCounters.__dataclass_fields__, 0)
STATS = StatsReply(dict.fromkeys((*COUNTERS, *ShardCounters.__dataclass_fields__, *catalogue.VERTEX), 0.0))


def _stream(**more: Any) -> StreamDetails:
    counters = COUNTERS | more.pop("counters", {"persisted": 5})
    values = dict.fromkeys(
        (
            "pending",
            "waiting",
            "in_delivery",
            "dead",
            "persisted",
            "completed",
            "failed",
            "died",
            "oldest_ms",
        ),
        0,
    )
    named = {
        "stream": "shop/orders",
        "owner": "shop",
        "title": "shop",
        "source": "orders",
        "max_pending": 100,
    }
    return StreamDetails(**(named | values | {"kind": JobKind.TOPOLOGY, "counters": counters} | more))


def _of_vertex(*streams: StreamDetails, stats: StatsReply = STATS) -> Families:
    families = Families()
    add_vertex(families, stats, StreamList(streams), "1.2.3", NOW_MS)
    return families


def _of_jobs(*jobs: AnnouncedJob) -> Families:
    families = Families()
    add_jobs(families, jobs)
    return families


def _samples(families: Families, metric: Metric) -> dict[frozenset[tuple[str, str]], float]:
    found = dict(families.values())
    return {frozenset(labels.items()): value for labels, value in found.get(metric, [])}


def _labels(**labels: str) -> frozenset[tuple[str, str]]:
    return frozenset(labels.items())


def _histograms(families: Families, metric: Metric) -> dict[frozenset[tuple[str, str]], Histogram]:
    found = dict(families.histograms())
    return {frozenset(labels.items()): histogram for labels, histogram in found.get(metric, [])}


# ---------------------------------------------------------------- a vertex


def test_streams_are_named_as_people_named_them() -> None:
    families = _of_vertex(
        _stream(pending=3),
        _stream(
            stream="0123/files",
            owner="0123",
            title="clean orders",
            source="files",
            kind=JobKind.QUERY,
            dead=2,
        ),
        _stream(stream="ingest/web", owner="", title="", source="ingest/web", kind=None, in_delivery=7),
    )
    shop = _labels(topology="shop", source="orders")
    clean = _labels(query="clean orders", source="files")
    web = _labels(source="ingest/web")
    assert _samples(families, catalogue.PENDING) == {shop: 3, clean: 0, web: 0}
    assert _samples(families, catalogue.DEAD_LETTERS) == {shop: 0, clean: 2, web: 0}
    assert _samples(families, catalogue.IN_DELIVERY) == {shop: 0, clean: 0, web: 7}
    assert _samples(families, catalogue.RECORDS["persisted"]) == {shop: 5, clean: 5, web: 5}


def test_a_stream_of_which_nothing_is_held_and_nothing_was_seen_is_left_out() -> None:
    families = _of_vertex(
        _stream(counters={}), _stream(stream="shop/late", source="late", counters={"purged": 1})
    )
    assert list(_samples(families, catalogue.PENDING)) == [_labels(topology="shop", source="late")]


def test_two_queries_of_one_name_are_added_and_of_ages_the_largest_is_taken() -> None:
    completion = Histogram(LATENCY_BOUNDS)
    completion.observe(0.02, 3, root=7, at_ms=NOW_MS)
    details = HistogramDetails.of(completion)
    both = [
        _stream(
            stream=f"{owner}/files",
            owner=owner,
            title="clean",
            source="files",
            kind=JobKind.QUERY,
            pending=1,
            oldest_ms=NOW_MS - age_ms,
            completion=details,
        )
        for owner, age_ms in (("aaaa", 2_000), ("bbbb", 9_000))
    ]
    families = _of_vertex(*both)
    labels = _labels(query="clean", source="files")
    assert _samples(families, catalogue.PENDING) == {labels: 2}
    assert _samples(families, catalogue.OLDEST) == {labels: 9.0}
    assert _histograms(families, catalogue.COMPLETION)[labels].count == 6


def test_attempts_are_told_by_what_ended_them() -> None:
    families = _of_vertex(_stream(counters={"failed_sealed": 1, "failed_explicit": 2, "timed_out": 3}))
    found = {
        dict(labels)["cause"]: value
        for labels, value in _samples(families, catalogue.ATTEMPTS_FAILED).items()
    }
    assert found == {"sealed": 1, "reported": 2, "timeout": 3}


def test_circuit_breakers_have_the_names_of_their_owners() -> None:
    open_one = CircuitStatus(CircuitState.OPEN, 3, 100, 40, 700)
    stats = replace(
        STATS, circuits={"shop": {"": CircuitStatus(), "enrich": open_one}, "0123": {"": open_one}}
    )
    families = _of_vertex(
        _stream(), _stream(stream="0123/f", owner="0123", title="clean", kind=JobKind.QUERY), stats=stats
    )
    states = _samples(families, catalogue.CIRCUIT_STATE)
    assert states[_labels(topology="shop", circuit="enrich", state="open")] == 1
    assert states[_labels(topology="shop", circuit="enrich", state="closed")] == 0
    assert states[_labels(topology="shop", state="closed")] == 1
    assert _samples(families, catalogue.CIRCUIT_OPENED)[_labels(query="clean")] == 3


def test_all_that_a_vertex_counts_is_told() -> None:
    """A counter that is new in the rules has to get a name here."""
    told = {*catalogue.RECORDS, *catalogue.CAUSES, *catalogue.IGNORED}
    assert set(COUNTERS) <= told
    assert set(ShardCounters.__dataclass_fields__) <= {*told, *catalogue.VERTEX}


# ---------------------------------------------------------------- jobs


def test_subtasks_in_one_slot_are_one_sample(jobs: Any) -> None:
    families = _of_jobs(AnnouncedJob(jobs.topology(), 0, False))
    first, second = (_labels(topology="shop", operator="parse", slot=slot) for slot in "01")
    assert _samples(families, catalogue.OPERATOR_IN)[first] == 70
    assert _samples(families, catalogue.OPERATOR_BUSY)[first] == 0.97
    assert _samples(families, catalogue.OPERATOR_WATERMARK_LAG) == {first: 9.0}
    assert _samples(families, catalogue.OPERATOR_LATE)[second] == 0
    edge = _labels(topology="shop", source="orders", target="parse", slot="0")
    assert _samples(families, catalogue.EDGE_BYTES)[edge] == 4_096


def test_a_source_that_can_tell_has_a_lag(jobs: Any) -> None:
    families = _of_jobs(AnnouncedJob(jobs.topology(), 0, False))
    assert _samples(families, catalogue.SOURCE_LAG) == {_labels(topology="shop", source="orders"): 17}


def test_a_job_is_in_one_state_and_states_that_it_has_left_are_0(jobs: Any) -> None:
    families = _of_jobs(AnnouncedJob(replace(jobs.topology(), state="melting"), 0, False))
    states = {
        dict(labels)["state"]: value for labels, value in _samples(families, catalogue.JOB_STATE).items()
    }
    assert states["melting"] == 1
    assert states["running"] == states["failed"] == 0


def test_durations_are_told_by_phase_and_part(jobs: Any) -> None:
    families = _of_jobs(AnnouncedJob(jobs.topology(), 0, False), AnnouncedJob(jobs.query(), 0, False))
    phases = _histograms(families, catalogue.BATCH_PHASE)
    assert {dict(labels)["phase"] for labels in phases} == {"run", "verdict", "seal", "sink", "commit"}
    assert {dict(labels)["query"] for labels in phases} == {"clean orders"}
    parts = _histograms(families, catalogue.CHECKPOINT_PART)
    assert _labels(topology="shop", operator="parse", part="async") in parts
    assert _histograms(families, catalogue.PERSIST)[_labels(topology="shop", source="orders")].count == 10


def test_rows_of_batches_are_counted_by_what_became_of_them(jobs: Any) -> None:
    families = _of_jobs(AnnouncedJob(jobs.query(2), 0, False))
    found = {name: _samples(families, metric) for name, metric in catalogue.BATCH_ROWS.items()}
    labels = _labels(query="clean orders")
    assert found == {
        name: {labels: count} for name, count in jobs.query(2).counters.items() if name != "batches"
    }


def test_a_job_that_is_over_is_told_of_for_a_while(jobs: Any) -> None:
    ended = replace(jobs.query(), state="failed", final=True, ended_ms=NOW_MS)
    shown = _of_jobs(AnnouncedJob(ended, SHOWN_AFTER_END_MS - 1, False))
    assert (
        _samples(shown, catalogue.JOB_STATE)[_labels(query="clean orders", kind="query", state="failed")] == 1
    )
    assert not list(_of_jobs(AnnouncedJob(ended, SHOWN_AFTER_END_MS, False)).values())


def test_circuit_breakers_of_acker_mode_are_told_by_the_vertex_alone(jobs: Any) -> None:
    job = jobs.topology()
    assert _samples(_of_jobs(AnnouncedJob(job, 0, False)), catalogue.CIRCUIT_OPENED)
    acker = replace(job, mode="acker")
    assert not _samples(_of_jobs(AnnouncedJob(acker, 0, False)), catalogue.CIRCUIT_OPENED)


@pytest.mark.parametrize("bounds", [BATCH_BOUNDS, (1.0,)])
def test_a_histogram_of_other_bounds_is_not_mixed_with_the_first(bounds: tuple[float, ...]) -> None:
    first, other = Histogram(LATENCY_BOUNDS), Histogram(bounds)
    first.observe(0.5)
    other.observe(0.5)
    families = Families()
    families.observe(catalogue.PERSIST, first, {"topology": "shop"})
    families.observe(catalogue.PERSIST, other, {"topology": "shop"})
    families.observe(catalogue.PERSIST, other, {"topology": "other"})
    found = _histograms(families, catalogue.PERSIST)
    assert found[_labels(topology="shop")].counts == first.counts
    assert found[_labels(topology="other")].counts == other.counts
