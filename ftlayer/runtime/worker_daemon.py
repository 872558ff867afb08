"""``spark.python.daemon.module = ftlayer.runtime.worker_daemon``: Python workers that begin with ftlayer imported.

Spark forks its Python workers from a daemon. This one is Spark's own, but for what it has imported: a slot that is lost
is back some tenths of a second sooner. It is for the session's builder, and changes nothing else.
"""

from __future__ import annotations

import gc

from pyspark.daemon import manager

import ftlayer.runtime.slot.main  # noqa: F401 - for the workers


def main() -> None:
    """Run as Spark's daemon does; returns only in its workers."""
    # A collection in a worker would write to all the pages that it shares with the daemon.
    gc.freeze()
    manager()


if __name__ == "__main__":
    main()
