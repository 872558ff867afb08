"""The client of a vertex: what tasks, drivers and tools talk to it with."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import msgpack
import pyarrow as pa
from pyarrow import flight

from ftlayer import __version__
from ftlayer.common.checks import LONGEST_MS, MOST_BYTES, check_bytes, check_int, check_text, known_options
from ftlayer.common.clock import mono_ms
from ftlayer.config import CLIENT_DEADLINE_MS, check_token
from ftlayer.errors import (
    ConfigError,
    FTLayerError,
    UnauthorizedError,
    UnreadableReplyError,
    UnsupportedError,
    VertexError,
    VertexUnavailableError,
)
from ftlayer.transport import flight_connection
from ftlayer.transport.address import parse_address
from ftlayer.vertex.calls import AnsweredBy, Envelope, Ingest, Persist, R, Register, Reply, Xor
from ftlayer.vertex.wire.frames import decode_reply, encode_call, fields_of, frame_of

logger = logging.getLogger(__name__)


T = TypeVar("T")

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5

SILENT_S = 10.0
"""Where an answer is waited for longer than that, the first failure of an outage is logged."""
_away: set[str] = set()  # Addresses that gave this process no answer the last time, which was logged.

# gRPC keeps threads and locks that a fork does not copy. Set by the first connection of a process.
_grpc_process: int | None = None


class VertexConnection:
    """Where a vertex is and how it is talked to. Any thread may use it.

    ``address`` is ``"grpc://host:port"``, ``"grpc+tls://host:port"`` or ``"grpc+unix:///path"``; ``root_certs`` the PEM
    that the vertex's certificate is verified by (None: the system's), ``client_pem`` the certificate and the key that
    are shown to a vertex that asks for one.
    """

    def __init__(
        self, address: str, token: str, root_certs: bytes | None, client_pem: bytes | None = None
    ) -> None:
        where = parse_address(address, "address")
        way_out = "grpc+tls://host:port" if where.path else f"grpc+tls://{where.listen}"
        if not where.tls and not where.is_here:
            raise ConfigError(f"address: the token would cross the network unencrypted; use {way_out}")
        if not where.tls and root_certs is not None:
            raise ConfigError(f"address: with root_certs use {way_out}")
        if not where.tls and client_pem is not None:
            raise ConfigError(f"address: with client_pem use {way_out}")
        _check_certificates(root_certs, client_pem)
        check_token(token)
        self.address = address
        self.token = token
        self.root_certs = root_certs
        self.client_pem = client_pem
        self._lock = threading.Lock()
        self._client: flight.FlightClient | None = None
        self._end: FTLayerError | None = None
        self._pid = os.getpid()

    def __reduce__(self) -> tuple[type[VertexConnection], tuple[str, str, bytes | None, bytes | None]]:
        return VertexConnection, (self.address, self.token, self.root_certs, self.client_pem)

    def client(self) -> flight.FlightClient:
        """Return the Flight client, made on a process's first call without waiting; raises what `end` was told."""
        with self._lock:
            if self._end is not None:
                # A copy: several threads raise it.
                raise type(self._end)(*self._end.args)
            self.check_process()
            if self._client is None:
                # One PEM has both certificate and key; each is found by its name.
                endpoint = flight_connection.Endpoint(
                    self.address,
                    self.token,
                    self.root_certs,
                    client_cert=self.client_pem,
                    client_key=self.client_pem,
                )
                self._client = flight_connection.connect(endpoint, retries=True)
            return self._client

    def check_process(self) -> None:
        """Raise `UnsupportedError` in a process forked from one that has used gRPC: it would hang."""
        global _grpc_process
        pid = os.getpid()
        if _grpc_process not in (None, pid):
            raise UnsupportedError(
                f"process {pid} was forked from process {_grpc_process} after that had talked to a vertex, "
                "which gRPC does not survive: fork before the first call, or start processes with 'spawn'"
            )
        _grpc_process = pid
        if self._pid != pid:
            self._pid, self._client = pid, None

    def options(self, timeout_s: float | None) -> flight.FlightCallOptions:
        """Return what goes with every request; ``timeout_s`` None is for streams."""
        return flight_connection.call_options(self.token, timeout_s)

    def close(self) -> None:
        with self._lock:
            if self._client is not None and self._pid == os.getpid():
                self._client.close()
            self._client = None

    def end(self, reason: FTLayerError) -> None:
        """Give the connection up permanently: later calls of this process, and further attempts, raise ``reason``."""
        with self._lock:
            self._end = reason
        self.close()


