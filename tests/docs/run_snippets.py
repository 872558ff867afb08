"""Runs snippets, one after another, as programs in an empty directory that share this process and its Spark session.

A line of JSON on standard input is a snippet, ``{"name": …, "code": …}``; a line of JSON on the descriptor that is the
argument answers it, ``{"error": …}`` with the traceback, "" if there is none. What snippets print goes to standard
output.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from pathlib import Path


def main() -> None:
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    for line in sys.stdin:
        snippet = json.loads(line)
        for left in Path.cwd().iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        print(json.dumps({"error": run(snippet["name"], snippet["code"])}), file=answers)


def run(name: str, code: str) -> str:
    """Run a snippet as a main program; its functions travel to Spark's workers whole, as those of one do."""
    try:
        exec(compile(code, name, "exec"), {"__name__": "__main__"})
    except Exception:  # noqa: BLE001 - the answer
        return traceback.format_exc()
    finally:
        sys.stdout.flush()
    return ""


if __name__ == "__main__":
    main()
