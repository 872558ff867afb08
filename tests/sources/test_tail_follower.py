"""The rules of a follower against a model: a list of lines, written to files that are rotated at any moment."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ftlayer.connectors import tail as places
from ftlayer.connectors import tail as rules
from ftlayer.connectors.tail import Follower, Seen, Stat, TailPlace, pack, unpack

LOG = "/logs/app.log"
QUIET_NS = 1_000_000


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places are told apart by few bytes, and chunks have few lines."""
    monkeypatch.setattr(places, "TAIL_BYTES", 8)
    monkeypatch.setattr(rules, "CHUNK_BYTES", 64)


@dataclass
class Inode:
    number: int
    modified_ns: int
    content: bytearray = field(default_factory=bytearray)
    handles: int = 0


class Handle:
    def __init__(self, disk: MemoryDisk, inode: Inode) -> None:
        self._disk, self._inode, self.inode = disk, inode, inode.number
        inode.handles += 1

    def stat(self) -> Stat:
        is_there = self._inode in self._disk.names.values()
        return Stat(len(self._inode.content), self._inode.modified_ns, is_there)

    def read(self, offset: int, length: int) -> bytes:
        self._disk.interrupt()
        return bytes(self._inode.content[offset : offset + length])

    def close(self) -> None:
        self._inode.handles -= 1


class MemoryDisk:
    """One directory. The numbers of inodes that nobody has any more are used again at once."""

    def __init__(self) -> None:
        self.names: dict[str, Inode] = {}
        self.known: list[Inode] = []
        self.now_ns = 1
        self.interruption: Callable[[], None] | None = None
        self.calls_before = 0
        self.skipped: dict[str, str] = {}

    def skip(self, path: str, why: str) -> None:
        self.skipped[path] = why

    def interrupt(self) -> None:
        """Something happens in the middle of what the follower does."""
        if self.interruption is not None:
            self.calls_before -= 1
            if self.calls_before < 0:
                happens, self.interruption = self.interruption, None
                happens()

    def files(self, wanted: Collection[int]) -> list[Seen]:
        found = [Seen(LOG, path, inode.number, inode.modified_ns) for path, inode in self.names.items()]
        self.interrupt()
        return found

    def open(self, path: str) -> Handle | None:
        self.interrupt()
        return Handle(self, self.names[path]) if path in self.names else None

    def create(self, path: str) -> Inode:
        alive = {inode.number for inode in self.known if inode.handles or inode in self.names.values()}
        inode = Inode(next(number for number in count(7) if number not in alive), self.tick())
        self.known.append(inode)
        self.names[path] = inode
        return inode

    def write(self, inode: Inode, data: bytes) -> None:
        inode.content += data
        inode.modified_ns = self.tick()

    def tick(self) -> int:
        self.now_ns += 1
        return self.now_ns

    def push_names(self) -> None:
        """``app.log.1`` is ``app.log.2`` from now on, and so on."""
        numbers = sorted((int(path.rpartition(".")[2]) for path in self.names if path != LOG), reverse=True)
        for number in numbers:
            self.names[f"{LOG}.{number + 1}"] = self.names.pop(f"{LOG}.{number}")


