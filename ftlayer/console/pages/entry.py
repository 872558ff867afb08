from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ftlayer.console.forms import PostedForm, SubmittedForm
from ftlayer.console.login import LOGIN, SESSION_MS, peer_of, session_key, too_many
from ftlayer.console.rendering import console_of, go_to, page

router = APIRouter(include_in_schema=False)


@router.get(LOGIN)
def login_page(request: Request, token: str = "", next: str = "/") -> Response:
    """Show the form; the link that a console prints brings the token with it."""
    return page(request, "login.html", token=token, next=own_path(next), failure="")


@router.post(LOGIN)
async def log_in(request: Request) -> Response:
    console = console_of(request)
    form = SubmittedForm(await request.form(max_files=0, max_fields=10))
    wanted = own_path(form.text("next"))
    token = form.text("token").strip()
    user = console.users.of_token(token)
    if user is None:
        wait_ms = console.throttle.failed(peer_of(request.scope), token)
        text, status = (too_many(wait_ms), 429) if wait_ms else ("No user has this token.", 403)
        return page(request, "login.html", token="", next=wanted, failure=text, status=status)
    answer = go_to(wanted)
    answer.set_cookie(
        console.cookie,
        console.sessions.start(user),
        max_age=SESSION_MS // 1_000,
        path="/",
        secure=console.options.has_tls,
        httponly=True,
        samesite="strict",
    )
    return answer


@router.post("/logout")
async def log_out(request: Request, form: PostedForm) -> Response:
    """End the session."""
    console = console_of(request)
    console.sessions.end(session_key(request.headers, console.cookie))
    answer = go_to(LOGIN)
    answer.delete_cookie(
        console.cookie, path="/", secure=console.options.has_tls, httponly=True, samesite="strict"
    )
    return answer


def own_path(path: str) -> str:
    """Return a path of this console, "/" for what would lead to another site."""
    is_own = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if is_own else "/"
