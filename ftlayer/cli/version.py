"""What ``ftlayer version`` says: what a report of a bug needs, and nothing private.

Private are paths (they name people and projects), names of hosts, and values of the environment.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import ssl
import subprocess
import sys
import textwrap
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import ftlayer
from ftlayer.errors import JavaMissingError

WIDTH = 80
"""Columns of the text, wherever it is printed: it is made to be pasted."""

LABEL = 11

WORKING_EXTRAS = ("test", "docs", "bench", "bench-flink")
"""Extras for work on ftlayer itself; a user's report does not turn on them."""

BROUGHT_ALONG = ("llvmlite", "py4j")
"""Packages that others bring along, and whose versions matter all the same."""

GIT_TIMEOUT_S = 20.0

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:.*\bextra == ['\"](?P<extra>[\w-]+)['\"])?")


def all_facts() -> dict[str, Any]:
    """Gather what ``--json`` prints. Whatever is missing is said in the place of what it would be; nothing raises."""
    return {
        "ftlayer": {"version": ftlayer.__version__, **installation()},
        "extension": extension(),
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "compiler": platform.python_compiler(),
            "virtual_environment": sys.prefix != sys.base_prefix,
            "openssl": ssl.OPENSSL_VERSION,
        },
        "system": _system(),
        "java": java(),
        "spark": spark_jars(),
        "packages": packages(),
        "extras": extras(),
    }


def installation(package: Path = Path(ftlayer.__file__).parent) -> dict[str, Any]:
    """Return how a package came here: ``installed``, and of a clone ``commit`` and whether it was ``changed``."""
    package = package.resolve()
    try:
        distribution = metadata.distribution("ftlayer")
    except metadata.PackageNotFoundError:
        return {"installed": "not by pip"}
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        source = Path(unquote(urlsplit(origin["url"]).path)).resolve()
        if source in package.parents:
            return {"installed": "editable, from a directory of sources", **_commit(source)}
    elif Path(str(distribution.locate_file("ftlayer"))).resolve() == package:
        tags = re.findall(r"^Tag: (\S+)$", distribution.read_text("WHEEL") or "", re.MULTILINE)
        commit = origin.get("vcs_info", {}).get("commit_id")
        built = "a wheel" if any("manylinux" in tag for tag in tags) else "built from its sources"
        return {"installed": built, "tags": tags, **({"commit": commit[:12]} if commit else {})}
    return {"installed": f"not by pip, which has installed {distribution.version} elsewhere"}


def _commit(source: Path) -> dict[str, Any]:
    """Return the commit that a clone is at; nothing where it is none, or git is missing or does not trust it."""
    if shutil.which("git") is None:
        return {}
    where = _git(source, "rev-parse", "--show-toplevel", "HEAD").splitlines()
    if len(where) != 2 or Path(where[0]).resolve() != source:
        return {}
    changes = _git(source, "status", "--porcelain", "--untracked-files=no")
    return {"commit": where[1][:12], "changed": bool(changes)}


def _git(source: Path, *arguments: str) -> str:
    try:
        return subprocess.run(
            ["git", "-C", str(source), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_TIMEOUT_S,
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)


def extension() -> dict[str, str]:
    try:
        from ftlayer import _native
    except ImportError as error:
        return {"missing": _without_paths(str(error))}
    return {"built": _native.BUILD}


def _without_paths(text: str) -> str:
    return re.sub(r"(?<![\w.])/\S*/", "…/", text)


def _system() -> dict[str, Any]:
    library, library_version = platform.libc_ver()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "kernel": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "name": _system_name(),
        "c_library": f"{library} {library_version}".strip() or "unknown",
        "processor": _processor(),
        "processors": os.cpu_count(),
        "usable_processors": usable,
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }


def _system_name() -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return "unknown"


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or "unknown"


def java() -> dict[str, str]:
    """Return the Java that ftlayer's own commands start Spark on, or why there is none."""
    from ftlayer.common.java import describe_java

    try:
        return describe_java()
    except JavaMissingError as error:
        return {"missing": _without_paths(str(error).partition(". Install it")[0])}


