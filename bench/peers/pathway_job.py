"""The `topology` benchmark's job in Pathway: two processes, one CSV file of ids a process, rows counted by key.

Run by ``pathway spawn -n 2 python -m bench.peers.pathway_job``. ``BENCH_IN`` is the directory of the files,
``BENCH_OUT`` one that each process leaves two files in: the monotone times of its first call of a function, and of
its end. Files are what Pathway reads without Python; its Python connector takes 10 µs a record. Pathway tells the
count of a key once for each of its commits, not for each record, so that the last function is called less often than
in the other systems.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pathway as pw

from bench.peers.functions import last, with_key

OUT = Path(os.environ["BENCH_OUT"])
PROCESS = os.environ.get("PATHWAY_PROCESS_ID", "0")


class Ids(pw.Schema):
    number: int


@pw.udf(deterministic=True)
def key_of(number: int) -> str:
    _note_start()
    return with_key(number)[1]


@pw.udf(deterministic=True)
def last_of(key: str, count: int) -> int:
    return last((key, count))[1]


def _note_start() -> None:
    if not _begun:
        _begun.append(time.monotonic())


_begun: list[float] = []


def main() -> None:
    ids = pw.io.csv.read(os.environ["BENCH_IN"], schema=Ids, mode="static")
    keyed = ids.select(key=key_of(ids.number))
    counted = keyed.groupby(keyed.key).reduce(keyed.key, count=pw.reducers.count())
    pw.io.null.write(counted.select(counted.key, last=last_of(counted.key, counted.count)))
    pw.run(monitoring_level=pw.MonitoringLevel.NONE)
    end = time.monotonic()
    (OUT / f"start-{PROCESS}").write_text(str(_begun[0] if _begun else end))
    (OUT / f"end-{PROCESS}").write_text(str(end))


if __name__ == "__main__":
    main()
