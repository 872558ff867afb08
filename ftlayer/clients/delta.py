"""Delta tables: the library, and which tables may be written to as files are added."""

from __future__ import annotations

from typing import Any

from ftlayer.errors import ConfigError, SinkError

_MAY_BE_ON = frozenset(
    {
        "appendOnly",
        "changeDataFeed",
        "deletionVectors",
        "domainMetadata",
        "invariants",
        "timestampNtz",
        "v2Checkpoint",
        "vacuumProtocolCheck",
    }
)
"""Features that ask nothing of files that are added; for some see `_asks_something`."""

_FEATURES_BY_VERSION = {
    2: "invariants",
    3: "checkConstraints",
    4: "generatedColumns",
    5: "columnMapping",
    6: "identityColumns",
}
"""What a table may have whose writer version is this or later, and has no list of features."""

_SIGNS = {
    "checkConstraints": "delta.constraints.",
    "generatedColumns": "delta.generationExpression",
    "identityColumns": "delta.identity.",
    "invariants": "delta.invariants",
}
"""How properties, or fields of the schema, show that a feature is used."""


def delta_library() -> Any:
    try:
        import deltalake
        import deltalake.exceptions
        import deltalake.transaction
    except ImportError as error:
        raise ConfigError(
            f"Delta tables need deltalake where driver and slots run: pip install 'ftlayer[delta]' ({error})"
        ) from error
    return deltalake


def check_can_add(table: Any, place: str) -> None:
    """Raise `SinkError` for a table with a feature that needs more of a writer than to add files.

    Constraints would have to be evaluated, generated and identity columns computed, mapped columns renamed.
    """
    protocol = table.protocol()
    listed = protocol.writer_features
    features = set(listed or ())
    if protocol.min_writer_version < 7:
        features |= {
            name for version, name in _FEATURES_BY_VERSION.items() if version <= protocol.min_writer_version
        }
    properties = dict(table.metadata().configuration)
    # Its texts are Spark's, and name what a field is.
    fields = table.schema().to_json()
    used = sorted(name for name in features if _asks_something(name, properties, fields))
    if used:
        raise SinkError(
            f"{place} has {', '.join(used)}, which DeltaSink does not do; write to a table without, or drop the feature"
        )


def _asks_something(feature: str, properties: dict[str, Any], fields: str) -> bool:
    if feature == "columnMapping":
        return str(properties.get("delta.columnMapping.mode", "none")) != "none"
    sign = _SIGNS.get(feature)
    if sign is not None:
        return any(name.startswith(sign) for name in properties) or sign in fields
    return feature not in _MAY_BE_ON
