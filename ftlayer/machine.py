"""What the machine must have: a Java that Spark runs on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from ftlayer.errors import JavaMissingError

LEAST_JAVA = 17
"""The oldest Java that Spark 4 runs on."""

ANSWER_TIMEOUT_S = 20.0
"""``java -version`` takes a tenth of a second; on a machine just started, with cold disks, some seconds."""

INSTALL = f"""\
  Debian, Ubuntu:  sudo apt install openjdk-{LEAST_JAVA}-jre-headless
  macOS:           brew install openjdk@{LEAST_JAVA}
                   export JAVA_HOME="$(brew --prefix openjdk@{LEAST_JAVA})/libexec/openjdk.jdk/Contents/Home"
  conda:           conda install -c conda-forge openjdk={LEAST_JAVA}"""

_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?')


@dataclass(frozen=True)
class Java:
    """A Java that was found: the program, and its major version."""

    program: str
    version: int


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
    try:
        answer = subprocess.run(
            [program, "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _missing(f"{program} does not run ({error})") from error
    text = answer.stderr + answer.stdout
    match = _VERSION.search(text)
    if answer.returncode or match is None:
        # macOS has a program of this name that only says that there is no Java.
        said = text.strip().splitlines()
        raise _missing(f"{program} -version says {said[0] if said else 'nothing'!r}")
    major, minor = int(match[1]), int(match[2] or 0)
    # Up to 8, versions began with 1: "1.8.0_392".
    return minor if major == 1 else major


def _missing(what: str) -> JavaMissingError:
    return JavaMissingError(
        f"Spark needs Java {LEAST_JAVA} or newer: {what}. Install it, or set JAVA_HOME to where it is:\n{INSTALL}"
    )
