"""The dead letters of a job, as its driver carries them out: to files, to the vertex, and back into the job."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from rules_client import RulesClient

from ftlayer.checkpoint.letters import ChainLetter, LetterKind
from ftlayer.checkpoint.options import CheckpointConfig, FailurePolicy
from ftlayer.checkpoint.snapshots import Checkpoint, SubtaskSnapshot
from ftlayer.checkpoint.storage.dead_letters import LettersInMemory, StoredLetters, stored_letters
from ftlayer.checkpoint.storage.files import LocalFiles
from ftlayer.checkpoint.storage.opening import FileDriverStorage
from ftlayer.common.clock import system_now
from ftlayer.common.rules.restart import NoRestart
from ftlayer.errors import CheckpointStorageError, ConfigError, StaleOwnerError
from ftlayer.functions.steps import Map
from ftlayer.records.ipc import as_stream
from ftlayer.records.partitioning import HashByKeyGroup, Rebalance, key_groups, subtasks_of
from ftlayer.records.traced import KeySelector
from ftlayer.runtime.barrier_mode.driver import checkpointing as checkpoint_io
from ftlayer.runtime.barrier_mode.driver import letters
from ftlayer.runtime.barrier_mode.driver import letters as readmission
from ftlayer.runtime.barrier_mode.driver.letters import (
    JobLetters,
    LetterPlaces,
    Target,
    check_place,
    open_letters,
    target_of,
)
from ftlayer.runtime.driver.rules.events import Crew
from ftlayer.runtime.driver.rules.job_rules import JobContext
from ftlayer.runtime.protocol.messages import Readmit
from ftlayer.state.snapshots.serializer import Serializer
from ftlayer.topology.job_graph import LETTERS, JobEdge, JobGraph, JobVertex
from ftlayer.topology.operators import IterableSource, Source
from ftlayer.vertex import calls
from ftlayer.vertex.calls import Attempt

WAIT_S = 120


@pytest.fixture(autouse=True)
def _asks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readmission, "ASK_EVERY_MS", 20)
    monkeypatch.setattr(readmission, "ORDERS_EVERY_MS", 20)


SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string())])
KEY = HashByKeyGroup(KeySelector(("n",)), 16)
POLICY = FailurePolicy()


def row(n: int, text: str = "a") -> pa.RecordBatch:
    """Return a record."""
    return pa.RecordBatch.from_pylist([{"n": n, "text": text}], SCHEMA)


def letter(number: int, chain: str = "count", checkpoint: int = 1, **more: Any) -> ChainLetter:
    """Return a letter of this number."""
    fields = {
        "letter": number.to_bytes(16, "big"),
        "checkpoint": checkpoint,
        "chain": chain,
        "subtask": 0,
        "input": 0,
        "kind": LetterKind.RECORD,
        "operator": "count",
        "key": b"",
        "payload": as_stream(row(number)).to_pybytes(),
        "event_time_ms": None,
        "attempts": (Attempt(3, 5, "ValueError: no", "count", "slot 0", "Traceback"),),
        "first_failed_ms": 4,
        "died_ms": 5,
    }
    return ChainLetter(**(fields | more))  # type: ignore[arg-type]


def graph_of(parallelism: int = 2, failures: FailurePolicy | None = POLICY) -> JobGraph:
    """source → count (by key) → show."""
    source = Source("source", IterableSource(()), SCHEMA)
    count, show = (Map(uid, lambda record: record, SCHEMA) for uid in ("count", "show"))
    tail = Map("tail", lambda record: record, SCHEMA)
    return JobGraph(
        "job",
        (
            JobVertex("source", (source,), parallelism),
            JobVertex("count", (count, tail), parallelism, failures),
            JobVertex("show", (show,), parallelism, failures),
        ),
        (JobEdge(0, "source", "count", 0, KEY, SCHEMA), JobEdge(1, "count", "show", 0, Rebalance(), SCHEMA)),
        tracked=False,
        max_parallelism=16,
    )


@dataclass
class Driver:
    """The part of a driver that has letters: its thread is the test's."""

    places: LetterPlaces
    graph: JobGraph = field(default_factory=graph_of)
    run: str = "run"
    owns: bool = True
    told: list[Any] = field(default_factory=list)
    events: queue.Queue[Callable[[], None]] = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        context = JobContext(
            self.run,
            self.graph,
            NoRestart(),
            Crew.__new__(Crew),
            happened=lambda event: None,
            later=self.events.put,
            tell=lambda slot, message: self.told.append((slot, message)),
        )
        self.letters = JobLetters(self.places, context, self._check_owner)

    def _check_owner(self) -> None:
        if not self.owns:
            raise StaleOwnerError("another driver has taken over")

    def until(self, condition: Callable[[], bool]) -> None:
        """Work off events until something is so."""
        deadline = system_now().mono_ms + WAIT_S * 1_000
        while not condition():
            assert system_now().mono_ms < deadline
            self.letters.tick()
            try:
                self.events.get(timeout=0.05)()
            except queue.Empty:
                continue

    def complete(self, number: int, *letters: ChainLetter, readmitted: tuple[bytes, ...] = ()) -> Checkpoint:
        """Take a checkpoint that holds these letters; it is the only one that is kept."""
        part = SubtaskSnapshot("count", 0, letters=letters, readmitted=readmitted)
        taken = Checkpoint(number, "job", self.run, "checkpoint", 1, 2, 16, (), (part,))
        published = self.letters.to_publish(taken)
        self.letters.stands(published, [published])
        return published

    def close(self) -> None:
        """The job is over."""
        self.letters.close(self._take_events, None)

    def _take_events(self) -> None:
        while not self.events.empty():
            self.events.get()()


