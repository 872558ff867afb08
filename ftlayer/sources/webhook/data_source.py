"""`WebhookSource` as a Python Data Source."""

from __future__ import annotations

from ftlayer.config import MIB
from ftlayer.sources.data_source import QueueDataSource, option_count
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
        """Return the name for ``format``."""
        return "ftlayer-webhook"

    def source(self) -> WebhookSource:
        """See `QueueDataSource.source`."""
        options = self.options
        names = str(options.get("headers", "")).split(",")
        return WebhookSource(
            options.get("listen"),  # type: ignore[arg-type]  # It is checked there.
            headers=[name.strip() for name in names if name.strip()],
            signature=self._signature(),
            max_body=option_count(options, "maxBody", MIB),
            max_pending=option_count(options, "maxPending", MAX_PENDING),
            answer_timeout=str(options.get("answerTimeout", "30s")),
            tls_cert=options.get("tlsCert"),
            tls_key=options.get("tlsKey"),
        )

    def _signature(self) -> HmacSignature | None:
        if "signatureSecret" not in self.options:
            return None
        parts = {
            part: str(self.options[f"signature{part.capitalize()}"])
            for part in ("secret", "header", "prefix", "encoding", "algorithm")
            if f"signature{part.capitalize()}" in self.options
        }
        return HmacSignature(**parts)
