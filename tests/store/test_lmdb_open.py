"""Opening the LMDB store: one clear error for each thing that can be wrong."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from ftlayer import __version__
from ftlayer.errors import (
    ConfigError,
    StoreDamagedError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StorePathError,
    StoreVersionError,
)
from ftlayer.vertex.store import LmdbStore
from ftlayer.vertex.store.lmdb_store import FORMAT_VERSION, check_file, read_meta

PAGE = os.sysconf("SC_PAGE_SIZE")
SIZE = 16 << 20
LARGE = random.Random(3).randbytes(60_000)
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def fill(path: Path, entries: int = 40) -> None:
    store = LmdbStore.open(path, max_store_bytes=SIZE, durability="none")
    for number in range(entries):
        with store.write(intake=True) as transaction:
            transaction.put("segments", b"%04d" % number, LARGE, append=True)
            for row in range(30):
                transaction.put("waiting", b"%04d-%04d" % (row, number), LARGE[: 20 * row])
            if number % 4 == 3:
                transaction.delete("segments", b"%04d" % (number - 2))
    store.close()


def test_a_new_store_is_private_and_counts_its_incarnations(path: Path) -> None:
    for incarnation in (1, 2, 3):
        store = LmdbStore.open(path, max_store_bytes=SIZE)
        assert store.incarnation == incarnation
        assert store.max_bytes == SIZE
        store.close()
    assert path.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o077 for file in path.iterdir()} == {0}


def test_reading_only_changes_nothing(path: Path) -> None:
    fill(path)
    before = (path / "data.mdb").read_bytes()
    store = LmdbStore.open(path, read_only=True)
    assert (store.incarnation, store.max_bytes) == (1, SIZE)
    with pytest.raises(StoreError, match="reading only"), store.write(intake=False):
        pass
    store.close()
    assert (path / "data.mdb").read_bytes() == before


def test_an_open_directory_is_made_private(path: Path) -> None:
    path.mkdir(mode=0o755)
    LmdbStore.open(path, max_store_bytes=SIZE).close()
    assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("durability", ["often", 0, -5, 2.5, None])
def test_an_unknown_durability_is_refused(path: Path, durability: object) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(durability))):
        LmdbStore.open(path, max_store_bytes=SIZE, durability=durability)  # type: ignore[arg-type]


def test_a_tiny_store_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="max_store_bytes"):
        LmdbStore.open(path, max_store_bytes=1 << 20)


def test_a_missing_parent_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorePathError, match=r"create .*/missing first"):
        LmdbStore.open(tmp_path / "missing" / "store", max_store_bytes=SIZE)
    assert not (tmp_path / "missing").exists()


def test_a_file_is_no_store(path: Path) -> None:
    path.write_text("hello")
    for read_only in (False, True):
        with pytest.raises(StorePathError, match="not a directory"):
            LmdbStore.open(path, max_store_bytes=SIZE, read_only=read_only)


def test_a_directory_of_something_else_is_left_alone(path: Path) -> None:
    path.mkdir(mode=0o755)
    (path / "thesis.txt").write_text("precious")
    with pytest.raises(StorePathError, match=r"thesis\.txt"):
        LmdbStore.open(path, max_store_bytes=SIZE)
    assert path.stat().st_mode & 0o777 == 0o755
    assert [file.name for file in path.iterdir()] == ["thesis.txt"]


def test_reading_needs_a_store(path: Path) -> None:
    with pytest.raises(StorePathError, match="does not exist"):
        LmdbStore.open(path, read_only=True)
    path.mkdir()
    with pytest.raises(StorePathError, match="no store"):
        LmdbStore.open(path, read_only=True)
    assert not list(path.iterdir())


def test_somebody_elses_lmdb_file_is_refused(path: Path) -> None:
    with lmdb.open(str(path)) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"not", b"ours")
    with pytest.raises(StorePathError, match="no ftlayer has written"):
        LmdbStore.open(path, max_store_bytes=SIZE)


def test_a_directory_that_cannot_be_written_is_named(path: Path, start_python: Start) -> None:
    path.mkdir()
    path.chmod(0o555)
    path.parent.chmod(0o755)
    child = start_python(
        """
        import os, sys
        sys.path[:0] = sys.argv[2].split(os.pathsep)
        from ftlayer.vertex.store import LmdbStore
        from ftlayer.errors import StorePathError
        if os.geteuid() == 0:  # root may write anywhere: become nobody
            directory = os.open(sys.argv[1], os.O_RDONLY)
            os.fchown(directory, 0, 0)
            os.fchdir(directory)
            os.setgid(65534); os.setuid(65534)
        else:
            os.chdir(sys.argv[1])
        try:
            LmdbStore.open(".", max_store_bytes=16 << 20)
        except StorePathError as error:
            print(error)
        """,
        path,
        os.getcwd(),
    )
    out, err = child.communicate(timeout=900)
    assert "cannot be written" in out, err
    path.chmod(0o755)


def test_a_store_that_is_held_names_the_holder(path: Path, start_python: Start) -> None:
    child = start_python(
        """
        import sys
        from ftlayer.vertex.store import LmdbStore
        store = LmdbStore.open(sys.argv[1], max_store_bytes=16 << 20)
        print("open", flush=True)
        sys.stdin.read()
        """,
        path,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    with pytest.raises(StoreLockedError, match=f"process {child.pid}"):
        LmdbStore.open(path, max_store_bytes=SIZE)
    child.kill()
    child.wait()
    store = LmdbStore.open(path, max_store_bytes=SIZE)
    assert store.incarnation == 2
    with pytest.raises(StoreLockedError, match=f"process {os.getpid()}"):
        LmdbStore.open(path, max_store_bytes=SIZE)
    store.close()


def write_header(path: Path, data: bytes) -> None:
    with lmdb.open(str(path), max_dbs=16) as environment:
        database = environment.open_db(b"header")
        with environment.begin(write=True) as transaction:
            transaction.put(b"header", data, db=database)


@pytest.mark.parametrize("number", [1, FORMAT_VERSION - 1, FORMAT_VERSION + 1])
def test_another_format_is_refused(path: Path, number: int) -> None:
    fill(path, 1)
    header = b"ftlayer\n" + number.to_bytes(4, "little") + b"whatever comes"
    write_header(path, header + zlib.crc32(header).to_bytes(4, "little"))
    way = "or a later one" if number > FORMAT_VERSION else "or move it away to begin anew"
    said = f"format {number}, written by ftlayer {__version__}; .* reads format {FORMAT_VERSION}: .* {way}"
    for read_only in (False, True):
        with pytest.raises(StoreVersionError, match=said):
            LmdbStore.open(path, max_store_bytes=SIZE, read_only=read_only)


def test_a_store_that_lacks_a_table_is_damaged(path: Path) -> None:
    fill(path, 1)
    with lmdb.open(str(path), max_dbs=20, map_size=SIZE) as environment, environment.begin(write=True) as txn:
        txn.drop(environment.open_db(b"audit", txn))
    with pytest.raises(StoreDamagedError, match="its table 'audit' is missing"):
        LmdbStore.open(path, read_only=True)


@pytest.mark.parametrize("data", [b"", b"ftlayer\n", b"ftlayer\n\x01\0\0\0", b"x" * 32])
def test_a_damaged_header_is_refused(path: Path, data: bytes) -> None:
    fill(path, 1)
    write_header(path, data)
    with pytest.raises(StoreDamagedError, match="header"):
        LmdbStore.open(path, max_store_bytes=SIZE)


def test_a_store_killed_at_birth_is_a_new_one(path: Path) -> None:
    path.mkdir()
    (path / "data.mdb").touch()
    LmdbStore.open(path, max_store_bytes=SIZE).close()
    shutil.rmtree(path)
    lmdb.open(str(path)).close()  # the two first pages, and nothing in them
    LmdbStore.open(path, max_store_bytes=SIZE).close()


@pytest.mark.parametrize("kept", [1, 100, PAGE, PAGE + 50, 2 * PAGE, 3 * PAGE, 300_000])
def test_a_truncated_file_is_refused(path: Path, kept: int) -> None:
    fill(path)
    os.truncate(path / "data.mdb", kept)
    for read_only in (False, True):
        with pytest.raises(StoreDamagedError, match="damaged"):
            LmdbStore.open(path, max_store_bytes=SIZE, read_only=read_only)


@pytest.mark.parametrize("number", [0, 1])
def test_a_garbage_header_page_is_refused(path: Path, number: int) -> None:
    fill(path)
    for garbage in (bytes(PAGE), random.Random(1).randbytes(PAGE)):
        with (path / "data.mdb").open("r+b") as file:
            file.seek(number * PAGE)
            file.write(garbage)
        with pytest.raises(StoreDamagedError, match="header"):
            LmdbStore.open(path, max_store_bytes=SIZE)


def test_a_zeroed_middle_is_refused(path: Path) -> None:
    fill(path)
    size = (path / "data.mdb").stat().st_size
    with (path / "data.mdb").open("r+b") as file:
        file.seek(2 * PAGE)
        file.write(bytes(size - 3 * PAGE))
    with pytest.raises(StoreDamagedError, match="page"):
        LmdbStore.open(path, max_store_bytes=SIZE)


def test_an_entry_with_a_flipped_bit_is_named(path: Path) -> None:
    fill(path)
    data = bytearray((path / "data.mdb").read_bytes())
    live = [match.start() for match in re.finditer(re.escape(LARGE[8_200:8_300]), data)]
    for at in live:  # copies of deleted values are among them
        data[at] ^= 1
    (path / "data.mdb").write_bytes(data)
    store = LmdbStore.open(path, max_store_bytes=SIZE)
    with store.read() as transaction:
        with pytest.raises(StoreDamagedError, match=f"{b'0000'.hex()} of table 'segments'"):
            transaction.get("segments", b"0000")
        assert bytes(transaction.get("waiting", b"0003-0000") or b"") == LARGE[:60]
    with store.write(intake=False) as transaction:  # and can be given up
        assert transaction.delete("segments", b"0000")
    store.close()


def test_no_damage_goes_unnoticed_or_crashes(path: Path, start_python: Start) -> None:
    """Overwrite pieces of the file at random and read everything, in a child since LMDB might crash."""
    fill(path)
    child = start_python(
        """
        import random, sys
        from pathlib import Path
        from ftlayer.errors import StoreDamagedError
        from ftlayer.vertex.store import LmdbStore
        path, page = Path(sys.argv[1]), int(sys.argv[2])
        good = (path / "data.mdb").read_bytes()

        def read_everything():
            store = LmdbStore.open(path, read_only=True)
            try:
                with store.read() as transaction:
                    return {(table, key): bytes(value)
                            for table in ("segments", "waiting") for key, value in transaction.scan(table)}
            finally:
                store.close()

        expected = read_everything()
        noticed = 0
        for seed in range(120):
            rng = random.Random(seed)
            bad = bytearray(good)
            at, size = rng.randrange(len(good)), rng.choice([1, 8, 512, page, 16 * page])
            if rng.random() < 0.5:
                at -= at % page
            size = min(size, len(good) - at)
            bad[at:at + size] = bytes(size) if rng.random() < 0.5 else rng.randbytes(size)
            (path / "data.mdb").write_bytes(bad)
            print(seed, at, size, file=sys.stderr)
            try:
                assert read_everything() == expected
            except StoreDamagedError:
                noticed += 1
        print("noticed", noticed)
        """,
        path,
        PAGE,
    )
    out, err = child.communicate(timeout=900)
    assert child.returncode == 0, err[-2_000:]
    assert int(out.split()[1]) > 20


def test_the_check_agrees_with_what_is_stored(path: Path) -> None:
    fill(path)
    meta = check_file(path / "data.mdb")
    file = os.open(path / "data.mdb", os.O_RDONLY)
    assert read_meta(file, path / "data.mdb") == meta
    os.close(file)
    with lmdb.open(str(path), readonly=True, lock=False, max_dbs=16) as environment:
        assert meta.page_size == environment.stat()["psize"]
        assert meta.last_page == environment.info()["last_pgno"]
        assert meta.transaction == environment.info()["last_txnid"]
        assert meta.main.entries == environment.stat()["entries"]


def test_an_address_space_limit_is_named(path: Path, start_python: Start) -> None:
    child = start_python(
        """
        import resource, sys
        from ftlayer.errors import MachineError
        from ftlayer.vertex.store import LmdbStore
        in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + (512 << 20),) * 2)
        try:
            LmdbStore.open(sys.argv[1], max_store_bytes=1 << 30)
        except MachineError as error:
            print(error)
        LmdbStore.open(sys.argv[1], max_store_bytes=64 << 20).close()
        """,
        path,
    )
    out, err = child.communicate(timeout=900)
    assert "address space" in out, err
    assert child.returncode == 0, err


FILL_DISK = """
import os, resource, sys
from ftlayer.errors import StoreFullError
from ftlayer.vertex.store import LmdbStore
path, limit = sys.argv[1], int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
store = LmdbStore.open(path, max_store_bytes=64 << 20)
value, number = os.urandom(300_000), 0
try:
    while True:
        with store.write(intake=True) as transaction:
            transaction.put("segments", b"%06d" % number, value, append=True)
        number += 1
