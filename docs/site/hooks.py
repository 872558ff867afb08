"""What the pages say for GitHub, in the words of Python-Markdown."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Name the language of a fragment alone, and show ``\\|`` in the code of a table as the bar that it stands for."""
    markdown = re.sub(r"^```python fragment$", "```python", markdown, flags=re.MULTILINE)
    return re.sub(r"^\|.*$", lambda row: _bars(row[0]), markdown, flags=re.MULTILINE)


def _bars(row: str) -> str:
    return re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row)