def spark_jars() -> dict[str, str]:
    """Return the version of the jars that a session would run on, which SPARK_HOME may take from elsewhere."""
    home, whose = os.environ.get("SPARK_HOME", ""), "SPARK_HOME"
    if not home:
        found = find_spec("pyspark")
        if found is None or found.origin is None:
            return {"missing": "pyspark is not installed"}
        home, whose = str(Path(found.origin).parent), "pyspark"
    for jar in Path(home, "jars").glob("spark-core_*.jar"):
        scala, _, version = jar.stem.removeprefix("spark-core_").partition("-")
        return {"version": version, "scala": scala, "jars_of": whose}
    return {"missing": f"{whose} has no jars of Spark"}


def packages() -> dict[str, str | None]:
    names = [name for name, extra in _requirements() if not extra]
    return {name: _version(name) for name in (*names, *BROUGHT_ALONG)}


def extras() -> dict[str, dict[str, str | None]]:
    found: dict[str, dict[str, str | None]] = {}
    for name, extra in _requirements():
        if extra and extra not in WORKING_EXTRAS:
            found.setdefault(extra, {})[name] = _version(name)
    return found


def _requirements() -> list[tuple[str, str]]:
    """Return the packages that ftlayer's metadata name, each with the extra that wants it ("" for none)."""
    try:
        required = metadata.requires("ftlayer") or []
    except metadata.PackageNotFoundError:
        return []
    found = [_REQUIREMENT.match(text) for text in required]
    return [(match["name"].lower(), match["extra"] or "") for match in found if match]


def _version(package: str) -> str | None:
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
    try:
        library = _LIBRARIES.get(package, str)()
    except ImportError as error:
        library = f"cannot be loaded: {_without_paths(str(error))}"
    return f"{version} ({library})" if library else version


def _liblmdb() -> str:
    import lmdb

    return f"liblmdb {'.'.join(map(str, lmdb.version()))}"


def _openssl() -> str:
    from cryptography.hazmat.backends.openssl import backend

    return str(backend.openssl_version_text())


_LIBRARIES = {"lmdb": _liblmdb, "cryptography": _openssl}
"""Packages that have a library of C inside, with a version of its own."""


def as_text(facts: dict[str, Any]) -> str:
    found = facts["ftlayer"]
    how = [found["installed"], *found.get("tags", ())]
    if "commit" in found:
        how.append(f"commit {found['commit']}{' with changes' if found.get('changed') else ''}")
    python, system = facts["python"], facts["system"]
    rows = [
        ("ftlayer", f"{found['version']}: {', '.join(how)}"),
        ("extension", _or_missing(facts["extension"], "{built}")),
        (
            "Python",
            f"{python['implementation']} {python['version']} ({python['compiler']}), "
            f"{'in a' if python['virtual_environment'] else 'no'} virtual environment, {python['openssl']}",
        ),
        ("system", "{name}, {kernel} {architecture}, {c_library}".format(**system)),
        (
            "machine",
            f"{system['usable_processors']} of {system['processors']} processors ({system['processor']}), "
            f"{system['memory_bytes'] / 2**30:.1f} GiB of memory",
        ),
        ("Java", _or_missing(facts["java"], "{version} by {vendor} ({machine}), {found}")),
        ("Spark", _or_missing(facts["spark"], "{version} for Scala {scala}, the jars of {jars_of}")),
        ("packages", _versions(facts["packages"])),
    ]
    there = {extra: versions for extra, versions in facts["extras"].items() if any(versions.values())}
    rows += [(f"[{extra}]", _versions(versions)) for extra, versions in there.items()]
    if absent := [extra for extra in facts["extras"] if extra not in there]:
        rows.append(("no extras", ", ".join(absent)))
    wrapper = textwrap.TextWrapper(WIDTH, break_long_words=False, break_on_hyphens=False)
    wrapper.subsequent_indent = " " * (LABEL + 1)
    lines = []
    for label, text in rows:
        wrapper.initial_indent = f"{label:<{LABEL}} "
        lines.append(wrapper.fill(text))
    return "\n".join(lines)


def _or_missing(facts: dict[str, str], form: str) -> str:
    return f"missing: {facts['missing']}" if "missing" in facts else form.format(**facts)


def _versions(versions: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
