"""Runs a vertex in this process until it is told to stop."""

from __future__ import annotations

import errno
import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import pyarrow as pa
from pyarrow import flight

from ftlayer import __version__
from ftlayer.common.checks import duration_ms
from ftlayer.common.rules.telemetry_settings import Tracing, tracing_of
from ftlayer.common.telemetry import EndedSpan, SpanError, SpanExport, open_spans
from ftlayer.config import TCP_LISTEN, ServeOptions, VertexOptions
from ftlayer.errors import ConfigError, FTLayerError, MalformedRequestError, VertexUnavailableError
from ftlayer.records.traced import attempt_span, record_span, trace_of
from ftlayer.transport import flight_connection
from ftlayer.transport.address import Address, parse_listen
from ftlayer.transport.frames import pack
from ftlayer.transport.sockets import Notifier, SocketDirectory, cannot_listen, check_socket_free, try_socket
from ftlayer.vertex.acker import warm_up
from ftlayer.vertex.calls import Reply
from ftlayer.vertex.metrics.catalogue import Families
from ftlayer.vertex.rules.followed import EndedAttempt
from ftlayer.vertex.rules.layer import FTLayerCore
from ftlayer.vertex.rules.state import LayerOptions
from ftlayer.vertex.service import directory
from ftlayer.vertex.service.heap import give_back_freed_memory, keep_freed_memory
from ftlayer.vertex.service.metrics import Metrics, Probes, vertex_families
from ftlayer.vertex.service.otlp import OtlpMetrics
from ftlayer.vertex.service.shard import Answer, ShardParts
from ftlayer.vertex.service.vertex import Vertex
from ftlayer.vertex.store.lmdb_store import Durability, LmdbStore
from ftlayer.vertex.wire import frames

logger = logging.getLogger(__name__)


# The vertex's face: an Arrow Flight server. It carries calls and answers, and decides nothing.
#
# ``DoAction "call"``    body: a call's frame (`ftlayer.vertex.wire.frames`). The bodies of the results, joined, are
#                        the reply's frame.
# ``DoAction "health"``  no body. One result: a msgpack map with protocol, incarnation, shards,
#                        max_message_bytes, exact (every id is kept, so that `Explain` is answered).
# ``DoAction "route"``   body: a stream's name. One result: a msgpack map with shard, shards: what the top bits
#                        of its root ids have to say.
# ``DoPut``              many calls. The descriptor's command is ``calls``; the schema has no columns, and the
#                        ``app_metadata`` of each message is a call's frame, of a call that has a sequence. Each is
#                        answered by one reply's or error's frame with its sequence, as soon as it is done and not
#                        always in order. With the command ``parts`` the messages, joined, are the frame of one call
#                        that is too long for one message.
# ``DoExchange``         the same; the answers come as messages of metadata alone.
#
# Every request has the header ``authorization: Bearer <token>``. What fails as a whole (an action, a
# stream that cannot be read) ends with a Flight error whose text begins with the code and whose
# ``extra_info`` is the error's frame; a single call of a stream is answered by its error's frame.


CALLS, PARTS = b"calls", b"parts"
RESULT_BYTES = 1 << 20
PARTS_PER_CALL = 16
# Calls of one stream that may wait for their answers: a client that never waits cannot fill the memory.
MAX_CALLS_IN_FLIGHT = 256

WriteFrame = Callable[[bytes], None]


