"""Options of wrapped streams that there are not are named with the nearest one, before anything else is looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ftlayer.common.failures import RetryLater, RowsRejected
from ftlayer.config import VertexOptions
from ftlayer.errors import ConfigError
from ftlayer.spark.facade import FTLayer
from ftlayer.spark.query.writer import TrackedWriter
from ftlayer.spark.tracked import TrackedStream
from ftlayer.vertex.calls import StreamOptions

NO: Any = None
LAYER = FTLayer(VertexOptions("nowhere"), StreamOptions())
STREAM = TrackedStream(NO)
WRITER = TrackedWriter(NO, "checkpoint", "name", lambda: NO)


def one(row: Any) -> Any:
    return row


@pytest.mark.parametrize(
    ("call", "option", "nearest"),
    [
        (lambda **typo: STREAM.map(one, "n int", **typo), "retry_onn", "retry_on"),
        (lambda **typo: STREAM.flat_map(one, "n int", **typo), "deadon", "dead_on"),
        (lambda **typo: STREAM.filter(one, **typo), "nam", "name"),
        (lambda **typo: STREAM.map_batches(one, "n int", **typo), "tagget", "tagged"),
        (lambda **typo: STREAM.map_async(one, "n int", **typo), "in_fligth", "in_flight"),
        (lambda **typo: STREAM.transform(one, **typo), "drop", "drops"),
        (lambda **typo: STREAM.repartition(1, **typo), "partition", "partitions"),
        (lambda **typo: STREAM.key_by("n", **typo), "partition", "partitions"),
        (lambda **typo: STREAM.sink(one, **typo), "chekpoint", "checkpoint"),
        (lambda **typo: STREAM.emit(one, **typo), "carier", "carrier"),
        (lambda **typo: STREAM.dead_letters(**typo), "checkpoints", "checkpoint"),
        (lambda **typo: LAYER.source(NO, **typo), "nane", "name"),
        (lambda **typo: LAYER.resume(NO, **typo), "carier", "carrier"),
        (lambda **typo: LAYER.ingest("name", **typo), "shema", "schema"),
        (lambda **typo: WRITER.restart(**typo), "strategie", "strategy"),
        (lambda **typo: WRITER.option("key", **typo), "values", "value"),
        (lambda **typo: RetryLater("busy", **typo), "uses_attempts", "uses_attempt"),
    ],
)
def test_an_option_that_there_is_not(call: Callable[..., Any], option: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no option {option!r}: did you mean {nearest!r}"):
        call(**{option: 1})


def test_a_start_takes_nothing() -> None:
    with pytest.raises(ConfigError, match=r"TrackedWriter.start: there is no option 'timeout'"):
        WRITER.start(timeout=3)  # type: ignore[call-arg]


def test_what_is_missing_is_said() -> None:
    with pytest.raises(ConfigError, match=r"TrackedStream.map: missing a required argument: 'schema'"):
        STREAM.map(one)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: STREAM.map(lambda: 1, "n int"),
            r"map: expected a function of 1 argument, got <lambda>\(\) ",
        ),
        (lambda: STREAM.filter(lambda row, other: True), r"filter: expected a function of 1 argument"),
        (
            lambda: STREAM.sink(one, checkpoint="c", name="n"),
            r"sink: function.*expected a function of 2 arguments, got one.row. .too many",
        ),
        (
            lambda: FTLayer.embedded("nowhere", on_dead=lambda: 1),
            "on_dead: expected a function of 1 argument",
        ),
        (lambda: FTLayer.embedded("nowhere", on_dead=5), "on_dead: expected a function, got an int"),
        (
            lambda: FTLayer.embedded("nowhere", retry_on=lambda error, attempt: True),  # type: ignore[misc, arg-type]
            r"FTLayer.embedded: retry_on: expected a function of 1 argument, .*missing a required argument: 'attempt'",
        ),
        (
            lambda: FTLayer.embedded("nowhere", dead_on=lambda: True),
            "dead_on: expected a function of 1 argument",
        ),
    ],
)
def test_functions_that_cannot_be_called_as_they_will_be(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        call()


@pytest.mark.parametrize("wrong", [3, None, "row 3", [(1, "why")]])
def test_rows_that_are_set_aside_have_to_be_named(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"RowsRejected: expected \{row: error\}, .*, got"):
        RowsRejected(wrong)


def test_rows_that_are_set_aside_have_to_have_a_reason() -> None:
    with pytest.raises(ConfigError, match=r"expected \{row: error\}, .*, got 5 for row 7"):
        RowsRejected({6: "good", 7: 5})  # type: ignore[dict-item]