KEY_BYTES = b"k" * 32


def places(directory: Path, vertex: Any = None, checkpoints: tuple[str, ...] = ()) -> LetterPlaces:
    """Return where a job's letters go."""
    config = CheckpointConfig(directory=str(directory))
    found = open_letters(config, "job", KEY_BYTES, checkpoints)
    return replace(found, vertex=vertex)


def in_files(directory: Path) -> dict[str, list[int]]:
    """Return the numbers of letters by file; emptied ones have none."""
    stored = StoredLetters(str(directory), "job", KEY_BYTES)
    found: dict[str, list[int]] = {file.name: [] for file in stored.found()}
    for name, each in stored.letters():
        found.setdefault(name, []).append(int.from_bytes(each.letter, "big"))
    return found


# ---------------------------------------------------------------- out


def test_letters_go_to_a_file_where_there_is_no_vertex(tmp_path: Path) -> None:
    driver = Driver(places(tmp_path))
    driver.complete(1, letter(1), letter(2, "show"))
    driver.until(lambda: driver.letters.unsent == 0)
    driver.complete(2)
    driver.close()
    assert in_files(tmp_path) == {"run-1": [1, 2]}


def test_letters_go_on_to_the_vertex_and_their_file_is_gone_with_its_checkpoint(tmp_path: Path) -> None:
    vertex = RulesClient()
    driver = Driver(places(tmp_path, vertex))
    driver.complete(1, letter(1), letter(2, "show"))
    driver.until(lambda: len(vertex.dead()) == 2)
    one, two = vertex.dead()
    assert (one.stream, one.title, one.source, one.operator, one.reason) == (
        "job/count",
        "job",
        "count",
        "count",
        "ValueError: no",
    )
    assert one.payload.to_pylist() == [{"n": 1, "text": "a"}]
    assert (one.attempt, one.history[0].place, two.stream) == (3, "slot 0", "job/show")
    driver.until(lambda: in_files(tmp_path) == {"run-1": []})
    driver.complete(2)
    driver.until(lambda: in_files(tmp_path) == {})
    with vertex.store.read() as txn:
        assert not [key for key, _ in txn.scan("meta", b"kept/", b"kept0")]
    driver.close()


