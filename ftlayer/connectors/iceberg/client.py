"""Iceberg: the library, catalogs by their properties, and commits that are not repeated unasked."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ftlayer.common.checks import check_choice, check_instance, check_text, check_texts
from ftlayer.connectors.libraries import client_library
from ftlayer.errors import ConfigError

RETRIES = "commit.retry.num-retries"


def iceberg_library() -> Any:
    modules = ("pyiceberg", "pyiceberg.catalog", "pyiceberg.exceptions")
    return client_library("an Iceberg table", "pyiceberg", "iceberg", *modules)


def check_catalog(catalog: object) -> None:
    if isinstance(catalog, str):
        check_text(
            catalog, "catalog", "the name of a catalog in pyiceberg's configuration, or its properties"
        )
        return
    check_instance(catalog, "catalog", Mapping)
    assert isinstance(catalog, Mapping)
    check_texts([*catalog, *catalog.values()], "catalog", "texts by name")
    if not {"type", "uri", "py-catalog-impl"} & set(catalog):
        raise ConfigError(
            "catalog: expected properties of pyiceberg's, 'type' or 'uri' among them, got "
            f"{', '.join(map(repr, catalog)) or 'none'}"
        )
    if "type" in catalog:
        kinds = sorted(kind.value for kind in iceberg_library().catalog.CatalogType)
        check_choice(catalog["type"], "catalog: type", kinds)


def load_catalog(catalog: str | Mapping[str, str]) -> Any:
    load = iceberg_library().catalog.load_catalog
    if isinstance(catalog, str):
        return load(catalog)
    properties = dict(catalog)
    return load(properties.pop("name", "default"), **properties)


def without_retries(table: Any) -> Any:
    """Return a table, just loaded, whose commits fail if there was another one since.

    pyiceberg would commit again on top of that, without another look at whether the same was committed by it. It
    reads how often from the properties of this object, which are not written back.
    """
    table.metadata.properties[RETRIES] = "0"
    return table


def make_local_files_last(urls: Iterable[str]) -> None:
    directories = set()
    for url in urls:
        if urlsplit(url).scheme not in ("", "file"):
            continue
        # As pyiceberg does: what looks quoted in a location is the name itself.
        path = Path(url.removeprefix("file://"))
        with path.open("rb") as file:
            os.fsync(file.fileno())
        directories.add(path.parent)
    for directory in directories:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
