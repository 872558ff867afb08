"""The machine's requirement: a Java that Spark runs on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ftlayer.errors import JavaMissingError
from ftlayer.java import bundled as bundled_java

LEAST_JAVA = 17
"""The oldest Java that Spark 4 runs on."""

ANSWER_TIMEOUT_S = 20.0
"""``java -version`` takes a tenth of a second; on a machine just started, with cold disks, some seconds."""

INSTALL = f"""\
  Debian, Ubuntu:  sudo apt install default-jre-headless
  macOS:           brew install openjdk@{LEAST_JAVA}
                   export JAVA_HOME="$(brew --prefix openjdk@{LEAST_JAVA})/libexec/openjdk.jdk/Contents/Home"
  conda:           conda install -c conda-forge openjdk={LEAST_JAVA}
  without root:    pip install 'ftlayer[java]', in a clone pip install '.[java]'"""

_RELEASE = re.compile(r'^JAVA_VERSION="(\d+)(?:\.(\d+))?', re.MULTILINE)
_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?')


@dataclass(frozen=True)
class Java:
    """A Java that was found: the program, and its major version."""

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
        if not bundled_java.is_installed():
            raise
    try:
        home = bundled_java.java_home()
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
    if not bundled_java.is_installed() or _noted_version() >= LEAST_JAVA:
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
    if Path(java.program).parents[1].name.startswith(f"{bundled_java.WHEEL}-"):
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
