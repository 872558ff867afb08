"""How a slot's process ends itself, and what it had in hand then: in a file on its host that outlives the process.

A page of the file is mapped to memory, so that a note costs a copy of some bytes and no system call, and is there
whatever becomes of the process. `LastWords` come behind the page. While its process lives, the file is locked.

No other process can tell. Spark's daemon forks the Python workers and has the kernel reap them (it ignores SIGCHLD), so
no exit code is ever read; a worker's parent alone could have it. So a worker writes while it ends:

- SIGSEGV, SIGABRT, SIGBUS, SIGILL and SIGFPE: `faulthandler` writes what came, and where the functions were. It is
  C, needs neither the interpreter nor its lock, and has a stack of its own for the thread that turned it on.
- ``os._exit`` is a function that writes the code first; ``exit`` of a C library sets a byte.

What leaves nothing in writing: SIGKILL, a lost host, other signals, and ``_exit`` of a C library. A function that turns
`faulthandler` on for itself takes it away from here.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import fcntl
import logging
import mmap
import os
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NoReturn

from ftlayer import _native
from ftlayer.common.secret_files import is_private
from ftlayer.runtime.protocol.messages import Death
from ftlayer.runtime.slot.rules.mode import SlotContext
from ftlayer.runtime.task.contract import NO_NOTES, RecordNotes

logger = logging.getLogger(__name__)

_STDERR = 2

_open: LastWords | None = None


class LastWords:
    """Are written by this process from the moment it is made until `close`. One at a time in a process."""

    def __init__(self, file: int, exits: Callable[[int], None], page: mmap.mmap, place: int) -> None:
        """Begin.

        Args:
            file: a descriptor that signals are written to.
            exits: called with the code of an ``os._exit``.
            page, place: the byte that is set at another exit.
        """
        global _open
        assert _open is None, "the last words of this process are written elsewhere"
        self._process = os.getpid()
        self._exits = exits
        self._was_enabled = faulthandler.is_enabled()
        self._exit = os._exit
        faulthandler.enable(file, all_threads=False)
        os._exit = self._written_exit
        _native.mark_exit(page, place)
        _open = self

    def close(self) -> None:
        """Write no more. Where `faulthandler` was on before, it is again, and writes to stderr."""
        global _open
        _open = None
        os._exit = self._exit
        _native.mark_exit(None, 0)
        faulthandler.disable()
        if self._was_enabled:
            faulthandler.enable(_STDERR)

    def _written_exit(self, status: int) -> NoReturn:
        # A child that was forked ends in this way, and is not meant.
        if os.getpid() == self._process:
            self._exits(status)
        self._exit(status)


def _leave_child_alone() -> None:
    """A forked child has the descriptor, too: how it ends is of no account."""
    if _open is not None:
        faulthandler.disable()


os.register_at_fork(after_in_child=_leave_child_alone)


MAX_STACK = 4_096
"""Characters that are kept of where the functions were."""

FORGOTTEN_S = 86_400
"""Boxes of processes that are gone are removed after so long where nobody has read them."""

_PREFIX = "ftlayer-boxes-"
_SUFFIX = ".box"
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
    """`RecordNotes` of one instance of a slot.

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
        self._last_words.close()
        self._path.unlink(missing_ok=True)
        self._page.close()
        os.close(self._file)
        _remove_if_empty(self._directory)

    def _exits(self, code: int) -> None:
        _EXIT.pack_into(self._page, _EXIT_AT, 1, code)


def box_directory(parent: str | None, job: str) -> Path:
    """Make the directory of one box of a job on this host; raises `OSError`.

    ``parent`` None: the system's directory for temporary files. It is this user's alone, as who can write there has
    records made dead letters, and its name is new: one that others know they could take.
    """
    base = Path(parent or tempfile.gettempdir())
    base.mkdir(parents=True, exist_ok=True)
    _sweep(base)
    return Path(tempfile.mkdtemp(prefix=_name_of(job), dir=base))


def deaths_of(parent: str | None, job: str, chains: Sequence[str]) -> tuple[Death, ...]:
    """Return how processes of a job on this host have ended themselves, and forget it.

    ``parent`` as for `box_directory`. To be called while no box of this process is open.
    """
    found = [_read_of_black_box(box, chains) for box in _boxes(parent, job)]
    return tuple(death for death in found if death is not None)


def last_words(parent: str | None, job: str, instance: str, chains: Sequence[str]) -> list[Death]:
    """Return how this instance's process has ended itself, as `deaths_of`, and forget nothing; for who lost it."""
    with contextlib.suppress(OSError):
        boxes = [box.read_bytes() for box in _boxes(parent, job) if box.stem == instance]
        deaths = [_death(box[:_PAGE], box[_PAGE:][: 4 * MAX_STACK], chains) for box in boxes]
        return [death for death in deaths if death is not None]
    return []  # the slot's next process was quicker


def _boxes(parent: str | None, job: str) -> list[Path]:
    directories = filter(is_private, Path(parent or tempfile.gettempdir()).glob(f"{_name_of(job)}*"))
    boxes = [box for directory in directories for box in directory.glob(f"*{_SUFFIX}")]
    return sorted(boxes, key=lambda box: box.name)


def _read_of_black_box(path: Path, chains: Sequence[str]) -> Death | None:
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
        _remove_if_empty(path.parent)
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
    return f"{_PREFIX}{blake2b(job.encode(), digest_size=8).hexdigest()}-"


def _sweep(base: Path) -> None:
    forgotten = time.time() - FORGOTTEN_S
    for directory in filter(is_private, base.glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError):
            for path in directory.iterdir():
                with contextlib.suppress(OSError):
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode) and status.st_mtime <= forgotten:
                        _read_of_black_box(path, ())
            if directory.lstat().st_mtime <= forgotten:
                directory.rmdir()  # its process was killed before it had a box


def _remove_if_empty(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:
        # Others have theirs in it, or it is gone.
        return


class SlotBox:
    """The box of one instance, where one can be had. What cannot be kept, or read, is a warning.

    Attributes:
        chains: those whose records may be noted.
        notes: take what is in hand, from the moment that it is made.
    """

    def __init__(self, slot: SlotContext, directory: str | None, chains: Sequence[str]) -> None:
        self.chains = tuple(chains)
        self.notes: RecordNotes = NO_NOTES
        self._slot = slot
        self._directory = directory
        self._box: BlackBox | None = None

    def deaths(self) -> tuple[Death, ...]:
        """Return how processes of the job on this host have ended themselves, as far as nobody has asked yet."""
        try:
            found = deaths_of(self._directory, self._slot.order.job, self.chains)
        except OSError as error:
            logger.warning("slot %d: how others have ended cannot be read: %s", self._slot.order.slot, error)
            return ()
        # To the driver a death is the begin of a search for a record.
        return found if self.chains else ()

    def open(self) -> bool:
        """The tasks begin: from now on the process writes down how it ends itself. Return whether it can."""
        order = self._slot.order
        try:
            directory = box_directory(self._directory, order.job)
            self.notes = self._box = BlackBox(directory, order.slot, self._slot.instance, self.chains)
        except OSError as error:
            logger.warning(
                "slot %d: %s, since nothing can be kept of it: %s",
                order.slot,
                "a record that ends its process would not be found"
                if self.chains
                else "how its process ends would not be known",
                error,
            )
        return self._box is not None

    def close(self) -> None:
        """The tasks run no more: what becomes of the process now is no record's doing."""
        if self._box is not None:
            self._box.close()
            self._box = None
