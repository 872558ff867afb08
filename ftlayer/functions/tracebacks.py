"""Tracebacks as text. Frames are formatted once for each place that is raised at, and only what was raised each time.

Formatting takes 56 µs and more, most of it for the frames: files are looked at, lines are parsed to mark what was at
work in them. Records that fail mostly fail at a few places.
"""

from __future__ import annotations

from traceback import TracebackException
from types import CodeType, TracebackType

MOST_PLACES = 256
"""Places whose frames are kept as text. They are forgotten together when there are more."""

# Id of the code and instruction, of each frame. The code objects are kept, so that no other gets their ids.
_kept: dict[tuple[int, ...], tuple[list[CodeType], str]] = {}


def traceback_text(error: BaseException, frames: TracebackType | None) -> str:
    """Return what ``traceback.format_exception(type(error), error, frames)`` says, as one text.

    Not seen are changes of a source file, or of ``sys.tracebacklimit``, after an error at the same place was formatted.
    """
    if _is_chained(error):
        return "".join(TracebackException(type(error), error, frames, compact=True).format())
    place: list[int] = []
    codes: list[CodeType] = []
    frame = frames
    while frame is not None:
        codes.append(frame.tb_frame.f_code)
        place += (id(codes[-1]), frame.tb_lasti)
        frame = frame.tb_next
    key = tuple(place)
    known = _kept.get(key)
    if known is not None:
        # Of no frame; they are given all the same, for names that are suggested in place of a wrong one.
        said = TracebackException(type(error), error, frames, limit=0, compact=True)
        return known[1] + "".join(said.format_exception_only())
    whole = TracebackException(type(error), error, frames, compact=True)
    text, last = "".join(whole.format()), "".join(whole.format_exception_only())
    if len(_kept) >= MOST_PLACES:
        _kept.clear()
    _kept[key] = codes, text.removesuffix(last)
    return text


def _is_chained(error: BaseException) -> bool:
    """Whether the text has other errors in it."""
    context = error.__context__ is not None and not error.__suppress_context__
    return context or error.__cause__ is not None or isinstance(error, BaseExceptionGroup)
