"""A sink that sends each row by HTTP."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from typing import Any

import pyarrow as pa

from ftlayer.common import printable
from ftlayer.common.checks import Duration, check_choice, check_int, duration_ms, known_options
from ftlayer.common.failures import PermanentFailure, RetryLater, RowsRejected
from ftlayer.connectors.at_least_once import bodies_of, check_columns, texts_of
from ftlayer.errors import ConfigError, SinkError, install

METHODS = ("POST", "PUT", "PATCH")

KEY_HEADER = "Idempotency-Key"

_COME_AGAIN = (408, 409, 425, 429)
"""Answers of 400 to 499 that another try may change."""

MOST_PAUSE_S = 3_600.0
"""A ``Retry-After`` beyond it counts as this one."""

_SAID = 200
"""Characters of an answer that are kept as the reason."""


@known_options
@printable.hides_secrets(lambda sink: sink._secrets)
class HttpSink:
    """Sends each row as a request of its own: the sink of a topology, in both modes.

    What the server answers decides on the row:

    - 2xx: it is done.
    - 408, 409, 425, 429, 5xx, no answer: it fails, and is tried again as the operator's rules say, or when the server
      says (``Retry-After``): that uses up no attempt.
    - any other answer: it is a dead letter at once (`PermanentFailure`).

    In barrier mode that needs a `FailurePolicy`; without one the first of them fails the job. Each row is sent at least
    once: give the ``key`` by which the server knows those that it has had.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        body: str | None = None,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        connections: int = 8,
        timeout: Duration = "10s",
    ) -> None:
        """Nothing is connected to before the first rows come.

        Args:
            url: ``http://…`` or ``https://…``; slots connect.
            key: column whose text is sent as ``Idempotency-Key``: the same whenever the row is sent, and of no other.
            body: column that is the body, a text or bytes. None: a JSON object of all columns, bytes in base64, times
                in ISO 8601.
            method: ``"POST"``, ``"PUT"`` or ``"PATCH"``.
            headers: sent with each request: ``{"Authorization": "Bearer …"}``. With a ``body`` of its own, the content
                type belongs here.
            connections: requests that are under way at the same time, of one subtask.
            timeout: for an answer.

        Raises `ConfigError` if httpx is missing, and for an option that will not do.
        """
        given, self._secrets = check_request(url, headers, "sink")
        check_columns(key=key, body=body)
        check_choice(method, "method", METHODS)
        check_int(connections, "connections", least=1, most=1_000)
        if any(name.lower() == KEY_HEADER.lower() for name in given):
            raise ConfigError(f"headers: {KEY_HEADER} is what key is for: name the column that has it")
        self._url, self._method, self._place = url, method, printable.shown_url(url)
        self._key, self._body = key, body
        self._headers = {"Content-Type": "application/json"} if body is None else {}
        self._headers |= given
        self.connections = connections
        self._timeout_s = duration_ms(timeout, "timeout") / 1_000
        self._client: Any = None
        self._threads: ThreadPoolExecutor | None = None

    def __call__(self, batch: pa.RecordBatch) -> None:
        """Send rows. Raises `RowsRejected` for those that the server has not taken, and `SinkError` for a column."""
        if not batch.num_rows:
            return
        keys = texts_of(batch, self._key, "key")
        requests = list(zip(keys, bodies_of(batch, self._body, "body"), strict=True))
        answers = self._pool().map(_Round(self).sent, requests)
        errors = {row: error for row, error in enumerate(answers) if error is not None}
        if errors:
            raise RowsRejected(errors)

    def __getstate__(self) -> dict[str, Any]:
        # A copy connects by itself.
        return {**self.__dict__, "_client": None, "_threads": None}

    def sent(self, request: tuple[str | None, bytes]) -> Exception | None:
        import httpx

        key, body = request
        headers = self._headers if key is None else {**self._headers, KEY_HEADER: key}
        try:
            answer = self._connected().request(self._method, self._url, content=body, headers=headers)
        except httpx.HTTPError as error:
            why = printable.without_secrets(printable.described(error), self._secrets)
            return SinkError(f"{self._place}: no answer: {why}")
        status, text = answer.status_code, printable.without_secrets(answer.text, self._secrets)[:_SAID]
        said = f"{self._place} answered {status}: {text}"
        if 200 <= status < 300:
            return None
        if status < 500 and status not in _COME_AGAIN:
            return PermanentFailure(said)
        pause_s = retry_after_s(answer.headers.get("retry-after"))
        if pause_s is None:
            return SinkError(said)
        return RetryLater(said, after=max(0.001, pause_s), uses_attempt=False)

    def _connected(self) -> Any:
        if self._client is None:
            import httpx

            limits = httpx.Limits(
                max_connections=self.connections, max_keepalive_connections=self.connections
            )
            keep_out_of_log(self._secrets)
            self._client = httpx.Client(timeout=self._timeout_s, limits=limits)
        return self._client

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._connected()
            self._threads = ThreadPoolExecutor(self.connections, "ftlayer-http-sink")
        return self._threads


class _Round:
    """The requests of one batch, by several threads. Once as many in a row have failed, no more are sent."""

    def __init__(self, sink: HttpSink) -> None:
        self._sink = sink
        self._failed = 0
        self._last: Exception | None = None

    def sent(self, request: tuple[str | None, bytes]) -> Exception | None:
        if self._failed >= self._sink.connections:
            return self._last
        error = self._sink.sent(request)
        if error is None or isinstance(error, PermanentFailure):
            self._failed = 0
        else:
            self._failed, self._last = self._failed + 1, error
        return error


def check_request(url: object, headers: object, what: str) -> tuple[dict[str, str], list[str]]:
    """Return headers, and what must not be shown of both. ``what`` is told of: a source, or a sink.

    Raises `ConfigError` if httpx is missing, and for options that will not do.
    """
    if find_spec("httpx") is None:
        raise ConfigError(f"an HTTP {what} needs httpx where slots run: {install('http')}")
    printable.url_parts(url, "url", "one that begins with http:// or https://", ("http", "https"))
    given = {} if headers is None else headers
    if not isinstance(given, Mapping) or not all(
        isinstance(part, str) for pair in given.items() for part in pair
    ):
        raise ConfigError("headers: expected a dict from name to text")
    return dict(given), printable.secrets_of(str(url), given.values())


_told: set[str] = set()


def keep_out_of_log(secrets: Iterable[str]) -> None:
    """Keep secrets out of what httpx logs, which is the URL of each request."""
    _told.update(secrets)
    logging.getLogger("httpx").addFilter(_without_told)  # The same one again is no second one.


def _without_told(record: logging.LogRecord) -> bool:
    said = record.getMessage()
    if (shown := printable.without_secrets(said, sorted(_told, key=len, reverse=True))) != said:
        record.msg, record.args = shown, ()
    return True


def retry_after_s(text: str | None, now: dt.datetime | None = None) -> float | None:
    """Return the pause that a ``Retry-After`` header asks for (RFC 9110, 10.2.3); None if it says nothing."""
    if text is None:
        return None
    if text.strip().isdecimal():
        return min(float(text), MOST_PAUSE_S)
    try:
        until = parsedate_to_datetime(text)
    except ValueError:
        return None
    if until.tzinfo is None:
        until = until.replace(tzinfo=dt.UTC)
    left_s = (until - (dt.datetime.now(dt.UTC) if now is None else now)).total_seconds()
    return min(max(left_s, 0.0), MOST_PAUSE_S)
