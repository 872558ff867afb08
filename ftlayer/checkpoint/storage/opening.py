"""Where driver and slots get their storage."""

from __future__ import annotations

from dataclasses import replace

from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.storage.contract import DriverStorage, SlotStorage
from ftlayer.checkpoint.storage.driver import FileDriverStorage, MemoryDriverStorage
from ftlayer.checkpoint.storage.keys import key_of as key_of
from ftlayer.checkpoint.storage.keys import storage_key as storage_key
from ftlayer.checkpoint.storage.layout import is_local, normal
from ftlayer.checkpoint.storage.layout import new_savepoint as new_savepoint
from ftlayer.checkpoint.storage.layout import pieces_directory as pieces_directory
from ftlayer.checkpoint.storage.loading import load_checkpoint as load_checkpoint
from ftlayer.checkpoint.storage.memory import MemorySlotStorage
from ftlayer.checkpoint.storage.slot import FileSlotStorage, WriterName
from ftlayer.errors import ConfigError


def absolute(config: CheckpointConfig) -> CheckpointConfig:
    """Return the options with absolute paths: slots have another working directory than the driver.

    To be called in the driver, before the options go anywhere.
    """
    return replace(
        config,
        directory=None if config.directory is None else normal(config.directory),
        savepoint_directory=None
        if config.savepoint_directory is None
        else normal(config.savepoint_directory),
    )


def slot_storage(
    config: CheckpointConfig, job: str, run: str, slot: int, epoch: int, instance: str, key: bytes
) -> SlotStorage:
    """Return the storage of one slot instance.

    Args:
        config: the options, with absolute paths (`absolute`).
        job: name of the topology.
        run: unique name of this execution; it is part of the path.
        slot, epoch, instance: who writes; they are part of the names of its files.
        key: `storage_key`, as the driver got it.

    Raises `ConfigError` for a URL that fsspec does not know, or a relative path.
    """
    seat = WriterName(slot, epoch, instance)
    if config.directory is None:
        return MemorySlotStorage(config, seat, key)
    if is_local(config.directory) and normal(config.directory) != config.directory:
        raise ConfigError(
            f"directory: {config.directory!r} means another place in each process; expected an absolute path"
        )
    return FileSlotStorage(config, job, run, seat, key)


def driver_storage(config: CheckpointConfig, job: str, run: str, key: bytes) -> DriverStorage:
    """Return the storage as the driver of one execution sees it; arguments as `slot_storage`."""
    if config.directory is None:
        return MemoryDriverStorage(config, job, key)
    return FileDriverStorage(config, job, run, key)
