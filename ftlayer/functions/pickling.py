"""Whether a user's function can be sent to where it runs."""

from __future__ import annotations

import pickle
import pickletools
import re
from collections.abc import Iterable
from typing import Any

_MISSING = re.compile(
    r"No module named '([^']+)'|cannot import name '([^']+)'|Can't get (?:local )?(?:attribute|object) '?([^'\s]+)'?"
)

WAY_OUT = (
    "Its function holds something that cannot be pickled (a lock, a connection, the Spark session): make it inside the "
    "function"
)


def pickling_fault(value: Any) -> str | None:
    """Return in a line why ``value`` cannot be pickled as Spark pickles functions; None if it can."""
    from pyspark import cloudpickle

    try:
        cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001 - a user's object may raise anything when it is pickled
        return said(error)
    return None


def refers_to(value: Any, missing: str) -> bool:
    """Whether ``value``, pickled, refers to a module or a name; False where it cannot be pickled."""
    from pyspark import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    except Exception:  # noqa: BLE001 - a user's object may raise anything when it is pickled
        return False
    names = (argument for _, argument, _ in pickletools.genops(pickled) if isinstance(argument, str))
    return any(name == missing or name.startswith(f"{missing}.") for name in names)


def needing(missing: str, parts: Iterable[tuple[str, Any]]) -> str:
    """Return the names of those parts that refer to a module or name, in a line; "" for none."""
    return ", ".join(name for name, value in parts if refers_to(value, missing)) if missing else ""


def missing_in(text: str) -> str:
    """Return the module or name that could not be loaded, as Python's errors in ``text`` say; "" for none."""
    found = _MISSING.findall(text)
    # The last one ended what was tried.
    return next(filter(None, found[-1])) if found else ""


def said(error: Exception) -> str:
    kind = "" if isinstance(error, pickle.PicklingError) else f"{type(error).__name__}: "
    return f"{kind}{error}".partition("\n")[0]
