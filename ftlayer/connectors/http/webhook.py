"""`WebhookSource` as a Python Data Source."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from typing import Any

import pyarrow as pa

from ftlayer.common.checks import (
    Duration,
    check_choice,
    check_function,
    check_instance,
    check_int,
    check_path,
    check_text,
    check_texts,
    duration_ms,
    known_options,
    named_type,
)
from ftlayer.config import MIB
from ftlayer.connectors.queue_stream import QueueDataSource
from ftlayer.errors import ConfigError, SourceError, install
from ftlayer.functions.data_sources import DataSourceOptions
from ftlayer.records import beside
from ftlayer.topology.operators import Fetched, Member, Queue, QueueReader
from ftlayer.transport.address import Address, parse_listen
from ftlayer.transport.sockets import Door, bounded_http

ALGORITHMS = ("sha1", "sha256", "sha384", "sha512")
ENCODINGS = ("hex", "base64")


@known_options
@dataclass(frozen=True)
class HmacSignature:
    """An HMAC (RFC 2104) of a request's body in one of its headers, as GitHub, Shopify and many others send it.

    Attributes:
        secret: what both know, or several, while one replaces the other.
        header: which header has the signature.
        prefix: what comes before it there.
        encoding: ``"hex"`` or ``"base64"``.
        algorithm: ``"sha256"``, …
    """

    secret: str | bytes | Sequence[str | bytes] = field(repr=False)
    header: str = "X-Hub-Signature-256"
    prefix: str = "sha256="
    encoding: str = "hex"
    algorithm: str = "sha256"

    def __post_init__(self) -> None:
        check_text(self.header, "header", "the name of a header")
        check_choice(self.encoding, "encoding", ENCODINGS)
        check_choice(self.algorithm, "algorithm", ALGORITHMS)
        if not isinstance(self.prefix, str):
            raise ConfigError(f"prefix: expected a text, got {named_type(self.prefix)}")
        if not self._secrets or not all(isinstance(each, bytes) and each for each in self._secrets):
            raise ConfigError("secret: expected a text, bytes, or several of them, none of them empty")

    @property
    def _secrets(self) -> list[bytes]:
        given = [self.secret] if isinstance(self.secret, str | bytes) else list(self.secret)
        return [each.encode() if isinstance(each, str) else each for each in given]

    def is_right(self, headers: Mapping[bytes, bytes], body: bytes) -> bool:
        """Whether a request has a right signature; ``headers`` by their names in small letters."""
        given = headers.get(self.header.lower().encode("latin-1"))
        return given is not None and any(
            hmac.compare_digest(given.strip(), self._of(secret, body)) for secret in self._secrets
        )

    def _of(self, secret: bytes, body: bytes) -> bytes:
        digest = hmac.digest(secret, body, getattr(hashlib, self.algorithm)().name)
        text = digest.hex() if self.encoding == "hex" else base64.b64encode(digest).decode()
        return (self.prefix + text).encode()


_ENTRY_BYTES = 512
"""What a request takes besides its body, about."""


@dataclass(eq=False, slots=True)
class Request:
    """What somebody has sent.

    Attributes:
        id: names it in answers and rows.
        time_us: wall clock, when all of it was there.
        path: with the query.
        headers: values of the source's headers; None where it has none.
        body: as it came.
        answer: is done with whether it is durable, in the loop that took it; False: that will not be known.
    """

    id: str
    time_us: int
    path: str
    headers: tuple[bytes | None, ...]
    body: bytes
    answer: asyncio.Future[bool]

    @property
    def size(self) -> int:
        return _ENTRY_BYTES + len(self.body)


class WebhookIntake:
    """For two threads: the server offers, the reader takes and stores."""

    def __init__(self, max_bytes: int) -> None:
        """Requests of ``max_bytes`` in all may wait, and always one."""
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._new: deque[Request] = deque()
        self._waiting: set[Request] = set()
        self._bytes = 0
        self._coming = 0
        self._is_woken = False
        self._is_closed = False

    def come(self, size: int) -> bool:
        """Bytes of bodies are there (below 0: are no more), whose requests are not; False: there is no room for them.

        One that comes alone always finds room.
        """
        with self._changed:
            if size > 0 and (self._bytes or self._coming) and self._taken + size > self._max_bytes:
                return False
            self._coming += size
        return True

    @property
    def _taken(self) -> int:
        return self._bytes + self._coming

    def offer(self, request: Request) -> bool:
        """Take a request in; False: there is no room now, or none are taken any more."""
        with self._changed:
            if self._is_closed or (self._waiting and self._taken + request.size > self._max_bytes):
                return False
            self._waiting.add(request)
            self._bytes += request.size
            self._new.append(request)
            if len(self._new) == 1:
                self._changed.notify()
        return True

    def take(self, most: int, wait_s: float) -> list[Request]:
        """Return up to ``most`` in the order in which they came; none if there was none for ``wait_s``."""
        with self._changed:
            if not self._new and not self._is_woken:
                self._changed.wait(wait_s)
            self._is_woken = False
            return [self._new.popleft() for _ in range(min(most, len(self._new)))]

    @property
    def untaken(self) -> int:
        return len(self._new)

    def wake_up(self) -> None:
        """Let `take` return now, for any thread."""
        with self._changed:
            self._is_woken = True
            self._changed.notify()

    def stored(self, requests: Iterable[Request]) -> list[Request]:
        """These are durable. Returns those that wait to hear of it: behind `close` none does."""
        with self._changed:
            known = [request for request in requests if request in self._waiting]
            self._waiting.difference_update(known)
            self._bytes -= sum(request.size for request in known)
        return known

    def close(self) -> list[Request]:
        """Take nothing any more; returns what waits, of which it is not known what becomes."""
        with self._changed:
            self._is_closed = True
            left, self._waiting = list(self._waiting), set()
            self._new.clear()
            self._bytes = 0
        return left


# The web application of a webhook: it answers a request when it is durable.
#
# It is an ASGI application (https://asgi.readthedocs.io), to be served or to be mounted into another one.


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

RETRY_AFTER_S = 1
"""When somebody whose request had no room is to come again."""

_NO_ROOM = 429, "too much waits to be stored: send it again later"


class WebhookApp:
    """See the module.

    It answers

    - 202, with the request's id: it is durable;
    - 401: the signature is missing, or wrong; 405: it is no POST; 408: the body did not come in time; 413: it is too
      large. Nothing was taken;
    - 429 with ``Retry-After``: too much waits, or is on its way. Nothing was taken;
    - 503 with ``Retry-After``: it was taken, and may be durable or not. Sent again, it may be there twice.
    """

    def __init__(
        self,
        intake: WebhookIntake,
        headers: Iterable[str],
        max_body: int,
        answer_timeout_s: float,
        signature: HmacSignature | None = None,
    ) -> None:
        """``headers`` are the ones that are kept; no answer is later than ``answer_timeout_s``."""
        self._intake = intake
        self._headers = [name.lower().encode("latin-1") for name in headers]
        self._max_body = max_body
        self._answer_timeout_s = answer_timeout_s
        self._signature = signature
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            status, said = await self._take(scope, receive)
            if status:
                await _answer(send, status, said)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _take(self, scope: Scope, receive: Receive) -> tuple[int, str]:
        if scope["method"] != "POST":
            return 405, "send it by POST"
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body:
            return 413, f"a body has {self._max_body} bytes at most"
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                body = await self._body(receive)
        except TimeoutError:
            return 408, "the body did not come in time: send it again"
        if not isinstance(body, bytes):
            return body
        if self._signature is not None and not self._signature.is_right(headers, body):
            return 401, f"{self._signature.header} is missing, or is not the signature of this body"
        query = scope["query_string"]
        path = scope["path"] + (f"?{query.decode('latin-1')}" if query else "")
        kept = tuple(headers.get(name) for name in self._headers)
        return await self._offered(path, kept, body)

    async def _body(self, receive: Receive) -> bytes | tuple[int, str]:
        """Return the body; or status and text of an answer, status 0: the sender is gone.

        What is there of it takes room, as what waits does: anybody may begin with one.
        """
        parts: list[bytes] = []
        size = 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return 0, ""
                part = message.get("body", b"")
                if not self._intake.come(len(part)):
                    return _NO_ROOM
                parts.append(part)
                size += len(part)
                if size > self._max_body:
                    return 413, f"a body has {self._max_body} bytes at most"
                if not message.get("more_body", False):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
        finally:
            self._intake.come(-size)

    async def _offered(self, path: str, headers: tuple[bytes | None, ...], body: bytes) -> tuple[int, str]:
        loop = self._loop = asyncio.get_running_loop()
        answer: asyncio.Future[bool] = loop.create_future()
        request = Request(secrets.token_hex(16), time.time_ns() // 1_000, path, headers, body, answer)
        if not self._intake.offer(request):
            return _NO_ROOM
        too_late = loop.call_later(self._answer_timeout_s, _set, [request], False)
        stored = await answer
        too_late.cancel()
        if stored:
            return 202, request.id
        return 503, "it may be stored or not: send it again"

    def settle(self, requests: list[Request], *, stored: bool) -> None:
        if requests and self._loop is not None:
            # In a loop that is closed no task waits.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(_set, requests, stored)


def _set(requests: list[Request], stored: bool) -> None:
    for request in requests:
        if not request.answer.done():
            request.answer.set_result(stored)


async def _answer(send: Send, status: int, said: str) -> None:
    body = json.dumps({"id" if status == 202 else "error": said}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status in (408, 429):
        # Of what comes yet of its body nothing is read.
        headers.append((b"connection", b"close"))
    if status in (429, 503):
        headers.append((b"retry-after", b"%d" % RETRY_AFTER_S))
    if status == 405:
        headers.append((b"allow", b"POST"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _live(receive: Receive, send: Send) -> None:
    while (await receive())["type"] != "lifespan.shutdown":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})


_BACKLOG = 2_048
_CONNECTIONS = 512
_LAST_ANSWERS_S = 1
"""How long answers may take when the server ends."""


class WebServer:
    """Serves one application. The thread that makes it knows that it listens."""

    def __init__(
        self, app: AsgiApp, address: Address, tls: tuple[str, str] | None, *, shares_port: bool
    ) -> None:
        """Listen. ``tls`` names certificate and key; ``shares_port``: with other processes of this host.

        Raises `SourceError` if that cannot be.
        """
        import uvicorn
        from uvicorn.protocols.http.auto import AutoHTTPProtocol

        self._socket = _listening(address, shares_port=shares_port)
        self._door = None if tls is None else Door(self.port)
        config = uvicorn.Config(
            app,
            http=bounded_http(AutoHTTPProtocol, _CONNECTIONS, self._door),
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="auto",
            ws="none",
            timeout_graceful_shutdown=_LAST_ANSWERS_S,
            ssl_certfile=None if tls is None else tls[0],
            ssl_keyfile=None if tls is None else tls[1],
        )
        try:
            config.load()
        except OSError as error:
            self._socket.close()
            if self._door is not None:
                self._door.close()
            raise SourceError(f"tls_cert, tls_key: {error}") from error
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="ftlayer-webhook", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def is_running(self) -> bool:
        """Whether it serves, or is about to."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End it: what was taken is answered first."""
        self._server.should_exit = True
        self._thread.join()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()
            if self._door is not None:
                self._door.close()


