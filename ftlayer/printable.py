"""Text as it may be shown: of records on a terminal, of answers, of URLs without their secrets.

A payload, a reason, a traceback, a name: the sender of records chooses them. Printed as they are, they could move the
cursor, rewrite what was printed before, or fill the clipboard.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from ftlayer.checks import check_text
from ftlayer.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

# Categories of Unicode: controls, lone surrogates, line and paragraph separators.
_ESCAPED = ("Cc", "Cs", "Zl", "Zp")
_KEPT = "\n\t"
# They are of category Cf, as joiners are, which scripts and emoji need: these turn the direction of what follows.
_TURNS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")

_URL = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)(.*)", re.DOTALL)
_SERVER = re.compile(r"(?:[\w.-]*|\[[0-9A-Fa-f:.]*\])(?::\d*)?")
_BETWEEN_URLS = re.compile(r",(?=\s*[A-Za-z][A-Za-z0-9+.-]*://)")

LEAST_SECRET = 4
"""A shorter one would be found in words that it is no part of."""

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


# ---------------------------------------------------------------- URLs


def shown_url(url: str) -> str:
    """Return a URL, or several with commas between, without user, password, query and fragment.

    What cannot be told from a password is left out too: each form of URL that a parser refuses comes here.
    """
    return ",".join(_shown(each) for each in _BETWEEN_URLS.split(url))


def _shown(url: str) -> str:
    found = _URL.match(url)
    if found is None:
        return "…" if set(url) & set("@:?#=,") else printable(url)
    scheme, authority, rest = found.groups()
    server = authority.rpartition("@")[2]
    # An @ further on may end a password that has a slash or a question mark.
    if "@" in rest or not server or not _SERVER.fullmatch(server):
        return f"{scheme}://…"
    return printable(f"{scheme}://{server}{re.split('[?#]', rest, maxsplit=1)[0]}")


def url_parts(
    url: object, option: str, expected: str, schemes: Sequence[str], whole: str | None = None
) -> SplitResult:
    """Return the parts of a URL of one of these schemes. Raises `ConfigError`, which shows no secret of it.

    ``whole``: the text that it is a piece of; a piece alone may be one of a password.
    No other error is its cause or context: those of parsers quote what they were given.
    """
    check_text(url, option, expected)
    parts = _split(str(url))
    if parts is None or parts.scheme not in schemes or not parts.hostname:
        raise ConfigError(f"{option}: expected {expected}, got {shown_url(whole or str(url))}")
    return parts


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    return parts


def secrets_of(url: str, others: Iterable[str] = ()) -> list[str]:
    """Return what must not be shown of a URL, and of ``others`` (values of headers, say), the longest first."""
    parts = urlsplit(url)
    query = [value for _, value in parse_qsl(parts.query)]
    found = [parts.password or "", *query, *re.split(r"[&=]", parts.query), *others]
    found += [word for each in others for word in each.split()]  # "Bearer …"
    found += [unquote(each) for each in found]
    return sorted({each for each in found if len(each) >= LEAST_SECRET}, key=len, reverse=True)


def without_secrets(text: str, secrets: Iterable[str]) -> str:
    """Return a text with ``…`` for each secret: a server's answer may repeat what it was sent."""
    for secret in secrets:
        text = text.replace(secret, "…")
    return text
