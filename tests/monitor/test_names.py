from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ftlayer.errors import ConfigError
from ftlayer.monitor.rules.names import JobKey, JobNames
from ftlayer.vertex.calls.jobs import JobKind

FIRST, SECOND = "3f2a" + "0" * 28, "77aa" + "1" * 28


def query(made: Any, owner: str, **fields: Any) -> Any:
    return made.job(owner, name="clean-orders", kind=JobKind.QUERY, **fields)


def test_a_query_is_called_what_people_called_it(made: Any) -> None:
    view = made.view(jobs=(query(made, FIRST),), streams=(made.stream(f"{FIRST}/orders", "clean-orders"),))
    names = JobNames([view])
    assert names.label("local", FIRST) == "clean-orders"
    assert names.stream("local", f"{FIRST}/orders") == "clean-orders/orders"
    assert names.stream("local", "ingest/web") == "ingest/web"
    assert names.stream("local", "gone/web") == "gone/web"
    for text in ("clean-orders", FIRST, "local:clean-orders", f"local:{FIRST}"):
        assert names.find(text) == JobKey("local", FIRST)
    for text in (
        "clean-orders",
        "clean-orders/orders",
        f"{FIRST}/orders",
        "local:clean-orders/orders",
        FIRST,
    ):
        assert names.streams(text) == (("local", f"{FIRST}/orders"),)
    assert names.streams("orders") == ()


def test_two_of_one_name_have_their_beginning_beside_it(made: Any) -> None:
    jobs = (query(made, FIRST, since_ms=1_800_000_000_000), query(made, SECOND, since_ms=1_800_000_060_000))
    names = JobNames([made.view(jobs=jobs)])
    labels = [names.label("local", owner) for owner in (FIRST, SECOND)]
    assert labels == ["clean-orders (2027-01-15 08:00:00Z)", "clean-orders (2027-01-15 08:01:00Z)"]
    assert names.find(labels[1]) == JobKey("local", SECOND)
    with pytest.raises(
        ConfigError, match="2 jobs are called 'clean-orders': say which of clean-orders \\(2027"
    ):
        names.find("clean-orders")


def test_of_two_of_one_name_the_one_that_is_alive_is_meant(made: Any) -> None:
    jobs = (query(made, FIRST, final=True, state="ended"), query(made, SECOND))
    assert JobNames([made.view(jobs=jobs)]).find("clean-orders") == JobKey("local", SECOND)
    silent = (query(made, FIRST, is_silent=True), query(made, SECOND))
    assert JobNames([made.view(jobs=silent)]).find("clean-orders") == JobKey("local", SECOND)


def test_labels_are_of_one_job_even_where_all_is_alike(made: Any) -> None:
    names = JobNames([made.view(jobs=(query(made, FIRST), query(made, SECOND)))])
    labels = {names.label("local", owner) for owner in (FIRST, SECOND)}
    assert len(labels) == 2
    streams = (made.stream(f"{FIRST}/a", "clean-orders"), made.stream(f"{SECOND}/a", "clean-orders"))
    unheard = JobNames([made.view(streams=streams)])
    assert unheard.stream("local", f"{FIRST}/a") == "clean-orders (3f2a0000)/a"


def test_jobs_of_one_name_on_two_vertices_are_told_apart_by_them(made: Any) -> None:
    names = JobNames([made.view("a", jobs=(made.job(),)), made.view("b", jobs=(made.job(),))])
    assert names.find("b:orders") == JobKey("b", "orders")
    with pytest.raises(ConfigError, match="2 jobs are called 'orders': say which of a:orders, b:orders"):
        names.find("orders")
    places = r"a:orders, b:orders; they are in a \(/first/ft\), b \(grpc://w1:7077\)"
    views = (made.view("a", jobs=(made.job(),), path="/first/ft"), made.view("b", jobs=(made.job(),)))
    with pytest.raises(ConfigError, match=places):
        JobNames([views[0], replace(views[1], address="grpc://w1:7077")]).find("orders")
    with pytest.raises(ConfigError, match="no job is called 'order'; there are: a:orders, b:orders"):
        names.find("order")
    with pytest.raises(ConfigError, match="there are: none"):
        JobNames([]).find("orders")
