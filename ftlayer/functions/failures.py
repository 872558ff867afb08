"""Failures: which operator, which record, and why, in words of bounded length."""

from __future__ import annotations

import dis
import os
import signal
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from operator import index
from traceback import TracebackException
from types import CodeType, TracebackType
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ftlayer.common.failures import FailException, RowsRejected
from ftlayer.common.printable import encodable, text_of
from ftlayer.errors import ConfigError
from ftlayer.functions.retry_rules import NO_RULES, RetryRules
from ftlayer.records.failures import RowFailure

# Tracebacks as text. Frames are formatted once for each place that is raised at, and only what was raised each time.
#
# Formatting takes 56 µs and more, most of it for the frames: files are looked at, lines are parsed to mark what was at
# work in them. Records that fail mostly fail at a few places.


MOST_PLACES = 256
"""Places whose frames are kept as text. They are forgotten together when there are more."""

# Id of the code and instruction, of each frame. The code objects are kept, so that no other gets their ids.
_kept: dict[tuple[tuple[int, int], ...], tuple[list[CodeType], str]] = {}


def traceback_text(error: BaseException, frames: TracebackType | None) -> str:
    """Return what ``traceback.format_exception(type(error), error, frames)`` says, as one text.

    Not seen are changes of a source file, or of ``sys.tracebacklimit``, after an error at the same place was formatted.
    """
    if _is_chained(error):
        return "".join(TracebackException(type(error), error, frames, compact=True).format())
    places = _places_of(frames)
    key = tuple((id(code), at) for code, at in places)
    known = _kept.get(key)
    if known is not None:
        # Of no frame; they are given all the same, for names that are suggested in place of a wrong one.
        said = TracebackException(type(error), error, frames, limit=0, compact=True)
        return known[1] + "".join(said.format_exception_only())
    whole = TracebackException(type(error), error, frames, compact=True)
    text, last = "".join(whole.format()), "".join(whole.format_exception_only())
    if len(_kept) >= MOST_PLACES:
        _kept.clear()
    _kept[key] = [code for code, _ in places], text.removesuffix(last)
    return text


def _is_chained(error: BaseException) -> bool:
    context = error.__context__ is not None and not error.__suppress_context__
    return context or error.__cause__ is not None or issubclass(type(error), BaseExceptionGroup)


MAX_REASON = 512
MAX_TRACEBACK = 4_096

_OURS = os.path.dirname(__file__) + os.sep


def failure_of(
    row: int, operator: str, error: BaseException, rules: RetryRules = NO_RULES, *, traced: bool = True
) -> RowFailure:
    """Describe ``error``, raised by ``operator`` for input row ``row``, within bounds; ``rules`` decide on it.

    Whatever a function raises fails its record, what is no `Exception` too. An error that a signal's handler has raised
    is not the function's, and is raised: it ends the process.

    ``traced``: with its traceback, whose text takes more time than all else here; what is fatal has it anyhow.
    """
    raise_signalled(error)
    said = text_of(error)
    if issubclass(type(error), FailException):  # its `__class__` may be anything
        reason = said or type(error).__name__
    else:
        reason = f"{type(error).__name__}: {said}"
    decision = rules.decide(error)
    if decision.note:
        reason = f"{reason[: MAX_REASON // 2]} ({decision.note})"
    text = traceback_of(error) if traced or decision.fatal else ""
    return RowFailure(
        row, operator, reason[:MAX_REASON], text, decision.fatal, decision.after_ms, decision.uses_attempt
    )


def raise_signalled(error: BaseException) -> None:
    """Raise ``error``, which a user's function has raised, if it came from a signal's handler while that ran."""
    if issubclass(type(error), KeyboardInterrupt | SystemExit) and _signalled(error):
        raise error


