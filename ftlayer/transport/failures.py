"""Errors on their way from a server to its client, and what a broken transport raises."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyarrow import flight

from ftlayer.errors import FTLayerError, UnauthorizedError, error_for_code
from ftlayer.printable import shortened
from ftlayer.transport.frames import pack

TRANSPORT_ERRORS = (pa.ArrowException, OSError)
"""What Flight raises for a connection or a stream that is broken."""


def error_frame(error: FTLayerError, sequence: int | None = None) -> bytes:
    """Return an error as a frame; what it quotes of a request is bounded (`ftlayer.printable.shortened`)."""
    frame = {"error": error.code, "message": shortened(str(error))}
    return pack(frame if sequence is None else frame | {"sequence": sequence}, "error")


def error_in(frame: dict[str, Any]) -> FTLayerError | None:
    """Return the error that `error_frame` was given; None for a frame of something else."""
    if "error" not in frame:
        return None
    return error_for_code(str(frame["error"]))(str(frame.get("message")))


def flight_error(error: FTLayerError) -> flight.FlightError:
    """Return ``error`` as Flight carries it: a text that begins with its code, and its frame as ``extra_info``."""
    kind = (
        flight.FlightUnauthenticatedError
        if isinstance(error, UnauthorizedError)
        else flight.FlightServerError
    )
    return kind(f"{error.code}: {shortened(str(error))}", extra_info=error_frame(error))
