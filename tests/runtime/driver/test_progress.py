"""What a user sees of a job: its line, in a terminal, a log or a notebook."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ftlayer.common.printable import NotebookLine, in_notebook, tell
from ftlayer.runtime.driver.rules.events import JobState
from ftlayer.runtime.driver.rules.job_status import ChainStatus, JobStatus
from ftlayer.runtime.environment import PlainLines, follow, hide_spark_bar
from ftlayer.vertex.calls import QueryStatus, SlotDetails, StreamStatus

RUNNING = JobStatus(
    "hosts",
    "hosts-1",
    JobState.RUNNING,
    epoch=1,
    uptime_s=12.34,
    slots=(SlotDetails(0, "running"), SlotDetails(1, "running", busy="parse", busy_ms=3_000)),
    chains=(ChainStatus("<parse>", 20_000, 19_990, 1_000.4, 0.0),),
    counters={"records_in": 20_000, "records_out": 60_000, "done": 19_980, "failed": 30},
    rates={"records_in": 1_000.0, "done": 900.0},
    vertex=StreamStatus(pending=5, due=1, waiting=4, dead=10, next_due_in_ms=0),
)


def test_a_tracked_job_counts_what_is_done_and_not_what_is_tried() -> None:
    assert RUNNING.line() == (
        "hosts: running · 20,000 in (1,000/s) · 19,980 done (900/s) · 6 pending, 4 waiting, 10 dead (30 failed tries)"
        " · slot 1 busy in parse for 3 s"
    )


def test_a_busy_slot_names_the_function() -> None:
    slot = replace(RUNNING.slots[1], function="parse (app.py:12)")
    assert replace(RUNNING, slots=(slot,)).line().endswith("slot 1 busy in parse (app.py:12) for 3 s")


def test_the_last_line_says_done_dead_and_failed() -> None:
    ended = replace(RUNNING, state=JobState.ENDED, vertex=StreamStatus(0, 0, 0, 20, -1))
    assert ended.line() == ("hosts: ended after 12.3 s · 20,000 in · 19,980 done · 20 dead (30 failed tries)")
    cancelled = replace(RUNNING, state=JobState.CANCELLED)
    assert "6 pending, 4 waiting, 10 dead" in cancelled.line()


def test_in_barrier_mode_what_waits_and_what_is_dead_are_said_once_something_has_failed() -> None:
    parse, score = ChainStatus("parse", 9, 9, 0, 0), ChainStatus("score", 9, 9, 0, 0)
    barrier = replace(
        RUNNING, vertex=None, slots=(), counters={"records_in": 9}, rates={}, chains=(parse, score)
    )
    assert barrier.line() == "hosts: running · 9 in (0/s) · 0 out (0/s)"
    failing = (replace(parse, retried=1_200, waiting=12), replace(score, dead=3, waiting=1))
    assert replace(barrier, chains=failing).line().endswith(" · 13 waiting, 3 dead (1,200 retried)")
    pausing = (replace(parse, waiting=12, paused=2), score)
    assert replace(barrier, chains=pausing).line().endswith(" · 12 waiting, 0 dead · parse paused")
    dead = replace(barrier, chains=(parse, replace(score, dead=3)))
    assert dead.line().endswith(" · 0 waiting, 3 dead")
    assert replace(dead, state=JobState.ENDED).line().endswith(" · 3 dead")


def test_new_letters_are_those_that_were_not_there_before() -> None:
    assert (RUNNING.dead, RUNNING.new_letters) == (10, 10)
    assert replace(RUNNING, before=StreamStatus(0, 0, 0, 7, -1)).new_letters == 3
    # Some of the old ones were purged since.
    assert replace(RUNNING, before=StreamStatus(0, 0, 0, 12, -1)).new_letters == 0
    barrier = replace(RUNNING, vertex=None, chains=(ChainStatus("score", 9, 9, 0, 0, dead=3),))
    assert (barrier.dead, barrier.new_letters) == (3, 3)


def test_what_an_earlier_run_left_stands_beside_what_came_in() -> None:
    before = StreamStatus(pending=3, due=0, waiting=4, dead=2, next_due_in_ms=0)
    again = replace(RUNNING, before=before, slots=())
    assert again.line() == (
        "hosts: running · 20,000 in (1,000/s), 7 left by an earlier run · 19,980 done (900/s) · 6 pending, 4 waiting, "
        "10 dead, 2 of them before (30 failed tries)"
    )
    ended = replace(again, state=JobState.ENDED, vertex=StreamStatus(0, 0, 0, 1, -1))
    assert ended.line() == (
        "hosts: ended after 12.3 s · 20,000 in, 7 left by an earlier run · 19,980 done · 1 dead, 1 of them before "
        "(30 failed tries)"
    )


def test_without_a_vertex_it_counts_what_came_out() -> None:
    counters = {"records_in": 20, "records_out": 60}
    line = replace(RUNNING, vertex=None, counters=counters, rates={}, slots=()).line()
    assert line == "hosts: running · 20 in (0/s) · 60 out (0/s)"


def test_a_job_that_had_nothing_to_do_says_why() -> None:
    counters = {"records_in": 0, "done": 0}
    ended = replace(RUNNING, state=JobState.ENDED, counters=counters)
    assert "an earlier run of this name has read them to their end" in ended.line()
    replayed = replace(ended, counters={"records_in": 0, "done": 1})
    assert "earlier run" not in replayed.line()


def test_tables_of_notebooks_escape_what_they_show() -> None:
    html = RUNNING._repr_html_()
    assert "&lt;parse&gt;" in html
    assert "<parse>" not in html
    assert '<td style="text-align: right">19,990</td>' in html
    assert "rows that are not done" in QueryStatus(1, 0, 0, 0, 3, -1)._repr_html_()
    assert "nothing is left to do" in QueryStatus(0, 0, 0, 0, 3, -1)._repr_html_()


class FakeJob:
    """Runs for some looks; the one at which it is interrupted is the last."""

    def __init__(self, looks: int, *, interrupted: bool = False, error: Exception | None = None) -> None:
        self.looks, self.interrupted, self.error = looks, interrupted, error
        self.cancelled = False

    def over(self, timeout: float) -> bool:
        self.looks -= 1
        if self.looks == 0 and self.interrupted:
            raise KeyboardInterrupt
        return self.looks <= 0

    def status(self) -> JobStatus:
        state = (
            JobState.CANCELLED if self.cancelled else JobState.ENDED if self.looks <= 0 else JobState.RUNNING
        )
        return replace(RUNNING, state=state)

    def interrupt(self) -> None:
        self.cancelled = True

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


def shown(capsys: pytest.CaptureFixture[str], job: Any) -> list[str]:
    follow(job, PlainLines())
    return capsys.readouterr().err.splitlines()


def test_in_a_log_each_look_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, FakeJob(3))
    assert [line.split()[1] for line in lines] == ["running", "running", "ended"]


def test_an_interrupt_cancels_in_order_and_is_raised(capsys: pytest.CaptureFixture[str]) -> None:
    job = FakeJob(2, interrupted=True)
    with pytest.raises(KeyboardInterrupt):
        shown(capsys, job)
    assert job.cancelled
    assert capsys.readouterr().err.splitlines()[-1].startswith("hosts: cancelled after")


class ImpatientJob(FakeJob):
    """Interrupted once more while it is cancelled."""

    def interrupt(self) -> None:
        super().interrupt()
        raise KeyboardInterrupt


@pytest.mark.parametrize("kind", [FakeJob, ImpatientJob])
def test_the_traceback_of_an_interrupt_is_the_users_own(kind: type[FakeJob]) -> None:
    with pytest.raises(KeyboardInterrupt) as raised:
        follow(kind(2, interrupted=True), PlainLines())  # type: ignore[arg-type]
    assert [entry.name for entry in raised.traceback][1:] == ["follow"]
    assert raised.value.__suppress_context__


def test_what_the_job_fails_with_is_raised_behind_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="broken"):
        shown(capsys, FakeJob(1, error=ValueError("broken")))
    assert "hosts: ended" in capsys.readouterr().err


class FakeIPython:
    """What a kernel's ``IPython`` has of it that is used."""

    def __init__(self) -> None:
        self.shown: list[list[str]] = []
        self.display = self
        self.HTML = str

    def get_ipython(self) -> Any:
        return SimpleNamespace(kernel=object())

    def __call__(self, text: str, display_id: bool) -> Any:
        assert display_id
        line = [text]
        self.shown.append(line)
        return SimpleNamespace(update=line.append)


def test_a_notebook_has_one_line_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    ipython = FakeIPython()
    display = SimpleNamespace(display=ipython, HTML=str)
    monkeypatch.setitem(sys.modules, "IPython", ipython)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "IPython.display", display)  # type: ignore[arg-type]
    assert in_notebook()
    job: Any = FakeJob(3)
    follow(job)
    assert len(ipython.shown) == 1
    (line,) = ipython.shown
    assert [text.split()[1] for text in line] == ["running", "running", "ended"]
    assert all(text.startswith("<pre>") for text in line)


def test_a_program_is_no_notebook() -> None:
    assert not in_notebook()
    NotebookLine().__exit__(None, None, None)


def test_a_session_of_spark_connect_has_no_bar_to_hide() -> None:
    hide_spark_bar(SimpleNamespace(_sc=None))
    hide_spark_bar(object())


def test_a_note_is_shown_to_a_person_and_logged_elsewhere(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level("INFO"):
        tell("the vertex is up")
    assert capsys.readouterr().err == ""
    assert caplog.messages == ["the vertex is up"]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    tell("up\x1b[2J")
    assert capsys.readouterr().err == "up\\x1b[2J\n"
