"""What the site of the docs is made of: each page has its place, and pictures are what their script draws."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def pictures(load_module: Any) -> Any:
    return load_module(DOCS / "site" / "pictures.py")


@pytest.fixture(scope="module")
def hooks(load_module: Any) -> Any:
    return load_module(DOCS / "site" / "hooks.py")


def test_every_page_has_its_place() -> None:
    nav = (DOCS / "site" / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    placed = re.findall(r"- (?:.*: )?([\w./-]+\.md)$", nav, re.MULTILINE)
    notebooks = [page.with_suffix(".md") for page in DOCS.rglob("*.ipynb")]
    pages = [*DOCS.rglob("*.md"), *notebooks]
    assert sorted(placed) == sorted(str(page.relative_to(DOCS)) for page in pages)


def test_a_picture_is_what_its_script_draws(pictures: Any) -> None:
    assert len(pictures.PICTURES) >= 4
    for name, draw in pictures.PICTURES.items():
        path = DOCS / "images" / f"{name}.svg"
        assert path.read_text("utf-8") == draw().svg(), "run python docs/site/pictures.py"


def test_a_fragment_and_a_bar_in_code_are_said_as_the_site_wants_them(hooks: Any) -> None:
    page = "| `a\\|b` | or \\| |\n\n`a\\|b`\n\n```python fragment\nx\n```\n"
    assert hooks.on_page_markdown(page) == "| `a|b` | or \\| |\n\n`a\\|b`\n\n```python\nx\n```\n"


def test_a_notebook_is_a_page_of_its_texts_its_cells_and_what_they_have_shown(hooks: Any) -> None:
    table = {"text/html": ["<table>\n", "</table>"], "text/plain": ["   a\n", "0  1"]}
    outputs = [
        {"data": table},
        {"data": {"text/plain": ["'x'"]}},
        {"name": "stdout", "text": ["two\n", "lines\n"]},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# A\n", "\n", "text"]},
        {"cell_type": "code", "source": ["a = 1\n", "a"], "outputs": outputs},
    ]
    assert hooks.page_of({"cells": cells}).split("\n\n") == [
        "# A",
        "text",
        "```python\na = 1\na\n```",
        "<table>\n</table>",
        "```text\n'x'\n```",
        "```text\ntwo\nlines\n```\n",
    ]


def test_the_notebook_is_led_to_as_a_page(hooks: Any) -> None:
    page = "[a](tutorials/notebook.ipynb) and [b](tutorials/others.ipynb)"
    assert hooks.on_page_markdown(page) == "[a](tutorials/notebook.md) and [b](tutorials/others.ipynb)"
