"""Removing checkpoints and savepoints: metadata first, so that a half-removed one is not there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator

from ftlayer.checkpoint.barrier import SnapshotKind
from ftlayer.checkpoint.snapshots import Checkpoint, Piece
from ftlayer.checkpoint.storage import layout
from ftlayer.checkpoint.storage.files import Files, StoragePool, raise_together
from ftlayer.checkpoint.storage.loading import (
    all_pieces,
    files_of,
    find_checkpoints,
    load_checkpoint,
    located,
    not_there,
    paths_of,
    read_each,
)
from ftlayer.checkpoint.storage.remote_files import open_files
from ftlayer.common.printable import shown_url
from ftlayer.errors import CheckpointDamagedError, CheckpointError, CheckpointStorageError, ConfigError

logger = logging.getLogger(__name__)


IsAlive = Callable[[str], bool]


def is_settled(path: str, latest: int) -> bool:
    """Whether no checkpoint that is still under way can refer to a shared file that none refers to now.

    ``latest``: the last completed checkpoint; all that began before it are complete or given up. The file may have
    got pieces for checkpoints up to the one in its name.
    """
    name = layout.parse_file_name(path.rpartition("/")[2])
    return name is not None and 0 < name.last <= latest


def is_bound(path: str, checkpoint: int) -> bool:
    """Whether a shared file got pieces for this checkpoint alone."""
    name = layout.parse_file_name(path.rpartition("/")[2])
    return name is not None and name.first == name.last == checkpoint


def orphans(
    paths: Iterable[str], used: Collection[str], completed: Collection[int], latest: int, is_alive: IsAlive
) -> list[str]:
    """Return the paths that can be removed.

    Args:
        paths: files of the run, relative to its directory.
        used: those that completed checkpoints refer to.
        completed: numbers of the completed checkpoints that are kept.
        latest: the last completed one.
        is_alive: whether an instance may still write.
    """
    return [path for path in paths if path not in used and _is_orphan(path, completed, latest, is_alive)]


def _is_orphan(path: str, completed: Collection[int], latest: int, is_alive: IsAlive) -> bool:
    directory, _, file = path.rpartition("/")
    number = layout.checkpoint_number(directory)
    name = layout.parse_file_name(file)
    if directory == layout.SHARED:
        # Files of others than slots are left alone.
        return name is not None and (name.last <= latest or not is_alive(name.instance))
    if number is None:
        return False
    if file == layout.METADATA:
        return number not in completed and number <= latest
    if name is None:
        # A metadata file that was being written is the driver's own.
        return file.startswith(".") and number <= latest
    return number <= latest or not is_alive(name.instance)


def _unreferenced(paths: Iterable[str], kept: Collection[Checkpoint]) -> list[str]:
    """Return what none of the ``kept`` checkpoints of a run that is over needs, of ``paths`` in its directory."""
    completed = {one.checkpoint for one in kept}
    return orphans(paths, files_of(kept), completed, layout.NEVER, lambda _instance: False)


def delete_checkpoint(url: str, key: bytes | None = None) -> str:
    """Remove a checkpoint of a run that is over, damaged or not, and what is unreferenced then; returns where it was.

    Raises `ConfigError` for a savepoint, `CheckpointStorageError` if there is no checkpoint or something cannot be
    removed, `CheckpointDamagedError` if another checkpoint of the run cannot be read: what it needs is unknown.
    ``key``: as for `load_checkpoint`.
    """
    location = _checked(url, is_savepoint=False)
    base = layout.parent(location)
    others = []
    beside = (other for other in find_checkpoints(base) if other != location)
    for other, found in read_each(beside, lambda each: load_checkpoint(each, key)):
        if isinstance(found, CheckpointDamagedError):
            raise CheckpointDamagedError(
                f"{shown_url(location)} is kept, as it cannot be known which files {shown_url(other)} shares "
                f"with it; delete that one first: {found}"
            ) from found
        if isinstance(found, CheckpointError):
            raise found
        others.append(found)
    files, crew = open_files(base), StoragePool()
    try:
        errors = delete_directory(files, layout.last_name(location), crew)
        left = _unreferenced((entry.path for entry in files.walk()), others)
        errors += crew.delete(files, left)
    finally:
        crew.close()
    for name in (*sorted({layout.parent(path) for path in left}), layout.SHARED, ""):
        files.delete_empty(name)
    raise_together(errors, location)
    return location


def sweep_earlier_runs(directory: str, job: str, run: str, key: bytes | None = None) -> Iterator[str]:
    """Remove what drivers that were killed have left of other runs than ``run``; yields their URLs.

    For the owner of the job's directory: what a driver before it would still publish, it finds missing, and fails.
    Checkpoints stay, with all that they refer to, and runs of which a checkpoint cannot be read stay as they are.
    """
    files = open_files(layout.job_directory(directory, job))
    found, unknown = left_behind(files, key, except_run=run)
    for name, error in unknown.items():
        logger.warning("what the run %s has left behind stays: %s", name, error)
    yield from remove_left(files, found)


def job_directories(url: str) -> list[Files]:
    """Return the directories of all jobs at or below ``url``, which are those that drivers have claimed."""
    files = open_files(located(url))
    claims = (
        entry.path
        for entry in files.walk()
        if f"/{entry.path}".rpartition("/")[0].endswith(f"/{layout.OWNERS}")
    )
    return [
        open_files(layout.join(files.url, name) if name else files.url)
        for name in sorted({layout.parent(layout.parent(each)) for each in claims})
    ]


def job_above(url: str) -> str | None:
    run = layout.parent(located(url))
    return next(
        (
            each
            for each in (run, layout.parent(run))
            if layout.last_name(each) and open_files(each).walk(layout.OWNERS)
        ),
        None,
    )


def left_behind(
    files: Files, key: bytes | None = None, *, except_run: str = ""
) -> tuple[dict[str, int], dict[str, CheckpointError]]:
    """Return what no checkpoint of a job needs, with sizes; and runs of which that is not known, with the reason.

    ``files``: the job's directory. While a driver of it runs that is not ``except_run`` it may still need some of it.
    """
    # Before it is known what checkpoints refer to: a file that comes later is left alone.
    by_run: dict[str, dict[str, int]] = {}
    for entry in files.walk():
        name, _, path = entry.path.partition("/")
        is_slots = (
            layout.last_name(path)[:1] == "." or layout.parse_file_name(layout.last_name(path)) is not None
        )
        if name not in (layout.part(except_run), layout.OWNERS) and is_slots:
            by_run.setdefault(name, {})[path] = entry.size
    found: dict[str, int] = {}
    unknown: dict[str, CheckpointError] = {}
    for name, sizes in by_run.items():
        kept = []
        for _, read in read_each(
            find_checkpoints(layout.join(files.url, name)), lambda each: load_checkpoint(each, key)
        ):
            if isinstance(read, CheckpointError):
                unknown[name] = read
            else:
                kept.append(read)
        if name not in unknown:
            found.update((layout.join(name, path), sizes[path]) for path in _unreferenced(sizes, kept))
    return found, unknown


def remove_left(files: Files, paths: Iterable[str]) -> Iterator[str]:
    """Remove these files of a job, and directories that are empty then; yields their URLs. For the job's owner."""
    above: set[str] = set()
    for path in paths:
        files.delete(path)
        above |= {layout.parent(path), path.partition("/")[0]}
        yield layout.join(files.url, path)
    for empty in sorted(above, reverse=True):
        files.delete_empty(empty)


