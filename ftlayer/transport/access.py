"""Authentication of the coordinator's Flight server and the slots'."""

from __future__ import annotations

import hmac

from pyarrow import flight

from ftlayer.errors import FTLayerError, UnauthorizedError
from ftlayer.printable import shortened


class JobTokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Lets no request pass that lacks the job's token (``authorization: Bearer <token>``)."""

    def __init__(self, token: str) -> None:
        self._wanted = f"Bearer {token}".encode()

    def start_call(self, info: flight.CallInfo, headers: dict[str, list[str]]) -> None:
        """Refuse a request, in the same words for a missing and for a wrong token."""
        given = headers.get("authorization", [])
        if len(given) != 1 or not hmac.compare_digest(given[0].encode("utf-8", "replace"), self._wanted):
            raise refusal(UnauthorizedError("the job's token is missing or wrong"))


def refusal(error: FTLayerError) -> flight.FlightError:
    """Return the Flight error that tells a caller of ``error``."""
    kind = (
        flight.FlightUnauthenticatedError
        if isinstance(error, UnauthorizedError)
        else flight.FlightServerError
    )
    return kind(f"{error.code}: {shortened(str(error))}")
