"""What processes that end leave in writing: real ones, each of which ends in its own way."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftlayer import _native
from ftlayer.runtime.protocol.messages import Death
from ftlayer.runtime.slot.black_box import FORGOTTEN_S, BlackBox, box_directory, deaths_of, last_words

CHAINS = ("first", "explode")
DIGEST = b"0123456789abcdef"

PROGRAM = """
import ctypes, multiprocessing, os, signal, sys
from ftlayer import _native
from ftlayer.runtime.slot.black_box import BlackBox, box_directory

def forked(end):
    pid = os.fork()
    if not pid:
        end()
    os.waitpid(pid, 0)

def deep():
    found = []
    for _ in range(1_000_000):
        found = [found]
    return found

def explode(end):
    eval(end)

me = os.getpid()
box = BlackBox(box_directory(sys.argv[1], "job"), 3, "instance", ("first", "explode"))
box.about_to("first", b"x" * 16)
box.over()
if sys.argv[3] == "in hand":
    box.about_to("explode", b"0123456789abcdef")
try:
    explode(sys.argv[2])
finally:
    box.close()
"""


def ended(directory: Path, how: str, *, in_hand: bool = True) -> tuple[Death, ...]:
    """Let a process end; return what is found of it then, and that it is found once."""
    arguments = [sys.executable, "-c", PROGRAM, str(directory), how, "in hand" if in_hand else "nothing"]
    process = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in process.stderr, process.stderr
    at_once = last_words(str(directory), "job", "instance", CHAINS)
    assert last_words(str(directory), "job", "another", CHAINS) == []
    found = deaths_of(str(directory), "job", CHAINS)
    assert list(found) == at_once
    assert deaths_of(str(directory), "job", CHAINS) == ()
    assert list(directory.iterdir()) == []
    return found


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("os.kill(me, signal.SIGSEGV)", "Segmentation fault"),
        ("ctypes.string_at(0)", "Segmentation fault"),
        ("(sys.setrecursionlimit(1 << 30), repr(deep()))", "Segmentation fault"),  # the stack is used up
        ("os.abort()", "Aborted"),
        ("os.kill(me, signal.SIGBUS)", "Bus error"),
        ("os.kill(me, signal.SIGILL)", "Illegal instruction"),
        ("os.kill(me, signal.SIGFPE)", "Floating point exception"),
        ("os._exit(3)", "it called os._exit(3)"),
        ("ctypes.CDLL(None).exit(3)", "a C library called exit()"),
    ],
)
def test_a_process_that_ends_itself_says_how_and_what_it_had_in_hand(
    tmp_path: Path, how: str, cause: str
) -> None:
    (found,) = ended(tmp_path, how)
    assert (found.instance, found.slot, found.cause) == ("instance", 3, cause)
    assert (found.chain, found.digest) == ("explode", DIGEST)
    assert ("in explode" in found.stack) == ("exit" not in how)


def test_nothing_in_hand_is_said_as_well(tmp_path: Path) -> None:
    (found,) = ended(tmp_path, "os.abort()", in_hand=False)
    assert (found.cause, found.chain, found.digest) == ("Aborted", "", b"")


@pytest.mark.parametrize(
    "how",
    [
        "os.kill(me, signal.SIGKILL)",
        "os.kill(me, signal.SIGTERM)",
        "0",
        "sys.exit(3)",
        "(forked(lambda: ctypes.CDLL(None).exit(3)), os.kill(me, signal.SIGKILL))",
        # What becomes of children is of no account.
        "(forked(os.abort), forked(lambda: os._exit(3)), os.kill(me, signal.SIGKILL))",
        "(forked(lambda: os.kill(os.getpid(), signal.SIGSEGV)), os.kill(me, signal.SIGKILL))",
    ],
)
def test_whom_others_have_ended_says_nothing(tmp_path: Path, how: str) -> None:
    assert ended(tmp_path, how) == ()


def test_the_box_of_a_process_that_lives_is_left_where_it_is(tmp_path: Path) -> None:
    program = PROGRAM.replace(
        "explode(sys.argv[2])", "print('open', flush=True); sys.stdin.read(); os.abort()"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path), "", "in hand"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        assert deaths_of(str(tmp_path), "job", CHAINS) == ()
        process.communicate("")
    assert [each.cause for each in deaths_of(str(tmp_path), "job", CHAINS)] == ["Aborted"]


def test_jobs_are_told_apart_and_what_is_not_this_users_alone_is_not_read(tmp_path: Path) -> None:
    mine, another = box_directory(str(tmp_path), "job"), box_directory(str(tmp_path), "another")
    for directory in (mine, another):
        assert directory.stat().st_mode & 0o777 == 0o700
        (directory / "instance.box").write_bytes(b"x" * 5_000)
    mine.chmod(0o750)
    assert deaths_of(str(tmp_path), "job", CHAINS) == ()
    assert sorted(tmp_path.glob("*/*.box")) == sorted(each / "instance.box" for each in (mine, another))
    mine.chmod(0o700)
    assert deaths_of(str(tmp_path), "job", CHAINS) == ()
    assert list(tmp_path.iterdir()) == [another]


def test_what_is_no_box_is_removed(tmp_path: Path) -> None:
    mine = box_directory(str(tmp_path), "job")
    for name, content in [("a", b""), ("b", b"x" * 5_000)]:
        (mine / f"{name}.box").write_bytes(content)
    assert deaths_of(str(tmp_path), "job", CHAINS) == ()
    assert list(tmp_path.iterdir()) == []


def test_what_killed_jobs_have_left_is_removed_a_day_later(tmp_path: Path) -> None:
    mine = box_directory(str(tmp_path), "job")
    old, new = mine / "old.box", mine / "new.box"
    for path in (old, new):
        path.write_bytes(b"x" * 5_000)
    empty, begun = box_directory(str(tmp_path), "job"), box_directory(str(tmp_path), "job")
    then = time.time() - FORGOTTEN_S - 1
    for path in (old, empty):
        os.utime(path, (then, then))
    box_directory(str(tmp_path), "another")
    assert [path.name for path in mine.iterdir()] == ["new.box"]
    assert begun.exists()
    assert not empty.exists()


def test_a_box_is_locked_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened = []
    lock, rename = fcntl.lockf, os.rename
    monkeypatch.setattr(fcntl, "lockf", lambda *given: (happened.append("lock"), lock(*given)))
    monkeypatch.setattr(os, "rename", lambda *given: (happened.append("rename"), rename(*given)))
    box = BlackBox(box_directory(str(tmp_path), "job"), 0, "instance", CHAINS)
    box.close()
    assert happened == ["lock", "rename"]


def test_a_full_disk_is_an_error_at_once_and_no_signal_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = box_directory(str(tmp_path), "job")
    monkeypatch.setattr(os, "write", lambda *_: 100)
    with pytest.raises(OSError, match="No space left"):
        BlackBox(directory, 0, "instance", CHAINS)
    assert list(directory.iterdir()) == []


def test_behind_it_the_process_is_as_it_was(tmp_path: Path) -> None:
    before, enabled = os._exit, faulthandler.is_enabled()
    box = BlackBox(box_directory(str(tmp_path), "job"), 0, "instance", CHAINS)
    assert os._exit is not before
    box.close()
    assert os._exit is before
    assert faulthandler.is_enabled() == enabled
    assert list(tmp_path.iterdir()) == []


def test_a_byte_that_is_not_there_cannot_be_set_at_exit() -> None:
    for place in (-1, 4):
        with pytest.raises(ValueError, match="there is no byte"):
            _native.mark_exit(bytearray(4), place)
    with pytest.raises(BufferError):
        _native.mark_exit(b"1234", 0)
