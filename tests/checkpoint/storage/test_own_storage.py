"""Checkpoint storage of one's own: the suite for its author, tried on one that keeps it, and on some that do not."""

from __future__ import annotations

import inspect
import json
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from ftlayer import CheckpointConfig, CheckpointStorage
from ftlayer.checkpoint import custom_storage
from ftlayer.checkpoint.custom_storage import FileStatus
from ftlayer.checkpoint.storage import conformance
from ftlayer.checkpoint.storage.conformance import CheckpointStorageConformance
from ftlayer.checkpoint.storage.files import open_files
from ftlayer.checkpoint.storage.keys import Ownership
from ftlayer.checkpoint.storage.loading import load_checkpoint
from ftlayer.checkpoint.storage.opening import slot_storage
from ftlayer.cli.main import app
from ftlayer.errors import CheckpointStorageError, ConfigError


class TestTheGuidesStorage(CheckpointStorageConformance):
    @pytest.fixture(autouse=True)
    def take(self, table_storage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.storage = table_storage.TableStorage
        monkeypatch.setattr(conformance, "MANY", 150)  # Each is a transaction of its own.

    def new_url(self) -> str:
        return f"table://test-{uuid.uuid4().hex}"


class Kept(CheckpointStorage):
    """Right, in this process."""

    files: ClassVar[dict[str, bytes | bytearray]] = {}

    def write(self, path: str, data: bytes) -> None:
        self.files[f"{self.url}/{path}"] = data

    def write_new(self, path: str, data: bytes) -> bool:
        own = bytearray(data)
        return self.files.setdefault(f"{self.url}/{path}", own) is own

    def read(self, path: str, offset: int, length: int) -> bytes:
        try:
            return bytes(self.files[f"{self.url}/{path}"][offset : offset + length])
        except KeyError:
            raise FileNotFoundError(path) from None

    def list(self, path: str) -> Any:
        below = f"{self.url}/{path}/" if path else f"{self.url}/"
        found = [(name, data) for name, data in self.files.copy().items() if name.startswith(below)]
        return [FileStatus(name[len(self.url) + 1 :], len(data)) for name, data in found]

    def delete(self, path: str) -> None:
        self.files.pop(f"{self.url}/{path}", None)


class Raises(Kept):
    def delete(self, path: str) -> None:
        del self.files[f"{self.url}/{path}"]


class Mixes(Kept):
    def list(self, path: str) -> Any:
        return [entry for entry in super().list("") if entry.path.startswith(path)]


class Absolute(Kept):
    def list(self, path: str) -> Any:
        return [FileStatus(f"{self.url}/{entry.path}", entry.size) for entry in super().list(path)]


class Flat(Kept):
    def list(self, path: str) -> Any:
        return [entry for entry in super().list(path) if "/" not in entry.path[len(path) + 1 :]]


class NoOffset(Kept):
    def read(self, path: str, offset: int, length: int) -> bytes:
        return super().read(path, 0, length)


class Empty(Kept):
    def read(self, path: str, offset: int, length: int) -> bytes:
        return bytes(self.files.get(f"{self.url}/{path}", b"")[offset : offset + length])


class Overwrites(Kept):
    def write_new(self, path: str, data: bytes) -> bool:
        is_new = self.size(path) is None
        self.write(path, data)
        return is_new


class OnceOnly(Kept):
    def delete(self, path: str) -> None:
        self.files[f"{self.url}/{path}"] = b""


class Halves(Kept):
    """The first to read a file behind a write sees a half: just of the one that is changed while others read it."""

    fresh: ClassVar[set[str]] = set()

    def write(self, path: str, data: bytes) -> None:
        super().write(path, data)
        if path == "file":
            self.fresh.add(self.url)

    def read(self, path: str, offset: int, length: int) -> bytes:
        data = super().read(path, offset, length)
        if path == "file" and self.url in self.fresh:
            self.fresh.discard(self.url)
            return data[: len(data) // 2]
        return data


class Lower(Kept):
    def write(self, path: str, data: bytes) -> None:
        super().write(path.replace("%", "_"), data)


class Early(Kept):
    """Its files lack what comes last."""

    def create(self, path: str) -> Any:
        output = super().create(path)
        writes = output.write
        output.write = lambda data: (writes(data), output.close(), setattr(output, "close", lambda: None))  # type: ignore[method-assign]
        return output


class FirstPage(Kept):
    def list(self, path: str) -> Any:
        return super().list(path)[:1_000]


class Small(Kept):
    def write(self, path: str, data: bytes) -> None:
        super().write(path, data[: 16 << 20])


class Same(Kept):
    def write_new(self, path: str, data: bytes) -> bool:
        return super().write_new(path, data) or self.read(path, 0, 1 << 20) == data


class Below(Kept):
    def delete(self, path: str) -> None:
        for entry in [*self.list(path), FileStatus(path, 0)]:
            super().delete(entry.path)


class Promises(Kept):
    def copy(self, path: str, target: str) -> bool:
        return True


class Seconds(Kept):
    def list(self, path: str) -> Any:
        return [FileStatus(entry.path, entry.size, int(time.time())) for entry in super().list(path)]


WRONG = (
    Raises,
    Mixes,
    Absolute,
    Flat,
    NoOffset,
    Empty,
    Overwrites,
    OnceOnly,
    Halves,
    Lower,
    Early,
    FirstPage,
)
WRONG = (*WRONG, Small, Same, Below, Promises, Seconds)


def failures(kind: type[CheckpointStorage]) -> list[str]:
    """Return the tests of the suite that a storage fails; it is known in one process."""
    suite = CheckpointStorageConformance()
    suite.storage = kind
    suite.new_url = lambda: f"kept-{kind.__name__.lower()}://{uuid.uuid4().hex}"  # type: ignore[method-assign]
    found = []
    for name, test in inspect.getmembers(suite, inspect.ismethod):
        if name.startswith("test_") and name != "test_other_processes_see_it":
            try:
                test()
            except Exception:  # noqa: BLE001 - whatever it fails with
                found.append(name)
    return found


def test_a_storage_that_is_right_passes() -> None:
    assert failures(Kept) == []


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_a_storage_that_is_wrong_is_found_out(kind: type[CheckpointStorage]) -> None:
    assert failures(kind)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"storage": Kept}, "expected a directory like 'mine://place', got None"),
        ({"storage": Kept, "directory": "/tmp/x"}, "a scheme of its own"),
        ({"storage": Kept, "directory": "file:///tmp/x"}, "files of this machine, or is fsspec's"),
        ({"storage": Kept, "directory": "s3://user:secret@bucket/x"}, "s3:// means files .* choose another"),
        ({"storage": Kept("a://b"), "directory": "kept://x"}, "expected a class that derives from"),
        ({"storage": dict, "directory": "kept://x"}, "expected a class that derives from CheckpointStorage"),
        (
            {"storage": 3, "directory": "kept://x"},
            "expected a class that derives from CheckpointStorage, got 3",
        ),
        (
            {"storage": CheckpointStorage, "directory": "kept://x"},
            "lacks delete, list, read, write, write_new",
        ),
        ({"storage": "no_such_module:It", "directory": "kept://x"}, "cannot be imported .*No module named"),
        (
            {"storage": "json:It", "directory": "kept://x"},
            "json:It.*cannot be imported .*'package.module:Class'",
        ),
        ({"storage": "It", "directory": "kept://x"}, "'It' cannot be imported"),
        ({"storage": "", "directory": "kept://x"}, "'' cannot be imported"),
        ({"storage": "json.JSONDecoder", "directory": "kept://x"}, "derives from CheckpointStorage"),
        ({"directory": "nobodys://x"}, "knows no scheme 'nobodys'.*storage="),
    ],
)
def test_what_cannot_be_a_storage_is_said_at_once(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        CheckpointConfig(**options)
    assert "secret" not in str(raised.value)


def test_a_scheme_is_kept_by_one_class() -> None:
    CheckpointConfig(storage=Kept, directory="only://x", savepoint_directory="only://y")
    CheckpointConfig(storage=Kept, directory="ONLY://z")
    with pytest.raises(
        ConfigError, match=r"only:// is kept by .*:Kept in this process, and cannot be by .*:Halves"
    ):
        CheckpointConfig(storage=Halves, directory="only://x")


def test_a_slot_knows_the_storage_that_the_driver_names(table_storage: Any, monkeypatch: Any) -> None:
    config = CheckpointConfig(storage="table_storage:TableStorage", directory="table://slots")
    custom_storage._served.clear()
    assert slot_storage(config, "job", "run", 0, 1, "a", b"k" * 32).location == "table://slots/job/run"
    custom_storage._served.clear()
    monkeypatch.delitem(sys.modules, "table_storage")
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfigError, match="'table_storage:TableStorage' cannot be imported in this process"):
        slot_storage(config, "job", "run", 0, 1, "a", b"k" * 32)


