"""Displays for people: in a notebook one line that changes and small tables; short notes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from ftlayer.common.printable import printable

logger = logging.getLogger(__name__)


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
