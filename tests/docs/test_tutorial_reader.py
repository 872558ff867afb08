"""What follows a tutorial sees what is wrong with its page."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def module(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    return load_module(Path(__file__).with_name("tutorial_reader.py"))


@pytest.fixture
def follow(module: ModuleType, tmp_path: Path) -> Callable[[str], int]:
    work, logs = tmp_path / "work", tmp_path / "logs"
    work.mkdir()
    logs.mkdir()
    python = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    reader = module.Reader(work, os.environ | {"PATH": python}, logs)
    return lambda page: int(reader.follow(page.replace("~~~", "```")))


def test_files_are_saved_and_commands_typed_with_the_names_of_this_run(
    follow: Callable[[str], int], tmp_path: Path
) -> None:
    page = """
A file, a command, and what it prints:

~~~csv title="letters.csv"
5f2c9ae01b7d4431,parse,"no number: 'n/a'",12s ago
~~~

~~~sh
echo first; sed "s/5f2c/77ab/; s/12s/1.5s/" letters.csv; echo last
~~~

~~~text
first
5f2c9ae01b7d4431,parse,…,12s ago
~~~

~~~sh
echo named 5f2c9ae01b7d4431
~~~
"""
    assert follow(page) == 1
    assert (tmp_path / "logs" / "2.log").read_text() == "named 77ab9ae01b7d4431\n"


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("one\ntwo\nthree", "one\nthree"),
        ("|  a|  1|", "| a| 1|"),
        ("26/11/27 19:47:22 WARN it", "26/01/02 03:04:05 WARN it"),
        ("begin\r[Stage 0:>  ]\rend", "begin\nend"),
        ("a (3 of 4) [x] $5 a.b", "a (3 of 4) [x] $5 a.b"),
        ("up 1m 20s", "up 7s"),
        ("12,370 out", "9,001 out"),
        ("aabbccdd0011 is aabbccdd0011", "0123456789ab is 0123456789ab"),
    ],
)
def test_what_is_seen(module: ModuleType, printed: str, shown: str) -> None:
    assert module.expression(shown).search(printed.replace("\r", "\n"))


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("one\ntwo", "two\none"),
        ("one and a half", "one"),
        ("3 dead", "2 dead"),
        ("axb", "a.b"),
        ("aabbccdd0011 is 0011aabbccdd", "0123456789ab is 0123456789ab"),
    ],
)
def test_what_is_not_seen(module: ModuleType, printed: str, shown: str) -> None:
    assert module.expression(shown).search(printed) is None


def test_a_command_that_fails_is_named_with_its_line(follow: Callable[[str], int]) -> None:
    with pytest.raises(AssertionError, match="line 3: exit code 3"):
        follow("A command:\n\n~~~sh\nfalse_is_not_last=1\nexit 3\n~~~\n")


def test_an_output_that_never_comes_is_named_with_its_line(follow: Callable[[str], int]) -> None:
    with pytest.raises(AssertionError, match=r"(?s)line 5: not seen\ngood bye.*hello"):
        follow("\n~~~sh\necho hello\n~~~\n~~~text\ngood bye\n~~~\n")


def test_a_program_goes_on_in_its_terminal_until_ctrl_c(follow: Callable[[str], int], tmp_path: Path) -> None:
    page = """
~~~sh title="first terminal"
trap 'echo interrupted; exit' INT
echo begun
until [ -e go ]; do sleep 0.05; done
echo gone on
while true; do sleep 0.05; done
~~~
~~~text
begun
~~~
~~~sh
touch go
~~~
~~~text title="first terminal"
gone on
~~~
~~~sh title="first terminal"
echo again
~~~
~~~text
again
~~~
"""
    assert follow(page) == 3
    assert (tmp_path / "logs" / "1.log").read_text() == "begun\ngone on\ninterrupted\n"


def test_commands_that_only_look_are_typed_again(follow: Callable[[str], int], tmp_path: Path) -> None:
    page = """
~~~py title="check.py"
from pathlib import Path

looks = Path("looks")
looks.write_text((looks.read_text() if looks.exists() else "") + ".")
print("looked", looks.stat().st_size, "times")
~~~
~~~sh
python check.py
~~~
~~~text
looked 3 times
~~~
"""
    assert follow(page) == 1
