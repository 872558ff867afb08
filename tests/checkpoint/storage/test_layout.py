"""Names and paths."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Piece, Scope
from ftlayer.checkpoint.storage.files import open_files
from ftlayer.checkpoint.storage.layout import (
    FileName,
    check_location,
    checkpoint_number,
    is_local,
    job_directory,
    last_name,
    new_savepoint,
    normal,
    parent,
    parse_file_name,
    part,
    run_directory,
    scheme_of,
)
from ftlayer.checkpoint.storage.opening import absolute, slot_storage
from ftlayer.checkpoint.storage.writer import Amplification
from ftlayer.errors import ConfigError


@given(st.integers(0, 99), st.integers(0, 99), st.text(min_size=1), st.booleans(), st.integers(1, 99))
def test_file_names_are_read_back(slot: int, epoch: int, instance: str, shared: bool, first: int) -> None:
    name = FileName(slot, epoch, instance, "u1", first if shared else 0, first + 3 if shared else 0)
    assert "/" not in str(name)
    assert parse_file_name(str(name)) == name


@pytest.mark.parametrize("name", ["", "_metadata", "_key", "0-1", "a-1-b-u", "0-1--u", "notes.txt"])
def test_other_names_are_refused(name: str) -> None:
    assert parse_file_name(name) is None


@given(st.text(max_size=20))
def test_any_name_is_one_part_of_a_path(name: str) -> None:
    assert "/" not in part(name)
    assert part(name) not in (".", "..")


@given(st.text(max_size=8), st.text(max_size=8))
def test_different_jobs_have_different_directories(one: str, other: str) -> None:
    assert (job_directory("/d", one) == job_directory("/d", other)) == (one == other)


@pytest.mark.parametrize(
    ("url", "expected", "scheme"),
    [
        ("/a/b/", "/a/b", "file"),
        ("file:///a/b", "/a/b", "file"),
        ("file:/a/b", "/a/b", "file"),
        ("a/b", os.path.abspath("a/b"), "file"),
        ("a:b", os.path.abspath("a:b"), "file"),
        ("/a::b", "/a::b", "file"),
        ("s3://bucket/a/", "s3://bucket/a", "s3"),
        ("simplecache::s3://bucket/a", "simplecache::s3://bucket/a", "simplecache"),
        ("hdfs://host:9000/a", "hdfs://host:9000/a", "hdfs"),
    ],
)
def test_urls(url: str, expected: str, scheme: str) -> None:
    assert normal(url) == expected
    assert scheme_of(url) == scheme
    assert is_local(url) == (scheme == "file")


@pytest.mark.parametrize("location", ["s3:/bucket/a", "gs:/b"])
def test_a_url_that_lacks_a_slash_is_no_path_of_this_machine(location: str) -> None:
    scheme = location.partition(":")[0]
    with pytest.raises(
        ConfigError, match=f"^path: expected a path, or a URL like {scheme}://bucket/path, got '{location}'"
    ):
        check_location(location, "path")


@pytest.mark.parametrize(
    "location", ["/a/b", "file:/a", "file:///a", "a:b", "s3://b", "simplecache::s3://b", "C:/x", "x/s3:/y"]
)
def test_paths_and_urls_are_taken(location: str) -> None:
    check_location(location, "path")


def test_parts_of_urls() -> None:
    assert parent("s3://bucket/a/b/") == "s3://bucket/a"
    assert last_name("s3://bucket/a/b/") == "b"
    assert checkpoint_number("chk-17") == 17
    assert checkpoint_number("chk-x") is None
    assert run_directory("/d/", "a job", "r/1") == "/d/a%20job/r%2F1"
    assert new_savepoint("/s", "run-abcdef").startswith("/s/savepoint-abcdef-")
    assert new_savepoint("/s", "r") != new_savepoint("/s", "r")


def test_relative_directories_are_made_absolute_in_the_driver() -> None:
    config = CheckpointConfig(directory="here", savepoint_directory="there")
    with pytest.raises(ConfigError, match="absolute path"):
        slot_storage(config, "job", "run", 0, 1, "a", b"k" * 32)
    made = absolute(config)
    assert (made.directory, made.savepoint_directory) == (os.path.abspath("here"), os.path.abspath("there"))
    assert slot_storage(made, "job", "run", 0, 1, "a", b"k" * 32).location == os.path.abspath("here/job/run")


@pytest.mark.parametrize("url", ["nosuchscheme://x/y", "nosuchscheme::file:///y"])
def test_unknown_schemes_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="fsspec knows no scheme 'nosuchscheme'"):
        CheckpointConfig(directory=url)
    with pytest.raises(ConfigError, match="cannot be reached"):
        open_files(url)


# ---------------------------------------------------------------- space amplification


def shared(path: str, offset: int, length: int) -> Piece:
    return Piece(b"", length, None, f"shared/{path}", offset, Scope.SHARED)


@pytest.mark.parametrize(
    ("bound", "wasteful"), [(2.0, {"shared/a"}), (1.0, {"shared/a", "shared/b"}), (0, set())]
)
def test_files_that_are_kept_for_too_little(bound: float, wasteful: set[str]) -> None:
    pieces = [
        shared("a", 0, 10),
        shared("a", 0, 10),
        shared("b", 50, 50),
        Piece(b"", 5, None, "chk-1/c"),
        Piece(b"", 5, b"12345", scope=Scope.SHARED),
    ]
    sizes = {"shared/a": 21, "shared/b": 100, "chk-1/c": 1_000}
    amplification = Amplification(sizes.get, bound)
    assert amplification.report("one", pieces) == set()
    assert amplification.report("one", pieces) == wasteful


def test_all_who_share_a_file_count() -> None:
    sizes = {"shared/a": 100}
    amplification = Amplification(sizes.get, 2.0)
    assert amplification.report("one", [shared("a", 0, 40)]) == set()
    assert amplification.report("two", [shared("a", 40, 60)]) == set()
    assert amplification.report("one", [shared("a", 0, 40)]) == set()
    assert amplification.report("two", []) == set()
    assert amplification.report("one", [shared("a", 0, 40)]) == {"shared/a"}