class VertexServer(flight_connection.TokenServer):
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
        """Listen; ``certificate`` is the PEM of (chain, key) for TLS, ``client_ca`` signs clients'."""
        self._vertex = vertex
        self._max_message_bytes = max_message_bytes
        super().__init__(listen, token=token, certificate=certificate, client_ca=client_ca)

    def list_actions(self, context: flight.ServerCallContext) -> list[tuple[str, str]]:
        return [
            ("call", "one call of the vertex, as a msgpack frame"),
            ("health", "whether the vertex is up, its incarnation and its limits"),
            ("route", "the shard of a stream"),
        ]

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterator[bytes]:
        self.admitted(context)
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
            raise flight_connection.flight_error(error) from error

    def _run(self, frame: bytes | pa.Buffer) -> bytes:
        call, envelope = frames.decode_call(frame)
        answers: queue.SimpleQueue[Reply | FTLayerError] = queue.SimpleQueue()
        self._vertex.submit(call, envelope, answers.put)
        answer = answers.get()
        if isinstance(answer, FTLayerError):
            raise answer
        return frames.encode_reply(answer)

    def _results(self, frame: bytes) -> Iterator[bytes]:
        for start in range(0, len(frame), RESULT_BYTES):
            yield frame[start : start + RESULT_BYTES]

    def _health(self) -> bytes:
        return frames.encode_health(
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

    def do_put(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        self.admitted(context)
        self._run_put(descriptor, reader, writer.write)

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """Do what `do_put` does, for clients that want to be able to cancel."""
        self.admitted(context)
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
            raise flight_connection.flight_error(error) from error
        except (pa.ArrowException, ValueError, OSError, EOFError) as error:
            if isinstance(error, flight.FlightError):
                raise
            raise flight_connection.flight_error(
                MalformedRequestError(f"stream: not readable ({error})")
            ) from error

    def _joined_parts(self, reader: flight.MetadataRecordBatchReader) -> bytes:
        # A stream that ends too early is noticed: no beginning of a frame is a frame.
        frame = bytearray()
        for part in flight_connection.frames_of(reader):
            frame += memoryview(self._checked(part))
            if len(frame) > PARTS_PER_CALL * self._max_message_bytes:
                raise self._too_long(len(frame))
        return bytes(frame)

    def _run_stream(self, reader: flight.MetadataRecordBatchReader, write: WriteFrame) -> None:
        answers = StreamAnswers(write)
        try:
            for message in flight_connection.frames_of(reader):
                frame = frames.open_frame(message)
                answer = answers.expect(frames.envelope_of(frame).sequence)
                try:
                    self._checked(message)
                    call, envelope = frames.call_of(frame)
                    self._vertex.submit(call, envelope, answer)
                except FTLayerError as error:
                    answer(error)
        finally:
            answers.finish()


class StreamAnswers:
    """Writes a stream's answers as they come.

    Those that are there at once are written by the thread that reads the stream, the others by a thread of their own: a
    client that does not read its answers holds up these two (and so itself), but neither the shard nor anyone else.
    """

    def __init__(self, write: WriteFrame) -> None:
        self._write_frame = write
        self._writing = threading.Lock()
        self._client_is_there = True
        self._reading_thread = threading.get_ident()
        # A token for each call that may be in flight; a queue of them is cheaper than a semaphore.
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(MAX_CALLS_IN_FLIGHT):
            self._room.put(None)
        self._late: flight_connection.WriterThread[tuple[int, Reply | FTLayerError]] = (
            flight_connection.WriterThread("ftlayer-answers")
        )
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
        for _ in range(MAX_CALLS_IN_FLIGHT):
            self._room.get()
        self._late.finish()
        self._late.join()

    def _write(self, sequence: int, reply: Reply | FTLayerError) -> None:
        frame = (
            flight_connection.error_frame(reply, sequence)
            if isinstance(reply, FTLayerError)
            else frames.encode_reply(reply, sequence)
        )
        with self._writing:
            if self._client_is_there:
                try:
                    self._write_frame(frame)
                except flight_connection.TRANSPORT_ERRORS as error:
                    self._gone(error)
        self._room.put(None)

    def _gone(self, error: BaseException) -> None:
        # The client sends the call again on its next connection and gets this answer then.
        logger.info("a client left before it got an answer: %s", error)
        self._client_is_there = False


def span_of(attempt: EndedAttempt) -> EndedSpan:
    """Return the span of an attempt, below the record's at its source."""
    cause = attempt.cause
    return EndedSpan(
        trace_of(attempt.origin),
        attempt_span(attempt.root),
        record_span(attempt.origin),
        f"attempt {attempt.number}",
        attempt.began_ms * 1_000_000,
        attempt.ended_ms * 1_000_000,
        {
            "ftlayer.stream": attempt.stream,
            "ftlayer.attempt": attempt.number,
            "ftlayer.outcome": str(attempt.outcome),
            "ftlayer.root": f"{attempt.root:016x}",
            "ftlayer.origin": f"{attempt.origin:016x}",
            **({} if cause is None or not cause.place else {"ftlayer.place": cause.place}),
        },
        None if cause is None else SpanError(cause.reason, cause.operator, cause.traceback),
    )


EXIT_STOPPED = 0
EXIT_FAULT = 70  # EX_SOFTWARE

# Threads of Flight, the writer and the answers take turns many times in a millisecond; at Python's 5 ms one that
# decodes a large batch would keep all others from answering.
SWITCH_INTERVAL_S = 0.000_5
_LOOK_FOR_SIGNALS_S = 0.1
_TRIM_EVERY_S = 2.0
_DESCRIPTORS_S = 60.0
# What was answered should reach its client before the process ends.
_LAST_ANSWERS_S = 0.5


def serve(
    options: ServeOptions,
    *,
    on_ready: Callable[[str], None] | None = None,
    stop: threading.Event | None = None,
    notifier: Notifier | None = None,
) -> int:
    """Serve until ``stop`` is set, SIGTERM or SIGINT comes (if this is the main thread), or a fault.

    ``on_ready`` gets the address for clients; ``notifier`` learns what probes would. Returns the exit code: 0 when
    stopped, 70 after a fault that the vertex could not recover from. Streams that clients have open keep threads of
    this process busy, so end it with ``os._exit`` after this.

    Raises `ConfigError` when the address cannot be listened on or certificates and key are none, `StoreError`
    for a store that cannot be opened.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    stop = stop or threading.Event()
    faults: list[Exception] = []

    def on_fatal(error: Exception) -> None:
        faults.append(error)
        stop.set()

    _check_tls(options)
    directory.check_unheld(Path(options.vertex.path))
    place, sockets = _place(options)
    _check_free(place)
    keep_freed_memory()
    flight_connection.poll_in_place()
    tracing = tracing_of(os.environ)
    spans = None if tracing is None else open_spans(tracing, "ftlayer-vertex", __version__)
    probes = Probes()
    # Behind a Unix socket there is no host.
    host = place.host or "127.0.0.1"
    asked = _Scraped()
    otlp = OtlpMetrics(asked.gather, options.vertex.otlp_endpoint, "ftlayer-vertex")
    # Before the stores are opened and until they are closed: probes tell of both.
    with Metrics(otlp.counted, host, options.vertex.metrics_port, probes):
        vertex = open_vertex(options.vertex, on_fatal, traced=_traced(tracing, spans))
        probes.opened(vertex)
        # What is there now stays: looking at it for garbage would stop every thread for a tenth of a second.
        gc.freeze()
        threading.Thread(
            target=_compile_kernels, args=(on_fatal, stop), name="ftlayer-kernels", daemon=True
        ).start()
        try:
            server = _listen(options, place, vertex)
            if sockets is not None:
                directory.link_access(
                    Path(sockets.path), Path(os.path.realpath(options.vertex.path)), directory.STORE
                )
                directory.link_access(Path(sockets.path), Path(place.path), directory.SERVED)
            asked.vertex = vertex
            telling = _Telling(probes, notifier or Notifier("", None), on_ready)
            with _signals() as signals, otlp:
                telling.ready(str(server.address))
                _wait(signals, stop, telling)
                telling.stopping()
            for number in signals:
                logger.info("stopping: %s", signal.Signals(number).name)
        finally:
            probes.stopping()
            vertex.close()
            if spans is not None:
                spans.close()
            if sockets is not None:
                sockets.remove()
    server.stop(_LAST_ANSWERS_S)
    return EXIT_FAULT if faults else EXIT_STOPPED


class _Scraped:
    """The vertex that scrapes ask, from when it serves."""

    vertex: Vertex | None = None

    def gather(self) -> Families:
        """Return the values of now; `VertexUnavailableError` while the stores are being opened."""
        if self.vertex is None:
            raise VertexUnavailableError("the vertex is opening its stores")
        return vertex_families(self.vertex, __version__)


@dataclass(frozen=True)
class _Telling:
    probes: Probes
    notifier: Notifier
    on_ready: Callable[[str], None] | None

    def ready(self, address: str) -> None:
        self.probes.serving()
        self.notifier.ready(f"serving at {address}")
        if self.on_ready is not None:
            self.on_ready(address)

    def alive(self) -> None:
        self.notifier.alive(lambda: self.probes.liveness().passes)

    def stopping(self) -> None:
        # Before anything is closed: who asks whether to send clients here hears no first.
        self.probes.stopping()
        self.notifier.stopping()


def _wait(signals: list[int], stop: threading.Event, telling: _Telling) -> None:
    trim_at = time.monotonic()
    while not signals and not stop.wait(_LOOK_FOR_SIGNALS_S):
        telling.alive()
        if time.monotonic() >= trim_at:
            give_back_freed_memory()
            trim_at = time.monotonic() + _TRIM_EVERY_S


def _compile_kernels(on_fatal: Callable[[Exception], None], stop: threading.Event) -> None:
    """Compile the kernels beside the service, ten seconds the first time on a machine; later they are read from disk.

    A wrapped query starts without them: only records that are followed by XOR need the table. A call that needs a
    kernel before it is there waits for it (numba compiles under one lock). Callers may hold all descriptors for a
    while: that alone ends no vertex.
    """
    began = time.monotonic()
    try:
        while not _compiled(began):
            if stop.wait(1):
                return
    except Exception as error:
        logger.exception("the kernels of the acker table cannot be compiled")
        on_fatal(error)
        return
    gc.freeze()
    logger.info("the kernels of the acker table are ready after %.1f s", time.monotonic() - began)


def _compiled(began: float) -> bool:
    try:
        warm_up()
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE) or time.monotonic() - began >= _DESCRIPTORS_S:
            raise
        logger.warning("the kernels of the acker table wait for a free descriptor: %s", error)
        return False
    return True


def _place(options: ServeOptions) -> tuple[Address, SocketDirectory | None]:
    """Return where to listen, and where tools find that, if it is nowhere that was named."""
    if options.listen is not None or options.tls_cert is not None:
        return parse_listen(options.listen or TCP_LISTEN, "listen"), None
    store = Path(os.path.realpath(options.vertex.path))
    directory.prepare_vertex(store)
    sockets = SocketDirectory.make("tools find this vertex by its address alone")
    try:
        (store / directory.SOCKET).mkdir(mode=0o700, exist_ok=True)
        try_socket(f"{store / directory.SOCKET}/probe")
        return Address(path=f"{store / directory.SOCKET}/vertex"), sockets
    except OSError as error:
        if sockets is None:
            raise ConfigError(
                f"listen: no socket can be in {store}: {error.strerror}: name a place"
            ) from error
        logger.warning(
            "%s; each start listens at another path, but for one that --listen names", error.strerror
        )
        return sockets.socket("vertex"), sockets


def _listen(options: ServeOptions, place: Address, vertex: Vertex) -> VertexServer:
    certificate = None
    if options.tls_cert is not None and options.tls_key is not None:
        certificate = options.tls_cert, options.tls_key
    try:
        return VertexServer(
            vertex,
            listen=place,
            token=options.token,
            max_message_bytes=options.vertex.max_message_bytes,
            certificate=certificate,
            client_ca=options.tls_client_ca,
        )
    except (pa.ArrowException, OSError) as error:
        vertex.close()
        raise ConfigError(f"listen: cannot listen on {place.listen} ({error})") from error


def _check_tls(options: ServeOptions) -> None:
    """Look at the certificates before gRPC does, which says only that it cannot listen."""
    if options.tls_cert is None or options.tls_key is None:
        return
    # Late: most vertices have none.
    from ftlayer.transport.tls import check_certificate, load_certificates

    check_certificate(options.tls_cert, options.tls_key, cert_option="tls_cert", key_option="tls_key")
    if options.tls_client_ca is not None:
        load_certificates(options.tls_client_ca, "tls_client_ca")


def _check_free(address: Address) -> None:
    """Find out before the store is opened: gRPC says only that it failed."""
    if address.path:
        check_socket_free(address.path, "listen")
        return
    host, port = address.host, address.port
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            if not address.is_here:
                logger.info("%s is not on loopback: clients need TLS", host)
    except OSError as error:
        raise cannot_listen("listen", address.listen, error) from error


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Gather what comes of SIGTERM and SIGINT, if this is the main thread.

    A handler runs in the middle of whatever the thread does, `Event.wait` too: `Event.set` would wait there for a lock
    that its own thread holds.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def handle(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Traced:
    """The share of records whose attempts are followed, and what gets them when they have ended."""

    ratio: float
    trace: Callable[[EndedAttempt], None]


def _traced(tracing: Tracing | None, spans: SpanExport | None) -> Traced | None:
    if tracing is None or spans is None:
        return None
    return Traced(tracing.ratio, lambda attempt: spans.send(span_of(attempt)))


def open_vertex(
    options: VertexOptions, on_fatal: Callable[[Exception], None], traced: Traced | None = None
) -> Vertex:
    """Open (or make) the stores of a vertex and recover what they hold; raises as `fix_shards` and `LmdbStore.open`."""
    path = Path(options.path)
    directory.prepare_vertex(path)
    directory.fix_shards(path, options.shards)
    return Vertex(path, [_parts(options, path, shard, traced) for shard in range(options.shards)], on_fatal)


def _parts(options: VertexOptions, path: Path, shard: int, traced: Traced | None) -> ShardParts:
    durability: Durability = "batch"
    sync_every_ms = None
    if options.durability == "none":
        durability = "none"
    elif options.durability != "batch":
        durability = sync_every_ms = duration_ms(options.durability, "durability")
    layer_options = LayerOptions(
        shard=shard,
        shards=options.shards,
        tracker=options.tracker,
        buckets=options.timeout_buckets,
        traced=0.0 if traced is None else traced.ratio,
    )
    return ShardParts(
        open_store=lambda: LmdbStore.open(
            path / f"shard-{shard:03}",
            max_store_bytes=options.max_store_bytes // options.shards,
            durability=durability,
        ),
        make_layer=lambda store, now: FTLayerCore(store, layer_options, now),
        persist_timeout_ms=options.persist_timeout_ms,
        sync_every_ms=sync_every_ms,
        flush_ms=layer_options.flush_ms,
        trace=None if traced is None else traced.trace,
    )
