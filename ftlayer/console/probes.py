"""The probes of a console: ``/livez`` and ``/readyz``, without a token, by whatever name it is asked."""

from __future__ import annotations

import json

from starlette.types import ASGIApp, Receive, Scope, Send

from ftlayer.console.state import Console
from ftlayer.vertex.rules.probes import STUCK_AFTER_MS, Phase, ProbeResult
from ftlayer.vertex.service.probes import LIVEZ, READYZ


def liveness(console: Console) -> ProbeResult:
    """Say whether only a restart can help: the loop of requests answers if this is asked; so vertices are left."""
    silent_ms = console.watch.silent_ms()
    reasons = []
    if silent_ms > STUCK_AFTER_MS:
        reasons.append(f"the thread that asks the vertices has not come round for {silent_ms / 1_000:.0f} s")
    return ProbeResult(_phase(console), tuple(reasons), _notes(console))


def readiness(console: Console) -> ProbeResult:
    """Say whether pages are served. A vertex that is away makes none of them wait: it is a note."""
    alive = liveness(console)
    reasons = alive.reasons
    if alive.phase is Phase.STOPPING:
        reasons = (*reasons, "the console is stopping")
    return ProbeResult(alive.phase, reasons, alive.notes)


class Probed:
    """Answers probes itself, in front of what asks who a caller is; leaves all else to ``app``."""

    def __init__(self, app: ASGIApp, console: Console) -> None:
        self._app = app
        self._console = console

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["path"] not in (LIVEZ, READYZ) or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        result = (liveness if scope["path"] == LIVEZ else readiness)(self._console)
        body = json.dumps(result.facts()).encode() + b"\n"
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"no-store"),
        ]
        status = 200 if result.passes else 503
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _phase(console: Console) -> Phase:
    return Phase.STOPPING if console.closing.is_set() else Phase.SERVING


def _notes(console: Console) -> tuple[str, ...]:
    there = [view for view in console.watch.known() if not view.is_gone]
    away = sum(not view.is_up for view in there)
    # No addresses: all that reach the console may ask.
    return (f"{away} of {len(there)} vertices give no answer",) if away else ()
