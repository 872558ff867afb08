"""`WebhookSource` as a Python Data Source."""

from __future__ import annotations

from ftlayer.config import MIB
from ftlayer.data_source_options import DataSourceOptions
from ftlayer.sources.data_source import QueueDataSource
from ftlayer.sources.webhook.signature import HmacSignature
from ftlayer.sources.webhook.source import MAX_PENDING, WebhookSource


class WebhookDataSource(QueueDataSource):
    """``spark.dataSource.register(WebhookDataSource)``, then ``format("ftlayer-webhook")`` to read.

    The driver serves it while the query runs; a request is answered when it is in the spool.

    Options: ``listen``, ``headers`` (names with commas between them), ``maxBody``, ``maxPending``, ``answerTimeout``,
    ``tlsCert``, ``tlsKey``, see `WebhookSource`; ``signatureSecret``, ``signatureHeader``, ``signaturePrefix``,
    ``signatureEncoding``, ``signatureAlgorithm``, see `HmacSignature`; ``spool`` and ``maxRowsPerTrigger`` as of
    `RedisDataSource`.
    """

    @classmethod
    def name(cls) -> str:
        return "ftlayer-webhook"

    def source(self, options: DataSourceOptions) -> WebhookSource:
        return WebhookSource(
            options.get("listen"),  # type: ignore[arg-type]  # It is checked there.
            headers=options.names("headers"),
            signature=_signature(options),
            max_body=options.count("maxBody", MIB),
            max_pending=options.count("maxPending", MAX_PENDING),
            answer_timeout=options.text("answerTimeout", "30s"),
            tls_cert=options.get("tlsCert"),
            tls_key=options.get("tlsKey"),
        )


def _signature(options: DataSourceOptions) -> HmacSignature | None:
    if options.get("signatureSecret") is None:
        return None
    found = {
        part: options.get(f"signature{part.capitalize()}")
        for part in ("secret", "header", "prefix", "encoding", "algorithm")
    }
    return HmacSignature(**{part: text for part, text in found.items() if text is not None})
