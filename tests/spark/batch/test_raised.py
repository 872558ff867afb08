"""What Py4J logs of batches that are given up because their query was told to stop."""

from __future__ import annotations

import logging

import pytest

from ftlayer.spark.batch.sinks import StoppedError, hide_stops


def test_py4j_logs_faults_and_no_stops(caplog: pytest.LogCaptureFixture) -> None:
    """As `py4j.clientserver` does where a call from the JVM raises."""
    hide_stops()
    hide_stops()
    logger = logging.getLogger("py4j.clientserver")
    for error in (StoppedError("lines"), OSError("the table is gone")):
        try:
            raise error
        except Exception:
            logger.exception("There was an exception while executing the Python Proxy on the Python Side.")
    logger.error("without an exception")
    assert [record.exc_info and str(record.exc_info[1]) for record in caplog.records] == [
        "the table is gone",
        None,
    ]
