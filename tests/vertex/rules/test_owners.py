"""Two runs of one topology on one vertex: the one that claims it last goes on, and the other one is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer.errors import ProtocolError, StaleIncarnationError, StaleOwnerError
from ftlayer.vertex import calls
from ftlayer.vertex.calls import Envelope, SourcePosition
from ftlayer.vertex.store.streams import get_query

JOB, STREAM = "job", "job/numbers"


@pytest.fixture(params=["table", "exact"])
def vertex(request, kit):
    return kit.Vertex(tracker=request.param)


class Run:
    """What one driver and its slots do: a source that goes on behind what was accepted, and tasks that hold roots."""

    def __init__(self, vertex: Any, kit: Any, name: str) -> None:
        self.vertex, self.kit, self.name = vertex, kit, name
        self.incarnation = 0
        self.read = 0
        self.roots: dict[int, str] = {}
        self._drawn = 0

    def claim(self) -> str:
        return self.vertex.call(calls.ClaimJob(JOB, self.name)).previous

    def open(self) -> None:
        """As the driver at its start, and a slot: learn the incarnation and where the source goes on."""
        options = calls.StreamOptions(timeout_ms=1_000, backoff_ms=(0,), jitter=0.0, max_attempts=None)
        opened = self.vertex.call(calls.OpenStream(STREAM, options, self.name))
        self.incarnation = opened.incarnation
        self.read = int(opened.positions.get("p", b"0"))

    def start(self) -> None:
        self.claim()
        self.open()
        self.recall()

    def persist_call(self) -> calls.Persist:
        self._drawn += 1
        # Roots of two runs differ, whatever record they are of.
        root = 1_000_000 * (1 + int(self.name.removeprefix("run-"))) + self._drawn
        start = str(self.read).encode() if self.read else None
        position = SourcePosition("p", start, str(self.read + 1).encode())
        rows, ids = self.kit.payload([f"row {self.read}"]), self.kit.u64([root])
        return calls.Persist(STREAM, rows, ids, ids, position=position, owner=self.name)

    def persist(self) -> int:
        call = self.persist_call()
        self.vertex.call(call)
        root = int(call.roots[0])
        self.roots[root] = f"row {self.read}"
        self.read += 1
        return root

    def take(self) -> list[str]:
        taken = self.kit.flat(self.vertex.call(calls.TakeReplays(STREAM, 2, self.name)))
        self.roots |= {root: text for root, _, _, text in taken}
        return [text for *_, text in taken]

    def recall(self) -> int:
        return self.vertex.call(calls.Recall((STREAM,), self.incarnation, self.name)).rows

    def status(self) -> calls.StreamStatus:
        return self.vertex.call(calls.StreamStatusCall((STREAM,), self.name))

    def acknowledge(self, root: int, *, hold: bool = False) -> calls.Xored:
        ids = self.kit.u64([root])
        return self.vertex.call(calls.Xor(ids, ids, self.incarnation, hold))

    def fail(self, root: int, *, hold: bool = False) -> calls.Failed:
        return self.vertex.call(calls.Fail((calls.Failure(root, "broken"),), self.incarnation, hold))

    def touch(self, root: int) -> calls.Touched:
        return self.vertex.call(calls.Touch(self.kit.u64([root]), self.incarnation))


@pytest.fixture
def first(vertex, kit):
    run = Run(vertex, kit, "run-1")
    run.start()
    return run


@pytest.fixture
def second(vertex, kit):
    return Run(vertex, kit, "run-2")


def test_a_claim_of_a_job_names_the_owner_before(vertex, kit):
    assert Run(vertex, kit, "run-1").claim() == ""
    assert Run(vertex, kit, "run-2").claim() == "run-1"
    vertex.restart()
    assert Run(vertex, kit, "run-3").claim() == "run-2"


@pytest.mark.parametrize("restarted", [False, True])
def test_calls_of_the_run_before_are_refused_and_change_nothing(vertex, first, second, restarted):
    first.persist()
    second.claim()
    if restarted:
        vertex.restart()
        first.incarnation = vertex.layer.incarnation
    for late in (first.persist, first.take, first.recall, first.open, first.status):
        with pytest.raises(StaleOwnerError, match=r"'job' was started again .*as run run-2.* run-1, ends"):
            late()
    second.open()
    assert second.read == 1
    second.recall()
    assert second.take() == ["row 0"]


def test_the_run_that_holds_a_job_goes_on_in_the_vertex_that_comes_next(vertex, first):
    first.persist()
    vertex.restart()
    with pytest.raises(StaleIncarnationError):
        first.recall()
    first.open()
    assert first.take() == ["row 0"]
    first.persist()
    assert first.status().pending == 2


def test_another_jobs_streams_and_calls_without_an_owner_are_as_they_were(vertex, first, second, kit):
    second.claim()
    vertex.open("other/s")
    vertex.open("ingest/job")
    vertex.persist([1], stream="other/s")
    vertex.persist([2], stream=STREAM)
    assert vertex.recall(STREAM) == 1
    assert [text for *_, text in vertex.take(stream=STREAM)] == ["row 2"]
    assert vertex.call(calls.StreamStatusCall((STREAM,))).pending == 1


def test_an_owner_that_has_claimed_nothing_is_told_to(vertex, kit):
    with pytest.raises(ProtocolError, match=r"not claimed job 'job': begin with ClaimJob"):
        Run(vertex, kit, "run-1").open()


def test_a_claim_that_comes_twice_takes_nothing_back(vertex, first, second):
    claim = calls.ClaimJob(JOB, "run-3"), Envelope("driver", 1)
    vertex.call(*claim)
    second.start()
    assert vertex.call(*claim).previous == "run-1"
    second.persist()
    vertex.restart()
    assert vertex.call(*claim).previous == "run-1"
    second.open()


def test_a_call_that_had_its_effect_before_is_answered_as_before(vertex, first, second):
    call, envelope = first.persist_call(), Envelope("slot", 1)
    vertex.call(call, envelope)
    second.claim()
    assert vertex.call(call, envelope) == calls.Accepted(1)
    second.open()
    assert second.read == 1


@pytest.mark.parametrize("hold", [False, True])
def test_late_events_of_the_run_before_have_no_effect(vertex, first, second, hold):
    roots = [first.persist() for _ in range(4)]
    first.fail(roots[3])
    second.start()
    known = 0 if hold else 4
    assert sum(first.acknowledge(root, hold=hold).unknown for root in roots) == known
    failed = [first.fail(root, hold=hold) for root in roots]
    assert sum(answer.waiting + answer.dead for answer in failed) == 0
    assert sum(first.touch(root).touched for root in roots) == 0
    assert [*second.take(), *second.take(), *second.take()] == [f"row {i}" for i in range(4)]
    # Held or not: none of them meets what is replayed, now or when its time is over.
    assert second.status().pending == 4
    vertex.advance(5_000, ticks=5)
    assert second.status().waiting + second.status().due == 4


def test_what_was_held_for_a_record_of_the_run_before_is_dropped_with_it(vertex, first, second):
    # The rows' events are there before the rows, which are on their way while the second run takes over.
    late = first.persist_call()
    root = int(late.roots[0])
    first.fail(root, hold=True)
    first.acknowledge(root, hold=True)
    second.start()
    with pytest.raises(StaleOwnerError):
        vertex.call(late)
    mine = second.persist()
    assert second.status().pending == 1
    assert second.acknowledge(mine).completed == 1
    vertex.advance(5_000, ticks=5)
    assert vertex.stats()["orphans"] == 0
    assert second.status().drained


def test_a_record_that_the_run_before_has_done_in_time_is_not_replayed(vertex, first, second):
    root = first.persist()
    second.claim()
    assert first.acknowledge(root).completed == 1
    second.open()
    assert second.recall() == 0


STEPS = ("claim", "open", "persist", "take", "recall", "acknowledge", "fail", "restart", "time")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(STEPS), st.integers(0, 3)), max_size=40))
def test_no_record_is_lost_or_accepted_twice_whatever_the_runs_do(kit, steps):
    vertex = kit.Vertex()
    runs = [Run(vertex, kit, f"run-{number}") for number in range(3)]
    owner: Run | None = None
    accepted, done = 0, set[str]()
    for number, step, which in steps:
        run = runs[number]
        if step == "claim":
            run.claim()
            run.open()
            owner = run
        elif step == "restart":
            vertex.restart()
        elif step == "time":
            vertex.advance(400)
        elif step in ("acknowledge", "fail"):
            try:
                for root in list(run.roots)[which : which + 1]:
                    reply = getattr(run, step)(root)
                    if step == "acknowledge" and reply.completed:
                        done.add(run.roots[root])
            except StaleIncarnationError:
                pass
        elif run is owner:
            try:
                if step == "persist":
                    # As its slots do: they ask where to go on before they read.
                    run.open()
                getattr(run, step)()
                accepted += step == "persist"
            except StaleIncarnationError:
                run.open()
        else:
            refused: type[Exception] = ProtocolError if owner is None else StaleOwnerError
            before = vertex.stored("segments")
            with pytest.raises((refused, StaleIncarnationError)):
                getattr(run, step)()
            assert vertex.stored("segments") == before

    last = Run(vertex, kit, "run-9")
    last.start()
    assert last.read == accepted
    texts: list[str] = []
    while taken := last.take():
        texts += taken
    assert len(set(texts)) == len(texts)
    assert set(texts) | done == {f"row {number}" for number in range(accepted)}
    for run in runs:
        run.incarnation = vertex.layer.incarnation
        assert sum(run.acknowledge(root).completed for root in run.roots) == 0
    assert sum(last.acknowledge(root).completed for root in last.roots) == len(texts)
    assert last.status().drained


def test_an_announcement_of_a_run_that_another_has_followed_is_refused(vertex, kit):
    """The claim counts, and of a query the last opening, whether or not the new run has announced itself."""
    vertex.call(calls.ClaimJob("j", "run-1"))
    vertex.call(calls.AnnounceJob(announced("j", "run-1", calls.JobKind.TOPOLOGY)))
    vertex.call(calls.ClaimJob("j", "run-2"))
    with pytest.raises(StaleOwnerError, match="as run run-2"):
        vertex.call(calls.AnnounceJob(announced("j", "run-1", calls.JobKind.TOPOLOGY)))
    vertex.call(calls.OpenQuery("q", "run-1", ("q/files",), title="clean"))
    vertex.call(calls.OpenQuery("q", "run-2", ("q/files",)))
    with pytest.raises(StaleOwnerError, match="as run run-2"):
        vertex.call(calls.AnnounceJob(announced("q", "run-1", calls.JobKind.QUERY)))
    vertex.restart()
    vertex.call(calls.AnnounceJob(announced("j", "run-2", calls.JobKind.TOPOLOGY)))
    vertex.call(calls.AnnounceJob(announced("q", "run-2", calls.JobKind.QUERY)))
    assert {found.job.run for found in vertex.call(calls.ListJobs()).jobs} == {"run-2"}
    with vertex.store.read() as txn:
        assert get_query(txn, "q").title == "clean"
    assert [found.title for found in vertex.call(calls.ListStreams()).streams] == ["clean"]


def announced(owner: str, run: str, kind: calls.JobKind) -> calls.JobDetails:
    return calls.JobDetails(owner, owner, kind, run, "acker", "running", False, 1, 2)
