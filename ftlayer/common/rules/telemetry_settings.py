"""Where a collector is, and what is sent to it, by the options and by OpenTelemetry's own variables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ftlayer.common.printable import shown_url, url_parts
from ftlayer.errors import ConfigError

INTERVAL_MS = 60_000
"""How often metrics are pushed, as OpenTelemetry has it."""

_PROTOCOL = "http/protobuf"
_RATIO_SAMPLERS = ("traceidratio", "parentbased_traceidratio")


@dataclass(frozen=True, slots=True)
class OtlpTarget:
    """Where one signal goes.

    Attributes:
        endpoint: its full URL; None: the SDK's exporter finds it in the environment.
        base: the collector's URL, as it was given.
        is_asked_for: by an option, and not by a variable that may be meant for other programs.
        problem: why nothing can be sent there, "" where nothing is known.
    """

    endpoint: str | None
    base: str
    is_asked_for: bool
    problem: str = ""

    @property
    def shown(self) -> str:
        return shown_url(self.base)


def check_endpoint(endpoint: str | None, option: str) -> None:
    """Raise `ConfigError` for what is no URL of a collector; None is one."""
    if endpoint is not None:
        expected = "the URL of a collector that takes OTLP over HTTP, like 'http://localhost:4318'"
        url_parts(endpoint, option, expected, ("http", "https"))


def target_of(signal: str, endpoint: str | None, environ: Mapping[str, str]) -> OtlpTarget | None:
    """Return where a signal (``"metrics"`` or ``"traces"``) goes; None: nowhere.

    ``endpoint`` is a collector's base URL, or None. The variables are those of OpenTelemetry's specification:
    ``OTEL_SDK_DISABLED``, ``OTEL_METRICS_EXPORTER``, ``OTEL_EXPORTER_OTLP_ENDPOINT``,
    ``OTEL_EXPORTER_OTLP_METRICS_ENDPOINT`` and so on.
    Another protocol than OTLP over HTTP, which they may name for other programs, is a ``problem``.
    """
    name = signal.upper()
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if endpoint is not None:
        return OtlpTarget(f"{endpoint.rstrip('/')}/v1/{signal}", endpoint, True)
    variables = (f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    found = next((environ[variable] for variable in variables if environ.get(variable)), None)
    exporters = [each.strip() for each in environ.get(f"OTEL_{name}_EXPORTER", "").split(",") if each.strip()]
    if "otlp" not in exporters and (exporters or found is None):
        return None
    return OtlpTarget(None, found or "http://localhost:4318", False, _problem(name, environ))


@dataclass(frozen=True, slots=True)
class Tracing:
    """What is traced, and where spans go. Travels to slots, which may have other variables.

    Attributes:
        ratio: the share of records, above 0 and at most 1.
        endpoint: the full URL for traces.
        problem: as `OtlpTarget.problem`.
    """

    ratio: float
    endpoint: str
    problem: str = ""


def tracing_of(environ: Mapping[str, str]) -> Tracing | None:
    """Return what is traced by OpenTelemetry's variables; None: nothing.

    On by ``OTEL_TRACES_SAMPLER`` ``traceidratio`` or ``parentbased_traceidratio`` alone, with the share in
    ``OTEL_TRACES_SAMPLER_ARG``, where there is an endpoint: without them OpenTelemetry would trace everything.
    Raises `ConfigError` for a share that is none.
    """
    sampler = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower()
    target = target_of("traces", None, environ) if sampler in _RATIO_SAMPLERS else None
    if target is None:
        return None
    text = environ.get("OTEL_TRACES_SAMPLER_ARG", "") or "1"
    ratio = _number(text)
    if not 0 <= ratio <= 1:
        raise ConfigError(
            f"OTEL_TRACES_SAMPLER_ARG: expected the share of records to trace, 0 to 1, got {text!r}"
        )
    own = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    endpoint = own or f"{target.base.rstrip('/')}/v1/traces"
    return Tracing(ratio, endpoint, target.problem) if ratio else None


def interval_s(environ: Mapping[str, str]) -> float:
    """Return how often metrics are pushed (``OTEL_METRIC_EXPORT_INTERVAL``, in ms); `ConfigError` for no duration."""
    text = environ.get("OTEL_METRIC_EXPORT_INTERVAL", "") or str(INTERVAL_MS)
    milliseconds = _number(text)
    if not 0 < milliseconds < math.inf:
        raise ConfigError(
            f"OTEL_METRIC_EXPORT_INTERVAL: expected milliseconds between two pushes, above 0, got {text!r}"
        )
    return milliseconds / 1_000


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _problem(name: str, environ: Mapping[str, str]) -> str:
    for variable in (f"OTEL_EXPORTER_OTLP_{name}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = environ.get(variable, "").strip()
        if protocol == _PROTOCOL:
            return ""
        if protocol:
            return (
                f"{variable}: ftlayer speaks {_PROTOCOL}, and it says {protocol!r}; set "
                f"OTEL_EXPORTER_OTLP_{name}_PROTOCOL={_PROTOCOL} with an endpoint for it (a collector's port is 4318), "
                f"or OTEL_{name}_EXPORTER=none"
            )
    return ""