def _check_certificates(root_certs: bytes | None, client_pem: bytes | None) -> None:
    """Look at the certificates before gRPC does, which would try until the deadline and name no reason."""
    check_bytes(root_certs, "root_certs")
    check_bytes(client_pem, "client_pem")
    if root_certs is None and client_pem is None:
        return
    # Late: most clients have none.
    from ftlayer.transport.tls import check_certificate, check_roots

    if root_certs is not None:
        check_roots(root_certs, "root_certs")
    if client_pem is not None:
        check_certificate(client_pem, client_pem, cert_option="client_pem", key_option="client_pem")


def vertex_error(error: BaseException) -> FTLayerError | None:
    """Return the vertex's own error in an exception of Flight; None where the transport failed."""
    if isinstance(error, flight.FlightError) and error.extra_info:
        answer, _ = decode_reply(error.extra_info)
        if isinstance(answer, VertexUnavailableError):
            return None
        if isinstance(answer, FTLayerError):
            return answer
    if isinstance(error, flight.FlightUnauthenticatedError):
        return UnauthorizedError(str(error))
    return None


def possible_cause(address: str, failure: str) -> str:
    """Return what a failure of the transport may come from, by its text: gRPC has no codes for these."""
    where = parse_address(address, "address")
    cause = ""
    if where.tls and "certificate verify failed" in failure:
        cause = "the vertex's certificate was not accepted: root_certs needs it, or what it is signed by"
    elif where.tls and "wrong version number" in failure:
        cause = f"a vertex without TLS is addressed as {replace(where, tls=False)}"
    elif where.tls and "Socket closed" in failure:
        cause = "a vertex with --tls-client-ca takes only clients whose client_pem is signed by that"
    elif not where.path and "Socket closed" in failure:
        cause = f"a vertex with TLS is addressed as {replace(where, tls=True)}"
    return cause and f"; possible cause: {cause}"


def retried(attempt: Callable[[float], T], what: str, address: str, deadline_ms: int) -> T:
    """Call ``attempt(seconds left)`` until it answers, or ``deadline_ms`` (monotone) has passed; refusals are raised.

    The last failure is in the `VertexUnavailableError`.
    """
    pause = FIRST_PAUSE_S
    while True:
        left = (deadline_ms - mono_ms()) / 1_000
        try:
            answer = attempt(max(left, 0.001))
            _away.discard(address)
            return answer
        except (*flight_connection.TRANSPORT_ERRORS, VertexUnavailableError) as error:
            refusal = vertex_error(error)
            if refusal is not None:
                raise refusal from None
            left = (deadline_ms - mono_ms()) / 1_000
            said = f"{what}: no answer from the vertex at {address}"
            failure = (
                f"last failure: {flight_connection.failure_text(error)}{possible_cause(address, str(error))}"
            )
            if left <= pause:
                raise VertexUnavailableError(f"{said} before the deadline; {failure}") from error
            if left > SILENT_S and address not in _away:
                _away.add(address)
                logger.warning("%s; it is tried again for up to %.0f s; %s", said, left, failure)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


BulkCall = Persist | Ingest | Xor | Register


@dataclass(slots=True)
class _Sent:
    frame: bytes
    size: int
    deadline_ms: int
    future: Future[Reply]


