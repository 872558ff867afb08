"""What a checkpoint storage has to do, as tests that its author runs with pytest.

```python fragment
class TestTheStorage(CheckpointStorageConformance):
    storage = DatabaseStorage

    def new_url(self) -> str:  # a place where nothing is yet
        return f"mine://test/{uuid4().hex}"
```
"""

from __future__ import annotations

import multiprocessing
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from typing import TypeVar

from ftlayer.checkpoint.barrier import Barrier, SnapshotKind
from ftlayer.checkpoint.custom_storage import CHUNK_BYTES, CheckpointStorage
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Checkpoint, KeyedSnapshot, Piece, Scope, StatePiece, SubtaskSnapshot
from ftlayer.checkpoint.storage.files import Files, open_files
from ftlayer.checkpoint.storage.keys import Ownership, storage_key
from ftlayer.checkpoint.storage.layout import new_savepoint, pieces_directory
from ftlayer.checkpoint.storage.loading import load_checkpoint
from ftlayer.checkpoint.storage.opening import driver_storage, slot_storage
from ftlayer.errors import CheckpointDamagedError, StaleOwnerError

Result = TypeVar("Result")

THREADS = 8
LOOKS = 32
MANY = 1_100
"""Files: stores list them in pages, many of them of a thousand."""
LARGE = 60
"""Thirds of `CHUNK_BYTES`: 20 MiB, more than a document, or a message, of many stores."""
NAMES = (
    "a",
    "ab/c",
    "AB/c",
    "abc/d",
    "ab.c/d",
    "a_b/c",
    "a b/ü%2F+=&.1",
    ".hidden",
    "a.b/_owners/12",
    "x" * 120,
)
_SPAWN_S = 300


