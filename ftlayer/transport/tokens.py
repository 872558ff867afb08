"""The token that every request carries, as the header ``authorization: Bearer <token>``."""

from __future__ import annotations

import hmac

from pyarrow import flight

from ftlayer.errors import UnauthorizedError
from ftlayer.transport.failures import flight_error


class TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Lets no request pass that lacks the token."""

    def __init__(self, token: str) -> None:
        self._wanted = _header(token)[1]

    def start_call(self, info: flight.CallInfo, headers: dict[str, list[str]]) -> None:
        """Refuse a request, in the same words for a missing and for a wrong token."""
        given = headers.get("authorization", [])
        if len(given) != 1 or not hmac.compare_digest(given[0].encode("utf-8", "replace"), self._wanted):
            raise flight_error(
                UnauthorizedError(
                    "the token is missing or wrong; send a header 'authorization: Bearer <token>'"
                )
            )


def call_options(token: str, timeout_s: float | None = None) -> flight.FlightCallOptions:
    """Return what goes with every request; ``timeout_s`` None is for streams."""
    return flight.FlightCallOptions(timeout=timeout_s, headers=[_header(token)])


def _header(token: str) -> tuple[bytes, bytes]:
    return b"authorization", f"Bearer {token}".encode()
