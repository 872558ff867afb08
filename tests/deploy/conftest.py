"""The files of docs/deploy, as what reads them does."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "docs" / "deploy"


def docker_command(name: str, target: str = "") -> dict[str, list[str]]:
    """Return ENTRYPOINT, CMD and the command of HEALTHCHECK of a stage of a Dockerfile, by instruction."""
    text = (DEPLOY / "docker" / name).read_text("utf-8").replace("\\\n", " ")
    stage = re.split(r"^FROM .* AS ", text, flags=re.MULTILINE)
    (of_target,) = (part for part in stage if part.startswith(f"{target}\n"))
    found = {}
    for instruction, value in re.findall(
        r"^(ENTRYPOINT|CMD|HEALTHCHECK)[^\[\n]*(\[.*\])", of_target, re.MULTILINE
    ):
        found[instruction] = json.loads(value)
    return found


def unit_lines(name: str) -> list[tuple[str, str]]:
    """Return the assignments of a unit of systemd, in order."""
    text = (DEPLOY / "systemd" / name).read_text("utf-8")
    return re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)


def unit_command(name: str) -> list[str]:
    """Return what a unit starts, without the variable for more options."""
    (command,) = (value for key, value in unit_lines(name) if key == "ExecStart")
    return [word for word in shlex.split(command) if not word.startswith("$")]


def manifests(*names: str) -> list[dict[str, Any]]:
    """Return the objects in manifests, of all of them without names."""
    paths = [DEPLOY / "kubernetes" / name for name in names] or sorted(
        path for path in (DEPLOY / "kubernetes").glob("*.yaml") if path.name != "kustomization.yaml"
    )
    return [each for path in paths for each in yaml.safe_load_all(path.read_text("utf-8"))]


def tool(name: str) -> str:
    """Return where a program is that the extra ``test`` brings."""
    return str(Path(sys.executable).with_name(name))


def run(*command: str | Path, directory: Path | None = None) -> tuple[int, str]:
    """Run a program; return its exit code and all that it says."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="session")
def files() -> Any:
    """What this module has, for tests, which import no module of each other's."""
    return sys.modules[__name__]
