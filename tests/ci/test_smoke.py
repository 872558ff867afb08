"""``pytest -m smoke`` touches every room."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def smoke() -> tuple[str, ...]:
    """The list, out of the conftest's source: to import it again would set up its hooks again."""
    tree = ast.parse((TESTS / "conftest.py").read_text("utf-8"))
    (value,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SMOKE"
    )
    found: tuple[str, ...] = ast.literal_eval(value)
    return found


def test_what_is_named_is_there(smoke: tuple[str, ...]) -> None:
    for name in smoke:
        path, _, test = name.partition("::")
        tree = ast.parse((TESTS / path).read_text("utf-8"))
        tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert not test or test in tests, name


def test_every_room_is_touched(smoke: tuple[str, ...]) -> None:
    rooms = {str(path.parent.relative_to(TESTS)) for path in TESTS.rglob("test_*.py")}
    touched = {str(Path(name.partition("::")[0]).parent) for name in smoke}
    assert rooms <= touched
