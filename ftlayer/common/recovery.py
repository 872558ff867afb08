"""Whether starting again can mend a failure: both supervisors ask before their restart strategy is asked.

The answer is False where the same program meets the same data again: a restart would find what it found before, only
later. What an error does not say by itself, its cause may; and where it comes as text, from a Python worker through
Spark's JVM, the traceback in it names the classes.
"""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Iterator, Sequence

from ftlayer import errors
from ftlayer.common import failures
from ftlayer.errors import (
    ConfigError,
    FTLayerError,
    FunctionLoadError,
    InvalidTopologyError,
    SinkTargetError,
    TimerFailedError,
    UnsupportedError,
)

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
        if isinstance(each, FTLayerError) and each.is_programs:
            return True
        if (
            isinstance(each, FTLayerError)
            and each.recoverable is not None
            and not isinstance(each.__cause__, _NO_DIRECTORY)
        ):
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
