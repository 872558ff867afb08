"""Follows a tutorial as its reader does: saves its files, types its commands, and looks for what it shows.

The blocks of a page are taken in order, all in one directory:

- a block with ``title="name.ext"`` is a file: it is saved, in place of an earlier one of that name;
- ``sh`` is typed in a terminal of its own and has to succeed; commands that only look are typed again until they show
  what the page does;
- ``sh title="first terminal"`` is typed in a terminal where it goes on running; Ctrl-C ends what ran there before;
- ``text`` is what the block above has printed, ``text title="first terminal"`` what is printed there by now: the lines
  of the block, in this order. ``…`` stands for anything within a line, and as a line for lines that were left out.

Spaces, times, durations and counts above a thousand (``12,370``) may be others than on the page. So may names that a
run draws (keys, directories of checkpoints): hexadecimal numbers of 6 digits or more. Commands further down are typed
with those of this run.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

WAIT_S = 300.0
POLL_S = 0.1
LOOKS = (
    "ftlayer jobs",
    "ftlayer pending",
    "ftlayer dead group",
    "ftlayer dead list",
    "ftlayer dead show",
    "ftlayer checkpoints list",
    "python check.py",
)
"""How commands begin that change nothing."""
DRAWN = r"\b(?=[0-9a-f]*[0-9])[0-9a-f]{6,}\b"
VARIES = re.compile(
    rf"(?P<gap>…)|(?P<drawn>{DRAWN})|(?P<space>\s+)"
    r"|(?P<time>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?|\d\d/\d\d/\d\d \d\d:\d\d:\d\d|\d\d:\d\d:\d\d(?:\.\d+)?)"
    r"|(?P<count>\b\d{1,3}(?:,\d{3})+\b)"
    r"|(?P<duration>\b\d[\d.,]* ?(?:ms|s|m|min|h)\b(?: ?\d+ ?(?:ms|s|m)\b)*)"
)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a page: its language, its title, what is in it, and the line it begins at."""

    language: str
    title: str
    text: str
    line: int


