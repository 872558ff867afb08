"""Flight servers: how they are connected to, what their failures mean, and streams of frames by ``DoExchange``."""

from __future__ import annotations

import contextlib
import hmac
import os
import queue
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa
from pyarrow import flight

from ftlayer.common.printable import shortened
from ftlayer.errors import FTLayerError, MalformedRequestError, UnauthorizedError, error_for_code
from ftlayer.transport.address import Address, parse_address
from ftlayer.transport.frames import pack
from ftlayer.transport.sockets import Door

# All connections are a client's own: one made anew does not share the backoff of the one before it.
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
]
_RETRYING = [
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


@dataclass(frozen=True)
class Endpoint:
    """A Flight server, and what it takes to be let in.

    ``root_certs`` is PEM of what the server's certificate is verified by (None: the system's), ``tls_name`` the name
    on it where that is not the address ("": it is). ``client_cert`` and ``client_key`` are PEM of what is shown to a
    server that asks for it; one text may hold both.
    """

    address: str
    token: str = field(repr=False)
    root_certs: bytes | None = None
    tls_name: str = ""
    client_cert: bytes | None = None
    client_key: bytes | None = field(default=None, repr=False)


def connect(endpoint: Endpoint, *, retries: bool = False) -> flight.FlightClient:
    """Return a client of ``endpoint``; does not wait for the server.

    With ``retries``, for a client that tries again: it soon finds a server that is back, and gives an attempt to
    connect up after a second. Raises `ConfigError` for an address that is none.
    """
    options = [*_OPTIONS, *(_RETRYING if retries else ())]
    if parse_address(endpoint.address, "address").is_here:
        options.append(("grpc.enable_http_proxy", 0))
    return flight.FlightClient(
        endpoint.address,
        tls_root_certs=endpoint.root_certs,
        cert_chain=endpoint.client_cert,
        private_key=endpoint.client_key,
        override_hostname=endpoint.tls_name or None,
        generic_options=options,
    )


_EXPERIMENTS = "GRPC_EXPERIMENTS"
_NO_EVENT_ENGINE = "-event_engine_listener,-event_engine_client"


def poll_in_place() -> None:
    """Let a thread that waits for a message read it from the socket itself.

    By default gRPC reads in threads of its own (its event engine) and hands over, which takes two more changes of
    threads at each end: as much time as a small call and its answer take without them.

    To be called before the process uses gRPC; later it has no effect. A value of `GRPC_EXPERIMENTS` that is there
    already stays.
    """
    os.environ.setdefault(_EXPERIMENTS, _NO_EVENT_ENGINE)


TRANSPORT_ERRORS = (pa.ArrowException, OSError)
"""What Flight raises for a connection or a stream that is broken."""

_WORDS = {
    r"No such file or directory|[Cc]onnection refused": "no process listens there",
    r"lookup (failed|error)|Name or service not known": "its host's name cannot be resolved",
    r"certificate verify failed": "its certificate is not accepted",
    r"wrong version number": "what listens there speaks no TLS",
    r"Failed parsing HTTP/2": "what listens there is another kind of server",
    r"timed out before receiving SETTINGS": "what listens there says nothing",
    r"Deadline Exceeded": "no answer came in time",
    r"Permission denied": "this user may not connect there",
    r"Socket closed|Broken pipe|reset by peer|GOAWAY|recvmsg": "the other end has closed the connection",
    r"[Uu]nreachable|No route to host": "the network does not reach it",
    r"[Cc]ancelled": "the connection was given up",
}


def failure_text(error: BaseException) -> str:
    """Return what a failure of the transport means, in plain words; gRPC has only texts for these."""
    text = str(error)
    if isinstance(error, FTLayerError):
        return text
    known = next((words for pattern, words in _WORDS.items() if re.search(pattern, text)), None)
    around = r"^Flight returned [\w ]+, with message: |\. gRPC client debug context.*"
    return known or re.sub(around, "", text)


def error_frame(error: FTLayerError, sequence: int | None = None) -> bytes:
    """Return an error as a frame; what it quotes of a request is bounded (`ftlayer.common.printable.shortened`)."""
    frame = {"error": error.code, "message": shortened(str(error))}
    return pack(frame if sequence is None else frame | {"sequence": sequence}, "error")


def error_in(frame: dict[str, Any]) -> FTLayerError | None:
    """Return the error that `error_frame` was given; None for a frame of something else."""
    if "error" not in frame:
        return None
    return error_for_code(str(frame["error"]))(str(frame.get("message")))


def flight_error(error: FTLayerError) -> flight.FlightError:
    """Return ``error`` as Flight carries it: a text that begins with its code, and its frame as ``extra_info``."""
    refused = isinstance(error, UnauthorizedError)
    kind = flight.FlightUnauthenticatedError if refused else flight.FlightServerError
    return kind(f"{error.code}: {shortened(str(error))}", extra_info=error_frame(error))


# Streams of Flight that carry frames: bytes as ``app_metadata``, in messages without a record batch.
#
# Flight gives a message with a record batch to Arrow's reader before anyone else sees it, and that reader takes what
# is claimed (buffers that expand to gigabytes) and can be made to crash (a message without a header where a dictionary
# was due). So a stream begins with a schema that has no columns, with which there is nothing for it to read, and
# batches travel inside frames, where `ftlayer.records.ipc` looks at them first.
#
# A client ends its stream by a frame (`end_stream`), never by ``done_writing``. Where one thread reads a ``DoExchange``
# and another writes, Arrow half-closes it twice if the stream ends while ``done_writing`` runs, and gRPC then aborts
# the process ("API misuse of type GRPC_CALL_ERROR_TOO_MANY_OPERATIONS"). With pyarrow 26, every third stream that is
# cancelled and half-closed at once shows it.

NO_COLUMNS = pa.schema([])
"""The first message of a client's stream."""

_END = pa.py_buffer(b"\0")
"""The frame behind the last one. Every other frame has a head, and so at least two bytes."""


def end_stream(writer: flight.FlightStreamWriter) -> None:
    """Tell the server that no frame comes behind those written; it ends the stream when it has answered them.

    Raises what Flight raises for a stream that is broken.
    """
    writer.write_metadata(_END)


def frames_of(reader: flight.MetadataRecordBatchReader) -> Iterator[pa.Buffer]:
    """Yield the frames of a stream, to its end, as views of what came.

    The end is what `end_stream` wrote, or that the client half-closed the stream.

    Raises `MalformedRequestError` for a stream that carries columns, and what Flight raises for one that breaks.
    """
    # Before the first message is read: it would be read by this schema.
    if len(reader.schema):
        raise MalformedRequestError(
            f"schema: expected one without columns, got {len(reader.schema)}; a stream carries frames as "
            "app_metadata, and record batches are inside them"
        )
    while True:
        try:
            chunk = reader.read_chunk()
        except StopIteration:
            return
        if chunk.data is not None or chunk.app_metadata is None:
            raise MalformedRequestError("message: expected app_metadata alone, got a record batch")
        if chunk.app_metadata == _END:
            return
        yield chunk.app_metadata


class TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        self._wanted = _header(token)[1]

    def start_call(self, info: flight.CallInfo, headers: dict[str, list[str]]) -> None:
        """Refuse a request, in the same words for a missing and for a wrong token."""
        given = headers.get("authorization", [])
        if len(given) != 1 or not hmac.compare_digest(given[0].encode("utf-8", "replace"), self._wanted):
            raise flight_error(
                UnauthorizedError(
                    "the token is missing or wrong: give the one that the server was started with, by token=… in "
                    "Python, in other clients by a header 'authorization: Bearer <token>'"
                )
            )


def call_options(token: str, timeout_s: float | None = None) -> flight.FlightCallOptions:
    """Return what goes with every request; ``timeout_s`` None is for streams."""
    return flight.FlightCallOptions(timeout=timeout_s, headers=[_header(token)])


def _header(token: str) -> tuple[bytes, bytes]:
    return b"authorization", f"Bearer {token}".encode()


T = TypeVar("T")


class WriterThread(Generic[T]):
    """Writes what it is given, in order: a peer that does not read holds up nothing else. Any thread may use it."""

    def __init__(self, name: str) -> None:
        """Take items from now on; they are written once it is started."""
        self._name = name
        self._lock = threading.Lock()
        self._items: deque[T] = deque()  # the first one is being written
        self._signals: queue.SimpleQueue[bool] = queue.SimpleQueue()  # one for an item; False: it ends here
        self._stopped = False
        self._thread: threading.Thread | None = None

    def start(
        self,
        write: Callable[[T], None],
        on_broken: Callable[[BaseException], None],
        at_end: Callable[[], None] | None = None,
    ) -> None:
        """Begin to write; ``at_end`` is called behind the last item, unless it was stopped.

        After one of `TRANSPORT_ERRORS` nothing more is written, and ``on_broken`` is told of it.
        """
        given = (write, on_broken, at_end)
        self._thread = threading.Thread(target=self._run, args=given, name=self._name, daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """Write ``item`` behind those before it; never waits."""
        with self._lock:
            self._items.append(item)
        self._signals.put(True)

    def waiting(self) -> list[T]:
        with self._lock:
            return list(self._items)

    def finish(self) -> None:
        self._signals.put(False)

    def stop(self) -> None:
        """Write nothing more; what is not written yet keeps waiting."""
        self._stopped = True
        self._signals.put(False)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended (None: however long that takes), unless it was never started."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(
        self,
        write: Callable[[T], None],
        on_broken: Callable[[BaseException], None],
        at_end: Callable[[], None] | None,
    ) -> None:
        try:
            while self._signals.get() and not self._stopped:
                write(self._items[0])
                with self._lock:
                    self._items.popleft()
            if at_end is not None and not self._stopped:
                at_end()
        except TRANSPORT_ERRORS as error:
            on_broken(error)


class FlightConnection:
    def __init__(self, endpoint: Endpoint, command: bytes) -> None:
        """Prepare a stream to ``endpoint``, whose descriptor is ``command``."""
        self._endpoint, self._command = endpoint, command
        self._lock = threading.Lock()
        self._cancelled = False
        self._client: flight.FlightClient | None = None
        self._writer: flight.FlightStreamWriter | None = None
        self._reader: flight.FlightStreamReader | None = None

    def open(self) -> None:
        self._client = connect(self._endpoint)
        descriptor = flight.FlightDescriptor.for_command(self._command)
        options = call_options(self._endpoint.token)
        self._writer, reader = self._client.do_exchange(descriptor, options)
        with self._lock:
            self._reader = reader
            cancelled = self._cancelled
        if cancelled:
            raise ConnectionAbortedError("the stream was cancelled before it began")
        self._writer.begin(NO_COLUMNS)

    def read(self) -> bytes | None:
        assert self._reader is not None
        while True:
            try:
                frame = self._reader.read_chunk().app_metadata
            except StopIteration:
                return None
            if frame is not None:
                data: bytes = frame.to_pybytes()
                return data

    def write(self, frame: bytes) -> None:
        assert self._writer is not None
        self._writer.write_metadata(frame)

    def end(self) -> None:
        assert self._writer is not None
        end_stream(self._writer)

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            reader = self._reader
        if reader is not None:
            reader.cancel()

    def close(self) -> None:
        if self._writer is not None:
            # A writer that is not closed complains when it is freed.
            with contextlib.suppress(*TRANSPORT_ERRORS):
                self._writer.close()
        if self._client is not None:
            self._client.close()


class TokenServer(flight.FlightServerBase):  # type: ignore[misc]
    """A Flight server for clients that have its token. It serves from the moment it is made, at ``address``."""

    def __init__(
        self, listen: Address, *, token: str, certificate: tuple[bytes, bytes] | None, client_ca: bytes | None
    ) -> None:
        """Listen (port 0: on any free one); ``certificate`` is the PEM of (chain, key) for TLS.

        With ``client_ca``, PEM, a client without a certificate signed by it sends nothing that would be read into
        memory before its token. What calls need has to be there before this: the first may come at once.

        Raises `pyarrow.ArrowException` or OSError when the address cannot be listened on.
        """
        tls = certificate is not None
        super().__init__(
            str(listen.of_server(listen.port, tls=tls)),
            tls_certificates=None if certificate is None else [certificate],
            verify_client=client_ca is not None,
            root_certificates=client_ca,
            middleware={"token": TokenCheck(token)},
        )
        _live.add(self)
        self.address = listen.of_server(self.port, tls=tls)
        self._door = None if listen.path else Door(self.port)

    def admitted(self, context: flight.ServerCallContext) -> None:
        """Tell that a call has the token: its connection stays. For the beginning of each method."""
        if self._door is not None:
            self._door.shown(context.peer())

    def shutdown(self) -> None:
        if self._door is not None:
            self._door.close()
        super().shutdown()

    def stop(self, timeout_s: float) -> None:
        """Take no more calls; wait for those under way, ``timeout_s`` at the longest: open streams may never end."""
        stopping = threading.Thread(target=self.shutdown, name="ftlayer-shutdown", daemon=True)
        stopping.start()
        stopping.join(timeout_s)


_live: weakref.WeakSet[TokenServer] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Let a forked process end without its parent's servers: Flight would shut them down, and wait without end.

    The threads that serve them are the parent's. What Flight does at the end is a `weakref.finalize` of the server: the
    callback of one of its weak references.
    """
    for server in list(_live):
        for reference in weakref.getweakrefs(server):
            if isinstance(finalizer := reference.__callback__, weakref.finalize):
                finalizer.detach()


os.register_at_fork(after_in_child=_leave_to_parent)


class Connection(Protocol):
    """A stream of frames, both ways. One thread reads, another writes; `cancel` is of any thread.

    Methods raise one of `TRANSPORT_ERRORS` when the stream is broken or cancelled, and the `FTLayerError` that the
    server has ended it with.
    """

    def open(self) -> None:
        """Connect, and begin the stream; comes first, and once."""

    def read(self) -> bytes | None:
        """Wait for the next frame; None when the server has ended the stream in order."""

    def write(self, frame: bytes) -> None:
        """Write a frame; waits while the server does not read."""

    def end(self) -> None:
        """Tell the server that no frame comes behind those written."""

    def cancel(self) -> None:
        """Break the stream: a thread that waits in a method is freed. May come before `open`, and repeatedly."""

    def close(self) -> None:
        """Free everything; comes last, when no other thread uses the stream any more."""


class Exchange(Generic[T]):
    """One stream, and no second one: when it breaks, that is told, and nothing is sent any more.

    What was on its way then is lost, or not.
    """

    def __init__(self, name: str, connection: Connection, encode: Callable[[T], bytes]) -> None:
        """Take what is to be sent; ``encode`` makes a frame of it. The threads are called ``name``."""
        self._name = name
        self._connection = connection
        self._encode = encode
        self._outbox: WriterThread[T] = WriterThread(f"{name}-write")
        self._lock = threading.Lock()
        self._silent = False  # closed, discarded or broken: nothing more is told
        self._thread: threading.Thread | None = None

    def start(
        self, on_frame: Callable[[bytes], None], on_end: Callable[[BaseException | None], None]
    ) -> None:
        """Connect, and begin to send and to receive; returns at once.

        ``on_frame`` is called with each frame that comes, in order, by a thread of this object. ``on_end`` is called
        once: with the error when the server cannot be reached, the stream breaks, or ``on_frame`` or ``encode`` raises
        an `FTLayerError`; with None when the server ends the stream. It is not called after `close` or `discard`.
        """
        self._on_frame, self._on_end = on_frame, on_end
        self._thread = threading.Thread(target=self._run, name=f"{self._name}-read", daemon=True)
        self._thread.start()

    def send(self, item: T) -> None:
        """Send ``item`` behind those before it; never waits and never raises."""
        self._outbox.put(item)

    def waiting(self) -> list[T]:
        """Return what is not written yet; may be called by any thread."""
        return self._outbox.waiting()

    def discard(self) -> None:
        """Send nothing more and tell nothing more; does not wait for anything."""
        with self._lock:
            self._silent = True
        self._outbox.stop()
        self._connection.cancel()

    def close(self, timeout_s: float) -> None:
        """End the stream behind what was sent, and wait for that; may be called by any thread.

        Waits ``timeout_s`` at the longest for a server that does not read, or does not end the stream in turn.
        """
        with self._lock:
            self._silent = True
        self._outbox.finish()
        if self._thread is threading.current_thread():
            self._outbox.join(timeout_s)
        elif self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._converse()
        finally:
            # Frees the thread that writes where the server does not read.
            self._connection.cancel()
            self._outbox.stop()
            self._outbox.join()
            self._connection.close()

    def _converse(self) -> None:
        """Read to the end of the stream, which is told before anything is cleaned up."""
        try:
            self._connection.open()
            self._outbox.start(self._write, self._write_broke, self._connection.end)
            while (frame := self._connection.read()) is not None:
                self._on_frame(frame)
            self._tell(None)
        except (FTLayerError, *TRANSPORT_ERRORS) as error:
            self._tell(error)

    def _write(self, item: T) -> None:
        try:
            frame = self._encode(item)
        except FTLayerError as error:
            self._tell(error)
            self._outbox.stop()
            return
        self._connection.write(frame)

    def _write_broke(self, error: BaseException) -> None:
        self._tell(error)
        self._connection.cancel()

    def _tell(self, error: BaseException | None) -> None:
        with self._lock:
            was_silent, self._silent = self._silent, True
        if not was_silent:
            self._on_end(error)
