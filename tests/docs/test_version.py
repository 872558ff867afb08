"""The version and the changelog agree."""

from __future__ import annotations

import re
from pathlib import Path

import ftlayer

CHANGELOG = Path(__file__).parents[2] / "docs" / "CHANGELOG.md"


def test_what_is_unreleased_does_not_say_that_it_is_a_release() -> None:
    headings = re.findall(r"^## (.+)$", CHANGELOG.read_text(), re.MULTILINE)
    if headings[0] == "Unreleased":
        assert ftlayer.__version__.endswith(".dev0")
        assert ftlayer.__version__.removesuffix(".dev0") not in headings
    else:
        assert headings[0] == ftlayer.__version__
