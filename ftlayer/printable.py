"""Text of records as a terminal may have it, and as long as an answer may be.

A payload, a reason, a traceback, a name: the sender of records chooses them. Printed as they are, they could move the
cursor, rewrite what was printed before, or fill the clipboard.
"""

from __future__ import annotations

import json
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# Categories of Unicode: controls, lone surrogates, line and paragraph separators.
_ESCAPED = ("Cc", "Cs", "Zl", "Zp")
_KEPT = "\n\t"
# They are of category Cf, as joiners are, which scripts and emoji need: these turn the direction of what follows.
_TURNS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")

LONGEST_ANSWER_BYTES = 1_500
r"""An error's text, in UTF-8. It travels in the headers of an answer, twice, escaped to up to three times its length:
together they have to stay below the 8 KiB that gRPC takes."""


def printable(text: str) -> str:
    r"""Return ``text`` with what a terminal would obey written as its escape (``\x1b``); lines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(_escaped(char) if _is_obeyed(char) else char for char in text)


def printable_json(value: object) -> str:
    r"""Return ``value`` as JSON on several lines; what a terminal would obey is escaped as JSON has it (``\u001b``)."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    if text.isascii() and "\x7f" not in text:
        return text
    return "".join(_escaped_for_json(char) if _is_obeyed(char) else char for char in text)


def shortened(text: str, most_bytes: int = LONGEST_ANSWER_BYTES) -> str:
    """Return ``text``, its middle left out where it has more than ``most_bytes`` in UTF-8; says how much."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= most_bytes:
        return data.decode()
    note = f" … {len(data) - most_bytes:,} bytes more … "
    room = most_bytes - len(note.encode())
    head, tail = data[: room - room // 4], data[-(room // 4) :]
    return head.decode("utf-8", "ignore") + note + tail.decode("utf-8", "ignore")


def printing_console() -> Console:
    """Return a console for standard output that prints all text as `printable`, and takes no brackets as markup."""
    from rich.console import Console
    from rich.text import Text

    class PrintingConsole(Console):
        def render_str(self, text: str, **options: object) -> Text:
            return super().render_str(printable(text), **options)  # type: ignore[arg-type]

    return PrintingConsole(markup=False, highlight=False)


def _is_obeyed(char: str) -> bool:
    return char not in _KEPT and (char in _TURNS or unicodedata.category(char) in _ESCAPED)


def _escaped_for_json(char: str) -> str:
    return json.dumps(char)[1:-1]


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()


def text_of(error: BaseException) -> str:
    """Return an exception's text, whatever its class does to hide it."""
    try:
        return str(error)
    except BaseException as broken:  # noqa: BLE001 - a user's exception may fail to describe itself
        return f"(its text cannot be had: {type(broken).__name__})"