def test_a_timer_has_a_row_of_its_own_in_the_vertex(tmp_path: Path) -> None:
    vertex = RulesClient()
    driver = Driver(places(tmp_path, vertex))
    packed = Serializer().pack(7)
    driver.complete(
        1, letter(1, kind=LetterKind.TIMER, payload=b"", key=packed, event_time_ms=86_400_000, attempts=())
    )
    driver.until(lambda: len(vertex.dead()) == 1)
    (info,) = vertex.dead()
    (shown,) = info.payload.to_pylist()
    assert str(shown["timer"]) == "1970-01-02 00:00:00+00:00"
    assert (shown["key"], info.operator) == (packed, "count")
    driver.close()


def test_a_vertex_that_is_away_only_leaves_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    vertex = RulesClient()
    vertex.is_away = True
    driver = Driver(places(tmp_path, vertex))
    driver.complete(1, letter(1))
    driver.until(lambda: in_files(tmp_path) == {"run-1": [1]} and "KeepLetters" not in vertex.asked)
    driver.complete(2, letter(2, checkpoint=2))
    driver.until(lambda: len(in_files(tmp_path)) == 2)
    assert driver.letters.unsent == 2
    assert caplog.text.count("dead letters wait for the vertex of 'job': the vertex gives no answer") == 1
    vertex.is_away = False
    driver.until(lambda: driver.letters.unsent == 0)
    assert len(vertex.dead()) == 2
    driver.close()


def test_a_storage_that_refuses_files_fails_no_checkpoint_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(places(tmp_path))
    refused = threading.Event()

    def full(self: LocalFiles, path: str, data: bytes) -> bool:
        refused.set()
        raise CheckpointStorageError("it is full")

    with monkeypatch.context() as broken:
        broken.setattr(LocalFiles, "publish_new", full)
        driver.complete(1, letter(1))
        assert refused.wait(WAIT_S)
        second = driver.complete(2, letter(2, checkpoint=2))
    assert [batch.name for batch in second.letters] == ["run-1"]
    later = Driver(places(tmp_path), run="later")
    later.letters.stands(second, [second])
    later.until(lambda: later.letters.unsent == 0)
    assert in_files(tmp_path) == {"run-1": [1], "run-2": [2]}
    later.close()


def test_the_next_driver_sends_what_is_left_once(tmp_path: Path) -> None:
    vertex = RulesClient()
    vertex.is_away = True
    first = Driver(places(tmp_path, vertex))
    stands = first.complete(1, letter(1))
    first.until(lambda: in_files(tmp_path) == {"run-1": [1]})
    vertex.is_away = False
    for life in range(3):
        driver = Driver(places(tmp_path, vertex, (f"{tmp_path}/job/run/chk-1",)), run=f"life{life}")
        driver.letters.stands(stands, [stands])
        driver.until(lambda driver=driver: driver.letters.unsent == 0)  # type: ignore[misc]
        driver.until(lambda: in_files(tmp_path) == {"run-1": []})
        driver.close()
    assert len(vertex.dead()) == 1
    # Its checkpoint is gone with its run: nothing names the file any more.
    last = Driver(places(tmp_path, vertex), run="last")
    last.complete(1)
    last.until(lambda: in_files(tmp_path) == {})
    last.close()


def test_who_has_lost_the_job_writes_nothing(tmp_path: Path) -> None:
    vertex = RulesClient()
    driver = Driver(places(tmp_path, vertex), owns=False)
    driver.complete(1, letter(1))
    assert driver.letters.write_all(driver._take_events, None)
    driver.close()
    assert in_files(tmp_path) == {}
    assert vertex.asked == []


def test_who_has_the_job_claims_it_again_from_who_claimed_it_later(tmp_path: Path) -> None:
    vertex = RulesClient()
    driver = Driver(places(tmp_path, vertex))
    driver.complete(1, letter(1))
    driver.until(lambda: driver.letters.unsent == 0)
    vertex.call(calls.ClaimJob("job", "an older one that came late"))
    driver.complete(2, letter(2, checkpoint=2))
    driver.until(lambda: driver.letters.unsent == 0)
    assert len(vertex.dead()) == 2
    driver.close()


