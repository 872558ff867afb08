"""Text as it may be shown: of records on a terminal, of answers, of URLs without their secrets.

A payload, a reason, a traceback, a name: the sender of records chooses them. Printed as they are, they could move the
cursor, rewrite what was printed before, or fill the clipboard.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import inspect
import json
import logging
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from types import GeneratorType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import SplitResult, quote, unquote, unquote_plus, urlsplit

from ftlayer.common.checks import check_text
from ftlayer.errors import ConfigError, FTLayerError

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)


# Categories of Unicode: controls, lone surrogates, line and paragraph separators.
_ESCAPED = ("Cc", "Cs", "Zl", "Zp")
_KEPT = "\n\t"
# They are of category Cf, as joiners are, which scripts and emoji need: these turn the direction of what follows.
_TURNS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")

_URL = re.compile(r"\s*((?:[a-z0-9]+::)*[A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)(.*)", re.DOTALL)
_HOST = r"(?:[\w.-]*|\[[0-9A-Fa-f:.]*\])(?::\d*)?"
_SERVER = re.compile(f"{_HOST}(?:,{_HOST})*")
_PATH = re.compile(r"/[\w./=-]*(?=[?#]|\Z)(?!.*@)", re.DOTALL)
_BETWEEN_URLS = re.compile(r",(?=\s*[A-Za-z][A-Za-z0-9+.-]*://)")

_TOKENS = ("http", "https", "nats", "tls")
"""Schemes in whose URLs a user without a password is a token."""
_PASSWORDS = re.compile(r"\w*(?:password|secret)\w*\s*=\s*(?:'((?:[^'\\]|\\.)*)'?|([^\s'&]+))", re.IGNORECASE)
_SECRET_NAME = re.compile(
    r"pass|secret|token|key|credential|pem|auth|jaas|sas|connection_?string|header", re.IGNORECASE
)

Class = TypeVar("Class")

LEAST_SECRET = 4
"""A shorter one would be found in words that it is no part of."""

LONGEST_ANSWER_BYTES = 1_500
r"""An error's text, in UTF-8. It travels in the headers of an answer, twice, escaped to up to three times its length:
together they have to stay below the 8 KiB that gRPC takes."""


def printable(text: str) -> str:
    r"""Return ``text`` with what a terminal would obey written as its escape (``\x1b``); lines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(char.encode("unicode_escape").decode() if _is_obeyed(char) else char for char in text)


def printable_json(value: object) -> str:
    r"""Return ``value`` as JSON on several lines; what a terminal would obey is escaped as JSON has it (``\u001b``)."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    if text.isascii() and "\x7f" not in text:
        return text
    return "".join(json.dumps(char)[1:-1] if _is_obeyed(char) else char for char in text)


class LetterWarnings:
    """When a log says that records have become dead letters: at the first one, and then once a minute at most."""

    def __init__(self) -> None:
        self._said = self._next_ms = 0

    def take(self, dead: int, now_ms: int) -> str:
        """Return what to say now, of ``dead`` letters since the program began; "" for nothing."""
        if dead <= self._said or now_ms < self._next_ms:
            return ""
        new, self._said, self._next_ms = dead - self._said, dead, now_ms + 60_000
        return letters_text(new).replace("dead", "new dead", 1)


def letters_text(count: int) -> str:
    see = ": ftlayer dead list, with --store or --checkpoints once the program has ended" if count else ""
    return f"{count:,} dead letters{see}"


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


MAX_TEXT = 1 << 16


def encodable(text: str, most: int = MAX_TEXT) -> str:
    """Return a text without lone surrogates (of undecodable file names, say), which UTF-8 cannot carry, and bounded."""
    if len(text) > most:
        half = (most - 64) // 2
        text = f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def text_of(error: BaseException, most: int = MAX_TEXT) -> str:
    """Return an exception's text, whatever its class does to hide it, as one that can be sent."""
    try:
        return encodable(str(error), most)
    except BaseException as broken:  # noqa: BLE001 - a user's exception may fail to describe itself
        return f"(its text cannot be had: {type(broken).__name__})"


