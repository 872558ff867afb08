"""Pushes the metrics of a vertex or a board to an OpenTelemetry collector, beside what Prometheus asks for."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from ftlayer import __version__
from ftlayer.common.rules.telemetry_settings import interval_s, target_of
from ftlayer.common.telemetry import CollectorNews, is_usable, pushing, resource_of
from ftlayer.errors import FTLayerError
from ftlayer.vertex.metrics.catalogue import OTLP_EXPORTS, Families

logger = logging.getLogger(__name__)


LAST_PUSH_S = 3.0
"""How long the end of a process waits for its last push."""


class OtlpMetrics:
    """Pushes what ``gather`` returns, on a thread of its own, while the ``with`` block runs and a collector is named.

    Pushes that fail are counted; the next one has all totals again.
    """

    def __init__(
        self,
        gather: Callable[[], Families],
        endpoint: str | None,
        service: str,
        *,
        interval_s: float | None = None,
    ) -> None:
        """``endpoint`` is a collector's base URL, None: as the variables of OpenTelemetry say; ``service`` its name."""
        self._gather = gather
        self._endpoint = endpoint
        self._service = service
        self._interval_s = interval_s
        self._shown = ""
        self._push: Callable[[Families], bool] = lambda families: False
        self._close: Callable[[], None] = lambda: None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._counts = {"done": 0, "failed": 0}
        self._pid = os.getpid()

    def __enter__(self) -> OtlpMetrics:
        """Begin to push; `ConfigError` where the SDK is missing and an option asks for it, and for odd variables."""
        target = target_of("metrics", self._endpoint, os.environ)
        if target is not None and is_usable(target, "metrics"):
            if self._interval_s is None:
                self._interval_s = interval_s(os.environ)
            self._shown = target.shown
            self._open(target.endpoint)
            self._thread = threading.Thread(target=self._run, name="ftlayer-otlp", daemon=True)
            self._thread.start()
            logger.info("metrics are pushed to %s every %g s", self._shown, self._interval_s)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Push once more, wait for that a little, and end. In a forked process: do nothing."""
        thread, self._thread = self._thread, None
        if thread is None or self._pid != os.getpid():
            return
        self._stop.set()
        thread.join(LAST_PUSH_S)
        self._close()

    def counted(self) -> Families:
        """Gather, and add how many pushes there were where there are any. Any thread."""
        families = self._gather()
        if self._shown:
            for outcome, count in self._counts.items():
                families.add(OTLP_EXPORTS, count, {"outcome": outcome})
        return families

    def _open(self, endpoint: str | None) -> None:
        # Late: it is there with the extra alone, and takes 0.2 s.
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics.export import MetricExportResult

        from ftlayer.vertex.service.otlp_data import Starts, metrics_data

        exporter = OTLPMetricExporter(endpoint)
        resource = resource_of(self._service, __version__)
        starts = Starts(time.time_ns())

        def push(families: Families) -> bool:
            data = metrics_data(families, resource, __version__, starts, time.time_ns())
            with pushing():
                return exporter.export(data) is MetricExportResult.SUCCESS

        self._push, self._close = push, exporter.shutdown

    def _run(self) -> None:
        news = CollectorNews("metrics", self._shown)
        while True:
            is_last = self._stop.wait(self._interval_s)
            is_taken = self._push_once()
            self._counts["done" if is_taken else "failed"] += 1
            news.note(is_taken=is_taken)
            if is_last:
                return

    def _push_once(self) -> bool:
        try:
            return self._push(self.counted())
        except FTLayerError as error:
            logger.warning("metrics cannot be gathered: %s", error)
        except Exception:
            # The end of a thread would go unseen; this is counted, and said.
            logger.exception("metrics cannot be pushed")
        return False
