"""Names of directories and files, as Flink lays them out. Strings alone; nothing is read or written here.

```
<directory>/<job>/_key
<directory>/<job>/_result
<directory>/<job>/_last
<directory>/<job>/_owners/<epoch>
<directory>/<job>/<run>/chk-<n>/_metadata
<directory>/<job>/<run>/chk-<n>/<slot>-<epoch>-<instance>-<unique>
<directory>/<job>/<run>/shared/<slot>-<epoch>-<instance>-<first>.<last>.<unique>
<directory>/dead-letters/<job>/<run>-<n>.arrow
<directory>/dead-letters/<job>/<run>-<n>.<unique>.purged
<savepoint directory>/savepoint-<run>-<unique>/_metadata, _key, <slot>-<epoch>-<instance>-<unique>
```

No two writers ever have the same name, so a zombie writes unreferenced files. ``first`` and
``last`` of a shared file are the checkpoints that it may get pieces for.
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from urllib.parse import quote, unquote

from ftlayer.checkpoint.barrier import SnapshotKind
from ftlayer.checkpoint.snapshots import Checkpoint
from ftlayer.errors import ConfigError

METADATA = "_metadata"
KEY = "_key"
RESULT = "_result"
LAST_REPORT = "_last"
OWNERS = "_owners"
SHARED = "shared"
DEAD_LETTERS = "dead-letters"
NEVER = 1 << 62
"""Behind every checkpoint's number."""
RUN_CHARS = 6
"""Of the run's name in a savepoint's: enough for a person to see which run it was."""

_LOCAL = re.compile(r"(?:file|local):(?://)?(?=/)")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(?=://|::)")
_ONE_SLASH = re.compile(r"([a-z][a-z0-9+.-]+):/(?!/)")
_CHECKPOINT = re.compile(r"chk-([0-9]+)")
_SHARED_RANGE = re.compile(r"([0-9]+)\.([0-9]+)\.([^.]+)")


def is_local(url: str) -> bool:
    """Whether ``url`` is a path of this machine: without a scheme, or ``file:``."""
    return _LOCAL.match(url) is not None or _SCHEME.match(url) is None


def check_location(location: str, option: str) -> None:
    """Raise `ConfigError` for a URL that lacks a slash, which would be a path of this machine."""
    found = _ONE_SLASH.match(location)
    if found is not None and _LOCAL.match(location) is None:
        raise ConfigError(
            f"{option}: expected a path, or a URL like {found[1]}://bucket/path, got {location!r}"
        )


def normal(url: str) -> str:
    """Return ``url`` without a slash at its end, and for this machine the absolute path."""
    if is_local(url):
        return os.path.abspath(os.path.expanduser(_LOCAL.sub("", url)))
    return url.rstrip("/")


def scheme_of(url: str) -> str:
    match = _SCHEME.match(url)
    return "file" if is_local(url) or match is None else match[0].lower()


def join(url: str, *parts: str) -> str:
    return "/".join((url.rstrip("/"), *parts))


def parent(url: str) -> str:
    return url.rstrip("/").rpartition("/")[0]


def last_name(url: str) -> str:
    return url.rstrip("/").rpartition("/")[2]


def part(name: str) -> str:
    """Return ``name`` as one part of a path."""
    quoted = quote(name, safe="")
    return quoted.replace(".", "%2E") if quoted in ("", ".", "..") else quoted


def job_directory(directory: str, job: str) -> str:
    return join(normal(directory), part(job))


def run_directory(directory: str, job: str, run: str) -> str:
    """Return where the checkpoints of one run lie: what paths in them are relative to."""
    return join(job_directory(directory, job), part(run))


def letters_directory(directory: str, job: str) -> str:
    return join(normal(directory), DEAD_LETTERS, part(job))


def checkpoint_name(checkpoint: int) -> str:
    return f"chk-{checkpoint}"


def checkpoint_number(name: str) -> int | None:
    """Return the checkpoint whose directory has this name; None: it is no such directory's."""
    match = _CHECKPOINT.fullmatch(name)
    return None if match is None else int(match[1])


def new_savepoint(directory: str, run: str) -> str:
    """Return the URL of a new savepoint's directory, which is not made yet."""
    return join(normal(directory), f"savepoint-{part(run)[-RUN_CHARS:]}-{secrets.token_hex(6)}")


def pieces_directory(checkpoint: Checkpoint) -> str:
    """Return the URL that the paths of a checkpoint's pieces are relative to; "" in the driver's memory.

    It is what `Restore.location` and `SlotStorage.open` are to be given.
    """
    if not checkpoint.location or checkpoint.kind == SnapshotKind.SAVEPOINT:
        return checkpoint.location
    return parent(checkpoint.location)


@dataclass(frozen=True, slots=True)
class FileName:
    """A slot's file. ``first`` to ``last``: the checkpoints it may get pieces for, 0 where its directory says it."""

    slot: int
    epoch: int
    instance: str
    unique: str
    first: int = 0
    last: int = 0

    def __str__(self) -> str:
        span = f"{self.first}.{self.last}." if self.last else ""
        return f"{self.slot}-{self.epoch}-{part(self.instance)}-{span}{self.unique}"


def new_unique() -> str:
    return secrets.token_hex(8)


def parse_file_name(name: str) -> FileName | None:
    """Return the parts of a slot's file name; None: no slot has made this file."""
    head, _, tail = name.rpartition("-")
    slot, _, rest = head.partition("-")
    epoch, _, instance = rest.partition("-")
    if not (slot.isdecimal() and epoch.isdecimal() and instance and tail):
        return None
    first = last = 0
    span = _SHARED_RANGE.fullmatch(tail)
    if span is not None:
        first, last, tail = int(span[1]), int(span[2]), span[3]
    return FileName(int(slot), int(epoch), unquote(instance), tail, first, last)
