"""Every combination: its files, what they name, and that source and sink take their options. No server, no Spark."""

from __future__ import annotations

import ast
import configparser
import glob
import importlib
import itertools
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from programs import find_program
from pyspark.sql.types import StructType

import ftlayer.cli.scaffold
from ftlayer import FTLayer, StreamEnvironment
from ftlayer.cli.new import (
    NAME,
    Choices,
    ProjectKind,
    ProjectMode,
    ProjectSink,
    ProjectSource,
    project,
    sinks_of,
    write_project,
)
from ftlayer.errors import SourceError

ROOT = Path(__file__).parents[2]
VARIANTS: dict[str, tuple[ProjectKind, ProjectMode | None]] = {
    "query": (ProjectKind.QUERY, None),
    "acker": (ProjectKind.TOPOLOGY, ProjectMode.ACKER),
    "barrier": (ProjectKind.TOPOLOGY, ProjectMode.BARRIER),
}


def choices_of(
    variant: str, source: ProjectSource = ProjectSource.FILES, sink: ProjectSink = ProjectSink.FILES
) -> Choices:
    name = f"{variant}_{source}_{sink}".replace("-", "_").replace("postgres", "pg")
    return Choices(name, *VARIANTS[variant], source, sink)


ALL = [
    choices_of(variant, source, sink)
    for variant, (kind, _) in VARIANTS.items()
    for source, sink in itertools.product(ProjectSource, sinks_of(kind))
]
EACH = [
    choices for choices in ALL if ProjectSource.FILES is choices.source or ProjectSink.FILES is choices.sink
]
"""Each source and each sink once a variant: a project's source and sink do not depend on each other."""


def test_there_are_all_combinations() -> None:
    assert len(ALL) == 12 * (10 + 11 + 11)


def test_every_template_is_installed() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    (pattern,) = setup["options.package_data"]["ftlayer.cli.scaffold"].split()
    here = Path(ftlayer.cli.scaffold.__file__).parent
    there = {path for path in (here / "templates").rglob("*") if path.is_file() and not is_of_a_tool(path)}
    # As setuptools looks for them, which leaves out hidden files.
    installed = {Path(path) for path in glob.glob(str(here / pattern / "*"), recursive=True)}
    assert there <= installed


def is_of_a_tool(path: Path) -> bool:
    return "__pycache__" in path.parts or any(part.startswith(".ruff") for part in path.parts)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_place_is_left_to_be_filled_in(variant: str) -> None:
    for choices in (each for each in ALL if each.variant == variant):
        for path, text in project(choices).items():
            assert NAME not in path + text, (choices, path)
            assert "${" not in text, (choices, path)
            assert text.endswith("\n"), (choices, path)
            assert not text.endswith("\n\n"), (choices, path)
            if path.endswith(".py"):
                ast.parse(text, path)


@pytest.mark.parametrize("choices", EACH, ids=lambda choices: choices.name)
def test_settings_are_where_people_look_for_them(choices: Choices) -> None:
    """Each variable that the code asks for is in the README and in the file for systemd, with its default."""
    files = project(choices)
    asked = re.findall(
        r'os\.environ\.get\(\s*"(\w+)", "([^"]*)"',
        "".join(text for path, text in files.items() if path.endswith(".py")),
    )
    assert {"STATE_DIR", "SPARK_MASTER", "STOP_SECONDS"} < {name for name, _ in asked}
    variables = files[f"deploy/{choices.name}.env"]
    for name, default in asked:
        assert f"| `{name}` | `{default}`" in files["README.md"], name
        if name != "STATE_DIR":  # systemd's StateDirectory=
            assert f"#{name}={default}\n" in variables, name
    required = tomllib.loads(files["pyproject.toml"])["project"]["dependencies"]
    extras = f"[{','.join(choices.extras)}]" if choices.extras else ""
    assert required == [f"ftlayer{extras}>={ftlayer.__version__}"]


@pytest.mark.parametrize("choices", EACH, ids=lambda choices: choices.name)
def test_a_readme_names_files_and_modules_that_there_are(choices: Choices) -> None:
    files = project(choices)
    text = files["README.md"]
    named = set(re.findall(r"`((?:tests|deploy|" + choices.name + r")/[\w./]+)`", text))
    assert f"{choices.name}/functions.py" in named
    assert named <= files.keys()
    for module in re.findall(r"python -m (\w+(?:\.\w+)?)", text):
        if module.startswith(choices.name):
            path = module.replace(".", "/")
            assert {f"{path}.py", f"{path}/__main__.py"} & files.keys(), module
    assert "\n\n\n" not in text
    assert "||" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in rows)


