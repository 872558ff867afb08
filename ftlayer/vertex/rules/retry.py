"""Why an attempt ended, and what is kept of it. `ftlayer.common.rules.restart` says when the record is tried again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ftlayer.errors import MalformedRequestError
from ftlayer.records.failures import Failure, split_traceback
from ftlayer.vertex.calls import StreamOptions
from ftlayer.vertex.store.rows import SHARED_FROM, History, StoredAttempt

MAX_REASON = 1_024  # characters
MAX_OPERATOR = 256  # characters
MAX_PLACE = 256  # characters
MAX_TRACEBACK = 4_096  # characters: some 50 frames, of which the first and the last tell most
MAX_HISTORY = 16  # failed attempts; the first and the newest are kept
MAX_TRACEBACKS = 4  # of them have their traceback; the first and the newest again

NOT_KEPT = f"[not kept: the first attempt and the last {MAX_TRACEBACKS - 1} have their tracebacks]"


def held(cause: Failure) -> Failure:
    """Return the cause as it counts while a circuit breaker holds records: it is the breaker that makes the pause."""
    return replace(cause, uses_attempt=False, after_ms=cause.after_ms or 0)


def shortened(history: History) -> History:
    """Return what stays of ``history`` when another attempt fails.

    With that one they are `MAX_HISTORY` attempts, the first and the last, and `MAX_TRACEBACKS` have their tracebacks.
    """
    if len(history) >= MAX_HISTORY:
        history = history[:1] + history[len(history) - MAX_HISTORY + 2 :]
    if len(history) >= MAX_TRACEBACKS:
        at = len(history) - MAX_TRACEBACKS + 1
        history = (*history[:at], _without_traceback(history[at]), *history[at + 1 :])
    return history


def stored_attempt(number: int, wall_ms: int, cause: Failure, hold: Callable[[str], bytes]) -> StoredAttempt:
    """Return a failed attempt, its texts cut to their bounds; ``hold`` keeps one that others may share."""
    reason = cut(cause.reason, MAX_REASON)
    frames, last_line = split_traceback(cut(cause.traceback, MAX_TRACEBACK))
    digest = b""
    said: str | None = last_line
    if len(frames) < SHARED_FROM:
        said = frames + last_line
    else:
        digest = hold(frames)
        if last_line == f"{reason}\n":
            said = None
    operator, place = cut(cause.operator, MAX_OPERATOR), cut(cause.place, MAX_PLACE)
    return StoredAttempt(number, wall_ms, reason, operator, place, digest, said)


def _without_traceback(attempt: StoredAttempt) -> StoredAttempt:
    has_one = bool(attempt.frames or attempt.last_line is None or attempt.last_line)
    return attempt._replace(frames=b"", last_line=NOT_KEPT if has_one else "")


def cut(text: str, limit: int) -> str:
    """Return ``text`` with at most ``limit`` characters; what is left out of its middle is counted there."""
    if len(text) <= limit:
        return text
    note = f"\n[… about {len(text) - limit} characters left out …]\n"
    kept = limit - len(note)
    head = kept // 2
    return text[:head] + note + text[len(text) - (kept - head) :]


def check_timeout(options: StreamOptions, buckets: int) -> None:
    """Raise `MalformedRequestError` for a timeout that cannot be cut into the vertex's buckets."""
    if options.timeout_ms < buckets - 1:
        raise MalformedRequestError(
            f"options.timeout_ms: expected at least {buckets - 1} ms of a vertex with timeout_buckets={buckets}, got "
            f"{options.timeout_ms}"
        )
