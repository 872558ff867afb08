"""What others put into a directory that is shared, as that for temporary files: left alone, and no hindrance."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numba
import pytest

from ftlayer.checkpoint.storage.files import LocalFiles
from ftlayer.checkpoint.storage.opening import LOCK, LocalCopies
from ftlayer.common.secret_files import read_own_secret
from ftlayer.connectors.tail import ROTATED, LocalDisk
from ftlayer.errors import ConfigError
from ftlayer.runtime.slot.black_box import FORGOTTEN_S, BlackBox, box_directory, deaths_of
from ftlayer.state.lmdb.stores import LocalDirectory
from ftlayer.transport.sockets import SocketDirectory, socket_directories
from ftlayer.vertex.acker.compiler import _warn_about_the_cache, kernel

NOBODY = 65_534
AGO = 2 * FORGOTTEN_S


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory like ``/tmp``: all may write, and remove their own."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    path.chmod(0o1777)
    yield path
    for each in path.rglob("*"):
        if each.is_dir() and not each.is_symlink():
            each.chmod(0o700)
    shutil.rmtree(path)


def as_another_user(work: Callable[[], None]) -> None:
    """Do it in a process of its own, for root as a user without rights; for others all in the test is their own."""
    pid = os.fork()
    if not pid:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            work()
        except BaseException:  # noqa: BLE001 - the process has to end here
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def plant(base: Path, prefix: str, names: tuple[str, ...], precious: Path) -> set[str]:
    """Put into ``base`` what an enemy may think of; returns the paths of what was put there."""
    (base / f"{prefix}loop").symlink_to(f"{prefix}loop")
    (base / f"{prefix}nowhere").symlink_to("/nowhere/at/all")
    (base / f"{prefix}elsewhere").symlink_to(precious)
    (base / f"{prefix}file").write_bytes(b"")
    os.mkfifo(base / f"{prefix}pipe")
    (base / os.fsdecode(b"%s\xff\xfe" % prefix.encode())).mkdir()
    for mode in (0o777, 0o755, 0o000):
        kinds: list[tuple[str, Callable[[Path], None]]] = [
            ("loop", lambda path: path.symlink_to(path.name)),
            ("link", lambda path: path.symlink_to(precious / path.name)),
            ("pipe", os.mkfifo),
            ("directory", Path.mkdir),
            ("closed", lambda path: path.touch(0o000)),
            ("huge", lambda path: (path.touch(), os.truncate(path, 1 << 40))[0]),
        ]
        for kind, make in kinds:
            directory = base / f"{prefix}{mode:o}-{kind}"
            directory.mkdir()
            for name in names:
                make(directory / name)
                os.utime(directory / name, (AGO, AGO), follow_symlinks=False)
            os.utime(directory, (AGO, AGO))
            directory.chmod(mode)
    return {str(path) for path in base.rglob("*")}


def test_no_sweep_is_stopped_by_or_takes_away_what_others_have_put_there(shared: Path) -> None:
    precious = shared / "precious"
    precious.mkdir(mode=0o777)
    precious.chmod(0o777)
    job, run = shared / "job", shared / "job" / "run-"
    for directory in (job, run):
        directory.mkdir(parents=True)
        directory.chmod(0o777)
    for name in ("lock", "new.box", LOCK):
        (precious / name).touch(0o666)
        (precious / name).chmod(0o666)
    squatted = box_directory(str(shared), "job")  # with a name as it was once, which others could know
    squatted.rename(str(squatted).rpartition("-")[0])
    planted = set[str]()
    for prefix, names in [
        ("ftlayer-state-", ("lock",)),
        ("ftlayer-boxes-", ("new.box",)),
        ("ftlayer-sockets-", ("access.json",)),
    ]:
        planted |= plant(shared, prefix, names, precious)
    planted |= plant(run, "slot-", (LOCK,), precious)

    def work() -> None:
        tempfile.tempdir = str(shared)
        LocalDirectory(str(shared)).close()
        BlackBox(box_directory(str(shared), "job"), 0, "instance", ("chain",)).close()
        assert deaths_of(str(shared), "job", ("chain",)) == ()
        copies = LocalCopies(str(shared), "job", "another", 0)
        copies.close(over=True)
        sockets = SocketDirectory.make()
        assert sockets is not None
        assert sockets.path.startswith(str(shared))
        assert Path(sockets.path) in socket_directories()
        sockets.remove()

    as_another_user(work)
    for each in shared.rglob("*"):
        if each.is_dir() and not each.is_symlink():
            each.chmod(0o700)
    assert {path.name for path in precious.iterdir()} == {"lock", "new.box", LOCK}
    if os.geteuid() == 0:  # else all of it is this user's own
        left = {str(path) for path in shared.rglob("*")}
        assert planted <= left
        assert stat.S_ISFIFO(os.lstat(shared / "ftlayer-state-pipe").st_mode)


def test_no_link_or_pipe_stops_who_reads_a_directory(tmp_path: Path) -> None:
    (tmp_path / "app.log").write_text("a\n")
    (tmp_path / "app.log.1").symlink_to("app.log.1")
    (tmp_path / "app.log.2").symlink_to("/nowhere")
    os.mkfifo(tmp_path / "app.log.3")
    disk = LocalDisk([str(tmp_path / "app.log")], ROTATED)
    assert [seen.path for seen in disk.files([])] == [str(tmp_path / "app.log")]
    os.mkfifo(tmp_path / "_metadata")
    assert [entry.path for entry in LocalFiles(str(tmp_path)).walk()] == ["app.log"]
    with pytest.raises(ConfigError, match="not a file of yours"):
        read_own_secret(tmp_path / "_metadata", "access file")


def kernel_of(number: int) -> int:
    return number * 2


@pytest.mark.parametrize("how", ["closed", "cut", "loop", "pipe", "others"])
def test_a_cache_that_is_of_no_use_is_no_hindrance(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert kernel(kernel_of)(21) == 42
    (index,) = tmp_path.glob("*/*.nbi")
    content = index.read_bytes()
    if how == "cut":
        index.write_bytes(content[:20])
    elif how in ("loop", "pipe"):
        index.unlink()
        index.symlink_to(index) if how == "loop" else os.mkfifo(index)
    if how in ("others", "pipe"):
        index.parent.chmod(0o777)
    if how == "closed":
        index.unlink()
        index.mkdir()
    _warn_about_the_cache.cache_clear()
    with pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR"):
        assert kernel(kernel_of)(21) == 42
    if how in ("cut", "loop"):
        assert len(index.read_bytes()) == len(content)  # and is of use again