# ---------------------------------------------------------------- and back


def test_a_requeued_letter_comes_back_to_the_subtask_of_its_key(tmp_path: Path) -> None:
    vertex = RulesClient()
    driver = Driver(places(tmp_path, vertex))
    given = [letter(number) for number in range(1, 9)]
    driver.complete(1, *given)
    driver.until(lambda: len(vertex.dead()) == 8)
    driver.letters.running()
    vertex.call(calls.Requeue(tuple(info.key for info in vertex.dead())))
    driver.until(lambda: sum(len(message.letters) for _, message in driver.told) == 8)
    groups = key_groups(KeySelector(("n",)).hash(pa.table({"n": range(1, 9)}).to_batches()[0]), 16)
    subtasks = dict(zip(range(1, 9), subtasks_of(groups, 2, 16).tolist(), strict=True))
    assert set(subtasks.values()) == {0, 1}
    for slot, message in driver.told:
        assert isinstance(message, Readmit)
        assert (message.uid, message.subtask) == ("count", slot)
        for each in message.letters:
            number = int.from_bytes(each.letter, "big")
            *earlier, last = each.attempts
            assert last.requeued_ms
            before = replace(each, attempts=(*earlier, replace(last, requeued_ms=0)))
            assert (before, subtasks[number]) == (given[number - 1], slot)
    driver.complete(2, readmitted=tuple(each.letter for each in given))
    driver.until(lambda: vertex.call(calls.Stats()).values["waiting"] == 0)
    assert vertex.dead() == []
    driver.close()


def test_a_letter_that_cannot_go_back_is_dead_again_with_the_reason(tmp_path: Path) -> None:
    vertex = RulesClient()
    driver = Driver(places(tmp_path, vertex))
    driver.complete(1, letter(1, "gone"))
    driver.until(lambda: len(vertex.dead()) == 1)
    driver.letters.running()
    vertex.call(calls.Requeue((vertex.dead()[0].key,)))
    driver.until(lambda: len(vertex.dead()) == 1)
    (info,) = vertex.dead()
    assert [each.reason for each in info.history] == [
        "ValueError: no",
        "the job has no operator 'gone' (any more); those with a failure policy are: 'count', 'show'",
    ]
    driver.close()


def test_what_checkpoints_hold_is_confirmed_at_the_end_too(tmp_path: Path) -> None:
    vertex = RulesClient()
    driver = Driver(places(tmp_path, vertex))
    driver.complete(1, letter(1))
    driver.until(lambda: len(vertex.dead()) == 1)
    driver.letters.running()
    vertex.call(calls.Requeue((vertex.dead()[0].key,)))
    driver.until(lambda: bool(driver.told))
    driver.complete(2, readmitted=(letter(1).letter,))
    driver.close()
    assert vertex.call(calls.Stats()).values["waiting"] == 0


# ---------------------------------------------------------------- back, without a vertex


def sent(driver: Driver) -> list[int]:
    """Return the numbers of the letters that went to subtasks."""
    return sorted(int.from_bytes(each.letter, "big") for _, said in driver.told for each in said.letters)


def numbered(names: Iterable[bytes]) -> list[int]:
    return sorted(int.from_bytes(name, "big") for name in names)


def test_letters_that_are_ordered_beside_their_files_go_back_edited_or_not(tmp_path: Path) -> None:
    driver = Driver(places(tmp_path))
    driver.complete(1, *(letter(number) for number in range(1, 5)))
    driver.until(lambda: driver.letters.unsent == 0)
    stored = StoredLetters(str(tmp_path), "job", KEY_BYTES)
    driver.letters.running()
    assert numbered(stored.requeue({letter(1).letter: None, letter(9).letter: None})) == [1]
    assert numbered(stored.requeue({letter(2).letter: EDITED, letter(1).letter: None})) == [2]
    assert in_files(tmp_path) == {"run-1": [3, 4]}
    # They are nobody's to purge now.
    assert numbered(stored.purge([letter(1).letter, letter(4).letter])) == [4]
    driver.until(lambda: sent(driver) == [1, 2])
    (edited,) = [each for _, said in driver.told for each in said.letters if each.letter == letter(2).letter]
    assert (edited.payload, edited.key) == (EDITED, b"")
    driver.complete(2, readmitted=(letter(1).letter, letter(2).letter))
    driver.until(lambda: not stored.order_names())
    assert (in_files(tmp_path), sent(driver)) == ({"run-1": [3]}, [1, 2])
    driver.close()


