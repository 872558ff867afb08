"""The LMDB store near its limit: it counts right, can always be emptied, and its file keeps to the cap."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path

import pytest

from ftlayer.errors import StoreFullError
from ftlayer.vertex.store import INTAKE_SHARE, LmdbStore

ROWS = 8_192
ROW_BYTES = 100
SAFE_DELETES = 8  # of a store of 8 MiB: see ftlayer/vertex/store/lmdb_store.py


def key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def test_used_bytes_follow_the_data(tmp_path: Path) -> None:
    store = LmdbStore.open(tmp_path / "s", max_store_bytes=64 << 20, durability="none")
    empty = store.used_bytes
    value = bytes(ROWS * ROW_BYTES)
    for number in range(20):
        with store.write(intake=True) as transaction:
            transaction.put("segments", key(number), value, append=True)
    filled = store.used_bytes
    assert 1.0 <= (filled - empty) / (20 * len(value)) < 1.02
    for number in range(20):
        with store.write(intake=False) as transaction:
            transaction.delete("segments", key(number))
    assert store.used_bytes - empty < 40 * 4_096  # the list of free pages
    store.close()
    reopened = LmdbStore.open(tmp_path / "s", max_store_bytes=64 << 20)
    assert abs(reopened.used_bytes - store.used_bytes) < 10 * 4_096
    reopened.close()


def fill_to_refusal(store: LmdbStore, rng: random.Random, live: set[tuple[str, int]], first: int) -> int:
    """Put large and small values until intake is refused; return the next free number."""
    number = first
    while True:
        size = rng.choice([50, 300, 2_500, 5_000, 60_000, 400_000])
        table = "segments" if size > 10_000 else "waiting"
        try:
            with store.write(intake=True) as transaction:
                transaction.put(table, key(number), rng.randbytes(16) * (size // 16))
        except StoreFullError:
            return number
        live.add((table, number))
        number += 1


@pytest.mark.parametrize("seed", range(12))
def test_a_store_filled_to_refusal_can_be_emptied_in_any_order(tmp_path: Path, seed: int) -> None:
    """Free pages end up scattered here, so that a run of neighbours is hard to find."""
    rng = random.Random(seed)
    store = LmdbStore.open(tmp_path / "s", max_store_bytes=8 << 20, durability="none")
    live: set[tuple[str, int]] = set()
    number = 0
    for _ in range(4):
        number = fill_to_refusal(store, rng, live, number)
        # Moves use what intake may not, up to where only deletes go on.
        try:
            while True:
                with store.write(intake=False) as transaction:
                    transaction.put("dead", key(number), rng.randbytes(3_000))
                live.add(("dead", number))
                number += 1
        except StoreFullError:
            pass
        assert store.used_share > 0.94
        keep = rng.choice([0.0, 0.3, 0.7])
        doomed = [entry for entry in sorted(live) if rng.random() >= keep]
        rng.shuffle(doomed)
        while doomed:
            batch = [doomed.pop() for _ in range(min(len(doomed), rng.randint(1, SAFE_DELETES)))]
            with store.write(intake=False) as transaction:
                for table, at in batch:
                    assert transaction.delete(table, key(at))
            live.difference_update(batch)
    for table, at in sorted(live):
        with store.write(intake=False) as transaction:
            transaction.delete(table, key(at))
    assert store.used_share < 0.05
    assert store.file_bytes <= 8 << 20
    # And all of it can be used again, though it was cut into pieces of every size.
    value = bytes(700_000)
    for again in range(int(store.max_bytes * (INTAKE_SHARE - 0.05)) // len(value)):
        with store.write(intake=True) as transaction:
            transaction.put("segments", key(number + again), value)
    store.close()


def test_one_transaction_can_delete_everything(tmp_path: Path) -> None:
    store = LmdbStore.open(tmp_path / "s", max_store_bytes=32 << 20, durability="none")
    live: set[tuple[str, int]] = set()
    fill_to_refusal(store, random.Random(1), live, 0)
    with store.write(intake=False) as transaction:
        for table, at in live:
            transaction.delete(table, key(at))
    assert store.used_share < 0.05
    store.close()


def test_a_store_larger_than_its_new_limit_opens_and_can_be_emptied(tmp_path: Path) -> None:
    store = LmdbStore.open(tmp_path / "s", max_store_bytes=16 << 20, durability="none")
    live: set[tuple[str, int]] = set()
    fill_to_refusal(store, random.Random(2), live, 0)
    store.close()
    store = LmdbStore.open(tmp_path / "s", max_store_bytes=8 << 20, durability="none")
    assert store.used_share > 1
    with pytest.raises(StoreFullError, match="8388608"), store.write(intake=True):
        pass
    for table, at in sorted(live):
        with store.write(intake=False) as transaction:
            transaction.delete(table, key(at))
    with store.write(intake=True) as transaction:
        transaction.put("segments", b"k", b"v")
    store.close()


def run_steady_load(path: Path, *, segments: int, max_bytes: int) -> None:
    """Store segments, complete them while 40 % of the store is behind, move 1 % of the rows to ``waiting``.

    The moved rows are deleted four segments' time after they would have been replayed.
    """
    store = LmdbStore.open(path, max_store_bytes=max_bytes, durability="none")
    payload = random.Random(7).randbytes(ROWS * ROW_BYTES)
    depth = int(max_bytes * 0.4) // len(payload)
    behind: deque[int] = deque()
    waiting: deque[list[bytes]] = deque()
    rng = random.Random(11)
    for number in range(segments):
        with store.write(intake=True) as transaction:
            transaction.put("segments", key(number), payload, append=True)
        behind.append(number)
        if len(behind) > depth:
            # Segments complete out of order.
            swap = rng.randrange(min(4, len(behind)))
            behind[0], behind[swap] = behind[swap], behind[0]
            moved = [key(rng.getrandbits(40)) + key(row) for row in range(ROWS // 100)]
            with store.write(intake=False) as transaction:
                for name in moved:
                    transaction.put("waiting", name, payload[: ROW_BYTES * 3])
                transaction.delete("segments", key(behind.popleft()))
            waiting.append(moved)
        if len(waiting) > depth + 4:
            with store.write(intake=False) as transaction:
                for name in waiting.popleft():
                    assert transaction.delete("waiting", name)
    assert store.file_bytes <= max_bytes
    assert store.used_share < 0.6
    with store.read() as reading:
        assert reading.count("segments") == len(behind)
        assert reading.count("waiting") == sum(map(len, waiting))
    store.close()
    assert (path / "data.mdb").stat().st_size <= max_bytes


def test_a_million_records_pass_through_a_small_store(tmp_path: Path) -> None:
    run_steady_load(tmp_path / "s", segments=1_000_000 // ROWS + 1, max_bytes=16 << 20)


@pytest.mark.soak
def test_twenty_million_records_pass_through_256_mib(tmp_path: Path) -> None:
    run_steady_load(tmp_path / "s", segments=20_000_000 // ROWS + 1, max_bytes=256 << 20)
