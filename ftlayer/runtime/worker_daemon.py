"""``spark.python.daemon.module = ftlayer.runtime.worker_daemon``: Python workers that begin with ftlayer imported.

Spark forks its Python workers from a daemon. This one is Spark's own, but for what it has imported: a slot that is lost
is back some tenths of a second sooner, and so is the first batch of a wrapped query. It also keeps what is imported out
of garbage collections: Spark asks for a whole one after each task, which takes some 50 ms otherwise. It is for the
session's builder, and changes nothing else.
"""

from __future__ import annotations

import gc

from pyspark.daemon import manager

import ftlayer.runtime.slot.main
import ftlayer.spark.stages.task  # noqa: F401 - both for the workers


def main() -> None:
    """Run as Spark's daemon does; returns only in its workers."""
    # A collection in a worker would look at all of it, and write to all the pages that it shares with the daemon.
    gc.collect()
    gc.freeze()
    manager()


if __name__ == "__main__":
    main()