def test_an_ordered_letter_that_cannot_go_back_is_dead_again_with_the_reason(tmp_path: Path) -> None:
    driver = Driver(places(tmp_path))
    driver.complete(1, letter(1, "gone"), letter(2, "gone"))
    driver.until(lambda: driver.letters.unsent == 0)
    driver.letters.running()
    stored = StoredLetters(str(tmp_path), "job", KEY_BYTES)
    stored.requeue({letter(1).letter: EDITED})
    driver.until(lambda: not stored.order_names())
    one, two = sorted((each for _, each in stored.letters()), key=lambda each: each.letter)
    assert [attempt.reason[:30] for attempt in one.attempts] == [
        "ValueError: no",
        "the job has no operator 'gone'",
    ]
    assert (one.payload, two) == (EDITED, letter(2, "gone"))
    driver.close()


class KilledError(BaseException):
    """The driver dies here."""


@pytest.mark.parametrize("at", range(12))
def test_an_order_is_carried_out_once_wherever_the_driver_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Letter 2 is in two files. What was sent counts once a checkpoint holds it; before that it is sent again."""
    first = Driver(places(tmp_path))
    first.complete(1, letter(1), letter(2), letter(3))
    first.until(lambda: first.letters.unsent == 0)
    first.complete(2, letter(2, checkpoint=2))
    first.until(lambda: first.letters.unsent == 0)
    first.close()
    stored = StoredLetters(str(tmp_path), "job", KEY_BYTES)
    stored.requeue({letter(1).letter: None, letter(2).letter: None})
    held: Checkpoint | None = None
    steps = 0
    died = threading.Event()

    def dies(name: str) -> None:
        real = getattr(LocalFiles, name)

        def step(self: LocalFiles, *arguments: Any) -> Any:
            nonlocal steps
            if "let" in threading.current_thread().name:
                steps += 1
                if steps == at + 1 or died.is_set():
                    died.set()
                    raise CheckpointStorageError("the driver is dead")
            return real(self, *arguments)

        monkeypatch.setattr(LocalFiles, name, step)

    with monkeypatch.context() as monkeypatch:
        for name in ("publish", "delete", "walk", "read"):
            dies(name)
        driver = Driver(places(tmp_path), run="second")
        driver.letters.running()
        driver.until(lambda: died.is_set() or sent(driver) == [1, 2])
        if not died.is_set() or sent(driver):
            held = driver.complete(1, readmitted=(letter(1).letter, letter(2).letter))
            driver.until(lambda: died.is_set() or not stored.order_names())
    last = Driver(places(tmp_path), run="last")
    if held is not None:
        last.letters.stands(held, [held])
    last.letters.running()
    if held is None:
        last.until(lambda: sent(last) == [1, 2])
        last.complete(9, readmitted=(letter(1).letter, letter(2).letter))
    last.until(lambda: not stored.order_names())
    assert [numbers for numbers in in_files(tmp_path).values() if numbers] == [[3]]
    assert sent(last) == ([] if held is not None else [1, 2])
    last.close()


def test_with_a_vertex_orders_of_before_are_carried_out_first_and_no_letter_is_twice(tmp_path: Path) -> None:
    first = Driver(places(tmp_path))
    first.complete(1, letter(1), letter(2, "gone"), letter(3))
    first.until(lambda: first.letters.unsent == 0)
    first.close()
    stored = StoredLetters(str(tmp_path), "job", KEY_BYTES)
    stored.requeue({letter(1).letter: None, letter(2).letter: None})
    vertex = RulesClient()
    driver = Driver(places(tmp_path, vertex), run="second")
    driver.letters.running()
    driver.until(lambda: sent(driver) == [1])
    assert vertex.dead() == []
    driver.complete(2, readmitted=(letter(1).letter,))
    driver.until(lambda: driver.letters.unsent == 0)
    assert [len(info.history) for info in vertex.dead()] == [1, 2]
    assert vertex.dead()[1].reason.startswith("the job has no operator 'gone'")
    driver.letters.down({0, 1})
    driver.letters.running()
    assert sent(driver) == [1]
    assert stored.order_names() == {}
    driver.close()


EDITED = as_stream(row(3, "better")).to_pybytes()
OTHER = as_stream(pa.record_batch({"m": [1]})).to_pybytes()


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"chain": "tail", "payload": OTHER}, "'tail' takes other records now: n int64"),
        ({"chain": "tail", "payload": b"junk"}, "the record for 'tail' cannot be read"),
        ({"chain": "tail", "input": 1}, "'tail' has no input 1"),
        ({"chain": "tail", "kind": LetterKind.TIMER, "payload": b""}, "'tail' has no key"),
        ({"input": 1}, "'count' has no input 1"),
        ({"payload": OTHER}, "'count' takes other records now: n int64, text string; this one has m int64"),
        ({"payload": b"junk"}, "where it belongs in 'count' is not known"),
        ({"chain": "show", "kind": LetterKind.TIMER, "payload": b""}, "'show' has no key"),
        ({"chain": "source"}, "'source' is a source: a row that it could not send"),
    ],
)
def test_why_a_letter_cannot_go_back(wrong: dict[str, Any], reason: str) -> None:
    said = target_of(letter(1, **wrong), graph_of())
    assert isinstance(said, str)
    assert reason in said


def test_a_letter_without_a_key_goes_to_the_subtask_it_was_in() -> None:
    assert target_of(letter(1, "show", subtask=5), graph_of(parallelism=2)) == Target(1, "show", 1)


def test_a_letter_of_a_head_that_has_others_before_it_now_goes_to_the_chain_that_it_is_in() -> None:
    assert target_of(letter(1, "tail", subtask=3), graph_of(parallelism=2)) == Target(1, "count", 1)


def test_a_letter_follows_its_key_to_another_parallelism() -> None:
    for parallelism in (1, 2, 5):
        for number in range(20):
            target = target_of(letter(number), graph_of(parallelism))
            group = key_groups(KeySelector(("n",)).hash(row(number)), 16)
            assert isinstance(target, Target)
            assert target.subtask == subtasks_of(group, parallelism, 16)[0]


def test_a_policy_needs_a_place_for_letters(tmp_path: Path) -> None:
    in_memory = CheckpointConfig()
    with pytest.raises(ConfigError, match=r"'count' gives up .* Give CheckpointConfig a directory"):
        check_place(graph_of(), in_memory, has_vertex=False)
    check_place(graph_of(), in_memory, has_vertex=True)
    check_place(graph_of(), CheckpointConfig(directory=str(tmp_path)), has_vertex=False)
    check_place(graph_of(failures=None), in_memory, has_vertex=False)


def test_letters_that_are_records_of_the_topology_need_no_place() -> None:
    in_memory, graph = CheckpointConfig(), graph_of()
    of_count, of_show = (
        JobEdge(2, uid, "show", 0, Rebalance(), SCHEMA, LETTERS) for uid in ("count", "show")
    )
    with pytest.raises(ConfigError, match="'show' gives up"):
        check_place(replace(graph, edges=(*graph.edges, of_count)), in_memory, has_vertex=False)
    check_place(replace(graph, edges=(*graph.edges, of_count, of_show)), in_memory, has_vertex=False)


# ---------------------------------------------------------------- a whole job


def test_the_letters_of_a_job_that_ends_are_in_the_vertex_and_nothing_is_left_of_them(
    play: ModuleType, tmp_path: Path
) -> None:
    vertex = RulesClient()
    play.MAY_COMMIT.set()
    played = play.Played(tmp_path, starts=False, bounded=True, vertex=vertex, failures=POLICY)
    played.letters = (letter(1, "numbers"),)
    played.start_tasks()
    assert played.job.wait(WAIT_S)
    play.until(lambda: len(vertex.dead()) == 1)
    assert vertex.dead()[0].stream == "played/numbers"
    assert not list((tmp_path / "dead-letters").rglob("*.arrow"))


def test_the_letters_of_a_job_without_a_vertex_are_in_files(play: ModuleType, tmp_path: Path) -> None:
    play.MAY_COMMIT.set()
    played = play.Played(tmp_path, starts=False, bounded=True, failures=POLICY)
    assert played.telling.details(0, with_plan=False).counters["letters_unsent"] == 0
    played.letters = (letter(1, "numbers"),)
    played.start_tasks()
    assert played.job.wait(WAIT_S)
    (stored,) = stored_letters(str(tmp_path))
    assert [file.letters for file in stored.found()] == [1]


def test_letters_are_written_before_the_job_says_that_it_has_ended_and_removes_what_holds_them(
    play: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a driver that dies at any step of the end has the letters in a file, or in a checkpoint that is restored."""
    steps: list[str] = []

    def watched(owner: Any, name: str, step: str) -> None:
        real = getattr(owner, name)

        def noted(*arguments: Any, **named: Any) -> Any:
            result = real(*arguments, **named)
            steps.append(step)
            return result

        monkeypatch.setattr(owner, name, noted)

    watched(LocalFiles, "publish_new", "letters")
    watched(checkpoint_io, "put_result", "result")
    watched(FileDriverStorage, "discard", "removal")
    play.MAY_COMMIT.set()
    played = play.Played(tmp_path, starts=False, bounded=True, failures=POLICY)
    played.letters = (letter(1, "numbers"),)
    played.start_tasks()
    assert played.job.wait(WAIT_S)
    assert steps == ["letters", "result", "removal"]


