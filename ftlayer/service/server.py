"""The vertex's face: an Arrow Flight server. It carries calls and answers, and decides nothing.

``DoAction "call"``    body: a call's frame (`ftlayer.service.wire`). The bodies of the results, joined, are
                       the reply's frame.
``DoAction "health"``  no body. One result: a msgpack map with protocol, incarnation, shards,
                       max_message_bytes, exact (every id is kept, so that `Explain` is answered).
``DoAction "route"``   body: a stream's name. One result: a msgpack map with shard, shards: what the top bits
                       of its root ids have to say.
``DoPut``              many calls of one kind (`ftlayer.service.put`).
``DoExchange``         the same; the answers come as messages of metadata alone.

Every request has the header ``authorization: Bearer <token>``. What fails as a whole (an action, a
stream that cannot be read) ends with a Flight error whose text begins with the code and whose
``extra_info`` is the error's frame; a single call of a stream is answered by its error's frame.
"""

from __future__ import annotations

import hmac
import logging
import queue
import threading
from collections.abc import Callable, Iterator

import pyarrow as pa
from pyarrow import flight

from ftlayer.errors import FTLayerError, MalformedRequestError, UnauthorizedError
from ftlayer.layer.calls import Reply
from ftlayer.service.put import PutDecoder, PutHeader, is_last_part, part_of
from ftlayer.service.rules import Answer
from ftlayer.service.vertex import Vertex
from ftlayer.service.wire import decode_call, encode_error, encode_reply, pack

PROTOCOL = 1
RESULT_BYTES = 1 << 20
PARTS_PER_CALL = 16
# Calls of one stream that may wait for their answers: a client that never waits cannot fill the memory.
MAX_CALLS_IN_FLIGHT = 256

WriteFrame = Callable[[bytes], None]

logger = logging.getLogger(__name__)


def flight_error(error: FTLayerError) -> flight.FlightError:
    """Return ``error`` as Flight carries it."""
    kind = (
        flight.FlightUnauthenticatedError
        if isinstance(error, UnauthorizedError)
        else flight.FlightServerError
    )
    return kind(f"{error.code}: {error}", extra_info=encode_error(error))


class TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Lets no request pass that lacks the token."""

    def __init__(self, token: str) -> None:
        self._wanted = f"Bearer {token}".encode()

    def start_call(self, info: flight.CallInfo, headers: dict[str, list[str]]) -> None:
        """Refuse a request with `FlightUnauthenticatedError`, the same for a missing and for a wrong token."""
        given = headers.get("authorization", [])
        if len(given) != 1 or not hmac.compare_digest(given[0].encode("utf-8", "replace"), self._wanted):
            raise flight_error(
                UnauthorizedError(
                    "the token is missing or wrong; send a header 'authorization: Bearer <token>'"
                )
            )


class VertexServer(flight.FlightServerBase):  # type: ignore[misc]
    """Serves a vertex; it listens from the moment it is made, at ``port``."""

    def __init__(
        self,
        vertex: Vertex,
        *,
        host: str,
        port: int,
        token: str,
        max_message_bytes: int,
        certificate: tuple[bytes, bytes] | None = None,
    ) -> None:
        """Listen; ``certificate`` is the PEM of (chain, key) for TLS.

        Raises `pyarrow.ArrowException` or OSError when the address cannot be listened on.
        """
        self._vertex = vertex
        self._max_message_bytes = max_message_bytes
        scheme = flight.Location.for_grpc_tcp if certificate is None else flight.Location.for_grpc_tls
        super().__init__(
            scheme(f"[{host}]" if ":" in host else host, port),
            tls_certificates=None if certificate is None else [certificate],
            middleware={"token": TokenCheck(token)},
        )

    # ------------------------------------------------------------ actions

    def list_actions(self, context: flight.ServerCallContext) -> list[tuple[str, str]]:
        """Name the actions."""
        return [
            ("call", "one call of the vertex, as a msgpack frame"),
            ("health", "whether the vertex is up, its incarnation and its limits"),
            ("route", "the shard of a stream"),
        ]

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterator[bytes]:
        """Run one action to its end; see the module's docstring."""
        try:
            body = self._checked_body(action.body)
            if action.type == "call":
                yield from self._results(self._run(body))
            elif action.type == "health":
                yield self._health()
            elif action.type == "route":
                yield self._route(body)
            else:
                raise MalformedRequestError(
                    f"action: no action {action.type!r}; there are call, health, route"
                )
        except FTLayerError as error:
            raise flight_error(error) from error

    def _run(self, frame: bytes) -> bytes:
        call, envelope = decode_call(frame)
        answers: queue.SimpleQueue[Reply | FTLayerError] = queue.SimpleQueue()
        self._vertex.submit(call, envelope, answers.put)
        answer = answers.get()
        if isinstance(answer, FTLayerError):
            raise answer
        return encode_reply(answer)

    def _results(self, frame: bytes) -> Iterator[bytes]:
        for start in range(0, len(frame), RESULT_BYTES):
            yield frame[start : start + RESULT_BYTES]

    def _health(self) -> bytes:
        return pack(
            {
                "protocol": PROTOCOL,
                "incarnation": self._vertex.incarnation,
                "shards": self._vertex.shards,
                "max_message_bytes": self._max_message_bytes,
                "exact": self._vertex.exact,
            },
            "health",
        )

    def _route(self, body: bytes) -> bytes:
        try:
            stream = body.decode("utf-8")
        except UnicodeDecodeError as error:
            raise MalformedRequestError(f"route: expected a stream's name in UTF-8 ({error})") from None
        return pack({"shard": self._vertex.shard_of_stream(stream), "shards": self._vertex.shards}, "route")

    def _checked_body(self, body: pa.Buffer) -> bytes:
        if body.size > self._max_message_bytes:
            raise self._too_long(body.size)
        data: bytes = body.to_pybytes()
        return data

    def _too_long(self, size: int) -> MalformedRequestError:
        return MalformedRequestError(
            f"message of {size} bytes: the limit is {self._max_message_bytes} (max_message_bytes); "
            "send fewer rows at a time, or the call in parts"
        )

    # ------------------------------------------------------------ streams of calls

    def do_put(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        """Run the calls of a stream; see `ftlayer.service.put`."""
        self._run_put(descriptor, reader, writer.write)

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """Do what `do_put` does, for clients that want to be able to cancel."""
        self._run_put(descriptor, reader, writer.write_metadata)

    def _run_put(
        self, descriptor: flight.FlightDescriptor, reader: flight.MetadataRecordBatchReader, write: WriteFrame
    ) -> None:
        try:
            if descriptor.command is None:
                raise MalformedRequestError("descriptor: expected a command, got a path")
            header = PutHeader.unpack(descriptor.command)
            decoder = PutDecoder(header, reader.schema)
            if header.call == "Parts":
                write(self._run(self._joined_parts(reader)))
            else:
                self._run_stream(decoder, reader, write)
        except FTLayerError as error:
            raise flight_error(error) from error
        except (pa.ArrowException, ValueError, OSError) as error:
            if isinstance(error, flight.FlightError):
                raise
            raise flight_error(
                MalformedRequestError(f"stream: not readable as Arrow IPC ({error})")
            ) from error

    def _joined_parts(self, reader: flight.MetadataRecordBatchReader) -> bytes:
        frame = bytearray()
        for chunk in reader:
            if chunk.data is None:
                raise MalformedRequestError("part: expected a record batch, got metadata alone")
            frame += part_of(chunk.data)
            if len(frame) > PARTS_PER_CALL * self._max_message_bytes:
                raise self._too_long(len(frame))
            if is_last_part(None if chunk.app_metadata is None else chunk.app_metadata.to_pybytes()):
                return bytes(frame)
        raise MalformedRequestError("part: the stream ended before its last part")

    def _run_stream(
        self, decoder: PutDecoder, reader: flight.MetadataRecordBatchReader, write: WriteFrame
    ) -> None:
        answers = StreamAnswers(write)
        try:
            for chunk in reader:
                self._run_chunk(decoder, chunk, answers)
        finally:
            answers.finish()

    def _run_chunk(
        self, decoder: PutDecoder, chunk: flight.FlightStreamChunk, answers: StreamAnswers
    ) -> None:
        if chunk.app_metadata is None:
            raise MalformedRequestError("app_metadata: missing; every batch needs its sequence")
        if chunk.app_metadata.size > self._max_message_bytes:
            raise self._too_long(chunk.app_metadata.size)
        envelope, fields = decoder.read_metadata(chunk.app_metadata.to_pybytes())
        answer = answers.expect(envelope.sequence)
        try:
            if chunk.data is None:
                raise MalformedRequestError("record batch: missing; only metadata came")
            # Unlike `nbytes` this does not look at every column's slice, a hundred times as fast.
            size = chunk.data.get_total_buffer_size()
            if size > self._max_message_bytes:
                raise self._too_long(size)
            call = decoder.decode(chunk.data, envelope, fields)
            self._vertex.submit(call, envelope, answer)
        except FTLayerError as error:
            answer(error)


class StreamAnswers:
    """Writes a stream's answers as they come.

    Those that are there at once are written by the thread that reads the stream, the others by a thread of
    their own: a client that does not read its answers holds up these two (and so itself), but neither the
    shard nor anyone else.
    """

    def __init__(self, write: WriteFrame) -> None:
        """Made by the thread that reads the stream."""
        self._write_frame = write
        self._writing = threading.Lock()
        self._client_is_there = True
        self._reading_thread = threading.get_ident()
        self._ready: queue.SimpleQueue[tuple[int, Reply | FTLayerError] | None] = queue.SimpleQueue()
        # A token for each call that may be in flight; a queue of them is cheaper than a semaphore.
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(MAX_CALLS_IN_FLIGHT):
            self._room.put(None)
        self._thread = threading.Thread(target=self._write_all, name="ftlayer-answers", daemon=True)
        self._thread.start()

    def expect(self, sequence: int) -> Answer:
        """Return the function that answers call ``sequence``; waits while too many are in flight."""
        self._room.get()

        def answer(reply: Reply | FTLayerError) -> None:
            if threading.get_ident() == self._reading_thread:
                self._write(sequence, reply)
            else:
                self._ready.put((sequence, reply))

        return answer

    def finish(self) -> None:
        """Wait until every call expected has been answered, and what can be written is written."""
        for _ in range(MAX_CALLS_IN_FLIGHT):
            self._room.get()
        self._ready.put(None)
        self._thread.join()

    def _write_all(self) -> None:
        while (item := self._ready.get()) is not None:
            self._write(*item)

    def _write(self, sequence: int, reply: Reply | FTLayerError) -> None:
        frame = (
            encode_error(reply, sequence)
            if isinstance(reply, FTLayerError)
            else encode_reply(reply, sequence)
        )
        with self._writing:
            if self._client_is_there:
                try:
                    self._write_frame(frame)
                except (pa.ArrowException, OSError) as error:
                    # The client sends the call again on its next connection and gets this answer then.
                    logger.info("a client left before it got an answer: %s", error)
                    self._client_is_there = False
        self._room.put(None)