class Following(RuleBasedStateMachine):
    """What all machines have: a follower that is killed, and goes back to what was saved."""

    is_copied = False

    def __init__(self) -> None:
        super().__init__()
        self.disk = MemoryDisk()
        self.numbers = count()
        self.written: list[bytes] = []
        self.files: dict[bytes, Inode] = {}
        self.delivered: list[bytes] = []
        self.saved: tuple[list[TailPlace], int] = ([], 0)
        self.ordered = self.once = True
        self.follower = self.opened([])

    def opened(self, at: list[TailPlace]) -> Follower:
        return Follower(
            self.disk,
            at,
            is_copied=self.is_copied,
            quiet_ns=QUIET_NS,
            max_line=1_024,  # type: ignore[arg-type]
        )

    def line(self, inode: Inode, length: int) -> bytes:
        # It has its number at both ends: places are told apart by the last bytes before them.
        number = b"%05d" % next(self.numbers)
        line = number + b"x" * length + number
        self.written.append(line)
        self.files[line] = inode
        return line

    # ------------------------------------------------------------ the follower

    @rule(looks=st.booleans(), reads=st.lists(st.integers(1, 6), max_size=4))
    def follow(self, looks: bool, reads: list[int]) -> None:
        if looks:
            self.look()
        for lines in reads:
            self.read(lines)

    @rule()
    def read_all(self) -> None:
        self.look()
        before = -1
        while before < len(self.delivered):
            before = len(self.delivered)
            self.read(6)

    def look(self) -> None:
        self.follower.look(self.disk.now_ns)

    def read(self, lines: int) -> None:
        chunk = self.follower.read(self.disk.now_ns)
        if chunk is None:
            return
        found = chunk.data.splitlines(keepends=True)[:lines]
        self.follower.take(chunk, sum(map(len, found)))
        self.delivered += [line.removesuffix(b"\n") for line in found]

    @rule()
    def save(self) -> None:
        _, at = unpack(pack(1, self.follower.places()))
        self.saved = at, len(self.delivered)

    @rule()
    def die(self) -> None:
        self.disk.interruption = None
        self.follower.close()
        self.follower = self.opened(self.saved[0])
        del self.delivered[self.saved[1] :]

    # ------------------------------------------------------------ files

    def delete_oldest(self) -> None:
        """Remove the oldest file, of which everything was delivered, and nobody goes back behind that."""
        path = max(
            (path for path in self.disk.names if path != LOG),
            key=lambda path: int(path.rpartition(".")[2]),
            default="",
        )
        done = set(self.delivered[: self.saved[1]])
        if path and all(line in done for line in self.lines_in(self.disk.names[path])):
            del self.disk.names[path]

    def lines_in(self, inode: Inode) -> list[bytes]:
        return bytes(inode.content).splitlines()

    def teardown(self) -> None:
        self.disk.interruption = None
        self.disk.now_ns += 2 * QUIET_NS
        for _ in range(3 + len(self.written)):
            self.look()
            self.read(6)
        assert set(self.delivered) == set(self.written)
        if self.once:
            assert sorted(self.delivered) == sorted(self.written)
        if self.once and self.ordered:
            assert self.delivered == self.written
        self.follower.close()


class Renamed(Following):
    """A log that is renamed; its writer goes on with the file that it has open until it opens the log again."""

    @initialize()
    def begin(self) -> None:
        self.writer = self.disk.create(LOG)
        self.half = False

    @rule(lengths=st.lists(st.sampled_from([0, 3, 9, 70]), min_size=1, max_size=4))
    def write(self, lengths: list[int]) -> None:
        if self.disk.names.get(LOG) is not self.writer and self.writer in self.disk.names.values():
            # The log may be there again, with lines of another writer.
            self.ordered = self.ordered and LOG not in self.disk.names
        self.finish()
        self.disk.write(self.writer, b"".join(self.line(self.writer, each) + b"\n" for each in lengths))

    @rule(cut=st.integers(1, 8))
    def write_half(self, cut: int) -> None:
        self.finish()
        self.rest = self.line(self.writer, 5)
        self.disk.write(self.writer, self.rest[:cut])
        self.rest, self.half = self.rest[cut:], True

    @rule()
    def finish(self) -> None:
        if self.half:
            self.disk.write(self.writer, self.rest + b"\n")
            self.half = False

    @precondition(lambda self: LOG in self.disk.names)
    @rule()
    def rotate(self) -> None:
        self.disk.push_names()
        self.disk.names[f"{LOG}.1"] = self.disk.names.pop(LOG)

    @precondition(lambda self: LOG not in self.disk.names)
    @rule(is_cut=st.booleans())
    def reopen(self, is_cut: bool) -> None:
        if self.half and is_cut:
            # It dies within a line, which is complete for ever.
            line = self.written[-1]
            self.written[-1] = line[: len(line) - len(self.rest)]
            self.half, self.ordered = False, False
        self.finish()
        self.writer = self.disk.create(LOG)

    @rule(calls=st.integers(0, 8), reopens=st.booleans())
    def rotate_in_the_middle(self, calls: int, reopens: bool) -> None:
        def happens() -> None:
            if LOG in self.disk.names:
                self.rotate()
            if reopens and LOG not in self.disk.names:
                self.reopen(is_cut=False)
                self.write([0, 3])

        self.disk.interruption, self.disk.calls_before = happens, calls

    @rule()
    def delete(self) -> None:
        if self.writer not in self.disk.names.values() or LOG in self.disk.names:
            self.delete_oldest()

    def teardown(self) -> None:
        if hasattr(self, "writer"):
            self.finish()
            super().teardown()


