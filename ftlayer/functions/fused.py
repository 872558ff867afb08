"""Per-record functions fused into one loop, written out as nested Python and compiled when a task starts.

For ``map(f0).flat_map(f1).filter(f2).map(f3)`` the loop is::

    for place, r0 in enumerate(records):
        before = len(out)
        at = 0
        try:
            r1 = f0(r0)
            at = 1
            for r2 in results(f1(r1)):
                at = 2
                if f2(r2):
                    at = 3
                    out.append(f3(r2))
                at = 1

so a record passes through all functions while it is in the processor's cache, nothing is built in
between, and ``at`` tells which function raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ftlayer.functions.steps import Filter, FlatMap, Record, RecordStep

Fused = Callable[[Sequence[Any], list[Record], list[int], Callable[[int, int, Exception], None]], None]
"""``loop(records, out, counts, fail)``: appends the results to ``out`` and how many each record has to
``counts``; a record whose functions raise has none, and ``fail(place, step, error)`` is called for it. An
`Exception` in the place of a record fails it as if the first function had raised it."""


def fuse(steps: Sequence[RecordStep]) -> Fused:
    """Return the loop over ``steps``. `MemoryError`, and what is no `Exception`, goes through it."""
    lines = [
        "def loop(records, out, counts, fail):",
        "    for place, r0 in enumerate(records):",
        "        before = len(out)",
        "        at = 0",
        "        try:",
        "            if isinstance(r0, Exception):",
        "                raise r0",
        *_body(steps),
        "        except MemoryError:",
        "            raise",
        "        except Exception as error:",
        "            del out[before:]",
        "            fail(place, at, error)",
        "        counts.append(len(out) - before)",
    ]
    names: dict[str, Any] = {f"f{number}": step.function for number, step in enumerate(steps)}
    names["results"] = _results
    exec(compile("\n".join(lines), __file__, "exec"), names)
    loop: Fused = names["loop"]
    return loop


def _body(steps: Sequence[RecordStep]) -> list[str]:
    lines: list[str] = []
    after: list[str] = []
    indent = " " * 12
    record = "r0"
    for number, step in enumerate(steps):
        if number:
            lines.append(f"{indent}at = {number}")
        if isinstance(step, Filter):
            lines.append(f"{indent}if f{number}({record}):")
            indent += "    "
        elif isinstance(step, FlatMap):
            lines.append(f"{indent}for r{number + 1} in results(f{number}({record})):")
            indent += "    "
            # What is still to come of an iterator is this step's to answer for.
            after.append(f"{indent}at = {number}")
            record = f"r{number + 1}"
        else:
            lines.append(f"{indent}r{number + 1} = f{number}({record})")
            record = f"r{number + 1}"
    return [*lines, f"{indent}out.append({record})", *reversed(after)]


def _results(returned: Iterable[Record]) -> Iterable[Record]:
    """Return what a flat_map returned; of an iterator, copies: it may yield one dict again and again, changed."""
    return returned if isinstance(returned, list | tuple) else _copied(returned)


def _copied(returned: Iterable[Record]) -> Iterator[Record]:
    for result in returned:
        yield result.copy() if type(result) is dict else result
