"""What stands before every request: the host it names, where it comes from, who makes it, and headers on each answer.

A plain ASGI layer, since streams go through it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ftlayer.monitor.console.options import LoginSession, Sessions, Throttle, User, Users

API = "/api/"
LOGIN = "/login"
STATIC = "/static/"
EVENTS = "/events"
METRICS = "/metrics"
MAX_BODY_BYTES = 4 << 20

_SAFE = ("GET", "HEAD", "OPTIONS")
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not "no-referrer": browsers then send "Origin: null" with the forms of our own pages.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Caller:
    """Who makes a request. ``session`` is None for a Bearer token, which browsers send by no one's trick."""

    def __init__(self, user: User, session: LoginSession | None) -> None:
        self.user, self.session = user, session


class Guard:
    """Lets requests through that name this console, come from its own pages, and are made by somebody logged in."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Iterable[str],
        users: Users,
        sessions: Sessions,
        throttle: Throttle,
        cookie: str,
    ) -> None:
        """Stand before ``app``; ``hosts`` may be asked for, ``cookie`` is the name of the session's."""
        self._app, self._hosts, self._cookie = app, frozenset(hosts), cookie
        self._users, self._sessions, self._throttle = users, sessions, throttle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._request(scope, receive, _with_headers(scope["path"], send))

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        path: str = scope["path"]
        bearer = _bearer(headers)
        refusal = self._refusal(scope, headers, bearer)
        if refusal is not None:
            await _answer(path, send, *refusal)
            return
        caller = self._caller(scope, headers, bearer)
        scope.setdefault("state", {})["caller"] = caller
        if caller is None and path != LOGIN and not path.startswith(STATIC):
            await _log_in_first(scope, send, bearer)
            return
        await self._app(scope, _bounded(receive), send)

    def _refusal(self, scope: Scope, headers: Headers, bearer: str | None) -> tuple[int, str, str] | None:
        host = headers.get("host", "")
        if _without_port(host) not in self._hosts:
            text = f"this console is not called {host!r}; open it by the address that it listens on"
            return 421, "HOST", text
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            return 413, "TOO_LARGE", f"a request has {MAX_BODY_BYTES:,} bytes at most"
        if bearer is not None:
            if self._users.of_token(bearer) is not None:
                return None
            wait_ms = self._throttle.failed(peer_of(scope), bearer)
            return (429, "TOO_MANY", too_many(wait_ms)) if wait_ms else None
        if scope["method"] in _SAFE:
            return None
        if not _is_own(scope["scheme"], host, headers):
            return 403, "ORIGIN", "this request comes from another site's page; use the console's own pages"
        return None

    def _caller(self, scope: Scope, headers: Headers, bearer: str | None) -> Caller | None:
        if bearer is not None:
            user = self._users.of_token(bearer)
            return None if user is None else Caller(user, None)
        key = session_key(headers, self._cookie)
        # A page that is merely open is not somebody at work.
        session = self._sessions.find(key, used=scope["path"] != EVENTS)
        return None if session is None else Caller(session.user, session)


def session_key(headers: Headers, cookie: str) -> str:
    try:
        cookies = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return ""
    return cookies[cookie].value if cookie in cookies else ""


def peer_of(scope: Scope) -> str:
    """Return the address that a request comes from; "" on a Unix socket."""
    client = scope.get("client")
    return client[0] if client else ""


def too_many(wait_ms: int) -> str:
    return f"too many wrong tokens from your address; try again in {wait_ms // 1_000 + 1} s"


def _is_own(scheme: str, host: str, headers: Headers) -> bool:
    """Whether one of our pages sent this, as browsers say in ``Origin``, or else in ``Sec-Fetch-Site``."""
    if (origin := headers.get("origin")) is not None:
        return origin == f"{scheme}://{host}"
    return headers.get("sec-fetch-site") == "same-origin"


def _bearer(headers: Headers) -> str | None:
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else None


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()


def _with_headers(path: str, send: Send) -> Send:
    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers[name] = value
            if not path.startswith(STATIC):
                headers["cache-control"] = "no-store"
        await send(message)

    return with_headers


def _bounded(receive: Receive) -> Receive:
    """Cut a body off that is longer than it said, or said nothing."""
    taken = 0

    async def bounded() -> Message:
        nonlocal taken
        message = await receive()
        if message["type"] == "http.request":
            taken += len(message.get("body", b""))
            if taken > MAX_BODY_BYTES:
                raise HTTPException(413, f"a request has {MAX_BODY_BYTES:,} bytes at most")
        return message

    return bounded


async def _log_in_first(scope: Scope, send: Send, bearer: str | None) -> None:
    path: str = scope["path"]
    if bearer is not None or path.startswith(API) or path in (EVENTS, METRICS):
        text = "no token was sent; log in, or send one: 'Authorization: Bearer TOKEN'"
        if bearer is not None:
            text = "no user has this token; send one of the login file, or the one in the console's link"
        await _answer(path, send, 401, "UNAUTHORIZED", text)
        return
    query = scope["query_string"].decode("latin-1")
    wanted = quote(f"{path}?{query}" if query else path, safe="")
    where = LOGIN if path == "/" or scope["method"] != "GET" else f"{LOGIN}?next={wanted}"
    await answer(send, 303, [(b"location", where.encode())], b"")


async def _answer(path: str, send: Send, status: int, code: str, text: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    body = f"{text}\n".encode()
    if path.startswith(API):
        headers = [(b"content-type", b"application/json")]
        body = json.dumps(error_body(code, text)).encode()
    if status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="ftlayer console"'))
    await answer(send, status, headers, body)


def error_body(code: str, text: str) -> dict[str, str]:
    """Return what the API answers a request with that it does not carry out; what to do stands behind the ``;``."""
    message, _, what_to_do = text.partition("; ")
    return {"error": code, "message": message, "what_to_do": what_to_do}


async def answer(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
