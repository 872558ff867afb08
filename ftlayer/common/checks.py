"""Checks of what a user gives as an option, calls, or forgets to start.

Each error names the option, what it may be, and what was given.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import math
import os
import re
import sys
import types
import typing
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any, TypeVar, dataclass_transform

from ftlayer.errors import ConfigError, InvalidTopologyError, NeverStartedWarning, NotHereError


def check_unlike(names: Sequence[str], what: str) -> None:
    """Raise `InvalidTopologyError`, with both names, for two columns that are one to Spark."""
    known: dict[str, str] = {}
    for place, name in enumerate(names):
        if name in names[:place]:
            raise InvalidTopologyError(f"{what}: two columns are named {name!r}; rename one")
        other = known.setdefault(name.lower(), name)
        if other != name and not case_matters():
            raise InvalidTopologyError(
                f"{what}: the columns {other!r} and {name!r} are one to Spark, which does not look at case; rename one "
                "(or set spark.sql.caseSensitive)"
            )


def case_matters() -> bool:
    # Late: where nothing is doubtful, nothing of Spark is needed.
    from pyspark.sql import SparkSession

    spark = SparkSession.getActiveSession()
    return spark is not None and str(spark.conf.get("spark.sql.caseSensitive")).lower() == "true"


Duration = timedelta | str | int | float
"""A time: a ``timedelta``, a text with its unit (``"250ms"``, ``"30s"``, ``"5 minutes"``), or a number of seconds."""

LONGEST_MS = 1 << 41
"""The longest duration, about 70 years: a thread can wait for it."""

MOST = (1 << 31) - 1
"""The highest count: of attempts, rows, failures."""

MOST_BYTES = 1 << 50
"""The highest number of bytes, a pebibyte."""

LEAST_RATE = 0.001
MOST_RATE = 1e9

_SHOWN_CHARS = 100
_UNITS_MS = {
    **dict.fromkeys(("ms", "millisecond"), 1),
    **dict.fromkeys(("s", "sec", "second"), 1_000),
    **dict.fromkeys(("m", "min", "minute"), 60_000),
    **dict.fromkeys(("h", "hour"), 3_600_000),
    **dict.fromkeys(("d", "day"), 86_400_000),
    **dict.fromkeys(("w", "week"), 604_800_000),
}
_DURATION = re.compile(r"(-?) *([0-9]{1,30})(?:\.([0-9]{1,30}))? *([A-Za-z]*)")

Record = TypeVar("Record")
Target = TypeVar("Target", bound=Callable[..., Any])
Choice = TypeVar("Choice", bound=StrEnum)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def fast_dataclass(cls: type[Record]) -> type[Record]:
    """Make a dataclass with slots that nobody assigns to: mypy checks that, and nothing does while it runs.

    A frozen one takes four times as long to make. For records of which each batch makes some.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


def shown(value: object) -> str:
    """Return ``value`` as an error repeats it, cut to a line's length."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}… ({len(text)} characters)"


def duration_ms(value: Duration, option: str, *, least: int = 1, most: int = LONGEST_MS) -> int:
    """Return the milliseconds of a duration. A number or timedelta is rounded to them, a text has to be whole ones.

    With ``least`` 0 a zero will do, with or without a unit; below that, all of these with a minus in front.
    Raises `ConfigError` naming ``option``.
    """
    parts, whole = _parts(value, option, zero=least < 1)
    milliseconds = (2 * parts + whole) // (2 * whole)
    # A float of a millisecond may be a little less.
    if parts and 1_000 * abs(parts) < 999 * whole:
        raise ConfigError(f"{option}: a duration is at least 1 ms, got {shown(value)}")
    _check_between(milliseconds, value, option, least, most)
    return milliseconds


def wait_seconds(value: Duration | None, option: str) -> float | None:
    """Return for how many seconds a call may wait, from 0, as exactly as they were given; None for None."""
    if value is None:
        return None
    parts, whole = _parts(value, option, zero=True)
    _check_between(parts // whole, value, option, 0, LONGEST_MS)
    return parts / whole / 1_000


def check_int(value: object, option: str, *, least: int, most: int = MOST) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        unit = " of milliseconds" if option.endswith("_ms") else ""
        raise ConfigError(f"{option}: expected an integer{unit} from {least} to {most}, got {shown(value)}")


def check_number(value: object, option: str, *, least: float, most: float = math.inf) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= value <= most or math.isinf(value):  # type: ignore[operator, arg-type]
        upper = "" if math.isinf(most) else f" to {most:g}"
        raise ConfigError(
            f"{option}: expected a number from {least:g}{upper or ' upwards'}, got {shown(value)}"
        )


def check_texts(values: Iterable[object], option: str, what: str) -> None:
    for value in values:
        check_text(value, option, what)


def rate_per_second(value: object, option: str) -> float | None:
    if value is None:
        return None
    check_number(value, option, least=LEAST_RATE, most=MOST_RATE)
    return float(typing.cast("float", value))


def check_bool(value: object, option: str) -> None:
    """Raise `ConfigError` unless ``value`` is True or False: the text "false" would pass for true."""
    if not isinstance(value, bool):
        raise ConfigError(f"{option}: expected True or False, got {shown(value)}")


def check_text(value: object, option: str, what: str = "a text") -> None:
    """Raise `ConfigError` unless ``value`` is a text with something in it, and no NUL; ``what`` says what it is."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConfigError(f"{option}: expected {what}, got {shown(value)}")


