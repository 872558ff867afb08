"""Who may publish and commit in a job's directory: owners that take over from each other, step by step."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer.checkpoint.custom_storage import FileStatus
from ftlayer.checkpoint.storage.files import Files, open_files
from ftlayer.checkpoint.storage.keys import Ownership, take_over
from ftlayer.errors import CheckpointDamagedError, CheckpointStorageError, StaleOwnerError


def stands(owner: Ownership) -> bool:
    try:
        owner.check()
    except StaleOwnerError:
        return False
    return True


@pytest.fixture(params=["local", "memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return open_files(str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def test_the_last_one_to_start_is_the_owner(files: Files) -> None:
    first = Ownership(files, "job", "run-1")
    assert stands(first)
    second = Ownership(files, "job", "run-2")
    assert not stands(first)
    third = Ownership(files, "job", "run-3")
    assert [stands(owner) for owner in (first, second, third)] == [False, False, True]
    assert [first.epoch, second.epoch, third.epoch] == [1, 2, 3]
    with pytest.raises(StaleOwnerError, match=r"'job' was started by another driver \(run run-3 on"):
        first.check()
    assert len(files.walk()) == 1


def test_a_dead_driver_is_not_waited_for(files: Files) -> None:
    for number in range(1, 6):
        assert Ownership(files, "job", f"run-{number}").epoch == number


def test_a_directory_that_is_gone_belongs_to_nobody_else(files: Files) -> None:
    """Removed, or not mounted: unknown, until it is there again or somebody else has claimed what is there."""
    for number in range(3):
        owner = Ownership(files, "job", f"run-{number}")
    (claim,) = files.walk()
    content = files.read(claim.path)
    files.delete(claim.path)
    with pytest.raises(CheckpointStorageError, match="was removed, or is not mounted"):
        owner.check()
    files.put_new(claim.path, content)
    owner.check()
    files.delete(claim.path)
    other = Ownership(files, "job", "run-9")
    assert other.epoch < owner.epoch
    assert stands(other)
    assert not stands(owner)


def test_driver_memory_belongs_to_its_driver() -> None:
    assert take_over(None, "job", "run") is None


class Racing:
    """Storage without exclusive creation, in which another driver does something right before a claim is written."""

    def __init__(self, files: Files, meanwhile: Callable[[], None]) -> None:
        self._files, self._meanwhile = files, meanwhile

    def __getattr__(self, name: str) -> object:
        return getattr(self._files, name)

    def put_new(self, path: str, data: bytes) -> bool:
        meanwhile, self._meanwhile = self._meanwhile, lambda: None
        meanwhile()
        self._files.publish(path, data)
        return True


def test_of_two_that_claim_in_the_same_moment_one_is_left(files: Files) -> None:
    """Both look, the first one writes, and the second one writes over it."""
    first: list[Ownership] = []
    racing = Racing(files, lambda: first.append(Ownership(files, "job", "run-1")))
    second = Ownership(racing, "job", "run-2")  # type: ignore[arg-type]
    assert first[0].epoch == second.epoch == 1
    assert not stands(first[0])
    assert stands(second)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=12))
def test_there_is_one_owner_at_a_time(steps: list[tuple[bool, int]]) -> None:
    """(a start that another one races, who is asked then): all but the last to have claimed are fenced."""
    files = open_files(f"memory://{uuid.uuid4().hex}")
    owners: list[Ownership] = []

    def start() -> None:
        owners.append(Ownership(files, "job", f"run-{len(owners)}-{uuid.uuid4().hex}"))

    for raced, _ in steps:
        if raced:
            racing = Racing(files, start)
            owners.append(Ownership(racing, "job", f"raced-{uuid.uuid4().hex}"))  # type: ignore[arg-type]
        else:
            start()
        assert [stands(owner) for owner in owners] == [False] * (len(owners) - 1) + [True]


# ---------------------------------------------------------------- every order of the storage's steps


class PauseError(Exception):
    """A driver asks something of the storage that it has had no answer to yet."""


class Scripted:
    """Storage that gives a driver the answers that it has had, and stops it at its next call."""

    url = "scripted://job"

    def __init__(self, answers: tuple[Any, ...]) -> None:
        self._answers = iter(answers)

    def _ask(self, does: str, path: str, data: bytes = b"") -> Any:
        for answer in self._answers:
            return answer
        raise PauseError(does, int(path.rpartition("/")[2] if "/" in path else 0), data)

    def walk(self, path: str) -> list[FileStatus]:
        return [FileStatus(f"{path}/{epoch}", 1) for epoch in self._ask("walk", path)]

    def put_new(self, path: str, data: bytes) -> bool:
        return self._ask("put", path, data)  # type: ignore[no-any-return]

    def size(self, path: str) -> int | None:
        return self._ask("size", path)  # type: ignore[no-any-return]

    def read(self, path: str) -> bytes:
        answer = self._ask("read", path)
        if answer is None:
            raise CheckpointDamagedError("it is missing")
        return answer  # type: ignore[no-any-return]

    def delete(self, path: str) -> None:
        self._ask("delete", path)


@dataclass(frozen=True)
class Driver:
    """Where one has come to: the answers it has had, and what it has seen of a call that takes two steps."""

    answers: tuple[Any, ...] = ()
    seen: frozenset[int] | None = None


State = tuple[tuple[Driver, ...], frozenset[tuple[int, bytes]]]


@dataclass(frozen=True)
class Orders:
    """The orders in which the steps of drivers may come that claim a job at once.

    ``exclusive``: whether of two that make a file one is told that it is there, or the second one writes over it: then
    to look and to write are two steps. A listing takes two as well: what comes or goes between them may be in it.
    """

    drivers: int
    exclusive: bool
    before: frozenset[int]

    def begin(self) -> State:
        return (Driver(),) * self.drivers, frozenset((epoch, b"before") for epoch in self.before)

    def explore(self) -> None:
        seen: set[State] = set()
        todo = [self.begin()]
        while todo:
            state = todo.pop()
            if state not in seen:
                seen.add(state)
                todo += self.look(state)

    def look(self, state: State) -> list[State]:
        """Check who has the job, and return what may come next."""
        drivers, files = state
        owners = [self._runs(number, driver) for number, driver in enumerate(drivers)]
        standing = [
            owner for owner in owners if isinstance(owner, Ownership) and self._stands(owner, dict(files))
        ]
        assert len(standing) <= 1, f"two have the job: {state}"
        if not any(isinstance(owner, tuple) for owner in owners):
            assert standing, f"no one has the job: {state}"
        return [
            ((*drivers[:number], driver, *drivers[number + 1 :]), frozenset(changed.items()))
            for number, owner in enumerate(owners)
            if isinstance(owner, tuple)
            for driver, changed in self._steps(drivers[number], *owner, dict(files))
        ]

    @functools.cache  # noqa: B019 - few of them live, and not for long
    def _runs(self, number: int, driver: Driver) -> Any:
        try:
            return Ownership(Scripted(driver.answers), "job", f"run-{number}")  # type: ignore[arg-type]
        except PauseError as pause:
            return pause.args
        except StaleOwnerError as error:
            return error

    def _stands(self, owner: Ownership, files: dict[int, bytes]) -> bool:
        epoch, claim = owner.epoch, owner._claim
        return epoch + 1 not in files and files.get(epoch) == claim

    def _steps(
        self, driver: Driver, does: str, epoch: int, data: bytes, files: dict[int, bytes]
    ) -> Iterator[tuple[Driver, dict[int, bytes]]]:
        def said(answer: Any) -> Driver:
            return Driver((*driver.answers, answer))

        if does == "walk" and driver.seen is None:
            yield Driver(driver.answers, frozenset(files)), files
        elif does == "walk":
            assert driver.seen is not None
            yield said(tuple(sorted(driver.seen & files.keys()))), files
            if driver.seen - files.keys() or files.keys() - driver.seen:
                yield said(tuple(sorted(files))), files
        elif does == "put" and self.exclusive:
            yield said(epoch not in files), {epoch: data, **files}
        elif does == "put" and driver.seen is None:
            looked = frozenset({epoch} & files.keys())
            if looked:
                yield said(False), files
            else:
                yield Driver(driver.answers, looked), files
        elif does == "put":
            yield said(True), {**files, epoch: data}
        elif does == "delete":
            yield said(None), {each: claim for each, claim in files.items() if each != epoch}
        else:
            yield said(files.get(epoch) if does == "read" else files.get(epoch) and 1), files


@pytest.fixture
def nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim says the same whenever it is made, and it is not asked who made another one."""
    monkeypatch.setattr(time, "time", lambda: 1.0)
    monkeypatch.setattr(Ownership, "_by_whom", lambda self: "")


@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("before", [(), (1,), (1, 2)])
@pytest.mark.usefixtures("nameless")
def test_whenever_two_claim_one_has_the_job(before: tuple[int, ...], exclusive: bool) -> None:
    Orders(2, exclusive, frozenset(before)).explore()


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(3, 5), st.booleans(), st.sets(st.integers(1, 4), max_size=2), st.data())
@pytest.mark.usefixtures("nameless")
def test_however_many_claim_one_has_the_job(
    drivers: int, exclusive: bool, before: set[int], data: st.DataObject
) -> None:
    orders = Orders(drivers, exclusive, frozenset(before))
    state = orders.begin()
    while following := orders.look(state):
        state = data.draw(st.sampled_from(following))
