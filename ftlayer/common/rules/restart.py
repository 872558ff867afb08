"""Restart strategies: whether, and after what pause, what failed is started again. Pure: time is an argument."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from random import Random
from typing import Protocol

from ftlayer import errors
from ftlayer.common import failures
from ftlayer.common.checks import (
    Duration,
    check_int,
    check_methods,
    check_number,
    duration_ms,
    known_options,
    shown,
)
from ftlayer.errors import (
    ConfigError,
    FTLayerError,
    FunctionLoadError,
    InvalidTopologyError,
    SinkTargetError,
    TimerFailedError,
    UnsupportedError,
)

BACKOFF = ("1s", "2s", "4s", "8s", "16s", "32s", "1m")
"""The pauses of every option called ``backoff`` where none are given: for any number of attempts."""

BACKOFF_MS = tuple(duration_ms(pause, "backoff") for pause in BACKOFF)

_MASK = (1 << 64) - 1


class Retrying(Protocol):
    """How often, and after which pauses, a record is tried again, in every mode.

    Attributes:
        max_attempts: runs of a record, the first included; None: without end.
        backoff_ms: the pause before attempt 2, 3, …; the last one serves all later ones; none: there is no pause.
        jitter: the share of a pause, 0 to 1, that is drawn.
    """

    @property
    def max_attempts(self) -> int | None: ...

    @property
    def backoff_ms(self) -> tuple[int, ...]: ...

    @property
    def jitter(self) -> float: ...


class Ended(Protocol):
    """How an attempt ended, as `ftlayer.functions.retry_rules.Decision` says it."""

    @property
    def fatal(self) -> bool:
        """The record is dead at once."""

    @property
    def after_ms(self) -> int | None:
        """The pause that the failure asks for."""

    @property
    def uses_attempt(self) -> bool:
        """Whether the failure counts."""


@dataclass(frozen=True, slots=True)
class Retry:
    """The next attempt: its number, and the wall time (ms) before which it does not begin."""

    attempt: int
    not_before_ms: int


def next_attempt(retrying: Retrying, seed: int, attempt: int, ended: Ended, *, wall_ms: int) -> Retry | None:
    """Return what follows when ``attempt`` failed at ``wall_ms``; None when the record is dead.

    A pause that the failure itself asks for is kept as it is; others are `pause_ms`.
    """
    most = retrying.max_attempts
    if ended.fatal or (ended.uses_attempt and most is not None and attempt >= most):
        return None
    pause = pause_ms(retrying, attempt, seed) if ended.after_ms is None else ended.after_ms
    return Retry(attempt + ended.uses_attempt, wall_ms + pause)


def pause_ms(retrying: Retrying, attempt: int, seed: int) -> int:
    """Return the pause behind ``attempt`` (1 is the first), less its drawn share.

    It is the same whenever it is computed for one record, which ``seed`` stands for, and attempt.
    """
    pauses = retrying.backoff_ms
    pause = pauses[min(attempt, len(pauses)) - 1] if pauses else 0
    return round(pause * (1 - retrying.jitter * (_hash64(seed, attempt) / 2**64)))


def pauses_of(backoff: Duration | Sequence[Duration], option: str = "backoff") -> tuple[int, ...]:
    """Return a user's pauses in ms: a duration, or a list of one or more; `ConfigError` names the ``option``."""
    pauses = [backoff] if isinstance(backoff, Duration) else backoff
    if not isinstance(pauses, list | tuple) or not pauses:
        raise ConfigError(
            f"{option}: expected a duration like '5s', or a list of one or more, got {shown(backoff)}"
        )
    names = [option] if pauses[0] is backoff else [f"{option}[{place}]" for place in range(len(pauses))]
    return tuple(map(duration_ms, pauses, names))


def check_pauses(retrying: Retrying, where: str) -> None:
    """Raise `ConfigError` naming ``where`` for more pauses than there are attempts to come behind them.

    The default list is for any number of attempts.
    """
    most, pauses = retrying.max_attempts, retrying.backoff_ms
    if most is None or pauses == BACKOFF_MS:
        return
    if len(pauses) > max(most - 1, 1):
        raise ConfigError(
            f"{where}: backoff has {len(pauses)} pauses, and with max_attempts={most} only {most - 1} can follow the "
            "attempts: leave out the last pauses, or raise max_attempts"
        )


