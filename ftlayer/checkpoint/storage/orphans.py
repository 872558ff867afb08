"""Which files of a run are unreferenced for good. Rules alone: no I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from ftlayer.checkpoint.storage.layout import METADATA, SHARED, checkpoint_number, parse_file_name

IsAlive = Callable[[str], bool]


def is_settled(path: str, latest: int) -> bool:
    """Whether no checkpoint that is still under way can refer to a shared file that none refers to now.

    ``latest``: the last completed checkpoint; all that began before it are complete or given up. The file may have
    got pieces for checkpoints up to the one in its name.
    """
    name = parse_file_name(path.rpartition("/")[2])
    return name is not None and 0 < name.last <= latest


def is_bound(path: str, checkpoint: int) -> bool:
    """Whether a shared file got pieces for this checkpoint alone."""
    name = parse_file_name(path.rpartition("/")[2])
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
    number = checkpoint_number(directory)
    name = parse_file_name(file)
    if directory == SHARED:
        # Files of others than slots are left alone.
        return name is not None and (name.last <= latest or not is_alive(name.instance))
    if number is None:
        return False
    if file == METADATA:
        return number not in completed and number <= latest
    if name is None:
        # A metadata file that was being written is the driver's own.
        return file.startswith(".") and number <= latest
    return number <= latest or not is_alive(name.instance)
