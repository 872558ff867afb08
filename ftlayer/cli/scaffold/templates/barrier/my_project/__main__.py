"""The program, `python -m my_project`: it runs until Ctrl-C or SIGTERM, and goes on there at its next start."""

from __future__ import annotations

import logging

from ftlayer import Job
from ftlayer.errors import CheckpointError

from .job import build, environment
from .process import StopSignal, session, start_log
from .settings import NAME, STATE, STOP_S

logger = logging.getLogger(NAME)


def main() -> None:
    """Run the topology."""
    start_log()
    spark = session()
    stop = StopSignal()
    env = environment(spark, NAME, str(STATE / "checkpoints"))
    build(env)
    job = env.execute_async(restore_from="latest")
    logger.info("runs; Ctrl-C or SIGTERM stops it")
    follow(job, stop)
    if stop.came:
        end(job)
    job.wait()


def follow(job: Job, stop: StopSignal) -> None:
    """Log how the job is, where that has changed, until it is over or to be stopped."""
    logged: dict[str, int] = {}
    dead = 0
    while not job.over(2) and not stop.came:
        status = job.status()
        if status.counters != logged:
            logger.info("%s", status.line())
            logged = status.counters
        before, dead = dead, sum(chain.dead for chain in status.chains)
        if dead > before:
            # This is the place for an alert.
            logger.warning("%d new dead letters: ftlayer dead list --checkpoints %s", dead - before, STATE)


def end(job: Job) -> None:
    """Take a last checkpoint, which stays for the next start; without it that goes on from the one before."""
    try:
        job.checkpoint(timeout=STOP_S)
        logger.info("stopped, with a last checkpoint")
    except (CheckpointError, TimeoutError) as error:
        logger.warning("stopped without a last checkpoint, the one before counts: %s", error)
    job.interrupt()


if __name__ == "__main__":
    main()
