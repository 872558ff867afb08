"""Handles and lookups of single values in C against those in Python: the same programs, step by step."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.errors import StateSerializationError, UnsupportedError
from ftlayer.functions.handles import ValueHandle
from ftlayer.functions.keyed import Backend, StateTtl, is_immutable
from ftlayer.functions.process import Context
from ftlayer.functions.undo import (
    ABSENT,
    LateFailure,
    Uncopied,
    UndoBackend,
    UndoLog,
    UndoValues,
    logged_lookup,
    value_handle,
)
from ftlayer.records.kernels import native
from ftlayer.state import opening as merging
from ftlayer.state.contract import BackendSpec, Frozen
from ftlayer.state.heap import HeapBackend
from ftlayer.state.opening import LayeredBackend, open_backend
from ftlayer.state.tables import layers as memory

KEY = pa.schema([("k", pa.string())])
keys = st.sampled_from(["a", "a", "b", None])
atoms = st.sampled_from([0, 1, True, 2**70, 1.5, "x", b"y", None, (1, "t")])
values = atoms | st.lists(atoms, max_size=2) | st.builds(lambda v: {"in": [v]}, atoms)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("get"), keys),
        st.tuples(st.just("set"), keys, values),
        st.tuples(st.just("change_in_place"), keys, st.booleans()),
        st.tuples(st.just("clear"), keys),
        st.tuples(st.just("reduce"), keys, values),
        st.tuples(st.just("mark")),
        st.tuples(st.just("fail")),
        st.tuples(st.just("undo")),
        st.tuples(st.just("forget")),
        st.tuples(st.just("freeze")),
        st.tuples(st.just("release")),
        st.tuples(st.just("tend")),
    ),
    max_size=40,
)


@pytest.fixture(autouse=True, scope="module")
def _small_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "SLICE", 2)
        patch.setattr(merging, "MAX_LAYERS", 1)
        patch.setattr(memory, "MAX_BYTES", 1)
        yield


def opened(name: str) -> Any:
    if name == "dict":
        return HeapBackend()
    config = CheckpointConfig(backend=name, directory="x")  # type: ignore[arg-type]
    return open_backend(config, BackendSpec(0, 8, 8, {"op": KEY}, None), None, cast(Any, None), "")


class Side:
    """One of the two: a backend, a context, a handle."""

    def __init__(
        self,
        name: str,
        logged: bool,
        make: Callable[[Context, Any, Any], ValueHandle],
        look_up: Callable[[UndoValues], Callable[[Any], Any]],
        default: Any,
    ) -> None:
        self.backend = opened(name)
        self.log = UndoLog() if logged else None
        used: Backend = self.backend if self.log is None else UndoBackend(self.backend, self.log)
        state = used.state("op")
        self.table: Any = state.values("v")
        self.context = Context("op", (), state)
        self.handle = make(self.context, self.table, copy.deepcopy(default))
        self.look_up = look_up(self.table) if logged else None
        self.marks = [0]
        self.out: list[Frozen] = []

    def close(self) -> None:
        if isinstance(self.backend, LayeredBackend):
            self.backend.close()

    def get(self, key: Any) -> Any:
        self.context.key = key
        return self.handle.get()

    def set(self, key: Any, value: Any) -> None:
        self.context.key = key
        self.handle.set(value.copy() if isinstance(value, list | dict) else value)

    def change_in_place(self, key: Any, again: bool) -> None:
        value = self.get(key)
        if isinstance(value, list):
            value.append("more")
        elif isinstance(value, dict):
            value["in"] = [*value["in"], "more"]
        if again:
            self.handle.set(value)

    def reduce(self, key: Any, value: Any) -> None:
        """Change what is there in place, where it can be, and put something in its place."""
        if self.look_up is None:
            return
        try:
            old = self.look_up(key)
        except KeyError:
            old = None
        if isinstance(old, list):
            old.append("more")
        value = value.copy() if isinstance(value, list | dict) else value
        self.table.table[key] = value if old is None else old if isinstance(old, list) else (1, "again")

    def clear(self, key: Any) -> None:
        self.context.key = key
        self.handle.clear()

    def mark(self) -> None:
        if self.log is not None:
            self.marks.append(len(self.log.entries))

    def fail(self) -> None:
        if self.log is not None:
            self.log.fail(self.marks.pop() if len(self.marks) > 1 else 0, 7)

    def undo(self) -> None:
        if self.log is not None:
            self.log.undo()
            self.marks = [0]

    def forget(self) -> None:
        if self.log is not None:
            self.log.forget()
            self.marks = [0]

    def freeze(self) -> None:
        self.forget()
        if isinstance(self.backend, LayeredBackend):
            self.out.append(self.backend.freeze(Barrier(len(self.out) + 1, 0)))

    def release(self) -> None:
        while self.out:
            self.out.pop().release()

    def tend(self) -> None:
        if isinstance(self.backend, LayeredBackend):
            for now_ms in range(5):
                self.backend.tend(now_ms)

    def did(self, step: str, *arguments: Any) -> str:
        try:
            return repr(getattr(self, step)(*arguments))
        except (LateFailure, TypeError, KeyError) as error:
            return repr(error)

    def content(self) -> dict[str, str]:
        table = self.table if self.log is None else self.table.table
        return {repr(key): repr(value) for key, value in table.items()}

    def logged(self) -> list[str]:
        """The log, with functions by their names."""
        entries = [] if self.log is None else self.log.entries
        return [getattr(entry, "__name__", "absent" if entry is ABSENT else repr(entry)) for entry in entries]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["dict", "heap", "lmdb"]), st.booleans(), values, STEPS)
@example("heap", True, 0, [("set", "a", [1]), ("freeze",), ("change_in_place", "a", False), ("fail",)])
@example("lmdb", True, 0, [("set", "a", 1), ("freeze",), ("release",), ("tend",), ("clear", "a"), ("undo",)])
@example("heap", False, 0, [("get", ["no key"]), ("set", ["no key"], 1), ("clear", ["no key"])])
@example("heap", True, 0, [("get", ["no key"]), ("set", ["no key"], 1), ("clear", ["no key"])])
@example("dict", True, None, [("set", 1, "int"), ("set", True, "bool"), ("get", 1.0), ("undo",), ("get", 1)])
@example(
    "heap", True, 0, [("reduce", "a", [1]), ("mark",), ("reduce", "a", 2), ("reduce", "b", 3), ("fail",)]
)
@example(
    "lmdb", True, 0, [("reduce", "a", 1), ("freeze",), ("release",), ("tend",), ("reduce", "a", 2), ("undo",)]
)
@example("heap", True, 0, [("reduce", ["no key"], 1)])
def test_c_does_what_python_does(name: str, logged: bool, default: Any, steps: list[tuple[Any, ...]]) -> None:
    quick = Side(name, logged, value_handle, logged_lookup, default)
    plain = Side(name, logged, ValueHandle, lambda values: values.look_up, default)
    try:
        assert (type(quick.handle) is native.DictValueHandle) is is_immutable(default)
        assert type(plain.handle) is ValueHandle
        assert not logged or type(quick.look_up) is native.LoggedLookup
        for step in steps:
            assert quick.did(*step) == plain.did(*step), step
            assert quick.logged() == plain.logged(), step
            assert quick.content() == plain.content(), step
    finally:
        quick.close()
        plain.close()


def contexts(table: Any) -> Iterator[tuple[ValueHandle, UndoLog | None, Context]]:
    """Handles over a table in plain sight, without and with a log."""

    class State:
        def values(self, _: str) -> Any:
            return table

    class OneTable:
        def state(self, _: str) -> Any:
            return State()

    log = UndoLog()
    for own, used in ((None, State()), (log, UndoBackend(cast(Any, OneTable()), log).state("op"))):
        context = Context("op", (), cast(Any, used))
        yield context.value("v", "default"), own, context


def test_what_a_handle_says_of_itself() -> None:
    for handle, _, context in contexts({}):
        assert isinstance(handle, ValueHandle)
        assert (handle.default, handle.ttl) == ("default", None)
        assert context.value("v", "default") is handle
        assert context.value("v", "another") is not handle
        for name in ("get", "set", "clear"):
            assert getattr(handle, name).__doc__ == getattr(ValueHandle, name).__doc__
        handle.default = 5
        context.key = 1
        assert handle.get() == 5
        del handle.default
        with pytest.raises(AttributeError, match="default"):
            handle.get()


def test_without_a_key_a_handle_says_so() -> None:
    for handle, log, _ in contexts({}):
        for call in (handle.get, handle.clear, lambda handle=handle: handle.set(1)):
            with pytest.raises(UnsupportedError, match="asked for a key, or its state, where there is none"):
                call()
        assert log is None or not log.entries


def test_tables_that_look_up_in_a_way_of_their_own_have_handles_in_python() -> None:
    class Loud(dict[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key, value * 2)

    for handle, _, context in contexts(Loud()):
        assert type(handle) is ValueHandle
        context.key = 1
        handle.set(2)
        assert handle.get() == 4
    for table in (defaultdict[Any, Any](list), OrderedDict[Any, Any]()):
        for handle, _, context in contexts(table):
            context.key = 1
            assert handle.get() == "default"
    context = Context("op", (), HeapBackend().state("op"))
    assert type(context.value("w", ttl=StateTtl("1s"))) is not native.DictValueHandle


def test_what_cannot_be_copied_is_refused_when_it_is_read() -> None:
    table = {1: iter(())}
    for handle, log, context in contexts(table):
        context.key = 1
        if log is None:
            assert handle.get() is table[1]
            continue
        table[1] = (item for item in ())  # type: ignore[assignment]
        with pytest.raises(StateSerializationError, match="cannot be copied"):
            handle.get()


class Key:
    """A key that can be told to fail."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        if self.error is not None:
            raise self.error
        return self is other


