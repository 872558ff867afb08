"""The program, `python -m my_project`: it runs until Ctrl-C or SIGTERM, and goes on there at its next start."""

from __future__ import annotations

import logging

from ftlayer import DeadLetter, FTLayer, Job, StreamEnvironment

from .job import build
from .process import StopSignal, session, start_log
from .settings import NAME, STATE, STOP_S

logger = logging.getLogger(NAME)


def main() -> None:
    """Run the topology."""
    start_log()
    spark = session()
    stop = StopSignal()
    with FTLayer.embedded(STATE / "store", max_attempts=5, on_dead=log_dead) as layer:
        env = StreamEnvironment(spark, layer, name=NAME, parallelism=2)
        build(env)
        job = env.execute_async()
        logger.info("runs; Ctrl-C or SIGTERM stops it")
        follow(job, stop)
        if stop.came:
            # What is read is finished; what needs longer is on disk, and the next start goes on with it.
            done = job.drain(timeout=STOP_S)
            logger.info("stopped; %s", "all is done" if done else "the next start does the rest")
        job.wait()


def follow(job: Job, stop: StopSignal) -> None:
    """Log how the job is, where that has changed, until it is over or to be stopped."""
    logged: dict[str, int] = {}
    while not job.over(2) and not stop.came:
        status = job.status()
        if status.counters != logged:
            logger.info("%s", status.line())
            logged = status.counters


def log_dead(letter: DeadLetter) -> None:
    """Log a dead letter. This is the place for an alert."""
    logger.warning("dead letter %s: %s: %s: %s", letter.key, letter.operator, letter.reason, letter.record)


if __name__ == "__main__":
    main()
