"""Which file system a directory is on."""

from __future__ import annotations

from ftlayer.checkpoint.storage.files import Files
from ftlayer.checkpoint.storage.layout import is_local
from ftlayer.checkpoint.storage.local_files import LocalFiles
from ftlayer.checkpoint.storage.remote_files import open_remote


def open_files(url: str) -> Files:
    """Return the directory at ``url``, which need not be there. `ConfigError` for an unreadable URL."""
    return LocalFiles(url) if is_local(url) else open_remote(url)