def dispose_savepoint(url: str) -> str:
    """Remove a savepoint, damaged or not; returns where it was.

    Raises `ConfigError` for a checkpoint, `CheckpointStorageError` if there is none or something cannot be removed.
    """
    location = _checked(url, is_savepoint=True)
    crew = StoragePool()
    try:
        raise_together(delete_savepoint(open_files(location), crew), location)
    finally:
        crew.close()
    return location


def discard_checkpoint(checkpoint: Checkpoint, keep: Iterable[Checkpoint], crew: StoragePool) -> None:
    """Remove a checkpoint of a run that is over, or a savepoint; errors as `DriverStorage.discard`."""
    location = checkpoint.location
    if checkpoint.kind == SnapshotKind.SAVEPOINT:
        raise_together(delete_savepoint(open_files(location), crew), location)
        return
    base = layout.pieces_directory(checkpoint)
    files = open_files(base)
    used = files_of(one for one in keep if layout.pieces_directory(one) == base)
    errors = delete_directory(files, layout.last_name(location), crew)
    errors += crew.delete(files, shared_paths(all_pieces(checkpoint)) - used)
    files.delete_empty(layout.SHARED)
    files.delete_empty("")
    raise_together(errors, location)


def delete_directory(files: Files, name: str, crew: StoragePool) -> list[CheckpointStorageError]:
    """Remove a checkpoint's own directory; returns what could not be removed."""
    errors = crew.delete(files, (layout.join(name, layout.METADATA),))
    try:
        errors += crew.delete(files, (entry.path for entry in files.walk(name)))
        files.delete_empty(name)
    except CheckpointStorageError as error:
        errors.append(error)
    return errors


def delete_savepoint(files: Files, crew: StoragePool) -> list[CheckpointStorageError]:
    """Remove a savepoint's directory, as far as the files in it are a savepoint's."""
    errors = crew.delete(files, (layout.METADATA,))
    try:
        names = [entry.path for entry in files.walk()]
        ours = [
            name
            for name in names
            if name == layout.KEY or name[:1] == "." or layout.parse_file_name(name) is not None
        ]
        errors += crew.delete(files, ours)
        if len(ours) == len(names):
            files.delete_empty("")
    except CheckpointStorageError as error:
        errors.append(error)
    return errors


def shared_paths(pieces: Iterable[Piece]) -> set[str]:
    return {path for path in paths_of(pieces) if layout.parent(path) == layout.SHARED}


def _checked(url: str, *, is_savepoint: bool) -> str:
    location = located(url)
    if open_files(location).size(layout.METADATA) is None:
        raise CheckpointStorageError(not_there(location))
    if (layout.checkpoint_number(layout.last_name(location)) is None) != is_savepoint:
        kind, command = ("checkpoint", "delete") if is_savepoint else ("savepoint", "dispose")
        raise ConfigError(f"{shown_url(location)} is a {kind}: use `ftlayer checkpoints {command}`")
    return location
