"""Checks of what a user gives as an option. Each error names the option, what it may be, and what was given."""

from __future__ import annotations

import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable
from enum import StrEnum
from typing import Any, TypeVar

from ftlayer.errors import ConfigError

Duration = str | int
"""``"30s"``, or milliseconds."""

LONGEST_MS = 1 << 41
"""The longest duration, about 70 years: a thread can wait for it."""

MOST = (1 << 31) - 1
"""The highest count: of attempts, rows, failures."""

MOST_BYTES = 1 << 50
"""The highest number of bytes, a pebibyte."""

LEAST_RATE = 0.001
MOST_RATE = 1e9

_SHOWN_CHARS = 100
_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(-?)\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(ms|s|min|m|h|d)?")

Target = TypeVar("Target", bound=Callable[..., Any])
Choice = TypeVar("Choice", bound=StrEnum)


def shown(value: object) -> str:
    """Return ``value`` as an error repeats it, cut to a line's length."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}… ({len(text)} characters)"


# ---------------------------------------------------------------- values


def duration_ms(value: Duration, option: str, *, least: int = 1, most: int = LONGEST_MS) -> int:
    """Return milliseconds for ``"250ms"``, ``"30s"``, ``"5m"``, ``"1h"``, ``"7d"``, or a number of milliseconds.

    With ``least`` 0 a zero will do, with or without a unit; below that, all of these with a minus in front.
    Raises `ConfigError` naming ``option``.
    """
    milliseconds = _milliseconds(value, option, zero=least < 1)
    if milliseconds < least:
        if least > 1:
            expected = f"at least {least} ms"
        else:
            expected = f"{'0 or ' if least == 0 else ''}a duration of at least 1 ms"
        raise ConfigError(f"{option}: expected {expected}, got {shown(value)}")
    if milliseconds > most:
        raise ConfigError(
            f"{option}: expected at most {most} ms, which is {_spelled(most)}, got {shown(value)}"
        )
    return milliseconds


def check_int(value: object, option: str, *, least: int, most: int = MOST) -> None:
    """Raise `ConfigError` unless ``value`` is an integer (no bool) in this range."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"{option}: expected an integer from {least} to {most}, got {shown(value)}")


def check_number(value: object, option: str, *, least: float, most: float = math.inf) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= value <= most or math.isinf(value):  # type: ignore[operator, arg-type]
        upper = "" if math.isinf(most) else f" to {most:g}"
        raise ConfigError(
            f"{option}: expected a number from {least:g}{upper or ' upwards'}, got {shown(value)}"
        )


def check_seconds(value: object, option: str) -> None:
    """Raise `ConfigError` unless ``value`` is how many seconds something may take, from 0, or None."""
    if value is not None:
        check_number(value, option, least=0, most=LONGEST_MS / 1_000)


def check_texts(values: Iterable[object], option: str, what: str) -> None:
    """Raise `ConfigError` unless all ``values`` are texts with something in them; ``what`` says what one is."""
    for value in values:
        check_text(value, option, what)


def rate_per_second(value: object, option: str) -> float | None:
    """Return records a second, None for no limit; `ConfigError` unless it is None or a number in this range."""
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
    """Raise `ConfigError` unless ``value`` is a path or URL as text, or None."""
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
        raise ConfigError(f"{option}: expected a function, got a {type(value).__name__}")
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


# ---------------------------------------------------------------- functions whose call runs nothing of them


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
    """Check these methods of a user's object, as far as it has them, by `check_runs`."""
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
            if not (
                inspect.isfunction(call) or inspect.ismethod(call) or isinstance(call, functools.partial)
            ):
                return function
            function = call


# ---------------------------------------------------------------- names of options


_ELSEWHERE = {
    "max_failing": ": it is one of FTLayer.embedded and FTLayer.connect, of sources, and of operators whose functions "
    "may fail; in barrier mode it is one of FailurePolicy, and of operators that have one"
}
"""Options that are looked for where they are not, and where they are."""

