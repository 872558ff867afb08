"""What a slot's process has in hand, and how it ends itself: in a file on its host that outlives the process.

A page of the file is mapped to memory, so that a note costs a copy of some bytes and no system call, and is there
whatever becomes of the process. `LastWords` come behind the page. While its process lives, the file is locked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
import tempfile
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from ftlayer.runtime.barrier_mode.slot.last_words import LastWords
from ftlayer.runtime.protocol.deaths import Death

MAX_STACK = 4_096
"""Characters that are kept of where the functions were."""

FORGOTTEN_S = 86_400
"""Boxes of processes that are gone are removed after so long where nobody has read them."""

_PREFIX = "ftlayer-boxes-"
_SUFFIX = ".box"
_OTHERS = 0o077
_PAGE = 4_096

_HEAD, _HEAD_AT = struct.Struct("<8sI32s"), 0
_NOTE, _NOTE_AT = struct.Struct("<II16s"), 64  # whether a record is in hand, its chain's place, its digest
_EXIT, _EXIT_AT = struct.Struct("<Ii"), 128  # whether the process exits, and its code
_EXIT_OF_C_AT = 136  # a byte: whether a C library has ended it
_IN_HAND = struct.Struct("<I")
_MAGIC = b"ftl box1"

_FATAL = "Fatal Python error: "
_NO_PLACE = "\nExtension modules:"


class BlackBox:
    """`ftlayer.runtime.barrier_mode.task.chain_suspects.RecordNotes` of one instance of a slot.

    Its methods are for the thread that runs the tasks.
    """

    def __init__(self, directory: Path, slot: int, instance: str, chains: Sequence[str]) -> None:
        """Make it in ``directory`` (see `box_directory`), and write last words from now on; raises `OSError`.

        ``chains`` are those whose records are noted; readers have to give the same.
        """
        self._directory = directory
        self._path = directory / f"{instance}{_SUFFIX}"
        self._places = {chain: place for place, chain in enumerate(chains)}
        # Locked before it has its name, so that it is never there and not locked.
        self._file, new = tempfile.mkstemp(dir=directory, prefix="new-")
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            # A hole that the disk has no room for would end the process at its first note, by SIGBUS.
            if os.write(self._file, bytes(_PAGE)) < _PAGE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))
            self._page = mmap.mmap(self._file, _PAGE)
            _HEAD.pack_into(self._page, _HEAD_AT, _MAGIC, slot, instance.encode())
            os.rename(new, self._path)
        except BaseException:
            os.close(self._file)
            Path(new).unlink(missing_ok=True)
            raise
        self._last_words = LastWords(self._file, self._exits, self._page, _EXIT_OF_C_AT)

    def about_to(self, chain: str, digest: bytes) -> None:
        _NOTE.pack_into(self._page, _NOTE_AT, 1, self._places[chain], digest)

    def over(self) -> None:
        _IN_HAND.pack_into(self._page, _NOTE_AT, 0)

    def close(self) -> None:
        """The instance has come to its end in a way that is known: remove the file."""
        self._last_words.close()
        self._path.unlink(missing_ok=True)
        self._page.close()
        os.close(self._file)
        _remove_if_empty(self._directory)

    def _exits(self, code: int) -> None:
        _EXIT.pack_into(self._page, _EXIT_AT, 1, code)


def box_directory(parent: str | None, job: str) -> Path:
    """Make the directory of a job's boxes on this host, if it is not there; raises `OSError`.

    ``parent`` None: the system's directory for temporary files. It is this user's alone: who can write there has
    records made dead letters.
    """
    base = Path(parent or tempfile.gettempdir())
    base.mkdir(parents=True, exist_ok=True)
    _sweep(base)
    path = base / _name_of(job)
    path.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(path):
        raise PermissionError(f"{path} is not a directory of this user's alone")
    return path


def deaths_of(parent: str | None, job: str, chains: Sequence[str]) -> tuple[Death, ...]:
    """Return how processes of a job on this host have ended themselves, and forget it.

    ``parent`` as for `box_directory`. To be called while no box of this process is open.
    """
    path = Path(parent or tempfile.gettempdir()) / _name_of(job)
    if not path.exists() or not _is_private(path):
        return ()
    found = [_read(box, chains) for box in sorted(path.glob(f"*{_SUFFIX}"))]
    _remove_if_empty(path)
    return tuple(death for death in found if death is not None)


def _read(path: Path, chains: Sequence[str]) -> Death | None:
    """Take the box away, if its process is gone; return how that has ended, None where it did not end itself."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None  # another slot was quicker
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(file).st_nlink:
            return None
        path.unlink()
        return _death(os.pread(file, _PAGE, 0), os.pread(file, 4 * MAX_STACK, _PAGE), chains)
    except (BlockingIOError, PermissionError):
        return None  # its process lives
    finally:
        os.close(file)


def _death(page: bytes, words: bytes, chains: Sequence[str]) -> Death | None:
    if len(page) < _PAGE:
        return None
    magic, slot, instance = _HEAD.unpack_from(page, _HEAD_AT)
    in_hand, place, digest = _NOTE.unpack_from(page, _NOTE_AT)
    exited, code = _EXIT.unpack_from(page, _EXIT_AT)
    text = words.decode("utf-8", "replace")
    first, _, rest = text.removeprefix(_FATAL).partition("\n")
    if magic != _MAGIC:
        return None
    if text.startswith(_FATAL):
        cause = first.strip()
    elif exited:
        cause = f"it called os._exit({code})"
    elif page[_EXIT_OF_C_AT]:
        cause = "a C library called exit()"
    else:
        return None
    stack = rest.partition(_NO_PLACE)[0].strip()[:MAX_STACK]
    name = instance.rstrip(b"\0").decode("ascii", "replace")
    if not in_hand or place >= len(chains):
        return Death(name, slot, cause, stack=stack)
    return Death(name, slot, cause, chains[place], digest, stack)


def _name_of(job: str) -> str:
    return _PREFIX + blake2b(job.encode(), digest_size=8).hexdigest()


def _is_private(path: Path) -> bool:
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & _OTHERS


def _sweep(base: Path) -> None:
    """Remove what killed jobs have left."""
    for directory in base.glob(f"{_PREFIX}*"):
        # Others may put anything there that has such a name: of theirs nothing is looked at, let alone followed.
        with contextlib.suppress(OSError):
            if not _is_private(directory):
                continue
            for path in directory.iterdir():
                with contextlib.suppress(OSError):
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime >= FORGOTTEN_S:
                        _read(path, ())
                        _remove_if_empty(directory)


def _remove_if_empty(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:
        # Others have theirs in it, or it is gone.
        return