def test_whatever_it_raises_is_the_storages_failure() -> None:
    class Breaks(Kept):
        def write(self, path: str, data: bytes) -> None:
            raise RuntimeError("the database is away")

        def delete(self, path: str) -> None:
            raise KeyError(path)

    CheckpointConfig(storage=Breaks, directory="breaks://x")
    with pytest.raises(
        CheckpointStorageError, match="breaks://x/file cannot be written: RuntimeError: the database is away"
    ):
        open_files("breaks://x").publish("file", b"")
    with pytest.raises(CheckpointStorageError, match="breaks://x/file cannot be deleted: KeyError: 'file'"):
        open_files("breaks://x").delete("file")


class Blind(Kept):
    def list(self, path: str) -> Any:
        return [entry for entry in super().list(path) if "_owners" not in entry.path]


def test_a_storage_that_does_not_show_a_claim_is_not_claimed_without_end() -> None:
    CheckpointConfig(storage=Blind, directory="blind://x")
    Ownership(open_files("blind://x"), "job", "one")
    with pytest.raises(
        CheckpointStorageError, match="topology 'job' cannot be claimed: its claims, _owners/1 is the"
    ):
        Ownership(open_files("blind://x"), "job", "two")


def test_an_installed_package_tells_its_storage(table_storage: Any, monkeypatch: Any) -> None:
    class Entry:
        value = "table_storage:TableStorage"

    custom_storage._served.clear()
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda group, name: [Entry] if name == "table" else []
    )
    open_files("table://entry").publish("file", b"x")
    assert open_files("table://entry").read("file") == b"x"
    CheckpointConfig(directory="table://entry")
    with pytest.raises(ConfigError, match=r"nobodys://x cannot be reached.*ftlayer.checkpoint_storages"):
        open_files("nobodys://x")