def _signalled(error: BaseException) -> bool:
    if threading.current_thread() is not threading.main_thread():
        return False  # No handler runs there.
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {code for handler in handlers if (code := _code_of(handler)) is not None}
    each: BaseException | None = error
    seen: list[BaseException] = []
    while each is not None and not any(each is one for one in seen):
        seen.append(each)
        frames = _places_of(each.__traceback__)
        if any(code in codes for code, _ in frames):
            return True
        if type(each) is KeyboardInterrupt and signal.default_int_handler in handlers and frames:
            # Python's own handler has no frame: it raises between any two instructions.
            code, at = frames[-1]
            if dis.opname[code.co_code[at]] != "RAISE_VARARGS":
                return True
        # What the function made of it while it was handled is of the signal too.
        each = each.__context__ if each.__cause__ is None else each.__cause__
    return False


def _places_of(trace: TracebackType | None) -> list[tuple[CodeType, int]]:
    places = []
    while trace is not None:
        places.append((trace.tb_frame.f_code, trace.tb_lasti))
        trace = trace.tb_next
    return places


def _code_of(handler: Any) -> CodeType | None:
    """Return the code that runs when ``handler`` is called, if it is Python's."""
    while isinstance(handler, partial):
        handler = handler.func
    if not hasattr(handler, "__code__") and not hasattr(handler, "__func__") and callable(handler):
        handler = handler.__call__
    code = getattr(getattr(handler, "__func__", handler), "__code__", None)
    return code if isinstance(code, CodeType) else None


def rejections_of(
    rejected: RowsRejected, rows: int, operator: str, rules: RetryRules = NO_RULES
) -> list[RowFailure]:
    """Return the failures of the rows that a sink has named by their numbers among the ``rows`` that it was given.

    They are in the order of the rows. Raises `ConfigError` for none, and for a row that is not there: the sink would be
    called without end.
    """
    if not rejected.errors:
        raise ConfigError("RowsRejected without a row: name one at least, or return")
    errors = {_number(row): error for row, error in rejected.errors.items()}
    wrong = [number for number in errors if not 0 <= number < rows]
    if wrong:
        raise ConfigError(
            f"RowsRejected for row {wrong[0]}, of {rows} that this write was given: they are numbered from 0, in "
            "the order in which they come"
        )
    return [
        RowFailure(row, operator, encodable(error, MAX_REASON), "")
        if isinstance(error, str)
        else failure_of(row, operator, error, rules)
        for row, error in sorted(errors.items(), key=lambda pair: pair[0])
    ]


def _number(row: object) -> int:
    if isinstance(row, bool) or not isinstance(row, SupportsIndex):
        raise ConfigError(
            f"RowsRejected for row {row!r}: expected its number among the rows of this write, from 0"
        )
    return index(row)


def traceback_of(error: BaseException, most: int = MAX_TRACEBACK) -> str:
    frames = error.__traceback__
    if frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OURS):
        # The loop's in Python; called from C, the user's own code begins at once.
        frames = frames.tb_next
    try:
        text = traceback_text(error, frames)
    except BaseException as broken:  # noqa: BLE001 - a user's exception may fail to describe itself
        raise_signalled(broken)
        return f"(its traceback cannot be had: {type(broken).__name__})"
    return encodable(text, most)


def this_process(what: str) -> str:
    return f"{what} on {socket.gethostname()}, pid {os.getpid()}"


I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SideOutput:
    """Records of one side output, and the input row of each: int64[n]."""

    tag: str
    batch: pa.RecordBatch
    parents: I64


@dataclass(frozen=True, slots=True)
class SegmentOutcome:
    """The rows that came out, the input row of each (int64[n]), and what failed."""

    batch: pa.RecordBatch
    parents: I64
    failures: list[RowFailure]
    side: list[SideOutput] = field(default_factory=list)


def without_rows(batch: pa.RecordBatch, parents: I64, failed: I64) -> tuple[pa.RecordBatch, I64]:
    keep = ~np.isin(parents, failed)
    if keep.all():
        return batch, parents
    return batch.filter(pa.array(keep)), parents[keep]


def first_of_each(failures: Iterable[RowFailure]) -> list[RowFailure]:
    first: dict[int, RowFailure] = {}
    for failure in failures:
        first.setdefault(failure.row, failure)
    return [first[row] for row in sorted(first)]


def failed_rows(failures: Iterable[RowFailure]) -> I64:
    return np.array(sorted({failure.row for failure in failures}), dtype=np.int64)
