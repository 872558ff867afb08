"""What is installed, and what is imported."""

from __future__ import annotations

import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import ftlayer.monitor.console

ROOT = Path(__file__).parents[2]


def test_every_file_of_the_console_is_installed() -> None:
    """A pattern of ``package_data`` covers each template and static file."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    patterns = setup["options.package_data"]["ftlayer.monitor.console"].replace(",", "\n").split()
    here = Path(ftlayer.monitor.console.__file__).parent
    installed = {path for pattern in patterns for path in here.glob(pattern)}
    there = {
        path
        for path in here.rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    assert there == installed


def test_the_script_is_small_and_alone() -> None:
    """One script of our own, of 300 lines at most; no page has another, or one inside it."""
    here = Path(ftlayer.monitor.console.__file__).parent
    (script,) = here.rglob("*.js")
    assert len(script.read_text().splitlines()) <= 300
    for template in here.rglob("*.html"):
        text = template.read_text()
        assert text.count("<script") == ("console.js" in text), template
        assert " style=" not in text, template
        assert not re.search(r"\son\w+=", text), template


def test_the_command_line_does_not_import_the_web() -> None:
    """``ftlayer --help`` costs no web framework."""
    names = ("fastapi", "starlette", "uvicorn", "jinja2")
    code = f"import sys, ftlayer, ftlayer.cli.main; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