def described(error: BaseException) -> str:
    """Return an exception's type and text: the text alone says nothing of a `KeyError`, or is empty."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def shown_url(url: str) -> str:
    """Return a URL, or several with commas between, without user, password, query and fragment.

    What cannot be told from a password is left out too: each form of URL that a parser refuses comes here.
    """
    return ",".join(_shown(each) for each in _BETWEEN_URLS.split(url))


def _shown(url: str) -> str:
    found = _URL.match(url)
    if url.startswith("/") and not url.startswith("//"):
        return printable(url)
    if found is None:
        return "…" if set(url) & set("@:?#=,") else printable(url)
    scheme, authority, rest = found.groups()
    if not authority and (path := _PATH.match(rest)) is not None:
        return f"{scheme}://{path[0]}"
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
    with contextlib.suppress(ValueError):
        parts = urlsplit(str(url))
        _ = parts.port
        if parts.scheme in schemes and parts.hostname:
            return parts
    raise ConfigError(f"{option}: expected {expected}, got {shown_url(whole or str(url))}")


def secrets_of(url: str, others: Iterable[str] = ()) -> list[str]:
    """Return what must not be shown of a URL or DSN, and of ``others`` (values of headers, say), the longest first."""
    found = list(others)
    found += [word for each in others for word in each.split()]  # "Bearer …"
    for each in _BETWEEN_URLS.split(url):
        scheme, _, rest = each.strip().partition("://")
        # A password may have the characters behind which parsers see a path: it ends at the last @, or the first.
        for user in {rest.rpartition("@")[0], re.split("[/?#]", rest, maxsplit=1)[0].rpartition("@")[0]}:
            name, colon, password = user.partition(":")
            if colon:
                found += [password, _basic(user), _basic(unquote(user))]
            elif scheme in _TOKENS:
                found.append(name)
        query = re.split("[?#]", rest, maxsplit=1)[1:]
        found += [part for text in query for part in re.split("[?#&=]", text)]
    found += [first or second for first, second in _PASSWORDS.findall(url)]
    found += [unquote(each) for each in found] + [unquote_plus(each) for each in found]
    found += [quote(each, safe="") for each in found] + [repr(each)[1:-1] for each in found]
    return sorted({each for each in found if len(each) >= LEAST_SECRET}, key=len, reverse=True)


def secrets_in(options: object, is_secret: bool = False) -> list[str]:
    """Return what must not be shown of options by name, within each other as a library has them."""
    if isinstance(options, str | bytes):
        text = options.decode("utf-8", "replace") if isinstance(options, bytes) else options
        return secrets_of(text, [text] if is_secret else [])
    if isinstance(options, Mapping):
        named = [(bool(_SECRET_NAME.search(str(name))), each) for name, each in options.items()]
        return [found for secret, each in named for found in secrets_in(each, is_secret or secret)]
    if isinstance(options, Sequence):
        return [found for each in options for found in secrets_in(each, is_secret)]
    return []


def _basic(user: str) -> str:
    return base64.b64encode(user.encode("utf-8", "surrogateescape")).decode()


def without_secrets(text: str, secrets: Iterable[str]) -> str:
    """Return a text with ``…`` for each secret: a server's answer may repeat what it was sent."""
    for secret in secrets:
        text = text.replace(secret, "…")
    return text


# Where errors of Python's, and of libraries, keep what they say.
_SAY = (
    *("args", "filename", "filename2", "strerror", "object", "reason", "message", "__notes__"),
    *("errors", "exceptions"),
)


def hidden(error: BaseException, secrets: Sequence[str]) -> BaseException:
    """Take secrets out of an error, its notes, and all that led to it; return it.

    Libraries quote URLs, DSNs and what a server has said, which may be what it was sent. Instead of an error that tells
    a secret in a way of its own there is another one then, with its type's name and its text.
    """
    return _hide(error, secrets, set())


def raise_from(error: BaseException, cause: BaseException, secrets: Sequence[str]) -> NoReturn:
    """Raise an error with another one as its cause, and let neither tell a secret."""
    error.__cause__ = hidden(cause, secrets)
    try:
        raise hidden(error, secrets)
    finally:
        error.__context__ = error.__cause__  # What is handled here would be it.


def _hide(error: BaseException, secrets: Sequence[str], seen: set[int]) -> BaseException:
    if id(error) in seen:
        return error
    seen.add(id(error))
    for name in _SAY:
        # What a class does to keep them is seen below.
        with contextlib.suppress(Exception):
            if isinstance(said := getattr(error, name, None), str | list | tuple | Mapping):
                setattr(error, name, _hidden_part(said, secrets, seen))
    for name in ("__cause__", "__context__"):
        if (led := getattr(error, name)) is not None:
            quiet = error.__suppress_context__
            setattr(error, name, _hide(led, secrets, seen))
            error.__suppress_context__ = quiet
    told, as_repr = text_of(error, sys.maxsize), repr(error)
    if (shown := without_secrets(told, secrets)) == told and without_secrets(as_repr, secrets) == as_repr:
        return error
    instead = FTLayerError(f"{type(error).__name__}: {shown}").with_traceback(error.__traceback__)
    instead.__cause__, instead.__context__ = error.__cause__, error.__context__
    instead.__suppress_context__ = error.__suppress_context__
    return instead


