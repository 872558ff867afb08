"""What the site of the docs is made of: each page has its place, and pictures are what their script draws."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_site_{name}", DOCS / "site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


pictures = module("pictures")
hooks = module("hooks")


def test_every_page_has_its_place() -> None:
    nav = (DOCS / "site" / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    placed = re.findall(r"- (?:.*: )?([\w./-]+\.md)$", nav, re.MULTILINE)
    assert sorted(placed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_what_its_script_draws(name: str) -> None:
    drawn = pictures.PICTURES[name]().svg()
    assert (DOCS / "images" / f"{name}.svg").read_text("utf-8") == drawn, "run python docs/site/pictures.py"


def test_a_fragment_and_a_bar_in_code_are_said_as_the_site_wants_them() -> None:
    page = "| `a\\|b` | or \\| |\n\n`a\\|b`\n\n```python fragment\nx\n```\n"
    assert hooks.on_page_markdown(page) == "| `a|b` | or \\| |\n\n`a\\|b`\n\n```python\nx\n```\n"