def test_every_reference_is_given_back() -> None:
    for handle, log, context in contexts({}):
        key, other, value, default = Key(), Key(), object(), object()
        handle.default = default
        counted = (key, other, value, default, [] if log is None else log.entries, ABSENT, context)
        gc.collect()
        before = [sys.getrefcount(thing) for thing in counted]
        for error in (None, KeyError("in __eq__"), ValueError("in __eq__"), None):
            context.key = key
            handle.get()
            handle.set(3)
            handle.get()
            context.key = other
            other.error = error
            for call in (handle.get, lambda handle=handle, value=value: handle.set(value), handle.clear):
                try:
                    call()
                except (KeyError, ValueError) as raised:
                    assert raised is error  # noqa: PT017 - not each of them is raised
                    raised.__traceback__ = None
            other.error = key.error = None
            context.key = [key]
            for call in (handle.get, lambda handle=handle, value=value: handle.set(value), handle.clear):
                with pytest.raises(TypeError, match="unhashable"):
                    call()
            for each in (key, other):
                context.key = each
                handle.clear()
            if log is not None:
                log.forget()
        context._leave()
        del call, error, each
        gc.collect()
        assert [sys.getrefcount(thing) for thing in counted] == before


@pytest.mark.parametrize("in_place", [True, False])
def test_a_lookup_gives_every_reference_back(in_place: bool) -> None:
    log = UndoLog()
    values = UndoValues({}, log if in_place else Uncopied(log))
    look_up = logged_lookup(values)
    assert type(look_up) is native.LoggedLookup
    key, other, plain, listed = Key(), Key(), (object(),), [object()]
    counted = (key, other, plain, listed, log.entries, ABSENT)
    gc.collect()
    before = [sys.getrefcount(thing) for thing in counted]
    for value in (plain, listed):
        with pytest.raises(KeyError):
            look_up(key)
        values.table[key] = value
        assert look_up(key) is value
        key.error = ValueError("in __eq__")
        with pytest.raises(ValueError, match="in __eq__"):
            look_up(other)
        key.error = None
        with pytest.raises(TypeError, match="unhashable"):
            look_up([])
        log.undo()
        assert not values.table
    del value
    gc.collect()
    assert [sys.getrefcount(thing) for thing in counted] == before


