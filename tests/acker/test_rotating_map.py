"""The hash table under growth, churn and keys chosen against it."""

from __future__ import annotations

import resource
import subprocess
import sys

import numpy as np
import pytest

from ftlayer.vertex.acker import kernels, rotating_map
from ftlayer.vertex.acker.rotating_map import RotatingHashMap

STAMP = np.uint16(1)


def longest_run(table: RotatingHashMap) -> int:
    """Of full lines: no search reads more than one line more."""
    longest = 0
    for segment in range(kernels.SEGMENTS):
        first = int(segment * table._stride)
        lines = table._arenas[0].array[8 * first : 8 * (first + int(table._lines[segment]))].reshape(-1, 8)
        not_full = np.flatnonzero(lines[:, kernels.PLACES - 1] == 0)
        gaps = np.diff(np.concatenate([not_full, not_full[:1] + len(lines)]))
        longest = max(longest, int(gaps.max()) - 1)
    return longest


def fill(table: RotatingHashMap, keys: np.ndarray, batch: int = 5000) -> None:
    for start in range(0, keys.size, batch):
        part = keys[start : start + batch]
        assert table.insert(part, ~part, part + np.uint64(1), STAMP) == 0


def check(table: RotatingHashMap, keys: np.ndarray) -> None:
    lookup = table.look_up(keys)
    assert lookup.found.all()
    assert (lookup.values == ~keys).all()
    assert (lookup.words == keys + np.uint64(1)).all()
    assert len(table) == keys.size


def adversarial(shape: str, count: int) -> np.ndarray:
    numbers = np.arange(1, count + 1, dtype=np.uint64)
    return {
        "sequential": numbers,
        "equal low bits": numbers << np.uint64(40),
        "equal low and high bits": numbers << np.uint64(20),
        "equal high bits": np.uint64(2**64 - 1) - numbers,
        "byte-swapped": numbers.byteswap(),
        "inverse of the first multiplier": numbers * np.uint64(pow(0x9E3779B97F4A7C15, -1, 2**64)),
    }[shape]


@pytest.mark.parametrize(
    "shape",
    [
        "sequential",
        "equal low bits",
        "equal low and high bits",
        "equal high bits",
        "byte-swapped",
        "inverse of the first multiplier",
    ],
)
def test_keys_that_collide_in_some_bits_spread(shape: str) -> None:
    table = RotatingHashMap()
    keys = adversarial(shape, 100_000)
    fill(table, keys)
    check(table, keys)
    assert longest_run(table) < 40


def test_every_size_while_growing_one_by_one() -> None:
    """All boundaries of growth of the first levels, with removal of every other key in between."""
    table = RotatingHashMap()
    rng = np.random.default_rng(5)
    keys = np.unique(rng.integers(1, 2**64, 6000, dtype=np.uint64))
    rng.shuffle(keys)
    for position in range(keys.size):
        one = keys[position : position + 1]
        table.insert(one, ~one, one + np.uint64(1), STAMP)
        if position % 3 == 2:
            gone = keys[position - 1 : position]
            assert table.remove(gone).values == ~gone
            table.insert(gone, ~gone, gone + np.uint64(1), STAMP)
    check(table, keys)


def test_runs_stay_short_after_the_content_was_replaced_ten_times() -> None:
    table = RotatingHashMap()
    rng = np.random.default_rng(1)
    live = np.unique(rng.integers(1, 2**64, 200_000, dtype=np.uint64))
    fill(table, live)
    fresh_run = longest_run(table)
    size = table.nbytes
    for _ in range(40):
        rng.shuffle(live)
        leaving, staying = live[: live.size // 4], live[live.size // 4 :]
        assert table.remove(leaving).found.all()
        coming = rng.integers(1, 2**64, leaving.size, dtype=np.uint64)
        fill(table, coming)
        live = np.concatenate([staying, coming])
    check(table, live)
    assert longest_run(table) <= max(2 * fresh_run, 16)
    assert table.nbytes <= 1.2 * size


def test_shrinks_after_a_peak_and_gives_memory_back() -> None:
    table = RotatingHashMap()
    # So many that what other threads of the process take meanwhile does not count.
    keys = np.arange(1, 4_000_001, dtype=np.uint64)
    fill(table, keys, 50_000)
    at_peak, resident_at_peak = table.nbytes, resident_bytes()
    table.remove(keys[5000:])
    for _ in range(2 * kernels.SEGMENTS):  # the first round forgets the peak
        table.shrink_one()
    check(table, keys[:5000])
    assert table.nbytes < at_peak / 50
    assert resident_bytes() < resident_at_peak - 0.7 * at_peak
    fill(table, keys[5000:])
    check(table, keys)


def test_a_table_that_outgrows_its_address_space_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotating_map, "RESERVED_LINES", 1 << 14)
    table = RotatingHashMap()
    keys = np.arange(1, 300_001, dtype=np.uint64)
    fill(table, keys)
    check(table, keys)
    assert table.stamped(STAMP).keys.size == keys.size
    assert table.remove(keys).found.all()
    assert len(table) == 0


def test_memory_per_key_is_bounded_at_every_size() -> None:
    table = RotatingHashMap()
    rng = np.random.default_rng(2)
    for _ in range(40):
        fill(table, rng.integers(1, 2**64, 25_000, dtype=np.uint64), 25_000)
        if len(table) > 200_000:
            assert table.nbytes / len(table) <= 48


def test_collecting_by_stamp() -> None:
    table = RotatingHashMap()
    keys = np.arange(1, 10_001, dtype=np.uint64)
    for stamp in (1, 2, 3):
        part = keys[stamp - 1 :: 3]
        table.insert(part, part, part, np.uint16(stamp))
    assert np.sort(table.stamped(np.uint16(2)).keys).tolist() == keys[1::3].tolist()
    table.restamp(keys[:100], np.uint16(9))
    assert np.sort(table.stamped(np.uint16(9)).keys).tolist() == keys[:100].tolist()
    assert table.stamped(np.uint16(4)).keys.size == 0
    table.remove(keys[:100])
    assert table.stamped(np.uint16(9)).keys.size == 0
    entries = table.entries()
    assert np.sort(entries.keys).tolist() == keys[100:].tolist()
    assert (entries.keys == entries.values).all()


def test_a_low_address_space_limit_is_lived_with_or_named() -> None:
    """Under a limit a smaller reservation is made; where not even that fits, the error says so."""
    script = (
        "import resource, sys\n"
        "from ftlayer.errors import MachineError\n"
        "from ftlayer.vertex.acker.rotating_map import RotatingHashMap\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))\n"
        "table = RotatingHashMap()\n"
        "print(int(open('/proc/self/statm').read().split()[0]) * 4096 - used >> 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (10 << 20), resource.RLIM_INFINITY))\n"
        "try:\n    RotatingHashMap()\n"
        "except MachineError as error:\n    print(error)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=900, check=True
    )
    assert int(out.stdout.splitlines()[0]) < 64  # the rest is for others: stores, the compiler of kernels
    assert "address space" in out.stdout
    assert "max_pending" in out.stdout


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
