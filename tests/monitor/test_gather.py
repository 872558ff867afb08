from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ftlayer.common.clock import Now
from ftlayer.errors import ConfigError, UnknownJobError, UnsupportedError, VertexUnavailableError
from ftlayer.monitor.gather import KEEP_GONE, Gatherer
from ftlayer.monitor.rules.health import Health, job_health, overall_health, vertex_health
from ftlayer.monitor.rules.names import state_of
from ftlayer.monitor.sources import VertexSource
from ftlayer.vertex.calls import (
    DeadGroups,
    GetHour,
    GetJob,
    GroupList,
    Hour,
    JobList,
    ListJobs,
    ListStreams,
    Stats,
    StatsReply,
    StreamList,
)

TOKEN = "a-token-of-some-length"
GONE_PID = (1 << 22) + 17
"""No process has it: the system's largest is 2^22."""


@dataclass
class Clock:
    wall_ms: int = 1_000_000

    def __call__(self) -> Now:
        return Now(0, self.wall_ms)


@dataclass
class Answering:
    """A vertex's client whose answers a test chooses; an error is raised."""

    answers: dict[type, Any]
    closed: bool = False
    asked: list[Any] = field(default_factory=list)

    def call(self, call: Any, *, deadline_ms: int | None = None) -> Any:
        self.asked.append(call)
        answer = self.answers[type(call)]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.closed = True


def vertex(made: Any, died: int = 0) -> Answering:
    streams = StreamList((made.stream(died=died),))
    return Answering(
        {ListJobs: JobList((made.job(),)), Stats: StatsReply({"pending": 3.0}), ListStreams: streams}
    )


def gatherer(clients: dict[str, Answering], clock: Clock, *sources: VertexSource) -> Gatherer:
    return Gatherer(lambda: sources, clock=clock, connect=lambda source, label: clients[source.address])


def at(address: str, name: str = "ft", path: str = "", file: str = "") -> VertexSource:
    return VertexSource(name, address, TOKEN, path=path, file=file, pid=os.getpid())


def test_what_each_said_last_is_remembered_with_its_time(made: Any) -> None:
    clients, clock = {"a": vertex(made), "b": vertex(made)}, Clock()
    gathering = gatherer(clients, clock, at("a", "first"), at("b", "second"))
    assert gathering.views() == ()
    first, second = gathering.gather()
    assert (first.vertex, first.is_up, first.as_of_ms) == ("first", True, 1_000_000)
    assert second.stats == {"pending": 3.0}
    clients["b"].answers[ListJobs] = VertexUnavailableError("no answer")
    clock.wall_ms += 5_000
    first, second = gathering.gather()
    assert (second.is_up, second.failure, second.as_of_ms, second.asked_ms) == (
        False,
        "no answer",
        1_000_000,
        1_005_000,
    )
    assert (second.jobs, second.stats) == (first.jobs, first.stats)
    clients["b"].answers[ListJobs] = JobList(())
    (_, second) = gathering.gather()
    assert (second.is_up, second.failure, second.jobs) == (True, "", ())
    gathering.close()
    assert [client.closed for client in clients.values()] == [True, True]


def test_a_drivers_own_board_keeps_no_records(made: Any) -> None:
    client = Answering({ListJobs: JobList(()), Stats: UnsupportedError("no records here")})
    (view,) = gatherer({"a": client}, Clock(), at("a")).gather()
    assert (view.is_up, view.has_records) == (True, False)


def test_groups_are_asked_for_where_there_are_dead_letters(made: Any) -> None:
    client = vertex(made)
    client.answers |= {
        Stats: StatsReply({"dead_letters": 12.0}),
        DeadGroups: GroupList((made.group(),), 0.5),
        GetHour: Hour(60_000, 1_000_000, {}),
    }
    gathering = gatherer({"a": client}, Clock(), at("a"))
    (view,) = gathering.gather()
    assert ([group.count for group in view.groups], view.indexed) == ([12], 0.5)
    client.answers[Stats] = StatsReply({"dead_letters": 0.0})
    (view,) = gathering.gather()
    assert (view.groups, view.indexed) == ((), 1.0)


def test_names_are_unique_and_stay(made: Any) -> None:
    clients = {name: vertex(made) for name in "abc"}
    sources = [at("a"), at("b")]
    gathering = Gatherer(
        lambda: sources, clock=Clock(), connect=lambda source, label: clients[source.address]
    )
    assert [(view.vertex, view.address) for view in gathering.gather()] == [
        ("ft-3e23", "b"),
        ("ft-ca97", "a"),
    ]
    again = Gatherer(
        lambda: sources[::-1], clock=Clock(), connect=lambda source, label: clients[source.address]
    )
    assert [view.vertex for view in again.gather()] == ["ft-3e23", "ft-ca97"]
    sources[:] = [at("c", "other"), at("b")]
    assert [view.vertex for view in gathering.gather()] == ["ft-3e23", "ft-ca97", "other"]
    with pytest.raises(ConfigError, match="no vertex is called 'ft'; there are: ft-3e23, ft-ca97, other"):
        gathering.client("ft")


