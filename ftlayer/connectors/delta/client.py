"""Delta tables: the library, and which tables may be written to as files are added."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from ftlayer.connectors.connections import client_library
from ftlayer.errors import ConfigError, SinkError

SCHEMES = frozenset({"s3", "s3a"})

_NAMES = {
    "access_key_id": "access_key",
    "secret_access_key": "secret_key",
    "session_token": "session_token",
    "token": "session_token",
    "region": "region",
    "default_region": "region",
    "virtual_hosted_style_request": "force_virtual_addressing",
    "skip_signature": "anonymous",
}
"""Options that both have: deltalake's names, without ``aws_``, and Arrow's."""

_ENDPOINTS = ("endpoint", "endpoint_url")
_TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})
_TRUTHS = frozenset({"force_virtual_addressing", "anonymous"})
_OF_COMMITS = frozenset(
    {
        "allow_http",
        "allow_unsafe_rename",
        "checksum_algorithm",
        "conditional_put",
        "connect_timeout",
        "copy_if_not_exists",
        "disable_tagging",
        "max_retries",
        "request_timeout",
        "retry_timeout",
        "s3_locking_provider",
        "timeout",
    }
)
"""Options of deltalake's that say nothing about where, or as whom: its own client uses them alone."""


def check_s3_options(options: Mapping[str, str]) -> None:
    known = {*_NAMES, *_ENDPOINTS, *_OF_COMMITS}
    for name in options:
        if _plain(name) not in known:
            raise ConfigError(
                f"storage_options: {name!r} is none of those that data files are written with: "
                f"{', '.join(f'aws_{each}' for each in sorted(known - {'token'}))}; others can be set in the "
                "environment, as AWS names them"
            )


def s3_file_system(options: Mapping[str, str]) -> Any:
    """Return a client. What the options lack comes from the environment, as for any of AWS' clients."""
    from pyarrow.fs import S3FileSystem

    given: dict[str, Any] = {}
    for name, value in options.items():
        plain = _plain(name)
        if plain in _ENDPOINTS:
            address = urlsplit(value if "://" in value else f"https://{value}")
            given["endpoint_override"] = address.netloc
            given["scheme"] = address.scheme
        elif plain in _NAMES:
            is_truth = _NAMES[plain] in _TRUTHS
            given[_NAMES[plain]] = value.lower() in _TRUE if is_truth else value
    return S3FileSystem(**given)


def _plain(name: str) -> str:
    return name.lower().removeprefix("aws_")


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
    modules = ("deltalake", "deltalake.exceptions", "deltalake.transaction")
    return client_library("a Delta table", "deltalake", "delta", *modules)


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