def test_a_lookup_takes_a_key_alone() -> None:
    look_up: Any = logged_lookup(UndoValues({}, UndoLog()))
    for call in (look_up, lambda: look_up(1, 2), lambda: look_up(key=1)):
        with pytest.raises(TypeError, match="a lookup takes a key, and nothing else"):
            call()
    make: Any = native.LoggedLookup
    for arguments in ((), ([], [], 1, 2, 3), ({}, {}, 1, 2, 3)):
        with pytest.raises(TypeError):
            make(*arguments)
    with pytest.raises(TypeError, match="no keywords"):
        make({}, [], 1, 2, 3, more=4)


def test_a_handle_in_a_cycle_is_collected() -> None:
    class Call:
        key = 1

    class Table(dict[Any, Any]):
        pass

    call, table = Call(), Table()
    handle = value_handle(cast(Any, call), table, ())
    handle.set(handle)
    handle.default = (handle,)
    assert handle.get() is handle
    gone = weakref.ref(table), weakref.ref(call)
    del handle, table, call
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_arguments_are_checked() -> None:
    make: Any = native.DictValueHandle
    for arguments in (
        (),
        (1, [], 2, 3),
        (1, {}, 2, 3, None, []),
        (1, {}, 2, 3, None, (), 4, 5, 6),
        (1, {}, 2, 3, None, [], 4, 5),
    ):
        with pytest.raises(TypeError):
            make(*arguments)
    with pytest.raises(TypeError, match="keywords"):
        make(1, {}, 2, default=3)
