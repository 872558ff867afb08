"""The web application of a webhook: it answers a request when it is durable.

It is an ASGI application (https://asgi.readthedocs.io), to be served or to be mounted into another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from ftlayer.sources.webhook.intake import Intake, Request
from ftlayer.sources.webhook.signature import HmacSignature

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
        intake: Intake,
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
        """Return status and text of the answer; 0: the sender is gone."""
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
        """Answer requests, from another thread."""
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
