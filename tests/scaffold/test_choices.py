from __future__ import annotations

from pathlib import Path

import pytest

from ftlayer.cli.new import Choices, ProjectKind, ProjectMode, ProjectSink, ProjectSource, name_of
from ftlayer.errors import ConfigError


def test_the_default_needs_no_server_and_no_extra() -> None:
    choices = Choices("shop")
    assert (choices.kind, choices.mode, choices.source, choices.sink) == ("query", None, "files", "files")
    assert choices.extras == []


def test_extras_are_those_of_source_and_sink_once() -> None:
    assert Choices("shop", source=ProjectSource.WEBHOOK, sink=ProjectSink.POSTGRES).extras == [
        "http",
        "postgres",
    ]
    assert Choices("shop", source=ProjectSource.KAFKA, sink=ProjectSink.KAFKA).extras == ["kafka"]
    assert Choices("shop", source=ProjectSource.TAIL, sink=ProjectSink.DELTA).extras == ["delta"]


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        (ProjectKind.QUERY, ProjectMode.ACKER),
        (ProjectKind.QUERY, ProjectMode.BARRIER),
        (ProjectKind.TOPOLOGY, None),
    ],
)
def test_a_topology_has_a_mode_and_a_query_has_none(kind: ProjectKind, mode: ProjectMode | None) -> None:
    with pytest.raises(ConfigError, match="--mode"):
        Choices("shop", kind, mode)


def test_a_sink_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"--sink http: .* a query; say --kind topology, .*files.*iceberg"):
        Choices("shop", ProjectKind.QUERY, sink=ProjectSink.HTTP)
    assert (
        Choices("shop", ProjectKind.TOPOLOGY, ProjectMode.ACKER, sink=ProjectSink.HTTP).sink
        is ProjectSink.HTTP
    )


@pytest.mark.parametrize("name", ["", "Shop", "1shop", "shop!", "class", "x" * 32, "../shop", "shöp"])
def test_a_name_that_no_package_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="expected the name of a Python package"):
        Choices(name)


@pytest.mark.parametrize("name", ["json", "pyspark", "ftlayer", "tests"])
def test_a_name_that_a_module_has_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="a module is called so already"):
        Choices(name)


@pytest.mark.parametrize(
    ("directory", "name"), [("shop", "shop"), ("a/my-shop", "my_shop"), ("shop.v2", "shop_v2")]
)
def test_the_name_is_the_directory_s(directory: str, name: str) -> None:
    assert name_of(Path(directory)) == name
