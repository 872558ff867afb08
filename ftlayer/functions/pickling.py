"""Whether a user's function can be sent to where it runs."""

from __future__ import annotations

import pickle
from typing import Any

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


def said(error: Exception) -> str:
    """Return an error of pickling in a line."""
    kind = "" if isinstance(error, pickle.PicklingError) else f"{type(error).__name__}: "
    return f"{kind}{error}".partition("\n")[0]
