"""How all is: signing in and out, the overview, the checkpoints in directories, the audit logs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ftlayer.checkpoint.snapshots import Checkpoint
from ftlayer.checkpoint.storage.loading import check_directory, find_checkpoints, load_checkpoint, read_each
from ftlayer.checkpoint.storage.report import summary
from ftlayer.errors import CheckpointError, ConfigError, UnsupportedError, VertexUnavailableError
from ftlayer.monitor.console.asking import PostedForm, SubmittedForm
from ftlayer.monitor.console.guard import LOGIN, peer_of, session_key, too_many
from ftlayer.monitor.console.live import Context, LivePage, Visit, shown_hours
from ftlayer.monitor.console.options import SESSION_MS
from ftlayer.monitor.console.rendering import console_of, go_to, page
from ftlayer.monitor.console.watch import Watch
from ftlayer.monitor.console.works import with_query
from ftlayer.monitor.rules.facts import Facts, audit_facts, iso, overview_facts, seconds
from ftlayer.vertex.calls import ListAudit

router = APIRouter(include_in_schema=False)


ENTRIES = 100
MOST_ENTRIES = 500


@router.get("/audit")
def audit_page(request: Request, vertex: str = "", after: str = "") -> Response:
    watch = console_of(request).watch
    found = audit_of(watch, vertex=vertex, after=after)
    there = [view.vertex for view in watch.views() if view.has_records]
    more = with_query("/audit", {"vertex": vertex, "after": found.next}) if found.next else ""
    about: Context = {"found": found, "vertices": there, "vertex": vertex, "more": more}
    return page(request, "audit.html", here="/audit", **about)


@dataclass(frozen=True, slots=True)
class FoundAudit:
    """Entries, the latest first; ``next`` goes on in the log of one vertex; ``troubles`` say why there may be more."""

    entries: list[Facts]
    next: str
    troubles: list[str]


def audit_of(watch: Watch, *, vertex: str = "", after: str = "", limit: int = ENTRIES) -> FoundAudit:
    """Return the latest entries of all vertices, or of one, where ``after`` goes on. Raises `ConfigError`."""
    if vertex:
        watch.client(vertex)  # which says so where there is none
    views = [view for view in watch.views() if not view.is_gone and vertex in ("", view.vertex)]
    if after and len(views) != 1:
        raise ConfigError("after: a page goes on in the log of one vertex; say which, by vertex")
    try:
        cursor = bytes.fromhex(after)
    except ValueError:
        raise ConfigError("after: this is not where a page ended; begin anew") from None
    entries: list[Facts] = []
    troubles: list[str] = []
    more = ""
    for view in views:
        try:
            page = watch.client(view.vertex).call(ListAudit(cursor, limit))
        except UnsupportedError:
            continue  # a driver's own board changes no records
        except VertexUnavailableError as error:
            troubles.append(f"{view.vertex} gives no answer: {error if view.is_up else view.failure}")
            continue
        entries += [{"vertex": view.vertex} | audit_facts(entry) for entry in page.entries]
        more = page.more.hex() if len(views) == 1 else ""
    entries.sort(key=lambda entry: entry["at"] or "", reverse=True)
    return FoundAudit(entries[:limit], more, troubles)


MOST_STORED = 200
"""The latest so many of a directory are read."""


@router.get("/checkpoints")
def checkpoints_page(request: Request) -> Response:
    found = stored_checkpoints(console_of(request).options.checkpoints)
    return page(request, "stored.html", here="/checkpoints", found=found)


@dataclass(frozen=True, slots=True)
class StoredCheckpoints:
    """What was found below ``url``, the latest first; ``failure`` says why nothing could be."""

    url: str
    items: list[Facts]
    failure: str = ""


def stored_checkpoints(urls: tuple[str, ...]) -> list[StoredCheckpoints]:
    found = []
    for url in urls:
        try:
            check_directory(url)
            each = read_each(islice(find_checkpoints(url), MOST_STORED), load_checkpoint)
            found.append(StoredCheckpoints(url, [_facts(location, read) for location, read in each]))
        except (CheckpointError, ConfigError) as error:
            found.append(StoredCheckpoints(url, [], str(error)))
    return found


def _facts(location: str, read: Checkpoint | CheckpointError) -> Facts:
    if isinstance(read, CheckpointError):
        return {"location": location, "failure": str(read)}
    found = summary(read)
    return {
        "location": location,
        "failure": "",
        **{name: found[name] for name in ("checkpoint", "kind", "job", "state_bytes", "written_bytes")},
        "completed": iso(found["completed_ms"]),
        "duration_seconds": seconds(found["duration_ms"]),
        "restore": f"env.execute(restore_from={location!r})",
    }


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


def _context(visit: Visit) -> Context:
    watch = visit.console.watch
    views = watch.views()
    overview = overview_facts(views, watch.names(), mask=visit.mask)
    jobs = overview["jobs"]
    over = [job for job in jobs if job["final"] or job["state"] in ("gone", "killed")]
    running = [job for job in jobs if job not in over]
    kept = [view.vertex for view in views if view.is_up and view.has_records]
    hours = [(f"{vertex}, of the records that it stores", vertex, "") for vertex in kept]
    return {
        "overview": overview,
        "totals": _totals(overview),
        "running": running,
        "gone": over,
        "alive": sum(job["state"] not in ("silent", "no answer") for job in running),
        "hours": shown_hours(visit, hours),
    }


def _totals(overview: Facts) -> Facts | None:
    kept = [vertex for vertex in overview["vertices"] if vertex["pending"] is not None]
    if not kept:
        return None
    oldest = [vertex["oldest_seconds"] for vertex in kept if vertex["oldest_seconds"] is not None]
    return {
        # Of jobs that recover or drain too; what is not heard has no rate.
        "in_per_second": sum(job["in_per_second"] or 0.0 for job in overview["jobs"] if not job["final"]),
        **{
            each: sum(vertex[each] for vertex in kept)
            for each in ("pending", "waiting", "in_delivery", "dead")
        },
        "oldest_seconds": max(oldest, default=None),
    }


LIVE = LivePage("/", "overview.html", ("verdict", "jobs", "vertices", "hours"), _context, "/")


@router.get("/")
def overview(request: Request) -> Response:
    return LIVE.respond(request)
