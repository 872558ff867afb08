"""OpenTelemetry's SDK, which is there with the extra ``otel`` alone: imported late, and named where it is missing."""

from __future__ import annotations

import importlib.util
import logging
import uuid
from typing import TYPE_CHECKING

from ftlayer.common.telemetry.settings import OtlpTarget
from ftlayer.errors import ConfigError, install

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

_EXPORTER = "opentelemetry.exporter.otlp.proto.http"

logger = logging.getLogger(__name__)


def is_usable(target: OtlpTarget, what: str) -> bool:
    """Whether the SDK is there; ``what`` would go to ``target``.

    Raises `ConfigError` where it is missing and an option asks for it. A variable may be meant for all programs of a
    machine, and stops none: the log says what is missing.
    """
    if target.problem:
        logger.warning("%s are not sent. %s", what, target.problem)
        return False
    if _is_there(_EXPORTER) and _is_there("opentelemetry.sdk"):
        return True
    missing = f"{what} for {target.shown} need OpenTelemetry's SDK, which is not installed: {install('otel')}"
    if target.is_asked_for:
        raise ConfigError(missing)
    logger.warning("%s (or set OTEL_SDK_DISABLED=true here)", missing)
    return False


def resource_of(service: str, version: str) -> Resource:
    """Return what this process is called: ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` come first.

    ``service.instance.id`` is drawn, one for each process.
    """
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    ours = {
        "service.name": service,
        "service.version": version,
        "service.instance.id": str(uuid.uuid4()),
    }
    return Resource.create({**ours, **OTELResourceDetector().detect().attributes})


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it
        return False