def blocks_of(page: str) -> Iterator[Block]:
    """Yield the blocks of a page that a reader does something with."""
    for found in re.finditer(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```$', page, re.DOTALL | re.MULTILINE):
        yield Block(found[1], found[2] or "", found[3], page.count("\n", 0, found.start()) + 1)


class Terminal:
    """A shell's command, and all that it prints."""

    def __init__(self, command: str, directory: Path, environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        self._seen = 0
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                ["bash", "-e", "-c", command],
                cwd=directory,
                # At a terminal a line is seen at once; in a file it would be when its buffer is full.
                env={**environment, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> int:
        """Return its exit code, when it has one."""
        return self._process.wait(WAIT_S)

    def output(self) -> str:
        """Return all that was printed; of a line that was drawn anew, all drawings."""
        return self._log.read_text("utf-8", "replace").replace("\r", "\n")

    def see(self, shown: str) -> dict[str, str] | None:
        """Return the drawn names by those on the page, once ``shown`` is there behind what was seen before."""
        found = expression(shown).search(self.output(), self._seen)
        if found is None:
            return None
        self._seen = found.end()
        drawn = [token[0] for token in VARIES.finditer(shown) if token["drawn"]]
        return dict(zip(dict.fromkeys(drawn), found.groups(), strict=True))

    def shows(self, shown: str) -> bool:
        """Whether ``shown`` is there behind what was seen before."""
        return expression(shown).search(self.output(), self._seen) is not None

    def wait_for(self, seconds: float) -> bool:
        """Wait for its end, so long at most; returns whether it has ended."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> None:
        """Press Ctrl-C, which all processes of a terminal get, unless it has ended."""
        if not self.wait_for(0):
            os.killpg(self._process.pid, signal.SIGINT)
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                raise


def expression(shown: str) -> re.Pattern[str]:
    """Return what finds a block of text in an output: its lines, whole and in order, with others in between."""
    lines = [line.strip() for line in shown.splitlines() if line.strip() not in ("", "…")]
    drawn: list[str] = []
    patterns = [_line(line, drawn) for line in lines]
    return re.compile(r"\n(?:.*\n)*?".join(rf"[ \t]*{pattern}[ \t]*$" for pattern in patterns), re.MULTILINE)


def _line(line: str, drawn: list[str]) -> str:
    pattern, end = "", 0
    for token in VARIES.finditer(line):
        pattern += re.escape(line[end : token.start()])
        end = token.end()
        if token["gap"]:
            pattern += ".*"
        elif token["space"]:
            pattern += "[ \t]+"
        elif token["time"]:
            pattern += r"[\d:/T .-]+\d"
        elif token["duration"]:
            pattern += r"\d[\d.,]*[ \w]*?"
        elif token["count"]:
            pattern += r"\d[\d,]*"
        elif token[0] in drawn:
            pattern += rf"\{drawn.index(token[0]) + 1}"
        else:
            drawn.append(token[0])
            pattern += r"([0-9a-f]{6,})"
    return pattern + re.escape(line[end:])


class Reader:
    """Follows one page in an empty ``directory``; ``logs`` is where terminals are kept."""

    def __init__(self, directory: Path, environment: Mapping[str, str], logs: Path) -> None:
        self._directory = directory
        self._environment = environment
        self._logs = logs
        self._terminals: dict[str, Terminal] = {}
        self._latest: Terminal | None = None
        self._drawn: dict[str, str] = {}
        self._typed = 0

    def follow(self, page: str) -> int:
        """Do all that a page says; returns how many of its outputs were seen. Raises `AssertionError`."""
        seen = 0
        blocks = [*blocks_of(page), Block("", "", "", 0)]
        try:
            for block, following in pairwise(blocks):
                is_shown = following.language == "text" and not following.title
                if block.language == "text" and block.title:
                    self._see(block, self._terminals[block.title])
                elif block.language == "text":
                    assert self._latest is not None, f"line {block.line}: nothing was typed"
                    self._see(block, self._latest)
                elif block.language == "sh" and block.title:
                    self._start(block)
                elif block.language == "sh" and is_shown and _only_looks(block.text):
                    self._look(block, following)
                elif block.language == "sh":
                    self._type(block)
                elif block.title:
                    (self._directory / block.title).write_text(block.text)
                seen += block.language == "text"
        finally:
            for terminal in reversed(self._terminals.values()):
                terminal.end()
        return seen

    def _open(self, block: Block) -> Terminal:
        """Type a block's commands, with the names of this run."""
        command = block.text
        for shown, drawn in self._drawn.items():
            command = command.replace(shown, drawn)
        self._typed += 1
        self._latest = Terminal(
            command, self._directory, self._environment, self._logs / f"{self._typed}.log"
        )
        return self._latest

    def _start(self, block: Block) -> None:
        """Type commands in a terminal where they go on; what runs there is ended first."""
        if block.title in self._terminals:
            self._terminals[block.title].end()
        self._terminals[block.title] = self._open(block)

    def _type(self, block: Block) -> None:
        """Type commands that have to succeed."""
        terminal = self._open(block)
        code = terminal.wait()
        assert code == 0, f"line {block.line}: exit code {code}\n{block.text}\n{terminal.output()}"

    def _look(self, block: Block, shown: Block) -> None:
        """Type commands that change nothing, until they succeed and show what the page does."""
        until = time.monotonic() + WAIT_S
        while (terminal := self._open(block)).wait() != 0 or not terminal.shows(shown.text):
            missing = f"line {shown.line}: not seen\n{shown.text}\nin what was printed\n{terminal.output()}"
            assert time.monotonic() < until, missing

    def _see(self, block: Block, terminal: Terminal) -> None:
        """Wait until a terminal shows what the page does."""
        until = time.monotonic() + WAIT_S
        is_over = False
        while (drawn := terminal.see(block.text)) is None:
            missing = f"line {block.line}: not seen\n{block.text}\nin what was printed\n{terminal.output()}"
            assert not is_over, missing
            assert time.monotonic() < until, missing
            is_over = terminal.wait_for(POLL_S)
        self._drawn |= drawn


def _only_looks(commands: str) -> bool:
    return all(line.startswith(LOOKS) for line in commands.splitlines())
