"""What requests bring: forms from one of our pages, parameters that are known, and callers who may."""

from __future__ import annotations

import hmac
from typing import Annotated

from fastapi import Depends, Request
from fastapi.routing import APIRoute
from starlette.datastructures import FormData, UploadFile

from ftlayer.checks import check_known
from ftlayer.console.login import Caller
from ftlayer.console.rendering import caller_of

CSRF_HEADER = "x-csrf-token"


class RefusedError(Exception):
    """A request that its maker may not make."""


class SubmittedForm:
    """The fields of a form, as text."""

    def __init__(self, data: FormData) -> None:
        self._data = data

    def text(self, name: str) -> str:
        """Return a field, "" where it is missing."""
        value = self._data.get(name, "")
        return "" if isinstance(value, UploadFile) else value

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(value for value in self._data.getlist(name) if isinstance(value, str))


async def _form(request: Request) -> SubmittedForm:
    data = await request.form(max_files=0, max_fields=2_000)
    form = SubmittedForm(data)
    _check_csrf(caller_of(request), form.text("csrf"))
    return form


def checked_caller(request: Request) -> Caller:
    """Return who makes a request of somebody logged in."""
    caller = caller_of(request)
    assert caller is not None, "the guard lets nobody through without one"
    return caller


def _operator(request: Request) -> Caller:
    caller = checked_caller(request)
    if not caller.user.is_operator:
        raise RefusedError(f"{caller.user.name} is a reader, and readers change nothing; ask an operator")
    return caller


def _api_operator(request: Request) -> Caller:
    """Return an operator who calls the API; one with a cookie has to bring the token of the forms as a header."""
    caller = _operator(request)
    if request.method != "GET":
        _check_csrf(caller, request.headers.get(CSRF_HEADER, ""))
    return caller


def _check_csrf(caller: Caller | None, given: str) -> None:
    if caller is None or caller.session is None:
        return
    if not hmac.compare_digest(caller.session.csrf.encode(), given.encode("utf-8", "replace")):
        raise RefusedError(
            "this form is not from one of the console's pages, or an earlier session's; load it again"
        )


def only_known(request: Request) -> None:
    """Raise `ConfigError` for a parameter of the query that the path does not have: one misspelled would list all.

    A dependency of routers.
    """
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    known = [field.alias for field in route.dependant.query_params]
    check_known(request.query_params, known, f"{request.method} {route.path}")


PostedForm = Annotated[SubmittedForm, Depends(_form)]
AnyCaller = Annotated[Caller, Depends(checked_caller)]
Operator = Annotated[Caller, Depends(_operator)]
ApiOperator = Annotated[Caller, Depends(_api_operator)]
