"""Options of a webhook: each that will not do is named."""

from __future__ import annotations

from typing import Any

import pytest

from ftlayer.errors import ConfigError
from ftlayer.sources import HmacSignature, WebhookSource


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"listen": ""}, "listen"),
        ({"listen": "here"}, "listen"),
        ({"listen": "unix:/tmp/x"}, "listen"),
        ({"listen": "http://localhost:8080"}, "listen: expected host:port without a scheme"),
        ({"headers": "X-A"}, "headers"),
        ({"headers": [""]}, "headers"),
        ({"headers": ["a", "A"]}, "headers"),
        ({"headers": ["Body"]}, "headers"),
        ({"signature": "secret"}, "signature"),
        ({"max_body": 0}, "max_body"),
        ({"max_pending": "1"}, "max_pending"),
        ({"max_body": 2, "max_pending": 1}, "max_body: 2 bytes are more than the 1 of max_pending"),
        ({"answer_timeout": "soon"}, "answer_timeout"),
        ({"app": 5}, "app"),
        ({"tls_cert": "cert.pem"}, "tls_cert and tls_key"),
        ({"tls_cert": 5, "tls_key": "key.pem"}, "tls_cert"),
    ],
)
def test_an_option_that_will_not_do_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        WebhookSource(**{"listen": "127.0.0.1:0", **options})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"secret": ""}, "secret"),
        ({"secret": []}, "secret"),
        ({"secret": [b"a", ""]}, "secret"),
        ({"secret": "s", "header": ""}, "header"),
        ({"secret": "s", "prefix": None}, "prefix"),
        ({"secret": "s", "encoding": "rot13"}, "encoding"),
        ({"secret": "s", "algorithm": "md5"}, "algorithm"),
    ],
)
def test_a_signature_that_cannot_be_checked_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        HmacSignature(**options)


def test_rows_have_the_headers_between_what_all_have() -> None:
    source = WebhookSource("0.0.0.0:80", headers=["X-Kind", "Content-Type"])
    assert source.schema.names == ["id", "time", "path", "X-Kind", "Content-Type", "body"]