_ATTEMPTS = ("max_attempts", "attempts")
_PAUSES = ("backoff", "delay", "initial_delay")
_PLACES = ("path", "directory", "checkpoint")
_SYNONYMS = {
    **dict.fromkeys(
        ("max_retries", "retries", "num_retries", "retry_limit", "max_tries", "tries"), _ATTEMPTS
    ),
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
    return typing.cast("Target", _checked(target, target.__qualname__, inspect.signature(target)))


def takes_options(options: type) -> Callable[[Target], Target]:
    """Make a method with ``**options`` of a TypedDict refuse others, as `known_options` does; none is required.

    Its signature shows each option by name, None by default.
    """

    def decorate(function: Target) -> Target:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        named = [
            # As it is written there, which is how the others' annotations are shown.
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=getattr(kind, "__forward_arg__", kind),
            )
            for name, kind in options.__annotations__.items()
        ]
        checked = _checked(function, function.__qualname__, signature.replace(parameters=[*own, *named]))
        return typing.cast("Target", checked)

    return decorate


def check_known(given: Iterable[str], known: Collection[str], what: str) -> None:
    """Raise `ConfigError` for the first name of ``given`` that ``what`` does not have, with the nearest it has."""
    for name in given:
        if name not in known:
            where = (
                _ELSEWHERE.get(name)
                or _meant(name, known)
                or _nearest(name, known)
                or f"; there are {', '.join(known)}"
            )
            raise ConfigError(f"{what}: there is no option {name!r}{where}")


def check_named(name: str, known: Collection[str], what: str) -> None:
    """Raise `ConfigError` unless ``name`` is one of ``known``, with the nearest of them; ``what`` ends in its kind."""
    if name not in known:
        there = _nearest(name, known) or f"; there are {', '.join(sorted(known)) or 'none'}"
        raise ConfigError(f"{what} {shown(name)}{there}")


def _checked(function: Callable[..., Any], what: str, signature: inspect.Signature) -> Callable[..., Any]:
    names = [name for name in signature.parameters if name not in ("self", "cls")]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not takes_any:
            check_known(kwargs, names, what)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"{what}: {error}; it is {what}({', '.join(names)})") from None
        return function(*args, **kwargs)

    checked.__signature__ = signature  # type: ignore[attr-defined]
    return checked


def _meant(name: str, known: Collection[str]) -> str:
    word = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    found = next((each for each in _SYNONYMS.get(word, ()) if each in known), "")
    return f": did you mean {found!r}?" if found else ""


def _nearest(name: object, known: Iterable[str]) -> str:
    # Late: most processes never need it.
    import difflib

    found = difflib.get_close_matches(str(name)[:_SHOWN_CHARS], list(known), n=1)
    return f": did you mean {found[0]!r}?" if found else ""


# ---------------------------------------------------------------- durations


def _milliseconds(value: object, option: str, *, zero: bool) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise ConfigError(f"{option}: expected a duration like '30s' or milliseconds, got {shown(value)}")
    match = _DURATION.fullmatch(value.strip())
    nothing = match is not None and not match[2].strip("0.")
    if match is None or (match[3] is None and not (nothing and zero)):
        raise ConfigError(
            f"{option}: expected a duration like '250ms', '30s', '5m', '1h' or '7d', got {shown(value)}"
        )
    if nothing:
        return 0
    milliseconds = round(float(match[2]) * _UNITS_MS[match[3]])
    if not milliseconds:
        raise ConfigError(f"{option}: a duration is at least 1 ms, got {shown(value)}")
    return -milliseconds if match[1] else milliseconds


def _spelled(milliseconds: int) -> str:
    for unit, size in (("years", 31_557_600_000), ("hours", 3_600_000), ("seconds", 1_000)):
        if milliseconds >= 2 * size:
            return f"about {milliseconds // size} {unit}"
    return f"{milliseconds} ms"