class Copied(Following):
    """A log that is copied and truncated, while its writer has it open."""

    is_copied = True

    @initialize()
    def begin(self) -> None:
        self.writer = self.disk.create(LOG)
        self.copy: Inode | None = None

    @rule(lengths=st.lists(st.sampled_from([0, 3, 9, 70]), min_size=1, max_size=4))
    def write(self, lengths: list[int]) -> None:
        self.disk.write(self.writer, b"".join(self.line(self.writer, each) + b"\n" for each in lengths))

    @precondition(lambda self: self.copy is None and self.writer.content)
    @rule(part=st.integers(0, 100))
    def begin_copy(self, part: int) -> None:
        self.disk.push_names()
        self.copy = self.disk.create(f"{LOG}.1")
        self.disk.write(self.copy, bytes(self.writer.content[:part]))

    @precondition(lambda self: self.copy is not None)
    @rule()
    def truncate(self) -> None:
        """What is written between these two is lost to everybody: here it is nothing."""
        assert self.copy is not None
        if not set(self.lines_in(self.writer)) & set(self.delivered):
            # Nobody can tell that these are other lines than those that are there later.
            self.ordered = False
        self.disk.write(self.copy, bytes(self.writer.content[len(self.copy.content) :]))
        self.writer.content.clear()
        self.writer.modified_ns = self.disk.tick()
        self.copy = None

    @rule(calls=st.integers(0, 8))
    def truncate_in_the_middle(self, calls: int) -> None:
        def happens() -> None:
            if self.copy is None and self.writer.content:
                self.begin_copy(10)
            if self.copy is not None:
                self.truncate()
                self.write([0, 3, 70])
                # Where that happens again while a copy is compared with its log, lines may come twice.
                self.once = False

        self.disk.interruption, self.disk.calls_before = happens, calls

    @precondition(lambda self: self.copy is None)
    @rule()
    def delete(self) -> None:
        self.delete_oldest()

    def teardown(self) -> None:
        if hasattr(self, "writer"):
            if self.copy is not None:
                self.truncate()
            super().teardown()


TestRenamed: Any = Renamed.TestCase
TestRenamed.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestCopied: Any = Copied.TestCase
TestCopied.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


# ---------------------------------------------------------------- single steps


def lines_of(follower: Follower, disk: MemoryDisk, looks: int = 2) -> list[bytes]:
    """Return what is read until there is nothing more."""
    found: list[bytes] = []
    for _ in range(looks):
        follower.look(disk.now_ns)
        while (chunk := follower.read(disk.now_ns)) is not None:
            follower.take(chunk, len(chunk.data))
            found += chunk.data.splitlines()
    return found


def make_follower(disk: MemoryDisk, at: Any = (), **options: Any) -> Follower:
    return Follower(disk, at, **{"quiet_ns": QUIET_NS, "max_line": 1_024, **options})


def test_a_file_that_got_the_inode_of_another_is_read_from_its_beginning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = MemoryDisk()
    disk.write(disk.create(LOG), b"first\n")
    before = make_follower(disk)
    assert lines_of(before, disk) == [b"first"]
    (place,) = before.places()
    before.close()
    del disk.names[LOG]
    disk.write(disk.create(LOG), b"third\nfourth\n")
    assert disk.names[LOG].number == place.inode
    after = make_follower(disk, [place])
    assert lines_of(after, disk) == [b"third", b"fourth"]
    assert "has 13 bytes, and was read up to byte 6: it was truncated, or is another file" in caplog.text


def test_a_log_that_was_truncated_and_has_grown_again_is_read_from_its_beginning() -> None:
    disk = MemoryDisk()
    log = disk.create(LOG)
    disk.write(log, b"1\n2\n")
    follower = make_follower(disk)
    assert lines_of(follower, disk) == [b"1", b"2"]
    log.content.clear()
    disk.write(log, b"3\n4\n")
    assert lines_of(follower, disk) == [b"3", b"4"]
    log.content.clear()
    disk.write(log, b"5\n6\n7\n")
    assert lines_of(follower, disk) == [b"5", b"6", b"7"]
    log.content.clear()
    disk.write(log, b"8\n")
    assert lines_of(follower, disk) == [b"8"]


def test_a_last_line_waits_for_its_newline() -> None:
    disk = MemoryDisk()
    log = disk.create(LOG)
    disk.write(log, b"whole\nha")
    follower = make_follower(disk)
    assert lines_of(follower, disk) == [b"whole"]
    disk.now_ns += 2 * QUIET_NS
    assert lines_of(follower, disk) == [], "its writer may be slow"
    disk.write(log, b"lf\nthe last")
    assert lines_of(follower, disk) == [b"half"]
    disk.names[f"{LOG}.1"] = disk.names.pop(LOG)
    assert lines_of(follower, disk) == []
    disk.now_ns += 2 * QUIET_NS
    assert lines_of(follower, disk) == [b"the last"]
    assert [place.is_ended for place in follower.places()] == [True]


