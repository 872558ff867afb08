"""The directory of a vertex: what is in it beside the stores of the shards."""

from __future__ import annotations

import json
from pathlib import Path

from ftlayer.errors import ConfigError, StorePathError
from ftlayer.store.directory import check_no_others
from ftlayer.vertex.service.access import ACCESS_FILE, NEW_ACCESS_FILE

MODE = 0o700
DESCRIPTION = "vertex.json"
ROUTES = "routes.json"
LOG_FILE = "vertex.log"
_NEW_DESCRIPTION = "vertex.new"
# Made by mkfs: a volume that has just been mounted is as good as empty.
_LOST_AND_FOUND = "lost+found"


def prepare_vertex(path: Path) -> None:
    """Make ``path`` a private directory, or make sure that it is one of a vertex, or empty.

    Raises `StorePathError`.
    """
    try:
        path.mkdir(mode=MODE, exist_ok=True)
        if not (path / DESCRIPTION).exists():
            shards = {shard.name for shard in path.glob("shard-*")}
            own = {_NEW_DESCRIPTION, ROUTES, LOG_FILE, ACCESS_FILE, NEW_ACCESS_FILE, _LOST_AND_FOUND}
            check_no_others(path, own | shards)
    except OSError as error:
        raise _unusable(path, error) from error


def fix_shards(path: Path, shards: int) -> None:
    """Write down the number of shards of a store that is new; `ConfigError` if it has another number.

    The top bits of stored root ids name the shard, so the number cannot change. Raises `StorePathError` too.
    """
    try:
        _fix_shards(path, shards)
    except OSError as error:
        raise _unusable(path, error) from error


def _fix_shards(path: Path, shards: int) -> None:
    file = path / DESCRIPTION
    if file.exists():
        try:
            stored = int(json.loads(file.read_text("utf-8"))["shards"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file}: not a vertex's description ({error})") from error
        if stored != shards:
            raise ConfigError(
                f"shards: the store in {path} was made with shards={stored}, not {shards}, and its root ids "
                f"depend on that: open it with shards={stored}, or begin a new store"
            )
        return
    temporary = path / _NEW_DESCRIPTION
    temporary.write_text(json.dumps({"shards": shards}), "utf-8")
    temporary.rename(file)


def _unusable(path: Path, error: OSError) -> StorePathError:
    return StorePathError(f"{path}: the store's directory cannot be used: {error.strerror}")
