"""Which records are convicted of ending processes: cases, and a job of random killers among random losses."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.runtime.barrier_mode.driver.rules.job_rules import CHECKPOINTS, MOST_EXCUSED, KillerSearch
from ftlayer.runtime.barrier_mode.task.chain_suspects import ChainSuspects
from ftlayer.runtime.protocol.messages import Conviction, Death

CHAIN = "explode"


def death(instance: str, digest: bytes = b"", cause: str = "Segmentation fault") -> Death:
    return Death(instance, 0, cause, CHAIN if digest else "", digest, "in explode")


def searching() -> KillerSearch:
    search = KillerSearch()
    assert not search.lost()
    search.died([death("a")])
    search.deployed()
    return search


def test_two_deaths_over_one_record_convict_it() -> None:
    search = searching()
    assert search.active
    assert search.convictions == ()
    (news,) = search.died([death("b", b"1")])
    assert (
        news.reason
        == "slot 0: it ended itself, with a record of 'explode' in hand: Segmentation fault\nin explode"
    )
    assert search.convictions == ()
    _, news = search.died([death("c", b"1", "os._exit(3)")])
    assert not news.ended_itself
    assert news.reason.startswith("'explode' makes a record a dead letter: ")
    (found,) = search.convictions
    assert (found.chain, found.digest, found.traceback, found.place) == (CHAIN, b"1", "in explode", "slot 0")
    assert found.reason.endswith("while it ran this record and no other, twice: os._exit(3)")
    assert search.status is not None
    assert search.status.found == 1


def test_a_death_that_two_slots_report_is_one() -> None:
    search = searching()
    search.died([death("b", b"1")])
    assert search.died([death("b", b"1")]) == []
    assert search.convictions == ()


def test_deaths_over_different_records_convict_none() -> None:
    search = searching()
    search.died([death(str(number), bytes([number])) for number in range(20)])
    assert search.convictions == ()


def test_a_loss_without_a_report_begins_no_search() -> None:
    search = KillerSearch()
    assert not any(search.lost() for _ in range(5))
    assert not search.active
    assert search.status is None


def test_losses_of_a_search_are_excused_up_to_a_number_and_again_behind_a_conviction() -> None:
    search = searching()
    assert [search.lost() for _ in range(MOST_EXCUSED + 1)] == [True] * MOST_EXCUSED + [False]
    search.died([death("b", b"1"), death("c", b"1")])
    assert [search.lost() for _ in range(MOST_EXCUSED + 1)] == [True] * MOST_EXCUSED + [False]


def test_the_search_is_over_behind_the_second_complete_checkpoint_and_accuses_nobody_any_more() -> None:
    search = searching()
    search.died([death("b", b"1")])
    search.completed([], 10)
    search.completed([], 20)
    search.deployed()
    search.completed([], 30)
    assert search.active
    search.completed([], 40)
    assert not search.active
    assert not search.lost()
    search.died([death("c", b"1")])
    assert search.convictions == ()


def test_a_source_that_skips_what_it_has_read_does_not_end_the_search() -> None:
    search = searching()
    search.completed([], 110)
    search.died([death("b", b"1")])
    search.deployed()
    for _ in range(10):
        search.completed([], 110)
    assert search.active
    _, news = search.died([death("c", b"1")])
    assert "makes a record a dead letter" in news.reason


def test_a_conviction_is_kept_until_a_complete_checkpoint_holds_the_letter() -> None:
    search = searching()
    search.died([death("b", b"1"), death("c", b"1")])
    for number in range(2 * CHECKPOINTS):
        search.completed([(CHAIN, b"2"), ("another", b"1")], number)
    assert not search.active
    assert [each.digest for each in search.convictions] == [b"1"]
    search.completed([(CHAIN, b"1")], 9)
    assert search.convictions == ()


def test_a_death_that_comes_behind_the_conviction_accuses_nobody() -> None:
    search = searching()
    search.died([death("b", b"1"), death("c", b"1"), death("d", b"1")])
    search.validate()
    assert len(search.convictions) == 1


# ---------------------------------------------------------------- a job


@dataclass
class Notes:
    """The file of one process."""

    at: tuple[str, bytes] | None = None
    seen: list[bytes] = field(default_factory=list)

    def about_to(self, chain: str, digest: bytes) -> None:
        assert self.at is None
        self.at = chain, digest
        self.seen.append(digest)

    def over(self) -> None:
        assert self.at is not None
        self.at = None


class DiedError(Exception):
    """The process has ended, by itself or not."""

    def __init__(self, *, itself: bool) -> None:
        self.itself = itself


@dataclass
class Position:
    """What a checkpoint holds: how far it is, which records had their effect, and which are dead."""

    place: int = 0
    done: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()


class PlayedJob:
    """One chain over records that are numbers; at some steps its process is killed from outside."""

    def __init__(
        self,
        records: list[int],
        killers: dict[int, set[int]],
        killed_at: set[int],
        batch: int,
        checkpoint_every: int,
    ) -> None:
        """``killers``: at which of their runs they end the process; empty: at each."""
        self.records, self.killers, self.killed_at = records, killers, killed_at
        self.batch, self.checkpoint_every = batch, checkpoint_every
        self.search = KillerSearch()
        self.stands = Position()
        self.runs: dict[int, int] = {}
        self.steps = self.instances = self.checkpoints = 0
        self.unexcused = self.killed = 0

    def run(self) -> None:
        while self.stands.place < len(self.records):
            assert self.instances < 500, "it does not come to an end"
            notes = Notes()
            try:
                self._instance(notes)
            except DiedError as died:
                self.unexcused += not self.search.lost()
                self.killed += not died.itself
                if died.itself:
                    self.search.died([death(str(self.instances), notes.at[1] if notes.at else b"")])
                self.search.validate()

    def _instance(self, notes: Notes) -> None:
        self.instances += 1
        armed, convictions = self.search.active, self.search.convictions
        suspects = ChainSuspects(CHAIN, armed=armed, convictions=convictions, notes=notes)
        self.search.deployed()
        now = Position(self.stands.place, self.stands.done, self.stands.dead)
        since = 0
        while now.place < len(self.records):
            took = self._batch(suspects, now)
            now.place += took
            since += took
            if since >= self.checkpoint_every or now.place == len(self.records):
                since = 0
                self._checkpoint(suspects, now)

    def _batch(self, suspects: ChainSuspects, now: Position) -> int:
        values = self.records[now.place : now.place + self.batch]
        payload = pa.record_batch({"n": pa.array(values, pa.int64())})
        convicted = dict(suspects.convicted(payload))
        assert [row for row, _ in suspects.convicted(payload)] == list(convicted)
        alone = suspects.one_at_a_time
        for row in range(len(values)):
            if row in convicted:
                now.dead = (*now.dead, now.place + row)
                continue
            if alone:
                suspects.about_to(payload, row)
            self._work(values[row])
            now.done = (*now.done, now.place + row)
            if alone:
                suspects.over()
        return len(values)

    def _work(self, value: int) -> None:
        self.steps += 1
        if self.steps in self.killed_at:
            raise DiedError(itself=False)
        self.runs[value] = self.runs.get(value, 0) + 1
        runs = self.killers.get(value)
        if runs is not None and (not runs or self.runs[value] in runs):
            raise DiedError(itself=True)

    def _checkpoint(self, suspects: ChainSuspects, now: Position) -> None:
        self.checkpoints += 1
        condemned = suspects.snapshot(self.checkpoints)
        self.stands = Position(now.place, now.done, now.dead)
        suspects.completed(self.checkpoints, now.place)
        self.search.completed([(CHAIN, digest) for digest in condemned], now.place)
        self.search.validate()


@st.composite
def jobs(draw: st.DrawFn, *, kills_always: bool, killed: bool) -> PlayedJob:
    records = draw(st.lists(st.integers(0, 40), min_size=1, max_size=60))
    chosen = draw(st.sets(st.sampled_from(records), max_size=4))
    runs = st.just(set[int]()) if kills_always else st.sets(st.integers(1, 6), max_size=3)
    return PlayedJob(
        records,
        {value: draw(runs) for value in chosen},
        draw(st.sets(st.integers(1, 200), max_size=6)) if killed else set(),
        draw(st.integers(1, 9)),
        draw(st.integers(1, 30)),
    )


@given(jobs(kills_always=False, killed=True))
def test_no_innocent_is_convicted_and_each_record_has_its_effect_once(job: PlayedJob) -> None:
    job.run()
    assert sorted(job.stands.done + job.stands.dead) == list(range(len(job.records)))
    assert {job.records[place] for place in job.stands.dead} <= job.killers.keys()
    always = {value for value, runs in job.killers.items() if not runs}
    assert not {job.records[place] for place in job.stands.done} & always


@given(jobs(kills_always=True, killed=False))
def test_who_always_kills_is_convicted_by_three_deaths_and_the_first_alone_is_a_failure(
    job: PlayedJob,
) -> None:
    job.run()
    assert {job.records[place] for place in job.stands.dead} == job.killers.keys()
    # Each convict has been dead in a complete checkpoint before an equal record may kill again.
    deaths = job.instances - 1
    assert job.unexcused <= len(job.stands.dead)
    assert deaths <= 3 * len(job.stands.dead)


def test_one_killer_costs_one_failure_and_two_excused_ones() -> None:
    job = PlayedJob(list(range(40)), {17: set()}, set(), batch=8, checkpoint_every=16)
    job.run()
    assert (job.instances, job.unexcused) == (4, 1)
    assert job.stands.dead == (17,)


@pytest.mark.parametrize("step", range(1, 60, 7))
def test_sigkills_over_the_same_record_convict_nobody(step: int) -> None:
    job = PlayedJob([7] * 20, {}, set(range(step, step + 12)), batch=4, checkpoint_every=8)
    job.run()
    assert job.stands.dead == ()
    assert len(job.stands.done) == 20


# ---------------------------------------------------------------- one chain


def convicted(digest: bytes, chain: str = CHAIN) -> Conviction:
    return Conviction(chain, digest, "reason", "", "slot 0")


def test_a_chain_without_convictions_looks_at_no_row() -> None:
    suspects = ChainSuspects(CHAIN, armed=False, convictions=[convicted(b"1", "another")], notes=Notes())
    assert not suspects.one_at_a_time
    assert suspects.convicted(None) == ()  # type: ignore[arg-type]


def test_equal_rows_are_told_apart_by_their_input_alone() -> None:
    notes = Notes()
    suspects = ChainSuspects(CHAIN, armed=True, convictions=(), notes=notes)
    rows = pa.record_batch({"n": pa.array([1, None, 3, 1], pa.int64()), "s": ["a", "b", None, "a"]})
    for row in range(4):
        suspects.about_to(rows, row)
        suspects.over()
    suspects.about_to(rows, 0, 1)
    assert len(set(notes.seen)) == 4
    assert notes.seen[0] == notes.seen[3]
    again = ChainSuspects(CHAIN, armed=False, convictions=[convicted(notes.seen[1])], notes=Notes())
    # What lies below a null, and where a slice begins, is of no account.
    other = pa.record_batch({"n": pa.array([9, 5, None], pa.int64()), "s": ["x", "y", "b"]}).slice(1)
    assert [row for row, _ in again.convicted(other)] == [1]
    assert again.convicted(other, 1) == []


def test_a_convict_is_kept_from_the_chain_until_a_checkpoint_that_holds_it_is_complete() -> None:
    notes = Notes()
    armed = ChainSuspects(CHAIN, armed=True, convictions=(), notes=notes)
    rows = pa.record_batch({"n": pa.array([5], pa.int64())})
    armed.about_to(rows)
    suspects = ChainSuspects(CHAIN, armed=True, convictions=[convicted(notes.seen[0])], notes=Notes())
    assert suspects.snapshot(1) == ()
    assert len(suspects.convicted(rows)) == 1
    for read in (10, 10, 10, 20):  # The source has to skip first what it has read.
        suspects.completed(1, read)
        assert suspects.one_at_a_time
    assert suspects.snapshot(2) == suspects.snapshot(3) == (notes.seen[0],)
    suspects.completed(2, 30)
    assert suspects.snapshot(4) == ()
    assert suspects.convicted(rows) == ()
    assert not suspects.one_at_a_time
