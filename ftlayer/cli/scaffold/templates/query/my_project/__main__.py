"""The program, `python -m my_project`: it runs until Ctrl-C or SIGTERM, and goes on there at its next start."""

from __future__ import annotations

import logging

from ftlayer import DeadLetter, FTLayer, TrackedQueryListener

from .job import build
from .process import StopSignal, session, start_log
from .settings import NAME, STATE, STOP_S

logger = logging.getLogger(NAME)


def main() -> None:
    """Run the query."""
    start_log()
    spark = session()
    stop = StopSignal()
    with FTLayer.embedded(STATE / "store", max_attempts=5, on_dead=log_dead) as layer:
        writer = build(spark, layer, str(STATE / "checkpoint"))
        query = writer.trigger(processingTime="1 second").listener(BatchLog()).start()
        logger.info("runs; Ctrl-C or SIGTERM stops it")
        while query.isActive and not stop.came:
            query.awaitTermination(1)
        if stop.came:
            # What is read is finished; what needs longer is on disk, and the next start goes on with it.
            done = query.drain(timeout=STOP_S)
            logger.info("stopped; %s", "all is done" if done else "the next start does the rest")
        query.awaitTermination()


class BatchLog(TrackedQueryListener):
    """Logs batches that had something to do."""

    def on_batch(self, report) -> None:  # type: ignore[no-untyped-def]
        """Log a batch."""
        if report.rows_in or report.delivered:
            logger.info(
                "batch %d: %d in, %d tried again, %d out; %d failed, %d wait, %d dead letters",
                report.batch,
                report.rows_in,
                report.delivered,
                report.rows_out,
                report.failed,
                report.waiting,
                report.dead,
            )


def log_dead(letter: DeadLetter) -> None:
    """Log a dead letter. This is the place for an alert."""
    logger.warning("dead letter %s: %s: %s: %s", letter.key, letter.operator, letter.reason, letter.record)


if __name__ == "__main__":
    main()
