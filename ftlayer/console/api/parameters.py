"""Parameters of the API's queries: those that a path does not have are refused, since one misspelled would list all."""

from __future__ import annotations

from fastapi import Request
from fastapi.routing import APIRoute

from ftlayer.checks import check_known


def only_known(request: Request) -> None:
    """Raise `ConfigError` for a parameter of the query that the path does not have; a dependency of routers."""
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    known = [field.alias for field in route.dependant.query_params]
    check_known(request.query_params, known, f"{request.method} {route.path}")
