"""No number in a call breaks a vertex: it is refused by name, or the rules do something with it, and go on."""

from __future__ import annotations

import contextlib
import dataclasses
import types
import typing
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer.errors import FTLayerError
from ftlayer.vertex import calls
from ftlayer.vertex.calls import I32, U64, Envelope
from ftlayer.vertex.wire.frames import decode_call, encode_call
from tests.vertex.rules.conftest import Vertex

EDGES = sorted(
    {
        sign * (1 << bits) + off
        for bits in (0, 7, 31, 32, 53, 62, 63)
        for off in (-1, 0, 1)
        for sign in (-1, 1)
    }
)
NUMBERS = st.integers(0, 3) | st.sampled_from([*EDGES, (1 << 64) - 1, (1 << 64) - 2, 1_700_000_000_000])
ROOTS = st.sampled_from([1, 2, 3, 4, 5, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
NAMES = st.sampled_from(["s", "r", "q", "j", "run", ""])


def arrays(most: int = 3) -> st.SearchStrategy[Any]:
    return st.lists(ROOTS, min_size=1, max_size=most).map(lambda values: np.array(values, np.uint64))


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    plain: dict[Any, st.SearchStrategy[Any]] = {
        int: NUMBERS,
        float: st.sampled_from([0.0, -1.0, 0.5, 1e308, float("inf"), float("nan")]),
        bool: st.booleans(),
        str: NAMES,
        bytes: st.sampled_from([b"", b"a", b"\xff" * 8, b"\0" * 8]),
        U64: arrays(),
        I32: st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=3).map(
            lambda v: np.array(v, np.int32)
        ),
        pa.RecordBatch: st.integers(1, 3).map(lambda rows: pa.record_batch({"n": list(range(rows))})),
    }
    if hint in plain:
        return plain[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return st.one_of([st.none() if a is type(None) else values_of(a) for a in arguments])
    if origin is tuple and arguments[1:] == (...,):
        return st.lists(values_of(arguments[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, arguments))
    if origin is dict:
        return st.dictionaries(NAMES, values_of(arguments[1]), max_size=2)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from(list(hint))
    hints = typing.get_type_hints(hint)
    fields = {field.name: values_of(hints[field.name]) for field in dataclasses.fields(hint)}
    if hint is calls.Persist:
        return st.one_of(_persists(), _made(hint, fields))
    return _made(hint, fields)


def _persists() -> st.SearchStrategy[Any]:
    return arrays().map(
        lambda roots: calls.Persist("s", pa.record_batch({"n": list(range(len(roots)))}), roots, None)
    )


def _made(kind: Any, fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Options that a program cannot make are sent all the same: whoever has a token can."""

    def made(values: dict[str, Any]) -> Any:
        with contextlib.suppress(FTLayerError, TypeError, ValueError):
            return kind(**values)
        bare = object.__new__(kind)
        for name, value in values.items():
            object.__setattr__(bare, name, value)
        return bare

    return st.fixed_dictionaries(fields).map(made)


def a_vertex() -> Vertex:
    vertex = Vertex()
    vertex.open("s")
    vertex.open("r")
    vertex.call(calls.OpenQuery("q", "run", ("s",)))
    vertex.call(calls.ClaimJob("j", "run"))
    vertex.persist([1, 2, 3])
    vertex.fail(2)
    vertex.fail(3, fatal=True)
    return vertex


def sent(vertex: Vertex, call: Any, sequence: int) -> None:
    try:
        try:
            frame = encode_call(call, Envelope("me", sequence) if call.enveloped else None)
        except (TypeError, ValueError, OverflowError, AttributeError):
            return  # It cannot be sent.
        received, envelope = decode_call(frame)
        vertex.call(received, envelope)
    except FTLayerError:
        pass


@pytest.mark.parametrize("kind", calls.CALLS.values(), ids=lambda kind: kind.__name__)
def test_no_number_breaks_the_rules(kind: type) -> None:
    small = [each for each in calls.CALLS.values() if each not in (calls.AnnounceJob, calls.KeepLetters)]
    others = st.one_of([values_of(each) for each in small])

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(values_of(kind), min_size=1, max_size=3), st.lists(others, max_size=2))
    def check(made: list[Any], then: list[Any]) -> None:
        vertex = a_vertex()
        for sequence, call in enumerate([*made, *then], 1):
            sent(vertex, call, sequence)
        vertex.advance(3_600_000, ticks=3)
        vertex.counts()
        vertex.stats()
        vertex.restart()
        vertex.advance(86_400_000, ticks=2)
        vertex.stats()

    check()
