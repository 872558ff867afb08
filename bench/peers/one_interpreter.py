"""The `topology` benchmark's functions in this interpreter: ``python -m bench.peers.one_interpreter RECORDS``.

One thread, without Spark. Prints one JSON object of CPU nanoseconds a record:

- ``bare``: the three functions called in a loop, as in `bench.peers.bare_loop`;
- ``generated``: ftlayer's generated Python loops over records that are tuples already;
- ``native``: its two chains over Arrow batches, records read from columns and results written to columns.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from bench.peers.bare_loop import count
from bench.peers.functions import last, with_key
from ftlayer.functions.chains.fused import KeyColumns, Reducing, fuse
from ftlayer.functions.chains.topology import TopologyChain
from ftlayer.functions.conversion import VALUES
from ftlayer.functions.steps import Map, Reduce
from ftlayer.state.heap import HeapBackend

ROWS = 16_384
REPEATS = 5

ID = pa.schema([("id", pa.int64())])
KEYED = pa.schema([("id", pa.int64()), ("key", pa.string())])
COUNTED = pa.schema([("key", pa.string()), ("n", pa.int64())])

KEY = Map("key", with_key, KEYED)
LAST = Map("last", last, COUNTED)


def none_yet() -> tuple[str, int]:
    return "", 0


def bare(batches: int) -> None:
    start = none_yet()
    counts: dict[str, tuple[str, int]] = {}
    for number in range(batches * ROWS):
        record = with_key(number)
        counts[record[1]] = counted = count(counts.get(record[1], start), record)
        last(counted)


def generated(batches: int) -> None:
    counting = Reducing("count", count, COUNTED, KeyColumns.of("count", ["key"], KEYED), {}, none_yet)
    first, keyed = fuse([KEY], VALUES), fuse([counting, LAST], VALUES)
    for batch in range(batches):
        pairs: list[tuple[int, str]] = []
        first(range(batch * ROWS, (batch + 1) * ROWS), pairs, [], refuse, None)
        keyed(pairs, [], [], refuse, None)


def native(batches: int) -> None:
    backend = HeapBackend()
    first = TopologyChain([KEY], [ID], backend)
    counting = Reduce("count", count, COUNTED, ("key",), create=none_yet)
    keyed = TopologyChain([counting, LAST], [KEYED], backend)
    for batch in range(batches):
        ids = pa.record_batch([pa.array(np.arange(batch * ROWS, (batch + 1) * ROWS))], schema=ID)
        (pairs,) = first.run(ids, None, 0, 0).outputs.values()
        keyed.run(pairs.batch, None, 0, 0)


def refuse(place: int, step: int, error: BaseException, mark: int) -> None:
    raise error


def ns_a_record(function: Callable[[int], None], records: int) -> float:
    """Return the median of several runs, behind one that warms up."""
    batches = max(1, records // ROWS)
    function(1)
    times = []
    for _ in range(REPEATS):
        begin = time.process_time_ns()
        function(batches)
        times.append((time.process_time_ns() - begin) / (batches * ROWS))
    return statistics.median(times)


def main(records: int) -> None:
    found = {each.__name__: ns_a_record(each, records) for each in (bare, generated, native)}
    print(json.dumps({"python": platform.python_version(), **found}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
