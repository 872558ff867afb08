"""One stream of a client's calls: numbers them, matches the answers, sends again what has none."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import flight

from ftlayer.errors import FTLayerError, VertexError, VertexUnavailableError
from ftlayer.transport.failures import TRANSPORT_ERRORS
from ftlayer.transport.streams import NO_COLUMNS, end_stream
from ftlayer.vertex.calls import Envelope, Ingest, Persist, Register, Reply, Xor
from ftlayer.vertex.client.connection import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Connection,
    monotonic_ms,
    possible_cause,
    vertex_error,
)
from ftlayer.vertex.wire.frames import decode_reply, fields_of, frame_of

BulkCall = Persist | Ingest | Xor | Register

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sent:
    """A call that has no answer yet, as it went out."""

    frame: bytes
    size: int
    deadline_ms: int
    future: Future[Reply]


class Lane:
    """Calls of one kind and stream, under a client name of their own.

    A thread reads the answers; when the stream breaks it makes another and sends what is unanswered again,
    in order, under the same numbers. The stream is a ``DoExchange``: unlike a ``DoPut``, which the vertex
    takes just as well, its client can cancel it.
    """

    def __init__(
        self, connection: Connection, kind: str, client: str, window: int, window_bytes: int
    ) -> None:
        self._connection = connection
        self._kind = kind
        self._client = client
        self._window, self._window_bytes = window, window_bytes
        self._writing = threading.Lock()  # its holder numbers and writes calls; taken before _changed
        self._sequence = 0
        self._changed = threading.Condition()  # guards everything below
        self._calls, self._bytes = 0, 0
        self._unanswered: OrderedDict[int, _Sent] = OrderedDict()
        self._writer: flight.FlightStreamWriter | None = None
        self._reader: flight.FlightStreamReader | None = None
        self._closing = False
        self._last_failure = "none"
        self._thread: threading.Thread | None = None

    def submit(self, call: BulkCall, deadline_ms: int) -> Future[Reply]:
        """Send a call; waits while the window is full. See `Pipeline.submit`."""
        fields = fields_of(call)
        size = sum(len(value) for value in fields.values() if isinstance(value, (bytes, memoryview)))
        future: Future[Reply] = Future()
        self._reserve(size, deadline_ms)
        if not self._writing.acquire(timeout=seconds_until(deadline_ms)):
            self._release(size)
            raise self._unavailable("another call of the same stream could not be sent")
        try:
            frame = self._frame(call, fields, size)
            sent = _Sent(frame, size, deadline_ms, future)
            with self._changed:
                self._unanswered[self._sequence] = sent
                self._changed.notify_all()
                writer = self._writer
            if self._thread is None:
                name = f"ftlayer-{self._kind.lower()}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            elif writer is not None:
                self._write(writer, sent)
        finally:
            self._writing.release()
        return future

    def _frame(self, call: BulkCall, fields: dict[str, Any], size: int) -> bytes:
        """Number a call and return its frame; one that cannot be written takes no number."""
        try:
            frame = frame_of(call, fields, Envelope(self._client, self._sequence + 1))
        except FTLayerError:
            self._release(size)
            raise
        self._sequence += 1
        return frame

    def wait_until_idle(self) -> None:
        """Wait until every call has its answer or has failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unanswered)

    def fail_overdue(self, now_ms: int) -> None:
        """Fail the calls whose deadline has passed, and begin the stream anew if there were any."""
        with self._changed:
            overdue = [number for number, sent in self._unanswered.items() if sent.deadline_ms <= now_ms]
            futures = [self._take(number).future for number in overdue]
            reader = self._reader
        if futures and reader is not None:
            # A vertex that hangs may hold the threads that read and write; this frees them.
            reader.cancel()
        for future in futures:
            future.set_exception(self._unavailable("no answer before the deadline"))

    def close(self) -> None:
        """End the stream; `wait_until_idle` first."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        with self._writing:
            with self._changed:
                writer = self._writer
            if writer is not None:
                self._end(writer)
        if self._thread is not None:
            self._thread.join()

    # ------------------------------------------------------------ submitting threads

    def _reserve(self, size: int, deadline_ms: int) -> None:
        def has_room() -> bool:
            fits = self._calls < self._window and self._bytes + size <= self._window_bytes
            return fits or self._calls == 0

        with self._changed:
            if not self._changed.wait_for(has_room, timeout=seconds_until(deadline_ms)):
                raise self._unavailable("the window stayed full until the deadline")
            self._calls += 1
            self._bytes += size

    def _release(self, size: int) -> None:
        with self._changed:
            self._calls -= 1
            self._bytes -= size
            self._changed.notify_all()

    def _unavailable(self, what: str) -> VertexUnavailableError:
        address = self._connection.address
        return VertexUnavailableError(
            f"{self._kind} to the vertex at {address}: {what}; last failure of the connection: "
            f"{self._last_failure}{possible_cause(address, str(self._last_failure))}"
        )

    def _write(self, writer: flight.FlightStreamWriter, sent: _Sent) -> None:
        try:
            writer.write_metadata(sent.frame)
        except TRANSPORT_ERRORS as error:
            # The reading thread sees the same failure and sends everything again.
            self._note(error)

    def _end(self, writer: flight.FlightStreamWriter) -> None:
        try:
            end_stream(writer)
        except TRANSPORT_ERRORS as error:
            logger.debug("stream was broken already: %s", error)

    def _note(self, error: BaseException) -> None:
        with self._changed:
            self._last_failure = str(error)

    # ------------------------------------------------------------ reading thread

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while self._wait_for_work():
            try:
                if self._serve_stream():
                    pause = FIRST_PAUSE_S
            except (*TRANSPORT_ERRORS, VertexError) as error:
                self._note(error)
                refusal = error if isinstance(error, VertexError) else vertex_error(error)
                if refusal is not None:
                    self._fail_all(refusal)
            with self._changed:
                self._writer = self._reader = None
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._unanswered or self._closing)
            return not self._closing

    def _serve_stream(self) -> bool:
        """Open a stream and read its answers until it ends; return whether there were any."""
        descriptor = flight.FlightDescriptor.for_command(b"calls")
        writer, reader = self._connection.client().do_exchange(descriptor, self._connection.options(None))
        try:
            writer.begin(NO_COLUMNS)
            return self._read_answers(writer, reader)
        finally:
            # A writer that is not closed complains on stderr when it is freed.
            with contextlib.suppress(*TRANSPORT_ERRORS):
                writer.close()

    def _read_answers(self, writer: flight.FlightStreamWriter, reader: flight.FlightStreamReader) -> bool:
        with self._changed:
            self._reader = reader
        with self._writing:
            with self._changed:
                again = list(self._unanswered.values())
                self._writer = writer
                closing = self._closing
            for sent in again:
                self._write(writer, sent)
            if closing:
                self._end(writer)
        answered = False
        try:
            while True:
                self._deliver(reader.read_chunk().app_metadata)
                answered = True
        except StopIteration:
            return answered

    def _deliver(self, frame: pa.Buffer | None) -> None:
        if frame is None:
            raise VertexError("the vertex sent rows where an answer was expected")
        answer, sequence = decode_reply(frame.to_pybytes())
        if isinstance(answer, VertexUnavailableError):
            # The vertex is about to stop: what is unanswered goes to the one that comes after it.
            raise ConnectionError(str(answer))
        with self._changed:
            sent = self._take(sequence) if sequence in self._unanswered else None
        if sent is None:
            return  # it had failed at its deadline
        if isinstance(answer, FTLayerError):
            sent.future.set_exception(answer)
        else:
            sent.future.set_result(answer)

    def _take(self, sequence: int | None) -> _Sent:
        sent = self._unanswered.pop(sequence)  # type: ignore[arg-type]
        self._calls -= 1
        self._bytes -= sent.size
        self._changed.notify_all()
        return sent

    def _fail_all(self, error: FTLayerError) -> None:
        with self._changed:
            futures = [self._take(number).future for number in list(self._unanswered)]
        for future in futures:
            future.set_exception(error)


def seconds_until(deadline_ms: int) -> float:
    """Return the seconds until a moment of the monotone clock, 0 if it has passed."""
    return max(deadline_ms - monotonic_ms(), 0) / 1_000
