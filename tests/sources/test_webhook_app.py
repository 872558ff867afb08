"""What a webhook answers, and when: the application without a server."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from ftlayer.connectors.http.webhook import HmacSignature, Request, WebhookApp, WebhookIntake

SECRET = "it is raining"


class Sender:
    """Sends one request, and hears the answer."""

    def __init__(self, *bodies: bytes, method: str = "POST", gone: bool = False, **headers: str) -> None:
        self.messages: list[dict[str, Any]] = [
            {"type": "http.request", "body": body, "more_body": more < len(bodies)}
            for more, body in enumerate(bodies, 1)
        ]
        if gone:
            self.messages[-1:] = [{"type": "http.disconnect"}]
        self.scope = {
            "type": "http",
            "method": method,
            "path": "/in",
            "query_string": b"a=1",
            "headers": [
                (name.replace("_", "-").encode(), text.encode("latin-1")) for name, text in headers.items()
            ],
        }
        self.sent: list[Any] = []

    async def receive(self) -> Any:
        return self.messages.pop(0)

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status

    @property
    def header(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def said(self) -> Any:
        return json.loads(self.sent[1]["body"])


def app(intake: WebhookIntake, **options: Any) -> WebhookApp:
    kept = {"headers": ("X-Kind",), "max_body": 100, "answer_timeout_s": 600.0, **options}
    return WebhookApp(intake, **kept)


async def sent(webhook: WebhookApp, *senders: Sender) -> list[asyncio.Task[None]]:
    """Send requests, and let each come as far as it can."""
    tasks = [
        asyncio.create_task(webhook(sender.scope, sender.receive, sender.send))  # type: ignore[arg-type]
        for sender in senders
    ]
    for _ in range(10):
        await asyncio.sleep(0)
    return tasks


def run(intake: WebhookIntake, sender: Sender, **options: Any) -> list[Request]:
    """Send a request, all of which is stored at once; returns what was stored."""

    async def both() -> list[Request]:
        webhook = app(intake, **options)
        (task,) = await sent(webhook, sender)
        taken = intake.take(10, 0)
        webhook.settle(intake.stored(taken), stored=True)
        await task
        return taken

    return asyncio.run(both())


def test_a_request_is_answered_when_it_is_stored() -> None:
    async def steps() -> None:
        intake = WebhookIntake(10_000)
        webhook = app(intake)
        first, second = Sender(b"one", x_kind="a"), Sender(b"t", b"wo")
        tasks = await sent(webhook, first, second)
        assert not first.sent
        assert not second.sent
        taken = intake.take(10, 0)
        assert [(each.body, each.headers, each.path) for each in taken] == [
            (b"one", (b"a",), "/in?a=1"),
            (b"two", (None,), "/in?a=1"),
        ]
        webhook.settle(intake.stored(taken[1:]), stored=True)
        await tasks[1]
        assert second.status == 202
        assert second.said == {"id": taken[1].id}
        assert not first.sent
        webhook.settle(intake.stored(taken), stored=True)
        await tasks[0]
        assert first.said == {"id": taken[0].id}

    asyncio.run(steps())


def test_what_has_no_room_is_told_to_come_again_and_finds_room_later() -> None:
    async def steps() -> None:
        intake = WebhookIntake(1_200)
        webhook = app(intake)
        senders = [Sender(b"x") for _ in range(3)]
        tasks = await sent(webhook, *senders)
        assert [len(sender.sent) for sender in senders] == [0, 0, 2]
        assert senders[2].status == 429
        assert senders[2].header[b"retry-after"] == b"1"
        taken = intake.take(10, 0)
        late = Sender(b"x")
        await sent(webhook, late)
        assert late.status == 429, "room is what is stored, not what is taken"
        webhook.settle(intake.stored(taken), stored=True)
        await asyncio.gather(*tasks)
        again = Sender(b"x")
        await sent(webhook, again)
        assert not again.sent

    asyncio.run(steps())


def test_one_request_always_has_room() -> None:
    assert [each.body for each in run(WebhookIntake(1), Sender(b"x" * 100))] == [b"x" * 100]


def test_who_waits_when_the_reader_ends_is_told_that_nobody_knows() -> None:
    async def steps() -> None:
        intake = WebhookIntake(10_000)
        webhook = app(intake)
        first, second = Sender(b"x"), Sender(b"y")
        tasks = await sent(webhook, first, second)
        taken = intake.take(1, 0)
        webhook.settle(intake.close(), stored=False)
        await asyncio.gather(*tasks)
        assert (first.status, second.status) == (503, 503)
        assert first.header[b"retry-after"] == b"1"
        assert intake.stored(taken) == []
        late = Sender(b"z")
        await sent(webhook, late)
        assert late.status == 429
        assert intake.take(1, 0) == []

    asyncio.run(steps())


def test_an_answer_does_not_take_forever() -> None:
    async def steps() -> None:
        intake = WebhookIntake(10_000)
        webhook = app(intake, answer_timeout_s=0.001)
        sender = Sender(b"x")
        (task,) = await sent(webhook, sender)
        await task
        assert sender.status == 503
        taken = intake.take(1, 0)
        assert intake.stored(taken) == taken, "it is stored all the same"
        webhook.settle(taken, stored=True)

    asyncio.run(steps())


@pytest.mark.parametrize(
    ("sender", "status"),
    [
        (Sender(b"x", method="GET"), 405),
        (Sender(b"x" * 101), 413),
        (Sender(b"x" * 60, b"x" * 41, b"x"), 413),
        (Sender(b"", content_length="101"), 413),
        (Sender(b"x" * 100, content_length="100"), 202),
        (Sender(b""), 202),
    ],
)
def test_what_is_refused(sender: Sender, status: int) -> None:
    taken = run(WebhookIntake(10_000), sender)
    assert sender.status == status
    assert len(taken) == (status == 202)


def test_a_sender_that_goes_away_in_the_middle_is_forgotten() -> None:
    sender = Sender(b"x", b"y", gone=True)
    assert run(WebhookIntake(10_000), sender) == []
    assert sender.sent == []


def hexed(secret: str, body: bytes) -> str:
    return hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (f"sha256={hexed(SECRET, b'body')}", 202),
        (f"sha256={hexed('old', b'body')}", 202),
        (f"sha256={hexed('another', b'body')}", 401),
        (f"sha256={hexed(SECRET, b'other body')}", 401),
        (hexed(SECRET, b"body"), 401),
        ("", 401),
        ("sha256=\xe4", 401),
    ],
)
def test_a_request_needs_its_signature(header: str, status: int) -> None:
    sender = Sender(b"body", x_hub_signature_256=header)
    taken = run(WebhookIntake(10_000), sender, signature=HmacSignature([SECRET, "old"]))
    assert sender.status == status
    assert len(taken) == (status == 202)
    assert SECRET not in str(sender.sent)


def test_signatures_of_other_kinds() -> None:
    shopify = HmacSignature(b"s", "X-Shopify-Hmac-Sha256", "", "base64")
    digest = base64.b64encode(hmac.digest(b"s", b"body", "sha256")).decode()
    assert shopify.is_right({b"x-shopify-hmac-sha256": digest.encode()}, b"body")
    assert not shopify.is_right({}, b"body")
    assert "s'" not in repr(HmacSignature("s's"))


def test_it_is_mounted_as_any_application() -> None:
    async def status(api: Any, path: str) -> int:
        transport = httpx.ASGITransport(api)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return (await client.get(path)).status_code

    webhook = app(WebhookIntake(10_000))
    api = FastAPI()
    api.mount("/hooks", webhook)
    api.get("/health")(lambda: "well")
    paths = [(api, "/health"), (api, "/hooks/"), (api, "/hooks/mine"), (webhook, "/")]
    assert [asyncio.run(status(*each)) for each in paths] == [200, 405, 405, 405]


def test_lifespan_and_sockets_of_others() -> None:
    async def steps(kind: str, *messages: str) -> list[str]:
        found: list[str] = []
        left = [{"type": message} for message in messages]

        async def receive() -> Any:
            return left.pop(0)

        async def send(message: Any) -> None:
            found.append(message["type"])

        await app(WebhookIntake(1))({"type": kind}, receive, send)
        return found

    lived = asyncio.run(steps("lifespan", "lifespan.startup", "lifespan.shutdown"))
    assert lived == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert asyncio.run(steps("websocket")) == ["websocket.close"]


def test_what_is_on_its_way_takes_room_and_has_to_come_in_time() -> None:
    """Bodies whose last byte never comes: beyond the room for them they are refused, the others are cut off."""

    async def steps() -> list[int]:
        intake = WebhookIntake(1_000)
        webhook = app(intake, answer_timeout_s=0.05)
        sent: list[int] = []

        async def slow() -> None:
            begun = False

            async def receive() -> Any:
                nonlocal begun
                if begun:
                    await asyncio.Event().wait()
                begun = True
                return {"type": "http.request", "body": b"x" * 100, "more_body": True}

            async def send(message: Any) -> None:
                if message["type"] == "http.response.start":
                    assert (b"connection", b"close") in message["headers"]
                    sent.append(message["status"])

            await webhook(Sender(b"").scope, receive, send)  # type: ignore[arg-type]

        await asyncio.gather(*(slow() for _ in range(30)))
        assert intake.come(1_000), "nothing is left of them"
        return sent

    assert sorted(asyncio.run(steps())) == [408] * 10 + [429] * 20