class Lane:
    """Calls of one kind and stream, under a client name of their own.

    A thread reads the answers; when the stream breaks it makes another and sends what is unanswered again, in order,
    under the same numbers. It is a ``DoExchange``: unlike a ``DoPut`` its client can cancel it.
    """

    def __init__(
        self, connection: VertexConnection, kind: type[BulkCall], client: str, window: int, window_bytes: int
    ) -> None:
        self._connection = connection
        self._kind, self._expected = kind.__name__, kind.expected
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
            f"{self._last_failure}"
        )

    def _write(self, writer: flight.FlightStreamWriter, sent: _Sent) -> None:
        try:
            writer.write_metadata(sent.frame)
        except flight_connection.TRANSPORT_ERRORS as error:
            # The reading thread sees the same failure and sends everything again.
            self._note(error)

    def _end(self, writer: flight.FlightStreamWriter) -> None:
        try:
            flight_connection.end_stream(writer)
        except flight_connection.TRANSPORT_ERRORS as error:
            logger.debug("stream was broken already: %s", error)

    def _note(self, error: BaseException) -> None:
        with self._changed:
            self._last_failure = flight_connection.failure_text(error) + possible_cause(
                self._connection.address, str(error)
            )

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while self._wait_for_work():
            try:
                if self._serve_stream():
                    pause = FIRST_PAUSE_S
            except (*flight_connection.TRANSPORT_ERRORS, VertexError) as error:
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
        descriptor = flight.FlightDescriptor.for_command(b"calls")
        writer, reader = self._connection.client().do_exchange(descriptor, self._connection.options(None))
        try:
            writer.begin(flight_connection.NO_COLUMNS)
            return self._read_answers(writer, reader)
        finally:
            # A writer that is not closed complains on stderr when it is freed.
            with contextlib.suppress(*flight_connection.TRANSPORT_ERRORS):
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
        if not isinstance(answer, FTLayerError):
            answer = self._expected(answer)
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
    return max(deadline_ms - mono_ms(), 0) / 1_000


# The vertex keeps the replies to the latest 256 calls of a client: what is sent again has to be among them.
MAX_WINDOW = 128
_WATCH_S = 0.2


class Pipeline:
    """Sends Persist, Ingest, Xor and Register without waiting for the answers. Any thread may use it.

    Calls of one kind and stream go to the vertex in the order of their submission; others may
    overtake them. Not guaranteed: that the answers come in order.
    """

    def __init__(
        self, connection: VertexConnection, client: str, deadline_ms: int, window: int, window_bytes: int
    ) -> None:
        check_int(window, "window", least=1, most=MAX_WINDOW)
        check_int(window_bytes, "window_bytes", least=1, most=MOST_BYTES)
        self._connection = connection
        self._client = client
        self._deadline_ms = deadline_ms
        self._window, self._window_bytes = window, window_bytes
        self._lock = threading.Lock()
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._closed = threading.Event()
        self._watchdog: threading.Thread | None = None

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise UnsupportedError(
            "a pipeline cannot be pickled: pickle its client, and make a pipeline from that"
        )

    def submit(self, call: BulkCall) -> Future[Reply]:
        """Send ``call`` and return the future of its reply; waits while the window is full.

        The future raises what the vertex raised, or `VertexUnavailableError` after the client's deadline. Its callbacks
        run on the thread that reads answers: they may submit to this pipeline only calls of another kind, and must not
        wait for anything.

        Raises `MalformedRequestError` for a call that cannot be written (nothing was sent), `VertexUnavailableError`
        for a window that stayed full until the deadline, and `UnsupportedError` in a process forked after its use.
        """
        return self._lane(call).submit(call, mono_ms() + self._deadline_ms)

    def flush(self) -> None:
        """Wait until every call so far has its answer or has failed. Raises nothing: see the futures."""
        for lane in self._all_lanes():
            lane.wait_until_idle()

    def close(self) -> None:
        """Flush and end the streams. Submitting after it raises `VertexUnavailableError`."""
        self.flush()
        self._closed.set()
        for lane in self._all_lanes():
            lane.close()
        if self._watchdog is not None:
            self._watchdog.join()

    def _all_lanes(self) -> list[Lane]:
        with self._lock:
            return list(self._lanes.values())

    def _lane(self, call: BulkCall) -> Lane:
        # Before the lock, which a fork may have copied while it was held.
        self._connection.check_process()
        key = type(call).__name__, "" if isinstance(call, Xor) else call.stream
        with self._lock:
            if self._closed.is_set():
                raise VertexUnavailableError("the pipeline is closed")
            lane = self._lanes.get(key)
            if lane is None:
                client = f"{self._client}/{len(self._lanes)}"
                lane = Lane(self._connection, type(call), client, self._window, self._window_bytes)
                self._lanes[key] = lane
            if self._watchdog is None:
                self._watchdog = threading.Thread(target=self._watch, name="ftlayer-deadlines", daemon=True)
                self._watchdog.start()
            return lane

    def _watch(self) -> None:
        while not self._closed.wait(_WATCH_S):
            for lane in self._all_lanes():
                lane.fail_overdue(mono_ms())


