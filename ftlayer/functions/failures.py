"""What failed, for which record, and why, in words of bounded length."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from ftlayer.errors import FailException
from ftlayer.functions.conversion import text_of

MAX_REASON = 512
MAX_TRACEBACK = 4_096


@dataclass(frozen=True, slots=True)
class RowFailure:
    """Input row ``row`` failed in ``operator``."""

    row: int
    operator: str
    reason: str
    traceback: str
    fatal: bool = False


def failure_of(row: int, operator: str, error: BaseException) -> RowFailure:
    """Describe ``error``, raised by ``operator`` for input row ``row``, within bounds."""
    said = text_of(error)
    if isinstance(error, FailException):
        reason = said or "FailException"
    else:
        reason = f"{type(error).__name__}: {said}"
    # The first frame is ours; the user's own code starts below it.
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    text = "".join(traceback.format_exception(type(error), error, frames))
    if len(text) > MAX_TRACEBACK:
        half = MAX_TRACEBACK // 2
        text = f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
    return RowFailure(row, operator, _encodable(reason[:MAX_REASON]), _encodable(text))


def _encodable(text: str) -> str:
    """Replace lone surrogates (from undecodable file names, say), which UTF-8 cannot carry."""
    return text.encode("utf-8", "backslashreplace").decode()
