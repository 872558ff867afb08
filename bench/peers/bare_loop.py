"""The `topology` benchmark's functions in a bare loop, no engine: ``python -m bench.peers.bare_loop BEGIN RECORDS``.

Two processes, each with half of the records and all keys, begin at the monotone time BEGIN. Prints one JSON object:
records, seconds from there to the end of the last one, and their CPU seconds together.
"""

from __future__ import annotations

import json
import sys
import time
from multiprocessing import Process, SimpleQueue

from bench.peers.functions import last, with_key

PROCESSES = 2


def count(aggregate: tuple[str, int], record: tuple[int, str]) -> tuple[str, int]:
    """The function of the keyed count."""
    return record[1], aggregate[1] + 1


def work(begin: float, first: int, records: int, done: SimpleQueue[tuple[float, float]]) -> None:
    """Call the three functions for each record; tell when that was done, and what CPU time it took."""
    none_yet = ("", 0)
    counts: dict[str, tuple[str, int]] = {}
    time.sleep(max(0.0, begin - time.monotonic()))
    cpu = time.process_time()
    for number in range(first, records, PROCESSES):
        record = with_key(number)
        counts[record[1]] = counted = count(counts.get(record[1], none_yet), record)
        last(counted)
    done.put((time.monotonic(), time.process_time() - cpu))


def main(begin: float, records: int) -> None:
    done: SimpleQueue[tuple[float, float]] = SimpleQueue()
    processes = [Process(target=work, args=(begin, first, records, done)) for first in range(PROCESSES)]
    for process in processes:
        process.start()
    ends = [done.get() for _ in processes]
    for process in processes:
        process.join()
    seconds = max(end for end, _ in ends) - begin
    print(json.dumps({"records": records, "seconds": seconds, "cpu_seconds": sum(cpu for _, cpu in ends)}))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