PART_BYTES = 1 << 20


@dataclass(frozen=True)
class VertexHealth:
    """A vertex's description of itself. ``exact``: it keeps every id, answers `Explain`; ``ftlayer``: its version."""

    protocol: int
    incarnation: int
    shards: int
    max_message_bytes: int
    exact: bool
    ftlayer: str = ""


class VertexClient:
    """Calls a vertex, from any thread; sends a call again until it is answered or its deadline has passed.

    A call sent again has its effect once. Not guaranteed: a call that ends in `VertexUnavailableError`
    may have had its effect or not. A client may be pickled, and a forked process may use it if its
    parent has not talked to a vertex yet; both start with names of their own.
    """

    @known_options
    def __init__(
        self,
        address: str,
        token: str,
        *,
        root_certs: bytes | None = None,
        client_pem: bytes | None = None,
        client_id: str | None = None,
        deadline_ms: int = CLIENT_DEADLINE_MS,
    ) -> None:
        """Check the arguments (`ConfigError`); connects with the first call.

        Args:
            address: ``"grpc+unix:///path"`` or ``"grpc://127.0.0.1:port"`` on this machine, ``"grpc+tls://host:port"``
                for others.
            token: the vertex's token.
            root_certs: PEM of the certificate to trust; None for the system's.
            client_pem: PEM of a certificate and its key, for a vertex that asks its clients for one.
            client_id: a name for logs, at most 100 bytes; made unique by what is added to it.
            deadline_ms: how long a call may take, sending it again included. Should exceed the vertex's
                ``persist_timeout_ms``.
        """
        self._connection = VertexConnection(address, token, root_certs, client_pem)
        if client_id is not None:
            check_text(client_id, "client_id")
        check_int(deadline_ms, "deadline_ms", least=1, most=LONGEST_MS)
        self._label = client_id or "client"
        self._deadline_ms = deadline_ms
        self._start_names()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self._connection, self._label, self._deadline_ms)

    def __enter__(self) -> VertexClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        return self._connection.address

    @property
    def token(self) -> str:
        return self._connection.token

    @property
    def root_certs(self) -> bytes | None:
        return self._connection.root_certs

    @property
    def client_pem(self) -> bytes | None:
        return self._connection.client_pem

    @property
    def client_id(self) -> str:
        """What the names of this client begin with, unique to it and its process."""
        self._check_fork()
        return self._client_id

    def call(self, call: AnsweredBy[R], *, deadline_ms: int | None = None) -> R:
        """Make one call and return its reply.

        Raises what the vertex raised, `VertexUnavailableError` when there is no answer in time,
        `MalformedRequestError` for a call that cannot be meant, `UnreadableReplyError` where the vertex runs another
        version of ftlayer, and `VertexError` for the reply to another call.
        """
        deadline = mono_ms() + (self._deadline_ms if deadline_ms is None else deadline_ms)
        if not call.enveloped:
            return self._exchange(call, encode_call(call, None), deadline)
        with self._envelope() as envelope:
            return self._exchange(call, encode_call(call, envelope), deadline)

    def call_once(self, call: AnsweredBy[R], name: str) -> R:
        """Make a changing call under a ``name`` of its own, under which it has one effect, whoever makes it again."""
        deadline = mono_ms() + self._deadline_ms
        return self._exchange(call, encode_call(call, Envelope(name, 1)), deadline)

    def pipeline(self, *, window: int = 64, window_bytes: int = 64 << 20) -> Pipeline:
        """Return a `Pipeline`: Persist, Ingest, Xor and Register with many calls in flight.

        ``window`` calls or ``window_bytes`` (whichever comes first) of each kind and stream may wait for
        their answers; after that `Pipeline.submit` waits. Close it when done.
        """
        self._check_fork()
        return Pipeline(self._connection, self._new_name(), self._deadline_ms, window, window_bytes)

    def health(self, *, deadline_ms: int | None = None) -> VertexHealth:
        """Return the vertex's state; `VertexUnavailableError` when it does not answer in time."""
        return VertexHealth(**self._small_action("health", b"", deadline_ms))

    def shard_of(self, stream: str) -> tuple[int, int]:
        """Return (shard, shards) of a stream: what the top bits of its root ids have to say.

        Ask for a query's streams after `OpenQuery`, which may choose the shard.
        """
        answer = self._small_action("route", stream.encode(), None)
        return answer["shard"], answer["shards"]

    def close(self) -> None:
        """Give the connection up. Pipelines are closed by themselves, before this."""
        self._connection.close()

    def end(self, reason: FTLayerError) -> None:
        """Close it permanently: later calls raise ``reason`` at once.

        A call under way raises it instead of trying again; an attempt that the vertex answers ends as it would have.
        """
        self._connection.end(reason)

    def _start_names(self) -> None:
        self._pid = os.getpid()
        self._client_id = f"{self._label}-{uuid.uuid4().hex[:16]}"
        self._lock = threading.Lock()
        self._free: list[Envelope] = []  # the last one under each name that no call is under way with
        self._names = 0

    def _check_fork(self) -> None:
        if self._pid != os.getpid():
            self._start_names()

    def _new_name(self) -> str:
        with self._lock:
            self._names += 1
            return f"{self._client_id}/{self._names}"

    @contextmanager
    def _envelope(self) -> Iterator[Envelope]:
        self._check_fork()
        with self._lock:
            last = self._free.pop() if self._free else None
        envelope = Envelope(last.client, last.sequence + 1) if last else Envelope(self._new_name(), 1)
        try:
            yield envelope
        finally:
            with self._lock:
                self._free.append(envelope)

    def _exchange(self, call: AnsweredBy[R], frame: bytes, deadline: int) -> R:
        send = partial(self._action, "call") if len(frame) <= PART_BYTES else self._send_parts
        what = type(call).__name__
        try:
            answer, _ = retried(lambda left: decode_reply(send(frame, left)), what, self.address, deadline)
        except UnreadableReplyError as error:
            raise UnreadableReplyError(
                f"the vertex at {self.address} runs {self._its_ftlayer()}, and this is ftlayer {__version__}: use the "
                f"ftlayer of its own environment ({error})"
            ) from error
        if isinstance(answer, FTLayerError):
            raise answer
        return call.expected(answer)

    def _its_ftlayer(self) -> str:
        try:
            version = self._small_action("health", b"", None).get("ftlayer", "of another version")
        except FTLayerError:
            version = "of another version"
        return f"{'another build of ' if version == __version__ else ''}ftlayer {version}"

    def _send_parts(self, frame: bytes, timeout_s: float) -> bytes:
        descriptor = flight.FlightDescriptor.for_command(b"parts")
        writer, reader = self._connection.client().do_put(
            descriptor, flight_connection.NO_COLUMNS, self._connection.options(timeout_s)
        )
        with writer:
            for start in range(0, len(frame), PART_BYTES):
                writer.write_metadata(frame[start : start + PART_BYTES])
            writer.done_writing()
            answer = reader.read()
        if answer is None:
            raise VertexUnavailableError("the vertex ended the stream without an answer")
        data: bytes = answer.to_pybytes()
        return data

    def _small_action(self, kind: str, body: bytes, deadline_ms: int | None) -> dict[str, Any]:
        deadline = mono_ms() + (self._deadline_ms if deadline_ms is None else deadline_ms)
        data = retried(lambda left: self._action(kind, body, left), kind, self.address, deadline)
        answer = msgpack.unpackb(data)
        if not isinstance(answer, dict):
            raise VertexError(f"{kind}: the vertex sent {type(answer).__name__} instead of a map")
        return answer

    def _action(self, kind: str, body: bytes, timeout_s: float) -> bytes:
        results = self._connection.client().do_action(
            flight.Action(kind, body), self._connection.options(timeout_s)
        )
        return b"".join(result.body.to_pybytes() for result in results)


def _rebuilt(connection: VertexConnection, label: str, deadline_ms: int) -> VertexClient:
    client = VertexClient.__new__(VertexClient)
    client._connection, client._label, client._deadline_ms = connection, label, deadline_ms
    client._start_names()
    return client
