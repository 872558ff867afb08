"""What the threads of a slot's process do at this moment."""

from __future__ import annotations

import sys
import threading
import traceback

MAX_CHARS = 60_000


def stacks(first: int) -> str:
    """Return the stack of each thread of this process, that of the thread with the id ``first`` in front.

    As Python's tracebacks are written: the line that runs now comes last.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = dict(sys._current_frames())
    own = threading.get_ident()
    order = sorted(frames, key=lambda ident: (ident != first, names.get(ident, ""), ident))
    parts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frames[ident]))}"
        for ident in order
        if ident != own
    ]
    return "\n".join(parts)[:MAX_CHARS]
