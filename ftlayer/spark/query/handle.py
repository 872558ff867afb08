"""The handle of a running wrapped query: the face of a StreamingQuery, with a supervisor behind it."""

from __future__ import annotations

from typing import Any

from ftlayer.circuit import CircuitState, CircuitStatus
from ftlayer.notebook import html_table
from ftlayer.spark.batch.raised import words_of
from ftlayer.spark.protocol import BatchReport
from ftlayer.spark.query.supervisor import QuerySupervisor
from ftlayer.vertex.calls import QueryStatus


class TrackedQuery:
    """A wrapped query that was started. Thread-safe; the properties of Spark's own are there by name."""

    def __init__(self, supervisor: QuerySupervisor) -> None:
        self._supervisor = supervisor

    # ------------------------------------------------------------ what Spark's own handle has

    @property
    def name(self) -> str:
        """The query's name."""
        return self._supervisor.name

    @property
    def id(self) -> str:
        """The id Spark keeps in the checkpoint."""
        return self._supervisor.id

    @property
    def runId(self) -> str:  # noqa: N802 - Spark's name
        """The id of the current run; a restart has a new one."""
        return self._supervisor.runId

    @property
    def isActive(self) -> bool:  # noqa: N802 - Spark's name
        """Whether the supervisor is at work (the Spark query itself may be between two runs)."""
        return self._supervisor.isActive

    @property
    def status(self) -> Any:
        """The status of the current run of the Spark query."""
        return self._supervisor.query.status

    @property
    def lastProgress(self) -> Any:  # noqa: N802 - Spark's name
        """The last progress of the current run."""
        return self._supervisor.query.lastProgress

    @property
    def recentProgress(self) -> Any:  # noqa: N802 - Spark's name
        """The recent progress of the current run."""
        return self._supervisor.query.recentProgress

    def exception(self) -> BaseException | None:
        """Return the error that ended the query for good, None while it runs or when it ended well."""
        return self._supervisor.error

    def awaitTermination(self, timeout: float | None = None) -> bool:  # noqa: N802 - Spark's name
        """Wait (seconds) until the query has ended; raise the error that ended it. False: it has not ended."""
        return self._supervisor.wait_until_ended(timeout)

    def processAllAvailable(self) -> None:  # noqa: N802 - Spark's name
        """Block until what the source has now is processed. Replays that wait for their pause are not awaited.

        Waits over restarts; raises the error that ended the query for good.
        """
        self._supervisor.processAllAvailable()

    def stop(self) -> None:
        """Stop. What is pending or waits for replay stays in the vertex for the next start."""
        self._supervisor.stop()

    def drain(self, timeout: float = 60.0) -> bool:
        """Read what the source has by now, finish it and what waits for replay, and end; return whether that is done.

        True: all rows that the source had are in committed batches, no record is pending, in delivery or waits, and
        the dead letters are in committed batches of the queries of this program that read them as a stream (of those
        in other programs nothing is known here).
        Later rows are the next start's. What is not through within ``timeout`` (seconds) stays in the source and in
        the vertex for the next start. An ingest gives what it accepts until it is empty: stop putting records in
        first. Of a query that has ended, it says what its last run came to. Raises the error that ended the query, if
        one did.
        """
        return self._supervisor.drain(timeout)

    def explain(self, extended: bool = False) -> None:
        """Print the plan of the last batch."""
        self._supervisor.query.explain(extended)

    # ------------------------------------------------------------ what ftlayer adds

    @property
    def restarts(self) -> int:
        """How many times the Spark query has been started again after a failure."""
        return self._supervisor.restarts

    @property
    def last_failure(self) -> str:
        """The text of the failure that made the last restart necessary, "" if there was none."""
        return self._supervisor.last_failure

    @property
    def recent_batches(self) -> list[BatchReport]:
        """The reports of the last batches, oldest first."""
        return list(self._supervisor.reports)

    def circuits(self) -> dict[str, CircuitStatus]:
        """Return where the circuit breakers of `max_failing` are, by operator; "" is the whole query's."""
        return self._supervisor.circuits()

    def ft_status(self) -> QueryStatus:
        """Ask the vertex what is still to do."""
        return self._supervisor.ft_status()

    def await_drained(self, timeout: float | None = None) -> bool:
        """Wait (seconds) until what the source has now is through and no record is pending or waits for replay.

        The dead letters are through then too, in the queries of this program that read them as a stream. False if
        that did not happen in time, or the query was stopped before. It goes on meanwhile: rows that the source gets
        later need not be through, but Spark must come to the source's end once. Raises the error that ended the query,
        if one did.
        """
        return self._supervisor.await_drained(timeout)

    def _repr_html_(self) -> str:
        """Return what became of the last batches as HTML, for notebooks."""
        error = self.exception()
        ended = "" if error is None else f": {words_of(error)}"
        state = "active" if self.isActive else f"ended{ended}"
        state += "".join(
            f", circuit {name or 'of the query'} {status.state}"
            for name, status in self.circuits().items()
            if status.state is not CircuitState.CLOSED
        )
        return html_table(
            f"{self.name}: {state}, {self.restarts} restarts",
            ("batch", "rows in", "rows out", "failed", "waiting", "dead"),
            [
                (report.batch, report.rows_in, report.rows_out, report.failed, report.waiting, report.dead)
                for report in self.recent_batches[-10:]
            ],
        )
