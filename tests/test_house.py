"""The house stays as small as it is: budgets of lines, files and shapes are in ``house.toml`` beside this file.

A budget that is too small is met by taking something away. Where that cannot be, a line under ``[[raised]]`` says by
how much, why, and what went for it.
"""

from __future__ import annotations

import ast
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]
BUDGETS = tomllib.loads(Path(__file__).with_name("house.toml").read_text("utf-8"))

LONG = 900
"""Lines: a module that has more holds more than one concept."""

SHORT = 150
"""Lines: one that has as many, and that one neighbour alone imports, is a part of its neighbour."""

SLACK = 0.02
"""How far below its budget a number may be before the budget is lowered."""


@dataclass(frozen=True)
class Module:
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text("utf-8")

    @cached_property
    def lines(self) -> int:
        return self.text.count("\n")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text)))

    @cached_property
    def name(self) -> str:
        return ".".join(self.path.relative_to(TOP).with_suffix("").parts).removesuffix(".__init__")

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def room(self) -> str:
        parts = self.path.relative_to(TOP / "ftlayer").parts
        return parts[0] if len(parts) > 1 else "top"

    def count(self, *kinds: type[ast.AST]) -> int:
        return sum(isinstance(node, kinds) for node in self.nodes)

    @cached_property
    def docstrings(self) -> list[str]:
        owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = (ast.get_docstring(node) for node in self.nodes if isinstance(node, owners))
        return [each for each in found if each is not None]

    @cached_property
    def statements(self) -> int:
        """Without imports and docstrings."""
        imports = self.count(ast.Import, ast.ImportFrom)
        return self.count(ast.stmt) - imports - len(self.docstrings)

    def imports(self) -> Iterator[str]:
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from (each.name for each in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module
                yield from (f"{node.module}.{each.name}" for each in node.names)

    def records(self) -> Iterator[tuple[str, frozenset[str]]]:
        """Yield each dataclass and named tuple, with the names of its own fields."""
        for node in self.nodes:
            if isinstance(node, ast.ClassDef):
                made_by = " ".join(map(ast.unparse, [*node.decorator_list, *node.bases]))
                if "dataclass" in made_by or "NamedTuple" in made_by:
                    fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                    yield (
                        f"{self.name}.{node.name}",
                        frozenset(each.id for each in fields if isinstance(each, ast.Name)),
                    )


def modules_in(folder: str) -> list[Module]:
    # Templates are programs of others.
    paths = sorted((TOP / folder).rglob("*.py"))
    return [Module(path) for path in paths if not {"templates", "__pycache__"} & set(path.parts)]


def lines_of(*patterns: str) -> int:
    return sum(
        path.read_bytes().count(b"\n")
        for pattern in patterns
        for path in TOP.glob(pattern)
        if path.is_file() and not any(part.endswith(("_cache", "__pycache__")) for part in path.parts)
    )


def importers_of(modules: list[Module]) -> dict[str, set[str]]:
    known, found = {module.name for module in modules}, defaultdict(set)
    for module in modules:
        wanted = set(module.imports()) & known - {module.name}
        for name in wanted:
            # ``from a.b import c`` is an import of a.b.c where that is a module, and of a.b where it is not.
            if not any(other.startswith(f"{name}.") for other in wanted):
                found[name].add(module.name)
    return found


def twins_among(records: list[tuple[str, frozenset[str]]]) -> list[tuple[str, str]]:
    """Return pairs that share four fields or more, and three quarters of the smaller one's."""
    return [
        (one, other)
        for (one, fields), (other, others) in combinations(records, 2)
        if len(fields & others) >= max(4, 0.75 * min(len(fields), len(others)))
    ]


@pytest.fixture(scope="module")
def measured() -> dict[str, int]:
    modules, tests = modules_in("ftlayer"), modules_in("tests")
    found: Counter[str] = Counter()
    for module in modules:
        functions = module.count(ast.FunctionDef, ast.AsyncFunctionDef)
        for place in ("package", f"rooms.{module.room}"):
            found[f"{place}.lines"] += module.lines
            found[f"{place}.files"] += 1
            found[f"{place}.functions"] += functions
        found["package.statements"] += module.statements
        found["package.classes"] += module.count(ast.ClassDef)
        found["package.docstrings"] += len(module.docstrings)
        found["package.empty_docstrings"] += sum(
            len(text.split()) <= 6 or text.startswith("See `") for text in module.docstrings
        )
        found["package.long_modules"] += module.lines > LONG
    importers = importers_of(modules)
    alone = [module for module in modules if not module.is_package and len(importers[module.name]) == 1]
    found["package.one_importer"] = len(alone)
    found["package.splinters"] = sum(
        module.lines <= SHORT
        and [name.rpartition(".")[0] for name in importers[module.name]] == [module.name.rpartition(".")[0]]
        for module in alone
    )
    found["package.twins"] = len(twins_among([each for module in modules for each in module.records()]))
    found["package.rooms"] = len({module.room for module in modules} - {"top"})
    found["native.lines"] = lines_of("native/**/*.[ch]")
    found["templates.lines"] = lines_of("ftlayer/**/templates/**/*")
    found["tests.lines"] = sum(module.lines for module in tests)
    pages = [*(TOP / "docs").rglob("*.md"), TOP / "README.md"]
    found["docs.words"] = sum(len(page.read_text("utf-8").split()) for page in pages)
    found["docs.pages"] = len(pages)
    return dict(found)


def budgets(table: dict[str, object] = BUDGETS, prefix: str = "") -> dict[str, int]:
    found: dict[str, int] = {}
    for name, value in table.items():
        if isinstance(value, dict) and name != "least":
            found |= budgets(value, f"{prefix}{name}.")
        elif isinstance(value, int):
            found[prefix + name] = value
    return found


def test_nothing_is_larger_than_its_budget(measured: dict[str, int]) -> None:
    allowed = Counter(budgets())
    for each in BUDGETS.get("raised", ()):
        allowed[each["budget"]] += each["by"]
    too_large = {
        name: f"{number:,}, allowed {allowed[name]:,}"
        for name, number in measured.items()
        if number > allowed[name]
    }
    assert not too_large, (
        f"take something away, or say under [[raised]] in tests/house.toml why not: {too_large}"
    )


def test_budgets_follow_what_went(measured: dict[str, int]) -> None:
    loose = {
        name: f"{budget:,}, now {measured.get(name, 0):,}"
        for name, budget in budgets().items()
        if budget - measured.get(name, 0) > max(20, SLACK * budget)
    }
    assert not loose, f"lower these in tests/house.toml, so that what went stays away: {loose}"


def test_a_budget_that_was_raised_says_why_and_what_went_for_it() -> None:
    known = budgets()
    for each in BUDGETS.get("raised", ()):
        assert each["budget"] in known
        assert min(each["by"], len(each["why"].strip()), len(each["went"].strip())) > 0


def test_tests_assert_no_less_than_they_did() -> None:
    found = Counter({"assert": 0, "raises": 0, "parametrize": 0})
    for module in modules_in("tests"):
        found["assert"] += module.count(ast.Assert)
        for node in module.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                found[node.func.attr] += node.func.attr in ("raises", "parametrize")
    fewer = {name: found[name] for name, least in BUDGETS["least"].items() if found[name] < least}
    assert not fewer, (
        f"tests/house.toml lists what tests that went had tested, beside a lower number: {fewer}"
    )
