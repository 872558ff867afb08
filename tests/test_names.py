"""A class's name says which class it is: each stands once in the package."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import ftlayer

PACKAGE = Path(ftlayer.__file__).parent
IN_CHECKPOINTS = {"Piece"}
"""Checkpoints hold objects of both classes, by their names."""


def test_public_classes_have_names_of_their_own() -> None:
    places = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        if "templates" in path.parts:
            continue  # They are parts of users' projects.
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.relative_to(PACKAGE).as_posix())
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in twice.items() if name not in IN_CHECKPOINTS} == {}
    assert set(twice) == IN_CHECKPOINTS
