from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

import pyarrow as pa

from ftlayer.checks import (
    Duration,
    check_function,
    check_instance,
    check_int,
    check_path,
    check_text,
    check_texts,
    duration_ms,
)
from ftlayer.config import MIB
from ftlayer.errors import ConfigError, SourceError
from ftlayer.sources.webhook.app import AsgiApp, WebhookApp
from ftlayer.sources.webhook.intake import Intake, Request
from ftlayer.sources.webhook.server import WebServer
from ftlayer.sources.webhook.signature import HmacSignature
from ftlayer.topology.queues import Fetched, Member, Queue
from ftlayer.transport.address import parse_listen

ID, TIME, PATH, BODY = "id", "time", "path", "body"

MAX_PENDING = 16 * MIB

_POSITION = b"webhook"


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
            raise ConfigError("a webhook needs uvicorn where slots run: pip install 'ftlayer[http]'")
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
        own = [
            pa.field(ID, pa.string()),
            pa.field(TIME, pa.timestamp("us", "UTC")),
            pa.field(PATH, pa.string()),
        ]
        named = [pa.field(name, pa.string()) for name in headers]
        self.schema: pa.Schema = pa.schema([*own, *named, pa.field(BODY, pa.binary())])

    def open(self, member: Member, positions: Mapping[int, bytes], *, stored: bool) -> WebhookReader:
        """See `Queue.open`. Positions only number what was taken: nothing can be had again."""
        intake = Intake(self._max_pending)
        webhook = WebhookApp(intake, self._headers, self._max_body, self._answer_timeout_s, self._signature)
        app: AsgiApp = webhook if self._app is None else self._app(webhook)
        number = _number_of(positions.get(member.subtask))
        server = WebServer(app, self._address, self._tls, shares_port=member.parallelism > 1)
        return WebhookReader(self.schema, member.subtask, number, intake, webhook, server)


class WebhookReader:
    """`QueueReader` of one slot's server."""

    def __init__(
        self, schema: pa.Schema, subtask: int, number: int, intake: Intake, app: WebhookApp, server: WebServer
    ) -> None:
        self._schema = schema
        self._subtask = subtask
        self._number = number
        self._intake = intake
        self._app = app
        self.server = server

    def fetch(self, max_rows: int, wait_s: float) -> Fetched | None:
        """See `QueueReader.fetch`. Raises `SourceError` if the server has ended by itself."""
        requests = self._intake.take(max_rows, wait_s)
        if requests:
            self._number += 1
            position = _POSITION + self._number.to_bytes(8)
            return Fetched(rows_of(requests, self._schema), self._subtask, position, requests)
        if not self.server.is_running:
            raise SourceError("the webhook's server has ended by itself; the log of its slot says why")
        return None

    def acknowledge(self, receipts: Sequence[list[Request]]) -> None:
        for requests in receipts:
            self._app.settle(self._intake.stored(requests), stored=True)

    def waiting(self) -> int:
        return self._intake.untaken

    @property
    def is_away(self) -> bool:
        return False

    def wake_up(self) -> None:
        self._intake.wake_up()

    def close(self) -> None:
        self._app.settle(self._intake.close(), stored=False)
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
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _number_of(position: bytes | None) -> int:
    if position is None:
        return 0
    if len(position) != len(_POSITION) + 8 or not position.startswith(_POSITION):
        raise ConfigError(
            "a webhook: the positions stored under this uid are of another source; give the new one a uid of its own"
        )
    return int.from_bytes(position[len(_POSITION) :])
