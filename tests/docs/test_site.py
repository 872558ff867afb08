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
    assert sorted(placed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_a_picture_is_what_its_script_draws(pictures: Any) -> None:
    assert len(pictures.PICTURES) >= 4
    for name, draw in pictures.PICTURES.items():
        path = DOCS / "images" / f"{name}.svg"
        assert path.read_text("utf-8") == draw().svg(), "run python docs/site/pictures.py"


def test_a_fragment_and_a_bar_in_code_are_said_as_the_site_wants_them(hooks: Any) -> None:
    page = "| `a\\|b` | or \\| |\n\n`a\\|b`\n\n```python fragment\nx\n```\n"
    assert hooks.on_page_markdown(page) == "| `a|b` | or \\| |\n\n`a\\|b`\n\n```python\nx\n```\n"
