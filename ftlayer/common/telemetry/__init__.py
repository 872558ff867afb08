"""OpenTelemetry: where a collector is, and the SDK that speaks to it (extra ``otel``)."""