def test_a_file_that_is_removed_is_read_to_its_end() -> None:
    disk = MemoryDisk()
    log = disk.create(LOG)
    disk.write(log, b"1\n")
    follower = make_follower(disk)
    assert lines_of(follower, disk) == [b"1"]
    disk.write(log, b"2\n3")
    del disk.names[LOG]
    assert lines_of(follower, disk) == [b"2", b"3"]
    assert (follower.places(), log.handles) == ([], 0)


def test_a_file_that_was_removed_meanwhile_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    disk = MemoryDisk()
    gone = [TailPlace(LOG, 70, 12, b"x", False), TailPlace(LOG, 71, 13, b"x", True)]
    follower = make_follower(disk, gone)
    follower.look(1)
    follower.look(1 + QUIET_NS)
    assert follower.places() == gone, "the directory may be away"
    disk.write(disk.create(LOG), b"1\n")
    assert lines_of(follower, disk) == [b"1"]
    assert len(follower.places()) == 3
    follower.look(disk.now_ns + QUIET_NS)
    assert len(follower.places()) == 1
    assert "read up to byte 12 is not there any more" in caplog.text
    assert "byte 13" not in caplog.text, "it had ended"


def test_a_source_may_begin_at_the_end() -> None:
    disk = MemoryDisk()
    log = disk.create(LOG)
    disk.write(log, b"old\nha")
    follower = make_follower(disk, from_end=True)
    assert lines_of(follower, disk) == []
    disk.write(log, b"lf\n")
    assert lines_of(follower, disk) == [b"half"]
    disk.push_names()
    disk.names[f"{LOG}.1"] = disk.names.pop(LOG)
    disk.write(disk.create(LOG), b"new\n")
    assert lines_of(follower, disk) == [b"new"]


def test_a_line_without_an_end_is_cut() -> None:
    disk = MemoryDisk()
    log = disk.create(LOG)
    disk.write(log, b"x" * 2_500)
    follower = make_follower(disk)
    assert list(map(len, lines_of(follower, disk))) == [1_024, 1_024]
    disk.write(log, b"y\n")
    assert list(map(len, lines_of(follower, disk))) == [2_500 - 2 * 1_024 + 1]


def test_a_line_is_cut_between_characters() -> None:
    disk = MemoryDisk()
    log = disk.create(LOG)
    lines = ["é" * 600, "y" + "é" * 600, "xy" + "日" * 400, "𝄞" * 300 + "z"]
    disk.write(log, "\n".join(lines)[:-1].encode() + "é".encode()[:1])
    follower = make_follower(disk)
    found = lines_of(follower, disk)
    assert all(line.decode() for line in found), "no character has its bytes in two of them"
    disk.write(log, "é".encode()[1:] + b"\n")
    assert b"".join(found + lines_of(follower, disk)).decode() == "".join(lines)[:-1] + "é"
    late = make_follower(disk, from_end=True)
    disk.write(log, "é".encode() * 600 + "é".encode()[:1])
    assert lines_of(late, disk) == []
    disk.write(log, "é".encode()[1:] + b"\n")
    assert [line.decode() for line in lines_of(late, disk)] == ["é"]


def test_a_file_whose_disk_fails_is_read_on_later(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = MemoryDisk()
    log = disk.create(LOG)
    disk.write(log, b"1\n")
    follower = make_follower(disk)
    assert lines_of(follower, disk) == [b"1"]
    disk.write(log, b"2\n")
    with monkeypatch.context() as broken:
        broken.setattr(
            Handle, "read", lambda *_: (_ for _ in ()).throw(OSError(errno.ESTALE, "Stale handle"))
        )
        assert lines_of(follower, disk) == []
        assert (disk.skipped, log.handles) == ({LOG: "cannot be read: Stale handle"}, 0)
        follower.look(disk.now_ns)
        follower.look(disk.now_ns + 2 * QUIET_NS)
        assert lines_of(follower, disk) == []
    assert lines_of(follower, disk) == [b"2"]


def test_a_copy_without_a_log_that_was_read_up_to_it_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    disk = MemoryDisk()
    log = disk.create(LOG)
    disk.write(log, b"1\n2\n")
    follower = make_follower(disk, is_copied=True)
    assert lines_of(follower, disk) == [b"1", b"2"]
    log.content.clear()
    disk.write(log, b"4\n")
    assert lines_of(follower, disk) == [b"4"]
    assert "was truncated" in caplog.text