def check_path(value: object, option: str) -> None:
    if value is not None:
        check_text(value, option, "a path or URL as text, or None")


def check_bytes(value: object, option: str, *, least: int = 1) -> None:
    """Raise `ConfigError` unless ``value`` is None, or so many bytes; they are a secret, and not shown."""
    if value is not None and not (isinstance(value, bytes) and len(value) >= least):
        got = f"{len(value)} bytes" if isinstance(value, bytes) else f"a {type(value).__name__}"
        raise ConfigError(f"{option}: expected at least {least} bytes, or None, got {got}")


def check_choice(value: object, option: str, choices: Collection[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(
            f"{option}: expected one of {', '.join(choices)}, got {shown(value)}{_nearest(value, choices)}"
        )


def member(value: object, option: str, kind: type[Choice]) -> Choice:
    """Return the member that ``value`` is, or the text of; `ConfigError` for another one."""
    check_choice(value, option, [str(one) for one in kind])
    return kind(typing.cast("str", value))


def check_function(
    value: object, option: str, *, takes: int | None = None, may_yield: bool = False, is_async: bool = False
) -> None:
    """Raise `ConfigError` unless ``value`` can be called, with so many arguments by position if ``takes`` says so.

    Of a function that does not tell its arguments, as many of C do not, it is believed. ``may_yield`` as in
    `check_runs`, which is left out with ``is_async``.
    """
    if not callable(value):
        raise ConfigError(f"{option}: expected a function, got {named_type(value)}")
    if not is_async:
        check_runs(value, option, may_yield=may_yield)
    if takes is None:
        return
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*range(takes))
    except TypeError as error:
        count = "1 argument" if takes == 1 else f"{takes} arguments"
        name = getattr(value, "__name__", type(value).__name__)
        raise ConfigError(
            f"{option}: expected a function of {count}, got {name}({', '.join(signature.parameters)}) ({error})"
        ) from None


def check_instance(value: object, option: str, kind: type) -> None:
    if isinstance(value, type) and issubclass(value, kind):
        raise ConfigError(f"{option}: expected an instance, got the class; write {value.__name__}(…)")
    if not isinstance(value, kind):
        raise ConfigError(f"{option}: expected a {kind.__name__}, got {shown(value)}")


def check_runs(function: object, option: str, *, may_yield: bool = False) -> None:
    """Raise `ConfigError` for an async function, and for a generator function unless it ``may_yield``.

    A call of one returns at once, and has run nothing of it: what it was to do would be taken for done. What is
    behind a decorator is not seen here, but by `check_ran`.
    """
    code = _innermost(function)
    name = getattr(code, "__name__", type(code).__name__)
    if is_async_function(function) or inspect.isasyncgenfunction(code):
        kind = "async generator function" if inspect.isasyncgenfunction(code) else "async function"
        raise ConfigError(
            f"{option}: expected a plain function, got the {kind} {name}, which is not awaited here: have a plain one "
            "call asyncio.run(…), or await it in a map_async before"
        )
    if inspect.isgeneratorfunction(code) and not may_yield:
        raise ConfigError(
            f"{option}: expected a function that returns, got the generator function {name}, of which a call runs "
            "nothing: take the yield out"
        )


def named_type(value: object) -> str:
    """Return what a value is, for a message: ``an int``, ``a str``."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def check_ran(returned: object, what: str) -> None:
    """Raise `TypeError` if ``what`` returned a coroutine or another awaitable, or a generator: it has not run."""
    if not isinstance(returned, _GENERATORS) and not hasattr(type(returned), "__await__"):
        return
    if isinstance(returned, types.CoroutineType):
        # Else Python warns of it, some time later.
        returned.close()
    raise TypeError(
        f"{what} returned a {type(returned).__name__}, so it has not run: it is to be a plain function, without yield; "
        "for an async one call asyncio.run(…) in it, or use map_async before"
    )


def check_methods(value: object, names: Iterable[str], what: str, *, may_yield: Collection[str] = ()) -> None:
    for name in names:
        method = getattr(value, name, None)
        check_runs(method, f"{what}: {type(value).__name__}.{name}", may_yield=name in may_yield)


def is_async_function(function: object) -> bool:
    """Whether a call of ``function`` returns a coroutine; partials, bound methods and objects are looked through."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(_innermost(function))


_GENERATORS = (types.GeneratorType, types.AsyncGeneratorType)


def _innermost(function: object) -> object:
    """Return the function behind partials, bound methods and objects with a ``__call__`` in Python."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif inspect.ismethod(function):
            function = function.__func__
        elif inspect.isfunction(function) or isinstance(function, type):
            return function
        else:
            # That of an object of C is one of C too, and has one, and so on.
            call = getattr(type(function), "__call__", None)  # noqa: B004 - what it is, not whether it is there
            if not isinstance(call, types.FunctionType | types.MethodType | functools.partial):
                return function
            function = call


_ELSEWHERE = {
    "max_failing": ": it is one of FTLayer.embedded and FTLayer.connect, of sources, and of operators whose functions "
    "may fail; in barrier mode it is one of FailurePolicy, and of operators that have one"
}
"""Options that are looked for where they are not, and where they are."""

_ATTEMPTS = ("max_attempts", "attempts")
_PAUSES = ("backoff", "delay", "initial_delay")
_PLACES = ("path", "directory", "checkpoint")
_RETRIES = ("max_retries", "retries", "num_retries", "retry_limit", "max_tries", "tries")
_SYNONYMS = {
    **dict.fromkeys(_RETRIES, _ATTEMPTS),
    **dict.fromkeys(("retry_delay", "retry_backoff", "retry_interval", "retry_wait"), _PAUSES),
    **dict.fromkeys(("dir", "folder", "location", "checkpoint_dir", "checkpoint_location"), _PLACES),
    **dict.fromkeys(("url", "uri", "endpoint", "host", "server"), ("address",)),
    **dict.fromkeys(("secret", "password", "api_key"), ("token",)),
    **dict.fromkeys(("dlq", "dead_letter_queue", "on_failure", "on_error"), ("on_dead",)),
    **dict.fromkeys(("retry_if", "retry_for", "retry_exceptions"), ("retry_on",)),
    **dict.fromkeys(("ttl", "expire_after", "expiry", "max_age"), ("time", "timeout")),
    **dict.fromkeys(("qps", "rps", "max_rate", "rate", "throttle"), ("rate_limit",)),
    **dict.fromkeys(("concurrency", "max_concurrency", "capacity", "workers"), ("in_flight", "parallelism")),
    "attempts": ("max_attempts",),
    "backoff": ("delay", "initial_delay"),
    "delay": ("backoff", "initial_delay"),
    "batch_size": ("batch_rows", "max_rows"),
    "checkpoint_interval": ("interval",),
    "checkpoint_timeout": ("timeout",),
    "max_concurrent_checkpoints": ("max_concurrent",),
    "min_pause_between_checkpoints": ("min_pause",),
    "name": ("uid",),
    "num_retained": ("retained",),
    "state_backend": ("backend",),
    "tolerable_failed_checkpoints": ("tolerable_failures",),
    "uid": ("name",),
}
"""Words that other systems have for an option, and its names here: the first that is one where it was given."""


def known_options(target: Target) -> Target:
    """Make a class's constructor, or a function, refuse arguments that it does not have by a `ConfigError`.

    Python's own error is a TypeError that does not know which option was meant.
    """
    if isinstance(target, type):
        made = target.__init__  # type: ignore[misc]
        target.__init__ = _checked(made, target.__name__, inspect.signature(made))  # type: ignore[misc]
        return typing.cast("Target", target)
    return typing.cast(
        "Target", _checked(target, target.__qualname__.removesuffix(".__init__"), inspect.signature(target))
    )


def _signature(method: types.FunctionType) -> inspect.Signature:
    """Return a method's signature, with each option of ``**options: Unpack[…]`` by name, None by default."""
    signature = inspect.signature(method)
    given: list[inspect.Parameter] = []
    for each in signature.parameters.values():
        unpacked = re.fullmatch(r"Unpack\[(\w+)\]", str(each.annotation))
        options = method.__globals__[unpacked[1]].__annotations__ if unpacked else {}
        # As it is written there, which is how the others' annotations are shown.
        written = {name: getattr(kind, "__forward_arg__", kind) for name, kind in options.items()}
        option = each.replace(kind=each.KEYWORD_ONLY, default=None) if options else each
        given += [option.replace(name=name, annotation=kind) for name, kind in written.items()] or [each]
    return signature.replace(parameters=given)


def check_known(given: Iterable[str], known: Collection[str], what: str) -> None:
    """Raise `ConfigError` for the first name of ``given`` that ``what`` does not have, with the nearest it has."""
    for name in given:
        if name not in known:
            where = _ELSEWHERE.get(name) or _meant(name, known) or _nearest(name, known)
            raise ConfigError(
                f"{what}: there is no option {name!r}" + (where or f"; there are {', '.join(known)}")
            )


def check_named(name: str, known: Collection[str], what: str) -> None:
    """Raise `ConfigError` unless ``name`` is one of ``known``, with the nearest of them; ``what`` ends in its kind."""
    if name not in known:
        there = _nearest(name, known) or f"; there are {', '.join(sorted(known)) or 'none'}"
        raise ConfigError(f"{what} {shown(name)}{there}")


def _checked(function: Callable[..., Any], what: str, signature: inspect.Signature) -> Callable[..., Any]:
    given = [each for name, each in signature.parameters.items() if name not in ("self", "cls")]
    names = [each.name for each in given]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            if not takes_any:
                check_known(kwargs, names, what)
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                way = function.__doc__ or ""
                said = f"use{way[3:]}" if way.startswith("Use `") else f"{error}; it is {what}{_plain(given)}"
                raise ConfigError(f"{what}: {said}") from None
            return function(*args, **kwargs)
        except Exception:
            if args:
                _tells_enough(args[0])
            raise

    if signature != inspect.signature(function):
        checked.__signature__ = signature  # type: ignore[attr-defined]
    return checked


def _plain(parameters: Iterable[inspect.Parameter]) -> str:
    """Return how parameters are given, without annotations; of enums and functions as defaults the name."""
    text = str(inspect.Signature([each.replace(annotation=each.empty) for each in parameters]))
    return re.sub(r"=<(?:\w+ )?([\w.]+)[^>]*>", r"=\1", text)


def _meant(name: str, known: Collection[str]) -> str:
    word = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    found = next((each for each in _SYNONYMS.get(word, ()) if each in known), "")
    return f": did you mean {found!r}?" if found else ""


def _nearest(name: object, known: Iterable[str]) -> str:
    # Late: most processes never need it.
    import difflib

    found = difflib.get_close_matches(str(name)[:_SHOWN_CHARS], list(known), n=1)
    return f": did you mean {found[0]!r}?" if found else ""


Line = tuple[str, int]


def users_line() -> Line:
    """Return file and line of the user's program that are running: the innermost that are not ftlayer's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "ftlayer":
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


class Unstarted:
    """Part of what a user builds: unless it is `settle`d, a `NeverStartedWarning` says where that was thrown away.

    Copies of what it is part of share it. In pickled ones, and in forked processes, it says nothing.
    """

    def __init__(self, what: str, line: Line | None = None) -> None:
        """``line``: where it was built; None: where it is now."""
        self._warning = weakref.finalize(self, _warn, what, line or users_line(), os.getpid())
        _forgive_behind_errors()
        _UNSTARTED.add(self)

    def settle(self) -> None:
        self._warning.detach()

    def __reduce__(self) -> tuple[Any, ...]:
        return _settled, ()


_UNSTARTED: weakref.WeakSet[Unstarted] = weakref.WeakSet()


def forgive_unstarted() -> None:
    """An error ends the program, or a block of it: what it had built and not started by then is no mistake."""
    for each in list(_UNSTARTED):
        each.settle()


@functools.cache
def _forgive_behind_errors() -> None:
    """Have it so where an error has ended the program. Behind the first `finalize`: what comes later goes first."""

    def at_exit() -> None:
        if getattr(sys, "last_value", None) is not None:
            forgive_unstarted()

    atexit.register(at_exit)


def _settled() -> Unstarted:
    unstarted = Unstarted("")
    unstarted.settle()
    return unstarted


def _warn(what: str, line: Line, pid: int) -> None:
    if os.getpid() == pid:
        warnings.warn_explicit(what, NeverStartedWarning, *line)


def _tells_enough(of: object) -> None:
    """A method of ``of`` raises an error: nothing else has to be said of it."""
    unstarted = getattr(of, "__dict__", {}).get("_unstarted")
    if isinstance(unstarted, Unstarted):
        unstarted.settle()


def not_here(of: object, name: str, words: Mapping[str, str]) -> AttributeError:
    """Return what ``__getattr__`` raises for an attribute that ``of``, an object or a class, does not have.

    ``words``: what to call instead, by names of other systems, in lower case and without ``_``, several in one text.
    """
    kind = of if isinstance(of, type) else type(of)
    if kind is not of and hasattr(kind, name):
        # A property that raised an AttributeError of its own, to be seen.
        object.__getattribute__(of, name)
    if not name.startswith("_"):
        plain = name.replace("_", "").lower()
        own = (each for each in dir(kind) if each[0] != "_" and each.replace("_", "").lower() == plain)
        same = next((f"it is called {each}" for each in own), None)
        said = next((text for names, text in words.items() if plain in names.split()), same)
        if said is not None:
            _tells_enough(of)
            return NotHereError(f"{kind.__name__} has no {name!r}: {said.replace('{name}', name)}")
    return AttributeError(f"{kind.__name__!r} object has no attribute {name!r}", name=name, obj=of)


class _Asked(type):
    """A class that is asked for what it has not says what its objects say: ``FTLayer.builder``."""

    _words: Mapping[str, str] = {}

    if not typing.TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            raise not_here(cls, name, cls._words)


class UserFacing(metaclass=_Asked):
    """What users hold: its methods take `known_options` alone, and what it has not says what to call (`not_here`)."""

    def __init_subclass__(cls, words: Mapping[str, str] | None = None) -> None:
        super().__init_subclass__()
        cls._words = cls._words if words is None else words
        for name in dir(cls):
            method = inspect.getattr_static(cls, name)
            is_public = not name.startswith("_") and inspect.isfunction(method)
            if is_public and not hasattr(method, "__signature__"):
                setattr(cls, name, _checked(method, f"{cls.__name__}.{name}", _signature(method)))

    if not typing.TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise not_here(self, name, self._words)


def _parts(value: object, option: str, *, zero: bool) -> tuple[int, int]:
    hint = ""
    if isinstance(value, timedelta):
        return value // timedelta(microseconds=1), 1_000
    if isinstance(value, int) and not isinstance(value, bool):
        return value * 1_000, 1
    if isinstance(value, float) and math.isfinite(value):
        above, below = value.as_integer_ratio()
        return above * 1_000, below
    if isinstance(value, str) and (match := _DURATION.fullmatch(value.strip())) is not None:
        minus, whole, part, unit = match[1], match[2], match[3] or "", match[4]
        # A short form is as it is written: M is not m. A word may be in capitals and of several.
        word = unit if len(unit) < 3 else unit.lower()
        word = word.removesuffix("s") if len(word) > 3 else word
        number = int(whole + part) * (-1 if minus else 1)
        if word in _UNITS_MS or (not unit and not number and zero):
            above, below = number * _UNITS_MS.get(word, 1), 10 ** len(part)
            if above % below:
                raise ConfigError(f"{option}: a duration is of whole milliseconds, got {shown(value)}")
            return above, below
        if not unit and number:
            hint = f": write its unit, '{value.strip()}s' for seconds"
        elif unit == "M":
            hint = ": M could be minutes or months, a minute is m"
        elif word in ("mon", "month", "mo", "y", "yr", "year"):
            hint = ": months and years differ in length, write days"
    # What is typed at a prompt, or for Spark, is a text.
    others = "" if isinstance(value, str) else ", a timedelta, or a number of seconds"
    forms = f"'250ms', '30s', '5 minutes', '1h' or '7d'{others}"
    raise ConfigError(f"{option}: expected a duration like {forms}, got {shown(value)}{hint}")


def _check_between(milliseconds: int, value: object, option: str, least: int, most: int) -> None:
    if milliseconds < least:
        one = f"{'0 or ' if least == 0 else ''}a duration of at least 1 ms"
        raise ConfigError(
            f"{option}: expected {one if least < 2 else f'at least {least} ms'}, got {shown(value)}"
        )
    if milliseconds > most:
        what = f"at most {most} ms, which is {_spelled(most)}"
        raise ConfigError(f"{option}: expected {what}, got {shown(value)}")


def in_words(milliseconds: int) -> str:
    unit, size = [each for each in _UNITS_MS.items() if not milliseconds % each[1]][-1]
    count = milliseconds // size
    return f"{count} {unit}{'' if count == 1 else 's'}"


def _spelled(milliseconds: int) -> str:
    sizes = {"years": 31_557_600_000, "days": 86_400_000, "hours": 3_600_000, "seconds": 1_000}
    for unit, size in sizes.items():
        if milliseconds >= 2 * size:
            return f"about {milliseconds // size} {unit}"
    return f"{milliseconds} ms"
