"""S3: a file system of Arrow's, by the options that deltalake takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from ftlayer.errors import ConfigError

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