def _listening(address: Address, *, shares_port: bool) -> socket.socket:
    family: Any = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server(
            (address.host, address.port), family=family, backlog=_BACKLOG, reuse_port=shares_port
        )
    except OSError as error:
        raise SourceError(
            f"listen: a webhook cannot listen on {address.host}:{address.port}: {error.strerror or error}"
        ) from error


ID, TIME, PATH, BODY = "id", "time", "path", "body"

MAX_PENDING = 16 * MIB

_POSITION = b"webhook"


@known_options
class WebhookSource(Queue):
    """Takes what others send by HTTP, in a server of its own in each slot that reads.

    A request is answered once it is durable: in the vertex, in acker mode, or in a complete checkpoint, in barrier
    mode, so that an answer takes up to the interval there. Requests that come meanwhile are stored together.

    A request that was not answered, or with 503, may be stored or not: senders repeat it, and it may be there twice.
    One that was answered with 202 is there.
    """

    def __init__(
        self,
        listen: str,
        *,
        headers: Sequence[str] = (),
        signature: HmacSignature | None = None,
        max_body: int = MIB,
        max_pending: int = MAX_PENDING,
        answer_timeout: Duration = "30s",
        app: Callable[[AsgiApp], AsgiApp] | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
    ) -> None:
        """Nothing listens before it is read.

        Args:
            listen: ``host:port`` in each slot; with a ``parallelism`` above 1 slots of one host share the port.
            headers: names of headers, each a column with a text, null where a request has none. Before them are ``id``,
                drawn, ``time``, that of the slot at which all of it was there, and ``path`` with its query; behind them
                is ``body``, as bytes.
            signature: requests without it are refused.
            max_body: bytes of a request's body.
            max_pending: bytes of requests that are not durable, in one slot; more are told to come again.
            answer_timeout: the longest time until an answer.
            app: is given the webhook as an ASGI application, and returns the one that is served, which has it mounted.
            tls_cert: a PEM file of the certificate chain, on the slots' hosts.
            tls_key: one of its private key.

        Raises `ConfigError` if uvicorn is missing, and for an option that will not do.
        """
        if find_spec("uvicorn") is None:
            raise ConfigError(f"a webhook needs uvicorn where slots run: {install('http')}")
        check_text(listen, "listen", "an address like 0.0.0.0:8080")
        if "://" in listen:
            raise ConfigError(
                f"listen: expected host:port without a scheme, like 0.0.0.0:8080, got {listen!r}"
            )
        self._address = parse_listen(listen, "listen")
        if self._address.path:
            raise ConfigError(f"listen: expected host:port, got {listen!r}")
        if isinstance(headers, str) or not isinstance(headers, Sequence):
            raise ConfigError(f"headers: expected a list of names, got {headers!r}")
        check_texts(headers, "headers", "the name of a header")
        if len({ID, TIME, PATH, BODY, *map(str.lower, headers)}) < len(headers) + 4:
            raise ConfigError(
                f"headers: {list(headers)!r} has a name twice, or one of {ID!r}, {TIME!r}, {PATH!r} and {BODY!r}"
            )
        if signature is not None:
            check_instance(signature, "signature", HmacSignature)
        check_int(max_body, "max_body", least=1)
        check_int(max_pending, "max_pending", least=1)
        if max_body > max_pending:
            raise ConfigError(
                f"max_body: {max_body} bytes are more than the {max_pending} of max_pending, which wait at most"
            )
        if app is not None:
            check_function(app, "app", takes=1)
        check_path(tls_cert, "tls_cert")
        check_path(tls_key, "tls_key")
        if (tls_cert is None) != (tls_key is None):
            raise ConfigError("tls_cert and tls_key belong together: give both, or neither")
        self._headers = tuple(headers)
        self._signature = signature
        self._max_body, self._max_pending = max_body, max_pending
        self._answer_timeout_s = duration_ms(answer_timeout, "answer_timeout") / 1_000
        self._app = app
        self._tls = None if tls_cert is None or tls_key is None else (tls_cert, tls_key)
        own = [(ID, pa.string()), (TIME, beside.STAMP), (PATH, pa.string())]
        named = [(name, pa.string()) for name in headers]
        self.schema: pa.Schema = pa.schema([*own, *named, (BODY, pa.binary())])

    def __repr__(self) -> str:
        return f"WebhookSource({f'{self._address.host}:{self._address.port}'!r})"

    def open(self, member: Member, positions: Mapping[int, bytes], *, stored: bool) -> WebhookReader:
        """See `Queue.open`. Positions only number what was taken: nothing can be had again."""
        intake = WebhookIntake(self._max_pending)
        webhook = WebhookApp(intake, self._headers, self._max_body, self._answer_timeout_s, self._signature)
        app: AsgiApp = webhook if self._app is None else self._app(webhook)
        number = _number_of(positions.get(member.subtask))
        server = WebServer(app, self._address, self._tls, shares_port=member.parallelism > 1)
        return WebhookReader(self.schema, member.subtask, number, intake, webhook, server)