def test_a_variable_tells_it(table_storage: Any, monkeypatch: Any) -> None:
    custom_storage._served.clear()
    monkeypatch.setenv(custom_storage.VARIABLE, "other=no:One, table=table_storage:TableStorage")
    open_files("table://variable").publish("file", b"x")
    CheckpointConfig(directory="table://variable")
    with pytest.raises(ConfigError, match="FTLAYER_CHECKPOINT_STORAGES: 'no:One' cannot be imported"):
        open_files("other://x")


@pytest.mark.parametrize(
    "given", ["table", "table=", "table:table_storage:TableStorage", "=table_storage:TableStorage"]
)
def test_a_variable_that_names_no_class_says_what_is_expected(given: str, monkeypatch: Any) -> None:
    custom_storage._served.clear()
    monkeypatch.setenv(custom_storage.VARIABLE, f"{given}, ")
    with pytest.raises(ConfigError, match=f"STORAGES: expected 'scheme=package.module:Class'.*got '{given}'"):
        open_files("table://variable")


def test_commands_take_it(table_storage: Any, make_kit: Callable[..., Any], made: Any) -> None:
    kit = make_kit("table", storage="table_storage:TableStorage")
    slot, driver = kit.slot(), kit.driver()
    writer = slot.writer(made.barrier(1))
    piece = writer.write([b"x" * 50_000])
    writer.close()
    checkpoint = driver.publish(made.checkpoint(1, made.subtask([piece])))
    custom_storage._served.clear()
    named = ["--storage", "table_storage:TableStorage"]

    def ftlayer(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["checkpoints", *arguments])
        assert result.exit_code == 0, result.output
        return result.output

    refused = CliRunner().invoke(app, ["checkpoints", "list", kit.config.directory])
    assert refused.exit_code == 2
    assert "storage of your own" in " ".join(refused.output.split())
    (row,) = json.loads(ftlayer("list", kit.config.directory, "--json", *named))
    assert row["location"] == checkpoint.location
    assert json.loads(ftlayer("verify", checkpoint.location, "--json", *named))[0]["error"] is None
    assert json.loads(ftlayer("show", checkpoint.location, "--json", *named))["checkpoint"] == 1
    assert load_checkpoint(checkpoint.location) == checkpoint
    ftlayer("delete", checkpoint.location, "--yes", *named)
    assert driver.completed(kit.job) == []
