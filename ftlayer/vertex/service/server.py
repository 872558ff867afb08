"""The vertex's face: an Arrow Flight server. It carries calls and answers, and decides nothing.

``DoAction "call"``    body: a call's frame (`ftlayer.vertex.wire.frames`). The bodies of the results, joined, are
                       the reply's frame.
``DoAction "health"``  no body. One result: a msgpack map with protocol, incarnation, shards,
                       max_message_bytes, exact (every id is kept, so that `Explain` is answered).
``DoAction "route"``   body: a stream's name. One result: a msgpack map with shard, shards: what the top bits
                       of its root ids have to say.
``DoPut``              many calls. The descriptor's command is ``calls``; the schema has no columns, and the
                       ``app_metadata`` of each message is a call's frame, of a call that has a sequence. Each is
                       answered by one reply's or error's frame with its sequence, as soon as it is done and not
                       always in order. With the command ``parts`` the messages, joined, are the frame of one call
                       that is too long for one message.
``DoExchange``         the same; the answers come as messages of metadata alone.

Every request has the header ``authorization: Bearer <token>``. What fails as a whole (an action, a
stream that cannot be read) ends with a Flight error whose text begins with the code and whose
``extra_info`` is the error's frame; a single call of a stream is answered by its error's frame.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator

import pyarrow as pa
from pyarrow import flight

from ftlayer.errors import FTLayerError, MalformedRequestError
from ftlayer.transport.address import Address
from ftlayer.transport.failures import TRANSPORT_ERRORS, error_frame, flight_error
from ftlayer.transport.frames import pack
from ftlayer.transport.server import TokenServer
from ftlayer.transport.streams import frames_of
from ftlayer.transport.writer import WriterThread
from ftlayer.vertex.calls import Reply
from ftlayer.vertex.service.rules import Answer
from ftlayer.vertex.service.vertex import Vertex
from ftlayer.vertex.wire.frames import (
    call_of,
    decode_call,
    encode_health,
    encode_reply,
    envelope_of,
    open_frame,
)

CALLS, PARTS = b"calls", b"parts"
RESULT_BYTES = 1 << 20
PARTS_PER_CALL = 16
# Calls of one stream that may wait for their answers: a client that never waits cannot fill the memory.
MAX_CALLS_IN_FLIGHT = 256

WriteFrame = Callable[[bytes], None]

logger = logging.getLogger(__name__)


class VertexServer(TokenServer):
    """Serves a vertex; it listens from the moment it is made, at ``address``."""

    def __init__(
        self,
        vertex: Vertex,
        *,
        listen: Address,
        token: str,
        max_message_bytes: int,
        certificate: tuple[bytes, bytes] | None = None,
        client_ca: bytes | None = None,
    ) -> None:
        """Listen; ``certificate`` is the PEM of (chain, key) for TLS, ``client_ca`` that of who signs clients'.

        Raises `pyarrow.ArrowException` or OSError when the address cannot be listened on.
        """
        self._vertex = vertex
        self._max_message_bytes = max_message_bytes
        super().__init__(listen, token=token, certificate=certificate, client_ca=client_ca)

    # ------------------------------------------------------------ actions

    def list_actions(self, context: flight.ServerCallContext) -> list[tuple[str, str]]:
        return [
            ("call", "one call of the vertex, as a msgpack frame"),
            ("health", "whether the vertex is up, its incarnation and its limits"),
            ("route", "the shard of a stream"),
        ]

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterator[bytes]:
        """Run one action to its end; see the module's docstring."""
        try:
            body = self._checked(action.body)
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

    def _run(self, frame: bytes | pa.Buffer) -> bytes:
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
        return encode_health(
            incarnation=self._vertex.incarnation,
            shards=self._vertex.shards,
            max_message_bytes=self._max_message_bytes,
            exact=self._vertex.exact,
        )

    def _route(self, body: pa.Buffer) -> bytes:
        try:
            stream = body.to_pybytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise MalformedRequestError(f"route: expected a stream's name in UTF-8 ({error})") from None
        return pack({"shard": self._vertex.shard_of_stream(stream), "shards": self._vertex.shards}, "route")

    def _checked(self, message: pa.Buffer) -> pa.Buffer:
        if message.size > self._max_message_bytes:
            raise self._too_long(message.size)
        return message

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
        """Run the calls of a stream; see the module's docstring."""
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
            command = descriptor.command
            if command == CALLS:
                self._run_stream(reader, write)
            elif command == PARTS:
                write(self._run(self._joined_parts(reader)))
            else:
                raise MalformedRequestError(
                    f"descriptor: expected the command 'calls' or 'parts', got {command!r}"
                )
        except FTLayerError as error:
            raise flight_error(error) from error
        except (pa.ArrowException, ValueError, OSError, EOFError) as error:
            if isinstance(error, flight.FlightError):
                raise
            raise flight_error(MalformedRequestError(f"stream: not readable ({error})")) from error

    def _joined_parts(self, reader: flight.MetadataRecordBatchReader) -> bytes:
        # A stream that ends too early is noticed: no beginning of a frame is a frame.
        frame = bytearray()
        for part in frames_of(reader):
            frame += memoryview(self._checked(part))
            if len(frame) > PARTS_PER_CALL * self._max_message_bytes:
                raise self._too_long(len(frame))
        return bytes(frame)

    def _run_stream(self, reader: flight.MetadataRecordBatchReader, write: WriteFrame) -> None:
        answers = StreamAnswers(write)
        try:
            for message in frames_of(reader):
                frame = open_frame(message)
                answer = answers.expect(envelope_of(frame).sequence)
                try:
                    self._checked(message)
                    call, envelope = call_of(frame)
                    self._vertex.submit(call, envelope, answer)
                except FTLayerError as error:
                    answer(error)
        finally:
            answers.finish()


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
        # A token for each call that may be in flight; a queue of them is cheaper than a semaphore.
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(MAX_CALLS_IN_FLIGHT):
            self._room.put(None)
        self._late: WriterThread[tuple[int, Reply | FTLayerError]] = WriterThread("ftlayer-answers")
        self._late.start(lambda answer: self._write(*answer), self._gone)

    def expect(self, sequence: int) -> Answer:
        """Return the function that answers call ``sequence``; waits while too many are in flight."""
        self._room.get()

        def answer(reply: Reply | FTLayerError) -> None:
            if threading.get_ident() == self._reading_thread:
                self._write(sequence, reply)
            else:
                self._late.put((sequence, reply))

        return answer

    def finish(self) -> None:
        """Wait until every call expected has been answered, and what can be written is written."""
        for _ in range(MAX_CALLS_IN_FLIGHT):
            self._room.get()
        self._late.finish()
        self._late.join()

    def _write(self, sequence: int, reply: Reply | FTLayerError) -> None:
        frame = (
            error_frame(reply, sequence) if isinstance(reply, FTLayerError) else encode_reply(reply, sequence)
        )
        with self._writing:
            if self._client_is_there:
                try:
                    self._write_frame(frame)
                except TRANSPORT_ERRORS as error:
                    self._gone(error)
        self._room.put(None)

    def _gone(self, error: BaseException) -> None:
        # The client sends the call again on its next connection and gets this answer then.
        logger.info("a client left before it got an answer: %s", error)
        self._client_is_there = False
