"""A killed process loses nothing that was acknowledged, and leaves no half of anything."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ftlayer.errors import StoreError
from ftlayer.vertex.store import LmdbStore
from ftlayer.vertex.store.lmdb_store import check_file

Start = Callable[..., "subprocess.Popen[str]"]

# Each transaction appends a segment of a size and content that follow from its number, moves the one four
# before it to ``dead`` in pieces, and notes its number in ``meta``; then it is acknowledged on stdout.
WRITER = """
import sys
from ftlayer.vertex.store import LmdbStore
durability = sys.argv[2] if sys.argv[2].isalpha() else int(sys.argv[2])
store = LmdbStore.open(sys.argv[1], max_store_bytes=64 << 20, durability=durability)
with store.read() as transaction:
    number = int(bytes(transaction.get("meta", b"last") or b"0"))
while True:
    number += 1
    with store.write(intake=False) as transaction:
        content = number.to_bytes(8, "big") * (1 + number * 7919 % 20_000)
        transaction.put("segments", b"%08d" % number, content, append=True)
        old = transaction.get("segments", b"%08d" % (number - 4))
        if old is not None:
            transaction.delete("segments", b"%08d" % (number - 4))
            transaction.put("dead", b"%08d" % (number - 4), old[:100])
        if number > 40:
            transaction.delete("dead", b"%08d" % (number - 40))
        transaction.put("meta", b"last", b"%d" % number)
    print(number, flush=True)
"""


def check_content(path: Path, acknowledged: int) -> int:
    """Check that the store is what its last number says, and return that."""
    check_file(path / "data.mdb")
    store = LmdbStore.open(path, max_store_bytes=64 << 20)
    with store.read() as transaction:
        last = int(bytes(transaction.get("meta", b"last") or b"0"))
        assert last >= acknowledged
        segments = {int(key): bytes(value) for key, value in transaction.scan("segments")}
        dead = {int(key): bytes(value) for key, value in transaction.scan("dead")}
    store.close()
    alive = range(max(1, last - 3), last + 1)
    gone = range(max(1, last - 39), max(1, last - 3))
    assert segments == {n: n.to_bytes(8, "big") * (1 + n * 7919 % 20_000) for n in alive}
    assert dead == {n: (n.to_bytes(8, "big") * (1 + n * 7919 % 20_000))[:100] for n in gone}
    return last


@pytest.mark.parametrize("durability", ["batch", "1000", "none"])
def test_a_process_killed_while_it_writes_loses_nothing(
    tmp_path: Path, durability: str, start_python: Start
) -> None:
    rng = random.Random(durability)
    for _ in range(6):
        child = start_python(WRITER, tmp_path / "s", durability)
        assert child.stdout is not None
        acknowledged = 0
        for _ in range(rng.randrange(2, 120)):
            acknowledged = int(child.stdout.readline())
        # Somewhere within the next transactions: spin for up to a few of their times.
        for _ in range(rng.randrange(20_000)):
            pass
        child.kill()
        for line in child.stdout.readlines():
            if line.endswith("\n"):
                acknowledged = int(line)
        child.wait()
        assert check_content(tmp_path / "s", acknowledged) >= acknowledged


def test_each_opening_is_a_new_incarnation_also_after_a_kill(tmp_path: Path, start_python: Start) -> None:
    for incarnation in (1, 2, 3):
        child = start_python(WRITER, tmp_path / "s", "none")
        assert child.stdout is not None
        child.stdout.readline()
        child.kill()
        child.wait()
        reader = LmdbStore.open(tmp_path / "s", read_only=True)
        assert reader.incarnation == incarnation
        reader.close()


def test_a_forked_child_cannot_use_the_store_and_keeps_no_lock(tmp_path: Path) -> None:
    store = LmdbStore.open(tmp_path / "s", max_store_bytes=16 << 20)
    from_child, to_parent = os.pipe()
    from_parent, to_child = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                with store.read():
                    os.write(to_parent, b"could read")
            except StoreError as error:
                os.write(to_parent, str(error).encode())
            os.close(to_child)
            os.read(from_parent, 1)  # lives on until the parent closes its end
        finally:
            os._exit(0)
    assert b"forked child" in os.read(from_child, 1_000)
    with store.write(intake=True) as transaction:
        transaction.put("meta", b"k", b"v")
    store.close()
    again = LmdbStore.open(tmp_path / "s", max_store_bytes=16 << 20)  # though the child is alive
    again.close()
    for end in (to_child, from_parent, to_parent, from_child):
        os.close(end)
    os.waitpid(child, 0)


def test_an_interval_is_synced_on_request_and_at_close(tmp_path: Path) -> None:
    store = LmdbStore.open(tmp_path / "s", max_store_bytes=16 << 20, durability=500)
    assert store.durability == 500
    with store.write(intake=True) as transaction:
        transaction.put("meta", b"k", b"v")
    store.sync()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.sync()