class CheckpointStorageConformance:
    """To be derived from in a test's module; each `new_url` is asked for by one test, which leaves its files there."""

    storage: type[CheckpointStorage]

    def new_url(self) -> str:
        raise NotImplementedError("new_url: return a URL of your storage below which nothing is yet")

    def test_a_file_is_read_as_it_was_written_whole_and_in_parts(self) -> None:
        one, other = self._two()
        for size in (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 17):
            data = secrets.token_bytes(size)
            one.write("dir/file", data)
            assert other.size("dir/file") == size, "size: of the file that was written last"
            ranges = (0, size), (0, 2 * size + 1), (size // 2, 1), (size // 3, size), (size, 9)
            for offset, length in ranges:
                found = bytes(other.read("dir/file", offset, length))
                assert found == data[offset : offset + length], f"read({offset}, {length}) of {size:,} bytes"
            assert b"".join(other.chunks("dir/file", 0, size + 1)) == data, "chunks: to the end"

    def test_names_are_kept_and_listed(self) -> None:
        one, other = self._two()
        for name in NAMES:
            one.write(name, name.encode())
        found = {entry.path: entry for entry in other.list("")}
        assert sorted(found) == sorted(NAMES), "list(''): all files, by their paths relative to the URL"
        for name in NAMES:
            assert other.read(name, 0, 1_000) == name.encode(), f"read of {name!r}"
            assert found[name].size == len(name.encode()) == other.size(name), f"size of {name!r}"
            age_ms = time.time() * 1_000 - (found[name].modified_ms or time.time() * 1_000)
            assert abs(age_ms) < 86_400_000, "modified_ms: ms since 1970, or 0"
        assert _paths(other, "ab") == {"ab/c"}, "list('ab'): not 'abc/d', nor 'AB/c'"
        assert _paths(other, "a_b") == {"a_b/c"}, "list('a_b'): not 'a b/…', nor 'a.b/…'"
        assert _paths(other, "a.b") == {"a.b/_owners/12"}, "list: with directories in it"
        assert not list(other.list("b")), "list of a directory that is not there: nothing"
        one.delete("ab")
        one.delete("a")
        one.delete_empty("ab.c")
        left = _paths(other, "")
        assert left == {*NAMES} - {"a"}, "delete: that file alone; delete_empty: no file"

    def test_many_files_are_listed_while_others_come_and_go(self) -> None:
        one, other = self._two()
        for number in range(MANY):
            one.write(f"many/{number:04}", b"")
        listed = iter(other.list("many"))
        seen = [next(listed).path]
        for number in range(1, 100):
            one.delete(f"many/{number:04}")
            one.write(f"many/new-{number}", b"")
        seen += [entry.path for entry in listed]
        stay = {f"many/{number:04}" for number in (0, *range(100, MANY))}
        assert stay <= set(seen), "list: all files that are there all the time, empty ones as well"
        assert len(seen) == len(set(seen)), "list: each file once"

    def test_what_is_missing_is_said_to_be(self) -> None:
        one, other = self._two()
        for storage in (one, other):
            assert storage.size("dir/none") is None
            assert not list(storage.list(""))
            storage.delete("dir/none")
            assert issubclass(_raised(partial(storage.read, "dir/none", 0, 1)), FileNotFoundError)
        one.write("dir/none", b"x")
        assert other.read("dir/none", 0, 9) == b"x", "read: a file that is there by now"
        one.delete("dir/none")
        one.write("dir/file", b"x")
        other.delete("dir/file")
        assert one.size("dir/file") is None, "delete: the others see it"
        assert not list(one.list("dir"))
        assert issubclass(_raised(lambda: one.read("dir/file", 0, 1)), FileNotFoundError)

    def test_a_file_gets_another_name_or_one_more(self) -> None:
        one, other = self._two()
        for path in ("dir/file", "other/taken"):
            one.write(path, path.encode())
        if one.copy("dir/file", "dir/copy"):
            one.write("dir/file", b"changed")
            assert other.read("dir/copy", 0, 99) == b"dir/file", "copy: what the file was then"
        one.move("dir/file", "other/taken")
        assert other.size("dir/file") is None, "move: it has its old name no more"
        found = other.read("other/taken", 0, 99)
        assert found in (b"dir/file", b"changed"), "move: in the place of what was there"
        assert issubclass(_raised(partial(one.move, "dir/file", "other/taken")), FileNotFoundError)
        assert other.size("other/taken"), "move of a file that is not there: nothing happens"

    def test_places_are_apart(self) -> None:
        url = self.new_url()
        here, below, beside = (self.storage(each) for each in (url, f"{url}/dir", f"{url}-2"))
        here.write("dir/file", b"x")
        assert below.read("file", 0, 1) == b"x", "a URL may be below another one"
        assert _paths(below, "") == {"file"}
        assert not list(beside.list("")), "a URL that begins as another one is another place"

    def test_a_file_changes_as_a_whole(self) -> None:
        one, other = self._two()
        contents = [bytes([number]) * (CHUNK_BYTES // 4) for number in range(4)]
        one.write("file", contents[0])

        def look() -> set[bytes]:
            return {bytes(other.read("file", 0, CHUNK_BYTES)) for _ in range(LOOKS)}

        with ThreadPoolExecutor(THREADS) as pool:
            looking = [pool.submit(look) for _ in range(THREADS)]
            written = cycle(contents)
            while not all(each.done() for each in looking):
                one.write("file", next(written))
            seen = set().union(*(each.result() for each in looking))
            assert seen <= set(contents), "read: one of the contents that were written, never a mixture"

    def test_of_many_that_make_a_file_one_is_told_that_it_is_new(self) -> None:
        url = self.new_url()
        for name in map(str, range(LOOKS)):
            told = _at_once(partial(self._make, url, name))
            assert sorted(told) == [False] * (THREADS - 1) + [True], "write_new: True for one of them"
            found = self.storage(url).read(name, 0, 100)
            assert found == bytes([told.index(True)]) * 99, "its content is there"
        storage = self.storage(url)
        for data in (b"x", b""):
            storage.delete("1")
            assert storage.write_new("1", data), "write_new: a file that was deleted can be made again"
            is_new = storage.write_new("1", data)
            assert not is_new, "write_new: a file that is there is not new, if it is the same"
            assert storage.size("1") == len(data), "write_new: an empty file is one"

    def test_a_file_that_is_written_in_parts_is_there_when_it_is_closed(self) -> None:
        one, other = self._two()
        parts = [secrets.token_bytes(CHUNK_BYTES // 3) for _ in range(LARGE)]
        output, discarded = one.create("dir/file"), one.create("dir/discarded")
        for part in parts:
            output.write(part)
            discarded.write(part)
        assert not list(other.list("")), "create: nothing is there before it is closed"
        discarded.discard()
        output.close()
        whole = b"".join(parts)
        found = b"".join(other.chunks("dir/file", 0, len(whole) + 1))
        assert found == whole, f"chunks of {len(whole):,} bytes"
        assert bytes(other.read("dir/file", 0, len(whole))) == whole, f"read of {len(whole):,} bytes at once"
        one.delete("dir/discarded")
        assert _paths(other, "") == {"dir/file"}

    def test_many_threads_use_one_object(self) -> None:
        storage = self.storage(self.new_url())

        def use(number: int) -> bytes:
            for count in range(10):
                storage.write(f"{number}/{count}", bytes([number]) * count)
                storage.write("all", bytes([number]))
            storage.delete(f"{number}/0")
            assert {entry.size for entry in storage.list(str(number))} == set(range(1, 10))
            return bytes(storage.read(f"{number}/9", 0, 10))

        assert _at_once(use) == [bytes([number]) * 9 for number in range(THREADS)]

    def test_other_processes_see_it(self) -> None:
        """Driver, slots and commands are processes of their own, which import the class by its name."""
        url = self.new_url()
        self.storage(url).write("here", b"x" * 10)
        process = multiprocessing.get_context("spawn").Process(target=_elsewhere, args=(self.storage, url))
        process.start()
        process.join(_SPAWN_S)
        assert process.exitcode == 0, "another process could not read what this one wrote, or write beside it"
        assert self.storage(url).read("there", 0, 100) == b"x" * 10 + b"y"

    def test_checkpoints_are_published_found_checked_and_removed(self) -> None:
        config = self._config()
        key = storage_key(config, "job")
        assert storage_key(config, "job") == key, "the job's key is made once"
        slots = [slot_storage(config, "job", "run", slot, 1, "a", key) for slot in range(2)]
        driver = driver_storage(config, "job", "run", key)
        shared: list[Piece] = []
        kept: list[Checkpoint] = []
        for number in (1, 2, 3):
            parts = []
            for slot, storage in enumerate(slots):
                writer = storage.writer(Barrier(number, number))
                pieces = [writer.write([secrets.token_bytes(size)]) for size in (9, 50_000, 90_000)]
                shared.append(writer.write([bytes([number]) * 70_000], Scope.SHARED))
                writer.close()
                parts.append(_subtask(slot, [*pieces, *shared]))
            kept.append(driver.publish(_checkpoint(number, parts)))
            for storage in slots:
                storage.completed(number)
            for before in kept[:-1]:
                driver.discard(before, kept[-1:])
            del kept[:-1]
        assert driver.completed("job") == [kept[0].location], "the last checkpoint alone is found"
        assert load_checkpoint(kept[0].location) == kept[0]
        driver.verify(kept[0])
        assert slots[1].open(pieces_directory(kept[0]), shared[0]).read() == b"\1" * 70_000
        for storage in slots:
            storage.close()
        files = open_files(slots[0].location)
        path = next(piece.path for piece in kept[0].subtasks[0].pieces() if piece.inline is None)
        files.publish(path, b"other bytes")
        damaged = _raised(lambda: driver.verify(kept[0]))
        assert damaged is CheckpointDamagedError, "what was changed is found out"
        driver.close([])
        assert files.walk() == [], "a run that is over leaves nothing"

    def test_savepoints_are_whole_and_go_as_a_whole(self) -> None:
        config = self._config()
        key = storage_key(config, "job")
        slot = slot_storage(config, "job", "run", 0, 1, "a", key)
        driver = driver_storage(config, "job", "run", key)
        where = new_savepoint(f"{config.directory}/savepoints", "run")
        writer = slot.writer(Barrier(1, 1, kind=SnapshotKind.SAVEPOINT, location=where))
        piece = writer.write([b"x" * 90_000])
        writer.close()
        savepoint = driver.publish(_checkpoint(1, [_subtask(0, [piece])], SnapshotKind.SAVEPOINT), where)
        slot.completed(1)
        slot.close()
        driver.close([])
        later = driver_storage(config, "job", "run-2", key)
        found = load_checkpoint(where)
        assert found == savepoint
        later.verify(found)
        later.discard(found, [])
        later.close([])
        assert open_files(where).walk() == []

    def test_of_many_drivers_the_last_to_claim_a_job_has_it(self) -> None:
        files = open_files(self._config().directory or "")
        for _ in range(2):
            owners = _at_once(lambda _number: _claim(files))
            assert [_stands(owner) for owner in owners].count(True) == 1
        last = Ownership(files, "job", "last")
        assert not any(map(_stands, owners))
        assert _stands(last)
        assert len(files.walk()) == 1, "earlier claims are removed"

    def _make(self, url: str, name: str, number: int) -> bool:
        return self.storage(url).write_new(name, bytes([number]) * 99)

    def _two(self) -> tuple[CheckpointStorage, CheckpointStorage]:
        url = self.new_url()
        return self.storage(url), self.storage(url)

    def _config(self) -> CheckpointConfig:
        return CheckpointConfig(directory=self.new_url(), storage=self.storage)


def _paths(storage: CheckpointStorage, directory: str) -> set[str]:
    return {entry.path for entry in storage.list(directory)}


def _elsewhere(storage: type[CheckpointStorage], url: str) -> None:
    there = storage(url)
    there.write("there", there.read("here", 0, 100) + b"y")


def _at_once(work: Callable[[int], Result]) -> list[Result]:
    barrier = threading.Barrier(THREADS)

    def begin(number: int) -> Result:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(begin, range(THREADS)))


def _raised(work: Callable[[], object]) -> type:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - it is what is asked for
        return type(error)
    return type(None)


def _claim(files: Files) -> Ownership | None:
    try:
        return Ownership(files, "job", secrets.token_hex(8))
    except StaleOwnerError:
        return None


def _stands(owner: Ownership | None) -> bool:
    try:
        if owner is not None:
            owner.check()
            return True
    except StaleOwnerError:
        pass
    return False


def _subtask(subtask: int, pieces: Iterable[Piece]) -> SubtaskSnapshot:
    parts = tuple(StatePiece("entries", piece, 1, 1) for piece in pieces)
    return SubtaskSnapshot("count", subtask, KeyedSnapshot(0, 128, (), parts))


def _checkpoint(
    number: int, subtasks: Iterable[SubtaskSnapshot], kind: SnapshotKind = SnapshotKind.CHECKPOINT
) -> Checkpoint:
    return Checkpoint(number, "job", "run", kind, number, number, 128, (), tuple(subtasks))