def test_a_job_whose_letters_cannot_be_written_keeps_its_checkpoint_and_its_next_start_writes_them(
    play: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: LocalFiles, path: str, data: bytes) -> bool:
        raise CheckpointStorageError("it is full")

    play.MAY_COMMIT.set()
    with monkeypatch.context() as broken:
        broken.setattr(LocalFiles, "publish_new", full)
        broken.setattr(letters, "WRITE_WAIT_S", 0.1)
        played = play.Played(tmp_path, starts=False, bounded=True, failures=POLICY)
        played.letters = (letter(1, "numbers"),)
        played.start_tasks()
        assert played.job.wait(WAIT_S)
    assert "dead letters of 'played' could not be written, so its last checkpoints stay" in caplog.text
    assert [path.parent.name for path in tmp_path.rglob("_metadata")] == ["chk-1"]
    assert not list(tmp_path.rglob("_result"))
    again = play.Played(tmp_path, bounded=True, run="played-2", restore_from="latest", failures=POLICY)
    assert again.job.wait(WAIT_S)
    (stored,) = stored_letters(str(tmp_path))
    assert [(file.name, file.letters) for file in stored.found()] == [("played-1-1", 1)]
    assert not list(tmp_path.rglob("_metadata"))


def test_letters_without_files_are_waited_for_and_lost_ones_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    vertex = RulesClient()
    driver = Driver(LetterPlaces(LettersInMemory(), (), vertex))
    driver.complete(1, letter(1))
    driver.close()
    assert len(vertex.dead()) == 1
    assert driver.letters.unsent == 0
    vertex.is_away = True
    again = Driver(LetterPlaces(LettersInMemory(), (), vertex))
    again.complete(1, letter(2))
    again.close()
    assert (
        "1 of its dead letters could not be sent to the vertex, and are lost with its driver's memory"
        in caplog.text
    )