# ---------------------------------------------------------------- as files


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a project of each source and each sink."""
    root = tmp_path_factory.mktemp("projects")
    for choices in EACH:
        write_project(root / choices.name, project(choices))
    return root


def test_ruff_has_nothing_to_say(projects: Path) -> None:
    """By its default rules, as each project's own configuration has them."""
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", "."],
            cwd=projects,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.campaign
@pytest.mark.parametrize("variant", VARIANTS)
def test_mypy_has_nothing_to_say(variant: str, projects: Path) -> None:
    for choices in (each for each in EACH if each.variant == variant):
        # A cache that several shared would mix them up: each has a module tests.test_job.
        cache = projects / "mypy" / choices.name
        done = subprocess.run(
            [sys.executable, "-m", "mypy", "--cache-dir", str(cache), "."],
            cwd=projects / choices.name,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("variant", VARIANTS)
def test_systemd_takes_the_unit(variant: str, projects: Path, tmp_path: Path) -> None:
    systemd = find_program("systemd-analyze")
    name = choices_of(variant).name
    unit = tmp_path / f"{name}.service"
    text = (projects / name / "deploy" / unit.name).read_text()
    # The program is looked for.
    unit.write_text(text.replace(f"/opt/{name}/bin/python", sys.executable))
    done = subprocess.run([systemd, "verify", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------- as code


@pytest.fixture
def module(projects: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Import a module of a project, whose directory is the current one."""
    before = set(sys.modules)

    def load(choices: Choices, name: str) -> Any:
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(projects / choices.name)
        return importlib.import_module(f"{choices.name}.{name}")

    yield load
    for name in set(sys.modules) - before:
        if name.partition("_")[0] in VARIANTS:
            del sys.modules[name]


NEEDS_SERVER = {ProjectSource.POSTGRES_CHANGES, ProjectSource.POSTGRES_TABLE}
"""The server is asked for the table's columns."""


@pytest.mark.parametrize(
    "choices", [each for each in EACH if each.kind is ProjectKind.TOPOLOGY], ids=lambda choices: choices.name
)
def test_a_topology_can_be_built(choices: Choices, module: Callable[..., Any]) -> None:
    job = module(choices, "job")
    if choices.mode is ProjectMode.BARRIER:
        env = job.environment(Mock(), choices.name, "state/checkpoints")
    else:
        env = StreamEnvironment(Mock(), FTLayer.embedded("state/store"), name=choices.name, parallelism=2)
    if choices.source in NEEDS_SERVER:
        with pytest.raises(SourceError, match="cannot be asked for"):
            job.build(env)
        return
    job.build(env)
    uids = [operator.uid for vertex in env.job_graph().vertices for operator in vertex.operators]
    assert {"source", "parse", "sink"} <= set(uids)


class Reading:
    """Stands for a session: notes the Data Source that is read, with its options."""

    def __init__(self) -> None:
        self.options_given: dict[str, str] = {}
        self.kind: Any = None
        self.dataSource = self.readStream = self

    def register(self, kind: Any) -> None:
        self.kind = kind

    def format(self, name: str) -> Reading:
        assert name == self.kind.name()
        return self

    def option(self, name: str, value: Any) -> Reading:
        self.options_given[name] = str(value)
        return self

    def options(self, **options: Any) -> Reading:
        self.options_given |= options
        return self

    def load(self) -> Reading:
        return self

    text = where = lambda self, _: self


@pytest.mark.parametrize("source", [each for each in ProjectSource if each is not ProjectSource.FILES])
def test_the_source_of_a_query_takes_its_options(source: ProjectSource, module: Callable[..., Any]) -> None:
    reading = Reading()
    module(choices_of("query", source), "source").read(reading)
    data_source = reading.kind(reading.options_given)
    if source in NEEDS_SERVER:
        with pytest.raises(SourceError, match="cannot be asked for"):
            data_source.schema()
    else:
        names = getattr(data_source.schema(), "names", None) or data_source.schema()
        order_of = (ROOT / f"ftlayer/cli/scaffold/templates/sources/{source}/query.py").read_text()
        (column,) = re.findall(r'record\["(\w+)"\]', order_of)
        assert column in names


class Writing:
    """Stands for a stream of a query: notes the Data Source that is written to, with its options."""

    writer: Any = None

    def map(self, function: Any, schema: str, name: str) -> Writing:
        return self

    def write_stream(self, kind: Any, *, checkpoint: str, **options: str) -> Writing:
        self.writer = kind(options).streamWriter(StructType(), False)
        return self


@pytest.mark.parametrize(
    "sink", [each for each in sinks_of(ProjectKind.QUERY) if each is not ProjectSink.PRINT]
)
def test_the_sink_of_a_query_takes_its_options(sink: ProjectSink, module: Callable[..., Any]) -> None:
    writing = Writing()
    assert module(choices_of("query", sink=sink), "sink").add_sink(writing, "checkpoint") is writing
    assert hasattr(writing.writer, "commit")
