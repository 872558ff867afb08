"""Keys that are pressed in a terminal, one by one, without waiting for a line."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum


class Key(StrEnum):
    """A key that means something."""

    UP = "up"
    DOWN = "down"
    ENTER = "enter"
    BACK = "back"
    QUIT = "quit"


_KEYS = {
    b"\x1b[A": Key.UP,
    b"\x1bOA": Key.UP,
    b"k": Key.UP,
    b"\x1b[B": Key.DOWN,
    b"\x1bOB": Key.DOWN,
    b"j": Key.DOWN,
    b"\r": Key.ENTER,
    b"\n": Key.ENTER,
    b"\x1b[C": Key.ENTER,
    b"\x1b": Key.BACK,
    b"\x7f": Key.BACK,
    b"\x1b[D": Key.BACK,
    b"q": Key.QUIT,
}
_READ = 64


@contextmanager
def pressed_keys() -> Iterator[int | None]:
    """Give the terminal to read keys from by `next_key`; None where standard input is none. Put it back at the end."""
    if not sys.stdin.isatty():
        yield None
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield terminal
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def next_key(terminal: int, timeout_s: float) -> Key | None:
    """Return the next key that means something; None if none was pressed in time, or another."""
    readable, _, _ = select.select([terminal], [], [], max(timeout_s, 0))
    return key_of(os.read(terminal, _READ)) if readable else None


def key_of(sent: bytes) -> Key | None:
    """Return which key a terminal has sent, None for one that means nothing; of several pressed at once, the first."""
    if sent in _KEYS or sent.startswith(b"\x1b"):
        return _KEYS.get(sent) or _KEYS.get(sent[:3])
    return _KEYS.get(sent[:1])