def _hidden_part(part: Any, secrets: Sequence[str], seen: set[int]) -> Any:
    if isinstance(part, str):
        return without_secrets(part, secrets)
    if isinstance(part, BaseException):
        return _hide(part, secrets, seen)
    if isinstance(part, Mapping):
        return dict(_hidden_part(tuple(part.items()), secrets, seen))
    if isinstance(part, tuple | list):
        kept = [_hidden_part(each, secrets, seen) for each in part]
        return kept if isinstance(part, list) else tuple(kept)
    said = str(part)
    return part if (shown := without_secrets(said, secrets)) == said else shown


def hides_secrets(secrets: Callable[[Any], Sequence[str]]) -> Callable[[type[Class]], type[Class]]:
    """Let no error of public methods and properties of a class, nor its repr, have one of its secrets: see `hidden`."""

    def decorated(made: type[Class]) -> type[Class]:
        if made.__repr__ is object.__repr__:
            made.__repr__ = _places  # type: ignore[method-assign]
        for name in dir(made):
            method = inspect.getattr_static(made, name)
            within = getattr(method, "fget", None) or getattr(method, "func", method)
            if not inspect.isfunction(within) or not within.__module__.startswith("ftlayer."):
                continue
            if name.startswith("_") and name != "__call__":
                continue
            quiet: Any = _hiding(within, secrets)
            if isinstance(method, property | functools.cached_property):
                quiet = type(method)(quiet)
            setattr(made, name, quiet)
            if isinstance(quiet, functools.cached_property):
                quiet.__set_name__(made, name)
        return made

    return decorated


def _places(self: object) -> str:
    """Return a source or sink with the texts that it needs: ``RedisSink(url='redis://h', stream='s')``."""
    shown = []
    for name, each in inspect.signature(type(self)).parameters.items():
        text = vars(self).get(name, vars(self).get(f"_{name}"))
        if each.default is each.empty and isinstance(text, str):
            plain = name in ("group", "listen", "queue", "servers", "stream", "topic")
            shown.append(f"{name}={text if plain else shown_url(text)!r}")
    return f"{type(self).__name__}({', '.join(shown)})"


def _hiding(method: Callable[..., Any], secrets: Callable[[Any], Sequence[str]]) -> Callable[..., Any]:
    @functools.wraps(method)
    def hiding(self: Any, *arguments: Any, **named: Any) -> Any:
        try:
            given = method(self, *arguments, **named)
            return _hiding_later(given, self, secrets) if isinstance(given, GeneratorType) else given
        except BaseException as error:
            if (instead := hidden(error, secrets(self))) is error:
                raise
        raise instead  # Out here it gets no context.

    return hiding


def _hiding_later(rows: Any, owner: Any, secrets: Callable[[Any], Sequence[str]]) -> Any:
    try:
        yield from rows
        return
    except BaseException as error:
        if (instead := hidden(error, secrets(owner))) is error:
            raise
    raise instead


def in_notebook() -> bool:
    """Whether this program runs in a kernel of Jupyter, whose output is a web page."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def tell(text: str) -> None:
    """Show a note on standard error where a person looks on, a terminal or a notebook; elsewhere log it."""
    if sys.stderr.isatty() or in_notebook():
        tell_anyway(text)
    else:
        logger.info("%s", text)


def tell_anyway(text: str) -> None:
    """Show on standard error what was asked for, as the link of a console: a file of it is read by somebody later."""
    print(printable(text), file=sys.stderr, flush=True)


class NotebookLine:
    """A line of a cell's output that is replaced by each `show`. Use it as a context."""

    def __init__(self) -> None:
        self._handle: Any = None

    def __enter__(self) -> NotebookLine:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last line where it is."""

    def show(self, text: str) -> None:
        from IPython.display import HTML, display

        line = HTML(f"<pre>{escape(printable(text))}</pre>")
        if self._handle is None:
            self._handle = display(line, display_id=True)
        else:
            self._handle.update(line)


def html_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as HTML; all text is escaped, numbers stand to the right."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div><p>{escape(printable(title))}</p>{table}</div>"


def _cell(value: object) -> str:
    if isinstance(value, int):
        return f'<td style="text-align: right">{value:,}</td>'
    return f"<td>{escape(printable(str(value)))}</td>"