def test_dead_letters_of_the_last_minutes_are_counted_by_the_vertex(made: Any) -> None:
    client = vertex(made)
    client.answers |= {Stats: StatsReply({"dead_letters": 12.0}), DeadGroups: GroupList((made.group(),), 1.0)}
    gathering = gatherer({"a": client}, Clock(), at("a"))

    def died(*points: float) -> int | None:
        client.answers[GetHour] = Hour(60_000, 1_000_000, {"died_per_second": points} if points else {})
        (view,) = gathering.gather()
        return view.died_lately

    assert died(9.0, 0.0, 0.0, 0.5, 0.0, 0.1) == 36
    assert died(math.nan, 0.0, 0.0, 0.5, 0.0, 0.1) == 36
    assert died(0.0, math.nan, 0.0, 0.5, 0.0, 0.1) is None  # the vertex was started again
    assert died(0.5, 0.1) is None
    assert died() is None


class Files:
    """A source whose access file a test changes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now: VertexSource | Exception | None = None
        monkeypatch.setattr(VertexSource, "refreshed", lambda source: self._refreshed())

    def _refreshed(self) -> VertexSource | None:
        if isinstance(self.now, Exception):
            raise self.now
        return self.now


def test_a_driver_that_is_started_again_is_followed(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files, clients, clock = Files(monkeypatch), {"a": vertex(made), "b": vertex(made)}, Clock()
    files.now = at("a", path="/ft", file="/ft/vertex.access")
    gathering = gatherer(clients, clock, files.now)
    (view,) = gathering.gather()
    assert view.is_up
    files.now = VertexUnavailableError("process 7 is gone")
    (view,) = gathering.gather()
    assert (view.is_up, view.is_gone, view.failure) == (False, False, "process 7 is gone")
    files.now = None
    (view,) = gathering.gather()
    assert (view.is_up, view.is_gone, view.failure) == (False, True, "its program has ended")
    assert view.jobs
    assert gathering.job("ft", "orders") == view.jobs[0]
    with pytest.raises(UnknownJobError, match="'other' is not known of vertex ft, whose program has ended"):
        gathering.job("ft", "other")
    with pytest.raises(VertexUnavailableError, match="has ended with its program"):
        gathering.hour("ft")
    files.now = at("b", path="/ft", file="/ft/vertex.access")
    (view,) = gathering.gather()
    assert (view.vertex, view.is_up, view.is_gone, view.address) == ("ft", True, False, "b")
    assert clients["a"].closed


def test_a_driver_that_was_killed_is_called_so_also_when_its_file_is_swept_up(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, client = Files(monkeypatch), vertex(made)
    files.now = at("a", path="/ft", file="/ft/vertex.access")
    gathering = gatherer({"a": client}, Clock(), files.now)
    gathering.gather()
    files.now = replace(files.now, pid=GONE_PID)
    (view,) = gathering.gather()
    assert (view.is_killed, view.is_gone, view.state) == (True, False, "killed")
    assert f"process {GONE_PID}, which served it, was killed" in view.failure
    assert str(gathering.error("ft")) == view.failure
    files.now = None
    assert gathering.gather()[0] == view
    assert (state_of(view, made.job()), state_of(view, made.job(final=True, state="ended"))) == (
        "killed",
        "ended",
    )
    assert [finding.health for finding in overall_health([view]).findings] == [Health.BROKEN]
    assert vertex_health(view).findings[0].text.startswith("vertex ft, which ran orders: process ")
    assert "its driver was killed" in job_health(view, made.job()).findings[0].text


def test_of_programs_that_have_ended_the_last_are_remembered(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A console runs for months, and programs come and go beside it."""
    clock = Clock()
    clients = {f"a{number}": vertex(made) for number in range(KEEP_GONE + 3)}
    there: list[VertexSource] = []
    monkeypatch.setattr(VertexSource, "refreshed", lambda source: source if source in there else None)
    gathering = Gatherer(
        lambda: tuple(there), clock=clock, connect=lambda source, label: clients[source.address]
    )
    for number in range(KEEP_GONE + 3):
        clock.wall_ms += 1_000
        there[:] = [at(f"a{number}", f"program-{number:03}", file=f"/gone/{number}")]
        gathering.gather()
    there.clear()
    names = [view.vertex for view in gathering.gather()]
    assert names == [f"program-{number:03}" for number in range(3, KEEP_GONE + 3)]
    assert [address for address, client in clients.items() if client.closed] == ["a0", "a1", "a2"]
    with pytest.raises(ConfigError, match="no vertex is called 'program-000'"):
        gathering.client("program-000")
    there[:] = [at("a0", "program-000", file="/gone/0")]
    clients["a0"].closed = False
    assert [view.vertex for view in gathering.gather() if view.is_up] == ["program-000"]


def test_single_jobs_are_asked_for(made: Any, tmp_path: Path) -> None:
    client = vertex(made)
    client.answers[GetJob] = made.job()
    gathering = gatherer({"a": client}, Clock(), at("a"))
    gathering.gather()
    assert gathering.job("ft", "orders").job.owner == "orders"
    assert client.asked[-1] == GetJob("orders")