def _hash64(seed: int, attempt: int) -> int:
    """Mix two numbers to 64 bits with SplitMix64's finalizer (Steele, Lea, Flood, 2014)."""
    value = (seed + attempt * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


# Whether starting again can mend a failure is asked before the restart strategy is. It cannot where the same program
# meets the same data again. What an error does not say by itself, its cause may; and where it comes as text, from a
# Python worker through Spark's JVM, the traceback in it names the classes.

SPARK_CONDITIONS = (
    "COLUMN_ALREADY_EXISTS",
    "AMBIGUOUS_REFERENCE",
    "PARSE_SYNTAX_ERROR",
    "PYTHON_VERSION_MISMATCH",
)
"""Of Spark's error conditions, those that lie in the program alone. Tables and paths may come into being."""

_NO_DIRECTORY = (NotADirectoryError, IsADirectoryError, FileExistsError)
_PROGRAM = (AttributeError, NameError, TypeError, ImportError, *_NO_DIRECTORY, SinkTargetError)
_PROGRAM_TEXT = frozenset(kind.__name__ for kind in (*_PROGRAM, UnboundLocalError, ModuleNotFoundError))
_PROGRAM_CONDITION = re.compile(
    r"\bKeyError: '(Field \"[^\"]*\"|Column .*) does not exist in schema'$"
    r"|\[(TABLE_OR_VIEW_NOT_FOUND|SCHEMA_NOT_FOUND|DELTA_TABLE_NOT_FOUND|UNRESOLVED_COLUMN|"
    r"UNRESOLVED_FIELD|UNRESOLVED_ROUTINE|FIELD_NOT_FOUND|PATH_ALREADY_EXISTS)[.\w]*\] "
    r"|\borg\.apache\.hadoop\.fs\.ParentNotDirectoryException: "
    # What a worker of Spark's tells has no causes.
    r"|\bCheckpointStorageError: .*\[Errno (?:17|20|21)\] ",
    re.MULTILINE,
)
_NO_ROWS = (ConfigError, FunctionLoadError, InvalidTopologyError, UnsupportedError)
_OF_NO_ROW = re.compile(
    r"^(?:[\w.]+\.)?(?:NameError|ImportError|ModuleNotFoundError|SinkTargetError"
    r"|KeyError: '(?:Field|Column) .* does not exist in schema'"
    r"|AttributeError: (?:'pyarrow\.lib\.RecordBatch' object|module '.*?'|type object '.*?') has no attribute "
    r"|TypeError: .*\(\) (?:takes \d+ positional|missing \d+ required))",
    re.MULTILINE,
)
"""A row that fails alone may have led into it, but not to any other place."""

_OURS = {
    f"{module.__name__}.{name}": kind
    for module in (errors, failures)
    for name, kind in vars(module).items()
    if inspect.isclass(kind) and issubclass(kind, FTLayerError)
}
_LOADING = {"ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "UnpicklingError"}
_MOVED = re.compile(r"Can't get (local )?(attribute|object) ")
_CONDITION = re.compile(rf"\[({'|'.join(SPARK_CONDITIONS)})\] .*")
TRACEBACK = "Traceback (most recent call last):"
_HANDLING = "During handling of the above exception, another exception occurred:"
_RAISED = re.compile(r"([A-Za-z_][\w.<>]*)(?:: (.*))?")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error``, and what it came from: once each, for ``raise error from error`` goes in a circle."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__


def lasting(error: BaseException) -> FTLayerError | None:
    """Return what to end with if starting again cannot mend ``error``, None if it may.

    The first error that knows decides, from ``error`` itself over its causes; of Spark's errors, what their text says.
    What is returned has the ``operator`` of the outermost error that names one.
    """
    operator = ""
    for each in _causes(error):
        if isinstance(each, FTLayerError):
            operator = operator or each.operator
            if each.recoverable is not None:
                each.operator = operator
                return None if each.recoverable else each
        found = _lasting_of_others(each)
        if found is not None:
            found.__cause__ = error
            found.operator = operator
            return found
    return None


def is_programs(error: BaseException) -> bool:
    """Whether ``error`` tells of a mistake in the program, or in what it was told: a name, a type, a table, a path.

    Before anything has succeeded starting again only repeats it; behind a success it may have been the data's, or of
    the moment. The first error that knows decides, as in `lasting`; but a path that is none is so in any storage.
    """
    for each in _causes(error):
        if isinstance(each, FTLayerError):
            if each.is_programs:
                return True
            if each.recoverable is not None and not isinstance(each.__cause__, _NO_DIRECTORY):
                return not each.recoverable
        if isinstance(each, _PROGRAM):
            return True
        if type(each).__module__.partition(".")[0] in ("pyspark", "py4j"):
            return is_programs_text(str(each))
    return False


def is_programs_text(text: str) -> bool:
    """Whether the tracebacks in ``text``, or a condition of Spark's there, tell of a mistake in the program."""
    names = (name.rpartition(".")[2].removeprefix("PySpark") for name, _ in _raised(text))
    return not _PROGRAM_TEXT.isdisjoint(names) or _PROGRAM_CONDITION.search(text) is not None


def is_of_no_row(tracebacks: Sequence[str], *, dead: bool) -> bool:
    """Whether what all rows of a sink's first batch have failed with is a mistake in the program, and none of theirs.

    All fail at one place, and are several, or with what names no value. ``dead``: a rule says what becomes of them.
    """
    one = f"{TRACEBACK}\n{tracebacks[0]}"  # One that no function of the user's has raised has no such line.
    if isinstance(lasting_in_text(one), _NO_ROWS):
        return True
    places = {each.rpartition('  File "')[2].partition("\n")[0] for each in tracebacks}
    return (
        len(places) == 1
        and not dead
        and is_programs_text(one)
        and (len(tracebacks) > 1 or _OF_NO_ROW.search(one) is not None)
    )


def lasting_in_text(text: str) -> FTLayerError | None:
    """Return what to end with if Spark's text of an error, with the tracebacks in it, tells that it is lasting."""
    for name, said in _raised(text):
        ours = _OURS.get(name)
        if ours is None:
            found = _unloadable(name.rpartition(".")[2], said)
            if found is not None:
                return found
        elif ours.recoverable is not None:
            return None if ours.recoverable else ours(said)
    condition = _CONDITION.search(text)
    return None if condition is None else InvalidTopologyError(condition[0])


def _lasting_of_others(error: BaseException) -> FTLayerError | None:
    if isinstance(error, TimerFailedError):
        return lasting_in_text(f"{TRACEBACK}\n{error.traceback}")
    if isinstance(error, pickle.PicklingError):
        return InvalidTopologyError(
            f"{error}. A function holds something that cannot be pickled (a lock, a connection, the Spark session): "
            "make it inside the function, or keep it in an imported module"
        )
    if isinstance(error, ImportError | SyntaxError | pickle.UnpicklingError | AttributeError):
        return _unloadable(type(error).__name__, str(error))
    if type(error).__module__.partition(".")[0] in ("pyspark", "py4j"):
        return lasting_in_text(str(error))
    return None


def _unloadable(name: str, said: str) -> FTLayerError | None:
    """Return the error for what Python raises where code cannot be loaded; None for anything else."""
    if name not in _LOADING and not (name == "AttributeError" and _MOVED.match(said)):
        return None
    return FunctionLoadError(
        f"{name}: {said}. Starting again would meet it again. What Spark's Python workers import has to be "
        "where they run: install it for the interpreter that they run with (PYSPARK_PYTHON), or send a module of "
        "yours along with spark.addArtifact('module.py', pyfile=True) or spark-submit --py-files"
    )


def _raised(text: str) -> Iterator[tuple[str, str]]:
    """Yield class and message of what each traceback in ``text`` ends with, the outermost error first."""
    found: list[tuple[str, str]] = []
    inside = False
    for line in text.splitlines():
        if line.endswith(TRACEBACK):
            inside = True
        elif line.strip() == _HANDLING:
            # It was being handled: what came of that is another matter.
            found.clear()
        elif inside and line[:1] not in ("", " ", "\t"):
            inside = False
            raised = _RAISED.fullmatch(line)
            if raised is not None:
                found.append((raised[1], raised[2] or ""))
    yield from reversed(found)


class RestartStrategy(Protocol):
    """Decides after each failure.

    One with a method ``on_success()`` is told of what went well since: a committed batch, a completed checkpoint, rows
    that a source gave. Time alone counts no failure down: what fails slowly would be tried without end.
    """

    def on_failure(self, now_ms: int) -> Duration | None:
        """Return the pause before the next start, or None to give up."""


def pause_after(strategy: RestartStrategy, now_ms: int) -> int | None:
    """Tell ``strategy`` of a failure, and return its pause in ms; `ConfigError` for one that is none."""
    pause = strategy.on_failure(now_ms)
    return None if pause is None else duration_ms(pause, f"{type(strategy).__name__}.on_failure", least=0)


def restart_of(strategy: RestartStrategy, pause_ms: int) -> str:
    """Return when the restart is that ``strategy`` has granted last, and which of how many, as far as it counts."""
    return f"in {pause_ms / 1_000:g} s{counted(strategy)}"


def counted(strategy: RestartStrategy) -> str:
    """Return which restart of how many ``strategy`` has granted last, behind a comma; "" where it does not count."""
    match strategy:
        case FixedDelay(attempts=most, _used=used):
            return f", {used} of {most}"
        case ExponentialDelay(attempts=int(most), _in_a_row=used):
            return f", {used} of {most} in a row"
        case FailureRate(max_failures=most, interval=interval, _times=times):
            return f", {len(times)} of {most} within {interval}"
    return ""


def restarts_text(count: int) -> str:
    return "1 restart" if count == 1 else f"{count:,} restarts"


def gave_up(restarts: int, failure: str) -> str:
    return f"the restart strategy has given up after {restarts_text(restarts)}: {failure}"


def note_success(strategy: RestartStrategy) -> None:
    on_success = getattr(strategy, "on_success", None)
    if on_success is not None:
        on_success()


def check_strategy(value: object, option: str) -> None:
    if isinstance(value, type):
        raise ConfigError(f"{option}: expected a restart strategy, got the class; write {value.__name__}(…)")
    if value is not None and not callable(getattr(value, "on_failure", None)):
        raise ConfigError(
            f"{option}: expected a restart strategy (NoRestart(), FixedDelay(…), ExponentialDelay(…), FailureRate(…), "
            f"or an object with on_failure(now_ms)), got {shown(value)}"
        )
    check_methods(value, ("on_failure",), option)


@known_options
@dataclass
class NoRestart:
    """Give up at the first failure."""

    def on_failure(self, now_ms: int) -> timedelta | None:
        """Give up."""
        return None


@known_options
@dataclass
class FixedDelay:
    """Start again after ``delay``, up to ``attempts`` times in all."""

    attempts: int = 3
    delay: Duration = "1s"
    _used: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_int(self.attempts, "attempts", least=1)
        self._delay_ms = duration_ms(self.delay, "delay")

    def on_failure(self, now_ms: int) -> timedelta | None:
        """Pause, or give up once the attempts are used."""
        self._used += 1
        return timedelta(milliseconds=self._delay_ms) if self._used <= self.attempts else None


@known_options
@dataclass
class ExponentialDelay:
    """Start again after a pause that doubles, up to ``max_delay``; back to the first after a success and a quiet time.

    ``attempts`` bounds the failures in a row: of two with a success and ``reset_after`` between them the second begins
    anew; None is no bound.
    ``jitter`` (0 to 1): a pause is up to this part of it longer or shorter, at random, so that jobs which failed
    together do not come back together.
    """

    initial_delay: Duration = "1s"
    max_delay: Duration = "1m"
    reset_after: Duration = "2m"
    attempts: int | None = 10
    jitter: float = 0.0
    _random: Random = field(default_factory=Random, init=False, repr=False, compare=False)
    _in_a_row: int = field(default=0, init=False, repr=False)
    _last_ms: int | None = field(default=None, init=False, repr=False)
    _succeeded: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._initial_ms = duration_ms(self.initial_delay, "initial_delay")
        self._max_ms = duration_ms(self.max_delay, "max_delay")
        self._reset_ms = duration_ms(self.reset_after, "reset_after")
        if self._max_ms < self._initial_ms:
            raise ConfigError(f"max_delay ({self.max_delay}) is below initial_delay ({self.initial_delay})")
        if self.attempts is not None:
            check_int(self.attempts, "attempts", least=1)
        check_number(self.jitter, "jitter", least=0, most=1)

    def on_failure(self, now_ms: int) -> timedelta | None:
        """Pause longer than the last time, or give up."""
        if self._succeeded and self._last_ms is not None and now_ms - self._last_ms >= self._reset_ms:
            self._in_a_row = 0
        self._last_ms, self._succeeded = now_ms, False
        self._in_a_row += 1
        if self.attempts is not None and self._in_a_row > self.attempts:
            return None
        # The exponent is bounded: 2**60 ms is past any max_delay.
        pause = min(self._max_ms, self._initial_ms << min(self._in_a_row - 1, 60))
        jittered = round(pause * (1 + self._random.uniform(-self.jitter, self.jitter)))
        return timedelta(milliseconds=jittered)

    def on_success(self) -> None:
        """Something went well since the last failure."""
        self._succeeded = True


@known_options
@dataclass
class FailureRate:
    """Start again after ``delay`` unless more than ``max_failures`` came within ``interval``, or without a success."""

    max_failures: int = 3
    interval: Duration = "5m"
    delay: Duration = "1s"
    _times: list[int] = field(default_factory=list, init=False, repr=False)
    _succeeded: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_int(self.max_failures, "max_failures", least=1)
        self._interval_ms = duration_ms(self.interval, "interval")
        self._delay_ms = duration_ms(self.delay, "delay")

    def on_failure(self, now_ms: int) -> timedelta | None:
        """Pause, or give up when failures come too fast."""
        if self._succeeded:
            self._times = [time for time in self._times if now_ms - time < self._interval_ms]
        self._succeeded = False
        self._times.append(now_ms)
        return timedelta(milliseconds=self._delay_ms) if len(self._times) <= self.max_failures else None

    def on_success(self) -> None:
        """Something went well since the last failure."""
        self._succeeded = True


def default_restart() -> RestartStrategy:
    """Return the strategy of topologies that were given none: back in half a second; what stays broken gives up."""
    return ExponentialDelay(initial_delay="50ms", max_delay="30s", reset_after="1m", attempts=10)
