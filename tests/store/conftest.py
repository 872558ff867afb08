from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftlayer.vertex.store import KeyValueStore, LmdbStore, MemoryStore

StoreFactory = Callable[[int], KeyValueStore]


@pytest.fixture(params=["memory", "lmdb"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreFactory]:
    """Make empty stores of a given size, which are closed after the test."""
    stores: list[KeyValueStore] = []

    def make(max_bytes: int) -> KeyValueStore:
        if request.param == "memory":
            store: KeyValueStore = MemoryStore(max_bytes)
        else:
            # Synced commits are tested where durability is; here they would only be slow.
            path = tmp_path / f"store-{len(stores)}"
            store = LmdbStore.open(path, max_store_bytes=max_bytes, durability="none")
        stores.append(store)
        return store

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def store(make_store: StoreFactory) -> KeyValueStore:
    return make_store(16 << 20)


@pytest.fixture
def start_python() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a child process that runs a piece of Python; killed after the test."""
    children: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-u", "-c", textwrap.dedent(code), *map(str, arguments)]
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()
