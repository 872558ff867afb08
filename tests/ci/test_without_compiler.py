"""What pip says where ftlayer's C extension cannot be built: one sentence on what to install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOW = (
    "install what builds it (Debian, Ubuntu: apt install gcc libc6-dev python3-dev; Fedora: dnf install gcc "
    "python3-devel; macOS: xcode-select --install), or install a wheel of ftlayer, which needs no compiler."
)

WITHOUT_HEADERS = """\
#!{python}
# A compiler that does not see Python's headers, wherever they are.
import os, sys
os.execvp("cc", ["cc", *(one for one in sys.argv[1:] if not one.startswith("-I"))])
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Copy what pip needs, so that nothing is built in the clone."""
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.cfg", "setup.py"):
        shutil.copy(ROOT / name, sources)
    shutil.copytree(ROOT / "native", sources / "native")
    (sources / "ftlayer").mkdir()
    shutil.copy(ROOT / "ftlayer" / "__init__.py", sources / "ftlayer")
    return sources


def build(sources: Path, compiler: Path | str) -> str:
    """Have pip build a wheel, which has to fail; return what it says."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-index",
            "--no-deps",
            "--no-build-isolation",
            str(sources),
        ],
        cwd=sources.parent,
        env={**os.environ, "CC": str(compiler)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode, done.stdout
    return done.stdout + done.stderr


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("said", "script"),
    [
        ("there is no C compiler here ({compiler}: No such file or directory)", None),
        (
            "the C compiler {compiler} does not work (no developer tools)",
            "#!/bin/sh\necho no developer tools >&2\nexit 1\n",
        ),
        ("the C compiler {compiler} finds no Python.h, the headers of this Python", WITHOUT_HEADERS),
        (
            "the C compiler {compiler} finds no headers of the C library",
            '#!/bin/sh\nexec cc -nostdinc "$@"\n',
        ),
    ],
    ids=["no compiler", "a stand-in", "no headers of Python", "no headers of C"],
)
def test_one_sentence_and_no_page(sources: Path, said: str, script: str | None) -> None:
    compiler = sources.parent / "compiler"
    if script is not None:
        program(compiler, script.format(python=sys.executable))
    output = build(sources, compiler)
    assert f"error: ftlayer has a C extension, and {said.format(compiler=compiler)}: {HOW}" in output
    assert "copying ftlayer/" not in output


def test_an_error_in_the_sources_is_the_compilers_own(sources: Path) -> None:
    (sources / "native" / "module.c").write_text("#error of the sources\n")
    output = build(sources, "cc")
    assert "#error of the sources" in output
    assert "install what builds it" not in output
