from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, urlencode

from ftlayer.monitor.health import Page


def job_href(job: str) -> str:
    """Return the page of a job, ``<vertex>:<owner>``."""
    return f"/jobs/{quote(job, safe=':')}"


def record_href(vertex: str, key: str) -> str:
    return f"/records/{quote(vertex, safe='')}/{quote(key, safe='')}"


def with_query(path: str, fields: Mapping[str, str | int | None]) -> str:
    """Return a path with those fields that say something."""
    given = {name: value for name, value in fields.items() if value not in ("", None)}
    return f"{path}?{urlencode(given)}" if given else path


def href_of(place: Mapping[str, str]) -> str:
    """Return where a finding leads to, as `ftlayer.monitor.facts` gives its place."""
    vertex, owner = place["vertex"], place["owner"]
    filters = {"vertex": vertex, "stream": place["stream"], "operator": place["operator"]}
    match place["page"]:
        case Page.JOB:
            return job_href(f"{vertex}:{owner}")
        case Page.CHECKPOINTS:
            return f"{job_href(f'{vertex}:{owner}')}/checkpoints"
        case Page.DEAD:
            return with_query("/dead", filters)
        case Page.RECORDS:
            return with_query("/records", {"state": "pending"} | filters)
        case _:
            return f"/#vertex-{quote(vertex, safe='')}"
