"""Who may publish and commit in a job's directory: owners that take over from each other, step by step."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.checkpoint.storage.file_systems import open_files
from ftlayer.checkpoint.storage.files import Files
from ftlayer.checkpoint.storage.ownership import Ownership, take_over
from ftlayer.errors import CheckpointStorageError, StaleOwnerError


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
