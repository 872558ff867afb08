"""What the pages say for GitHub, in the words of Python-Markdown; the notebook as a page."""

from __future__ import annotations

import json
import re
from typing import Any

NOTEBOOK = "tutorials/notebook"


def on_files(files: Any, config: Any) -> Any:
    """Add the notebook as a page beside itself."""
    from mkdocs.structure.files import File

    notebook = files.get_file_from_path(f"{NOTEBOOK}.ipynb")
    page = page_of(json.loads(notebook.content_string))
    files.append(File.generated(config, f"{NOTEBOOK}.md", content=page))
    return files


def page_of(notebook: dict[str, Any]) -> str:
    """Return a notebook as Markdown: its texts, its cells as blocks, and what each has shown."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [_shown(output) for output in cell.get("outputs", ())]
    return "\n\n".join(parts) + "\n"


def _shown(output: dict[str, Any]) -> str:
    data = output.get("data", {"text/plain": output.get("text", ())})
    html = "".join(data.get("text/html", ()))
    return html or f"```text\n{''.join(data['text/plain']).rstrip()}\n```"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Name a fragment's language alone, lead to the notebook's page, and show ``\\|`` in a table's code as a bar."""
    markdown = markdown.replace(f"{NOTEBOOK}.ipynb)", f"{NOTEBOOK}.md)")
    markdown = re.sub(r"^```python fragment$", "```python", markdown, flags=re.MULTILINE)
    return re.sub(r"^\|.*$", lambda row: _bars(row[0]), markdown, flags=re.MULTILINE)


def _bars(row: str) -> str:
    return re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row)
