"""The client of a vertex: what tasks, drivers and tools talk to it with."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import msgpack
from pyarrow import flight

from ftlayer.checks import LONGEST_MS, check_int, check_text, known_options
from ftlayer.config import CLIENT_DEADLINE_MS
from ftlayer.errors import FTLayerError, VertexError, VertexUnavailableError
from ftlayer.transport.streams import NO_COLUMNS
from ftlayer.vertex.calls import Call, Envelope, Reply
from ftlayer.vertex.client.connection import Connection, monotonic_ms, retried
from ftlayer.vertex.client.pipeline import Pipeline
from ftlayer.vertex.wire.frames import ENVELOPED, decode_reply, encode_call

PART_BYTES = 1 << 20


@dataclass(frozen=True)
class VertexHealth:
    """A vertex's description of itself. ``exact``: it keeps every id, and answers `Explain`."""

    protocol: int
    incarnation: int
    shards: int
    max_message_bytes: int
    exact: bool


@dataclass
class _Lane:
    """A name calls are numbered under, one at a time."""

    client: str
    sequence: int = 0


class VertexClient:
    """Calls a vertex, from any thread; sends a call again until it is answered or its deadline has passed.

    A call sent again has its effect once. Not guaranteed: a call that ends in `VertexUnavailableError`
    may have had its effect or not. A client may be pickled, and a forked process may use it if its
    parent has not talked to a vertex yet; both start with names of their own.

    Attributes:
        address: where the vertex is.
        client_id: the beginning of the names its calls are numbered under.
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
        self._connection = Connection(address, token, root_certs, client_pem)
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def address(self) -> str:
        return self._connection.address

    @property
    def token(self) -> str:
        """The vertex's token, for clients in other processes."""
        return self._connection.token

    @property
    def root_certs(self) -> bytes | None:
        """PEM of the certificate that is trusted, None for the system's."""
        return self._connection.root_certs

    @property
    def client_pem(self) -> bytes | None:
        """PEM of the certificate and key that are shown to the vertex, None for none."""
        return self._connection.client_pem

    @property
    def client_id(self) -> str:
        """What the names of this client begin with, unique to it and its process."""
        self._check_fork()
        return self._client_id

    def call(self, call: Call, *, deadline_ms: int | None = None) -> Reply:
        """Make one call and return its reply.

        Raises what the vertex raised, `VertexUnavailableError` when there is no answer in time, and
        `MalformedRequestError` for a call that cannot be meant.
        """
        deadline = monotonic_ms() + (self._deadline_ms if deadline_ms is None else deadline_ms)
        if type(call) not in ENVELOPED:
            return self._exchange(encode_call(call, None), type(call).__name__, deadline)
        with self._lane() as lane:
            frame = encode_call(call, Envelope(lane.client, lane.sequence))
            return self._exchange(frame, type(call).__name__, deadline)

    def call_once(self, call: Call, name: str) -> Reply:
        """Make a changing call under a ``name`` of its own: made again under it, by whomever, it has no second effect.

        The vertex remembers a name for as long as it remembers a client. Raises as `call`.
        """
        deadline = monotonic_ms() + self._deadline_ms
        return self._exchange(encode_call(call, Envelope(name, 1)), type(call).__name__, deadline)

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

    # ------------------------------------------------------------ names

    def _start_names(self) -> None:
        self._pid = os.getpid()
        self._client_id = f"{self._label}-{uuid.uuid4().hex[:16]}"
        self._lock = threading.Lock()
        self._free: list[_Lane] = []
        self._names = 0

    def _check_fork(self) -> None:
        if self._pid != os.getpid():
            self._start_names()

    def _new_name(self) -> str:
        with self._lock:
            self._names += 1
            return f"{self._client_id}/{self._names}"

    @contextmanager
    def _lane(self) -> Iterator[_Lane]:
        self._check_fork()
        with self._lock:
            lane = self._free.pop() if self._free else None
        lane = lane or _Lane(self._new_name())
        lane.sequence += 1
        try:
            yield lane
        finally:
            with self._lock:
                self._free.append(lane)

    # ------------------------------------------------------------ requests

    def _exchange(self, frame: bytes, what: str, deadline: int) -> Reply:
        send = self._send if len(frame) <= PART_BYTES else self._send_parts
        answer, _ = retried(lambda left: decode_reply(send(frame, left)), what, self.address, deadline)
        if isinstance(answer, FTLayerError):
            raise answer
        return answer

    def _send(self, frame: bytes, timeout_s: float) -> bytes:
        return self._action("call", frame, timeout_s)

    def _send_parts(self, frame: bytes, timeout_s: float) -> bytes:
        descriptor = flight.FlightDescriptor.for_command(b"parts")
        writer, reader = self._connection.client().do_put(
            descriptor, NO_COLUMNS, self._connection.options(timeout_s)
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
        deadline = monotonic_ms() + (self._deadline_ms if deadline_ms is None else deadline_ms)
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


def _rebuilt(connection: Connection, label: str, deadline_ms: int) -> VertexClient:
    client = VertexClient.__new__(VertexClient)
    client._connection, client._label, client._deadline_ms = connection, label, deadline_ms
    client._start_names()
    return client
