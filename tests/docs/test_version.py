"""The version stands in one place, and the changelog agrees with it."""

from __future__ import annotations

import re
from pathlib import Path

import ftlayer

ROOT = Path(__file__).parents[2]
CHANGELOG = ROOT / "docs" / "CHANGELOG.md"


def test_what_is_unreleased_does_not_say_that_it_is_a_release() -> None:
    headings = re.findall(r"^## (.+)$", CHANGELOG.read_text(), re.MULTILINE)
    if headings[0] == "Unreleased":
        assert ftlayer.__version__.endswith(".dev0")
        assert ftlayer.__version__.removesuffix(".dev0") not in headings
    else:
        assert headings[0] == ftlayer.__version__


def test_no_other_file_repeats_the_version() -> None:
    suffixes = {".py", ".pyi", ".html", ".js", ".css", ".c", ".h"}
    files = [
        path for name in ("ftlayer", "native") for path in (ROOT / name).rglob("*") if path.suffix in suffixes
    ]
    files += [ROOT / name for name in ("setup.py", "setup.cfg", "pyproject.toml", "MANIFEST.in")]
    version = re.compile(rf"(?<![\w.]){re.escape(ftlayer.__version__)}(?![\w.])")
    having = [str(path.relative_to(ROOT)) for path in files if version.search(path.read_text("utf-8"))]
    assert having == ["ftlayer/__init__.py"]
    assert "version = attr: ftlayer.__version__" in (ROOT / "setup.cfg").read_text("utf-8")