@dataclass(slots=True)
class WebhookReader(QueueReader):
    schema: pa.Schema
    subtask: int
    number: int
    intake: WebhookIntake
    app: WebhookApp
    server: WebServer

    def fetch(self, max_rows: int, wait_s: float) -> Fetched | None:
        requests = self.intake.take(max_rows, wait_s)
        if requests:
            self.number += 1
            position = _POSITION + self.number.to_bytes(8)
            return Fetched(rows_of(requests, self.schema), self.subtask, position, requests)
        if not self.server.is_running:
            raise SourceError("the webhook's server has ended by itself; the log of its slot says why")
        return None

    def acknowledge(self, receipts: Sequence[list[Request]]) -> None:
        for requests in receipts:
            self.app.settle(self.intake.stored(requests), stored=True)

    def waiting(self) -> int:
        return self.intake.untaken

    def wake_up(self) -> None:
        self.intake.wake_up()

    def close(self) -> None:
        self.app.settle(self.intake.close(), stored=False)
        self.server.close()


def rows_of(requests: Sequence[Request], schema: pa.Schema) -> pa.RecordBatch:
    headers = zip(*(request.headers for request in requests), strict=True)
    columns = [
        [request.id for request in requests],
        [request.time_us for request in requests],
        [request.path for request in requests],
        *([None if value is None else value.decode("latin-1") for value in values] for values in headers),
        [request.body for request in requests],
    ]
    return pa.RecordBatch.from_pydict(dict(zip(schema.names, columns, strict=True)), schema=schema)


def _number_of(position: bytes | None) -> int:
    if position is None:
        return 0
    if len(position) != len(_POSITION) + 8 or not position.startswith(_POSITION):
        raise ConfigError(
            "a webhook: the positions stored under this uid are of another source; give the new one a uid of its own"
        )
    return int.from_bytes(position[len(_POSITION) :])


class WebhookDataSource(QueueDataSource):
    """``readStream.format("ftlayer-webhook")``, served by the driver; a request is answered when it is in the spool.

    Options as of `RedisDataSource`, without ``app``; ``signatureSecret`` and so on, see `HmacSignature`.
    """

    format = "ftlayer-webhook"

    def source(self, options: DataSourceOptions) -> WebhookSource:
        names = {part.name: f"signature{part.name.capitalize()}" for part in fields(HmacSignature)}
        is_signed = options.get(names["secret"]) is not None
        options.know(*names.values())
        return options.made(
            WebhookSource, signature=options.made(HmacSignature, names) if is_signed else None
        )
