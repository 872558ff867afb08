"""No secret of a URL or a DSN is in an error, in what leads to it, or in what is shown of a place."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ftlayer.clients import amqp, mqtt, nats, postgres, redis
from ftlayer.clients.kafka import Brokers, check_producer_properties, check_properties
from ftlayer.errors import ConfigError
from ftlayer.printable import secrets_of, shown_url, without_secrets
from ftlayer.sinks import HttpSink
from ftlayer.sources.http_pull.requests import check_request
from ftlayer.telemetry.settings import check_endpoint

SECRET = "hunter2"

FORMS = (
    "{0}://u:hunter2@h:1{1}",
    "{0}://:hunter2@h:1x{1}",
    "{0}://u:hunter2@127.0.0.1:99999{1}",
    "{0}://u:hunter2@[::1{1}",
    "{0}://u:hunter2/@h:1{1}",
    "{0}://u:hunter2@h@i:1{1}",
    "{0} ://u:hunter2@h",
    "x{0}://u:hunter2@h:1",
    "{0}:u:hunter2@h",
    "u:hunter2@h:1",
    "{0}://h:1{1}?api_key=hunter2",
    "{0}://h:1{1}#hunter2",
    "{0}://u:hunter2%zz@h:1{1}?hunter2%zz=1",
    "{0}://u:hunter2@h:-1{1}",
    " {0}://u:hunter2@h:1",
    "{0}://u:pa,hunter2@h:1",
    "{0}://u:1,hunter2,b@h:1",
    "{0}://u:hunter2@h:1?password=hunter2&nosuch=hunter2",
)
DSNS = (
    "host=h password=hunter2 x",
    "host=h password='hunter2",
    "host=h passwrd=hunter2",
    "password=hunter2 nosuch=1",
    "host=h password = 'hunter2' oops",
)

CHECKS: dict[str, tuple[str, str, Callable[[str], object]]] = {
    "HttpSink": ("https", "/p", HttpSink),
    "pull": ("http", "/p", lambda url: check_request(url, None)),
    "nats": ("nats", "", lambda url: (nats.check_nats_url(url), nats.place_of(url))),
    "redis": ("redis", "/0", lambda url: (redis.check_redis_url(url), redis.place_of(url))),
    "amqp": ("amqp", "/%2F", lambda url: (amqp.check_amqp_url(url), amqp.place_of(url))),
    "mqtt": ("mqtt", "", mqtt.address_of),
    "postgres": ("postgresql", "/db", lambda dsn: (postgres.check_dsn(dsn), postgres.database_of(dsn))),
    "otlp": ("http", "/v1", lambda url: check_endpoint(url, "otlp_endpoint")),
}


def all_that_is_said(error: BaseException | None) -> str:
    """Return what an error, its causes and contexts say, also where a traceback would leave one out."""
    said = ""
    while error is not None:
        said += "".join(traceback.format_exception_only(error)) + repr(error)
        error = error.__cause__ or error.__context__
    return said


@pytest.mark.parametrize("name", CHECKS)
def test_checks_of_urls_quote_no_secret(name: str) -> None:
    scheme, path, check = CHECKS[name]
    refused = 0
    for form in (*FORMS, *DSNS):
        if name == "postgres" and "#" in form:
            continue  # libpq knows no fragments: it is part of the database's name.
        try:
            said = repr(check(form.format(scheme, path)))
        except ConfigError as error:
            refused += 1
            said = all_that_is_said(error)
        assert SECRET not in said, (form, said)
    assert refused > 3


WORD = st.text(st.characters(exclude_categories=["C"]), max_size=8)


@given(WORD, WORD, st.sampled_from(FORMS))
@example("@", "/", FORMS[0])
@example(",", ",", FORMS[0])
@example("1/", "", FORMS[0])
@example("1?", "", FORMS[0])
def test_no_form_shows_one(before: str, behind: str, form: str) -> None:
    url = form.format("http", "/p").replace(SECRET, f"{before}{SECRET}{behind}")
    assert SECRET not in shown_url(url)


def test_what_is_shown() -> None:
    assert shown_url("https://u:p@h:8/a?k=v#f") == "https://h:8/a"
    assert shown_url("nats://a:1,nats://u:p@[::1]:2") == "nats://a:1,nats://[::1]:2"
    for ambiguous in (
        "redis://u:1234/5@h",
        "http://u:1234?5@h",
        "http://u:1234#5@h",
        "https://h/a?to=me@hunter2",
    ):
        assert shown_url(ambiguous) == ambiguous.partition("://")[0] + "://…"
    assert shown_url("host=a,b password=a,hunter2,b") == "…"
    assert shown_url("/no/url") == "/no/url"


def test_an_answer_that_repeats_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    token = "a-token-of-some-length"
    sink = HttpSink("https://u:hunter2@h/p?key=s%65cret", headers={"Authorization": f"Bearer {token}"})

    def answer(request: Any) -> httpx.Response:
        if b"away" in request.read():
            raise httpx.ConnectError(f"no {request.url} with {request.headers}")
        return httpx.Response(400, text=f"bad {request.url} with {token}, secret and {dict(request.headers)}")

    sink._client = httpx.Client(transport=httpx.MockTransport(answer), headers=sink._headers)
    for body in (b"{}", b"away"):
        said = all_that_is_said(sink.sent((None, body)))
        assert "https://h/p" in said
        assert not [each for each in (SECRET, token, "secret", "s%65cret") if each in said]


@pytest.mark.parametrize("check", [check_properties, check_producer_properties])
@pytest.mark.parametrize("value", [SECRET, "a b"])
def test_librdkafka_quotes_values(check: Callable[[Any], None], value: str) -> None:
    with pytest.raises(ConfigError, match=r"security\.protocol") as raised:
        check({"security.protocol": value})
    assert value not in all_that_is_said(raised.value)


def test_what_a_repr_leaves_out() -> None:
    assert SECRET not in repr(Brokers("h:1", "g", (("sasl.password", SECRET),)))
    assert SECRET not in repr(mqtt.address_of(f"mqtt://u:{SECRET}@h"))
    assert without_secrets("a hunter2 b", secrets_of("http://u:hunter2@h?k=abc")) == "a … b"