except StoreFullError as error:
    print(error)
for doomed in range(number):  # deletes go on
    with store.write(intake=False) as transaction:
        assert transaction.delete("segments", b"%06d" % doomed)
    with store.write(intake=False) as transaction:
        transaction.put("meta", b"deleted", b"%d" % doomed)
for again in range(number // 2):
    with store.write(intake=True) as transaction:
        transaction.put("segments", b"%06d" % again, value)
store.close()
store = LmdbStore.open(path, max_store_bytes=64 << 20)
with store.read() as transaction:
    assert sum(bytes(v) == value for _, v in transaction.scan("segments")) == number // 2 > 5
print("done")
"""


def test_a_full_disk_refuses_intake_and_not_deletes(path: Path, start_python: Start) -> None:
    """A limit on the size of files fails a write as a full disk does."""
    child = start_python(FILL_DISK, path, 20 << 20)
    out, err = child.communicate(timeout=900)
    assert "disk is full" in out, err
    assert out.endswith("done\n"), err


def test_a_full_file_system_refuses_intake_and_not_deletes(tmp_path: Path, start_python: Start) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting needs root")
    try:
        child = start_python(FILL_DISK, disk / "store", 0)
        out, err = child.communicate(timeout=900)
        assert "disk is full" in out, err
        assert out.endswith("done\n"), err
        shutil.rmtree(disk / "store")
        (disk / "hog").write_bytes(bytes(20 << 20)[: os.statvfs(disk).f_bavail * PAGE])
        with pytest.raises((StorePathError, StoreFullError), match="full"):
            LmdbStore.open(disk / "store", max_store_bytes=SIZE)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
