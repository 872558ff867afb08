"""The command ``ftlayer jobs``: what runs, how it is, and one of them in full."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ftlayer.cli import printing
from ftlayer.cli.connection import Asking, asking, warn
from ftlayer.cli.printing import Part, PrintedLine, new_table, print_json, rate_text, size_text, time_text
from ftlayer.common.printable import printing_console
from ftlayer.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from ftlayer.monitor.rules.health import Judgement
    from ftlayer.monitor.rules.names import JobNames, VertexView
    from ftlayer.vertex.calls import AnnouncedJob, Hour, JobDetails

SHOWN = 10
"""So many of the last incidents, checkpoints and batches are printed; ``--json`` has all that are known."""

_COLOURS = {"ok": "green", "look here": "yellow", "broken": "red"}

COUNTS = {"pending": "pending", "waiting": "waiting", "in_delivery": "in delivery", "dead_letters": "dead"}
"""What a vertex counts, in words."""

HELD = ("pending", "waiting", "in_delivery", "dead")
"""What streams count."""

FORGET = "forget"

JobName = Annotated[str, typer.Argument(metavar="NAME", help="A topology's or query's name.")]


@asking
def jobs(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME] | forget [NAME...]",
            help="Show this topology or query in full. Or forget programs that were killed: those that were started in "
            "this directory, above or below it, or those of these vertices.",
        ),
    ] = None,
    *,
    checkpoints: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="A directory with checkpoints: what drivers have said last of their jobs is listed too; repeatable.",
        ),
    ] = None,
    asking: Asking,
) -> None:
    """List topologies and wrapped queries: what runs, what has ended, and what is wrong."""
    from ftlayer.monitor.rules.facts import job_facts, overview_facts

    if names and names[0] == FORGET:
        _forget(names[1:], as_json=asking.as_json)
        return
    if names and len(names) > 1:
        raise ConfigError(f"jobs: name one, or say `ftlayer jobs {FORGET} NAME...`")
    name = names[0] if names else None
    with asking.gatherer(shows_killed=True, checkpoints=checkpoints or ()) as gatherer:
        views, called = gatherer.views(), gatherer.names()
        if name is None:
            if asking.as_json:
                print_json(overview_facts(views, called))
            else:
                printing.print_parts(printing_console(), overview_parts(views, called))
            return
        try:
            key = called.find(name)
        except ConfigError:
            for view in views:
                if view.is_killed and not view.jobs:
                    warn(f"what {view.vertex} ran is not known: {view.failure}")
            raise
        view = next(view for view in views if view.vertex == key.vertex)
        job = gatherer.job(key.vertex, key.owner)
        hour = gatherer.hour(key.vertex, key.owner) if view.is_up else None
        if asking.as_json:
            print_json(job_facts(view, job, called, hour=hour))
        else:
            printing.print_parts(printing_console(), job_parts(view, job, called, hour))


def _forget(names: list[str], *, as_json: bool) -> None:
    from ftlayer.monitor.rules.names import marked
    from ftlayer.monitor.sources import sources_here

    found = sources_here()
    known = (*found.killed, *found.elsewhere)
    called = {each.identity: {each.name, each.path, marked(each.name, each.identity)} for each in known}
    chosen = list(found.killed) if not names else []
    for name in names:
        meant = [each for each in known if name in called[each.identity]]
        if len(meant) != 1:
            shown = sorted(f"{marked(each.name, each.identity)} ({each.path})" for each in meant or known)
            several = (
                f"{len(meant)} programs that were killed have" if meant else "no program that was killed has"
            )
            raise ConfigError(f"{several} the vertex {name!r}; there are: {', '.join(shown) or 'none'}")
        chosen += meant
    for source in chosen:
        source.forget()
    if as_json:
        print_json([{"vertex": source.name, "path": source.path, "pid": source.pid} for source in chosen])
        return
    if not chosen:
        typer.echo("nothing to forget: no program of this directory was killed")
    for source in chosen:
        kept = f"; its store {source.path} stays" if source.path else ""
        printing.print_line(
            printing_console(), f"forgot {source.name}, whose process {source.pid} was killed{kept}"
        )


# ---------------------------------------------------------------- all


def overview_parts(views: Iterable[VertexView], names: JobNames, selected: int = -1) -> Iterator[Part]:
    """Give how all is, the vertices and the jobs; the job at the place ``selected`` is marked."""
    from ftlayer.monitor.rules.health import overall_health

    views = tuple(views)
    yield from _judgement_parts(overall_health(views), whole=False)
    yield _table_of_vertices(views)
    for view in views if len(views) > 1 else ():
        yield PrintedLine(f"  {view.place}")
    yield _table_of_jobs(views, names, selected)


def _judgement_parts(judged: Judgement, *, whole: bool = True) -> Iterator[Part]:
    """Give how something is, reason by reason, of each its first line where not the whole; "ok" where all is well."""
    for finding in judged.findings:
        text = finding.text if whole else finding.text.partition("\n")[0]
        yield PrintedLine(f"{finding.health}: {text}", _COLOURS[finding.health])
    if not judged.findings:
        yield PrintedLine("ok", _COLOURS["ok"])


def _table_of_vertices(views: tuple[VertexView, ...]) -> Table:
    numbers = (*COUNTS.values(), "store")
    table = new_table("vertex", "state", *numbers, numbers=numbers)
    for view in views:
        figures = [f"{int(view.stats.get(name, 0)):,}" for name in COUNTS]
        figures.append(f"{view.stats.get('used_share', 0.0):.1%}")
        known = view.has_records and view.as_of_ms
        table.add_row(view.vertex, view.state, *(figures if known else [""] * len(figures)))
    return table


def jobs_of(views: Iterable[VertexView]) -> list[tuple[VertexView, AnnouncedJob]]:
    return [(view, announced) for view in views for announced in view.jobs]


def _table_of_jobs(views: tuple[VertexView, ...], names: JobNames, selected: int) -> Part:
    from ftlayer.monitor.rules.health import job_health
    from ftlayer.monitor.rules.names import pace_of, spoken, state_of

    several, numbers = len(views) > 1, ("in/s", "up", "restarts")
    vertex = ("vertex",) if several else ()
    table = new_table("job", "kind", "state", "health", *numbers, *vertex, numbers=numbers)
    for place, (view, announced) in enumerate(jobs_of(views)):
        job = announced.job
        health = job_health(view, announced).health
        colour = "" if health == "ok" else _COLOURS[health]
        table.add_row(
            names.label(view.vertex, job.owner),
            str(job.kind),
            state_of(view, announced),
            str(health),
            rate_text(pace_of(view, announced)),
            spoken((job.ended_ms or job.at_ms) - job.since_ms),
            f"{job.restarts:,}",
            *((view.vertex,) if several else ()),
            style=f"{colour} reverse" if place == selected else colour,
        )
    return table if table.row_count else PrintedLine("no topology or query has announced itself")


# ---------------------------------------------------------------- one


def job_parts(
    view: VertexView, announced: AnnouncedJob, names: JobNames, hour: Hour | None
) -> Iterator[Part]:
    """Give all that is known of a job, and what its vertex holds of it."""
    from ftlayer.monitor.rules.health import bottleneck, job_health
    from ftlayer.monitor.rules.names import spoken, state_of

    job = announced.job
    label, state = names.label(view.vertex, job.owner), state_of(view, announced)
    yield PrintedLine(f"{job.kind} {label}: {state}", "bold")
    yield from _judgement_parts(job_health(view, announced, hour))
    found = bottleneck(job)
    lines = {
        "heard": f"{spoken(view.heard_ago_ms(announced))} ago",
        "since": f"{time_text(job.since_ms)}, for {spoken((job.ended_ms or job.at_ms) - job.since_ms)}",
        "mode": job.mode,
        "vertex": view.place,
        "driver": f"process {job.pid} on {job.host}" if job.pid else "",
        "ftlayer": job.version,
        "restarts": f"{job.restarts:,}" + (f", the last one: {job.last_failure}" if job.last_failure else ""),
        "limited": found.text if found else "",
        "now" if state == job.state else "said last": job.line,
        "checkpoint": job.checkpoint_location,
        **job.links,
    }
    yield from (PrintedLine(f"  {name:11}{value}") for name, value in lines.items() if value)
    if streams := [stream for stream in view.streams if stream.owner == job.owner]:
        counts = {name: sum(getattr(each, name) for each in streams) for name in HELD}
        held = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items())
        yield PrintedLine(f"  {'records':11}{held}")
    if (totals := job.checkpoint_totals) is not None:
        taken = f"{totals.completed:,} completed, {totals.failed:,} failed, {totals.in_progress:,} under way"
        yield PrintedLine(f"  {'taken':11}checkpoints: {taken}")
    tables = (_operators(job), _latencies(job), _slots(job), _checkpoints(job), _batches(job), _circuits(job))
    yield from (table for table in tables if table.row_count)
    yield from _incidents(announced)


def _operators(job: JobDetails) -> Table:
    from ftlayer.monitor.rules.facts import operator_facts
    from ftlayer.monitor.rules.names import spoken

    # Of a job without a policy for records that fail a line has to stay short.
    has_policy = any(name.startswith("waiting/") for name in job.counters)
    failing = {"retried": "retried", "to retry": "waiting", "dead": "dead"} if has_policy else {}
    unread = {"unread": "source_lag_records"} if any(name.startswith("lag/") for name in job.counters) else {}
    numbers = ("in/s", "out/s", "in", "out", *unread, *failing, "busy", "waits", "lag")
    table = new_table("operator", *numbers, numbers=numbers)
    for operator in operator_facts(job):
        lag = operator["watermark_lag_seconds"]
        table.add_row(
            operator["uid"],
            rate_text(operator["in_per_second"]),
            rate_text(operator["out_per_second"]),
            f"{operator['records_in']:,}",
            f"{operator['records_out']:,}",
            *("" if operator[name] is None else f"{operator[name]:,}" for name in unread.values()),
            *(f"{operator[name]:,}" for name in failing.values()),
            f"{operator['busy_ratio']:.0%}",
            f"{operator['back_pressured_ratio']:.0%}",
            "" if lag is None else spoken(round(lag * 1_000)),
        )
    return table


def _latencies(job: JobDetails) -> Table:
    from ftlayer.monitor.rules.facts import latency_facts
    from ftlayer.monitor.rules.names import spoken

    numbers = ("half within", "99 % within", "measured")
    table = new_table("source", "sink", *numbers, numbers=numbers)
    for each in latency_facts(job):
        times = (spoken(round(each[name] * 1_000)) for name in ("p50_seconds", "p99_seconds"))
        table.add_row(each["source"], each["sink"], *times, f"{each['count']:,}")
    return table


def _slots(job: JobDetails) -> Table:
    from ftlayer.monitor.rules.names import spoken

    numbers = ("slot", "pid", "heard", "restarts")
    table = new_table("slot", "state", "host", "pid", "heard", "restarts", "busy in", numbers=numbers)
    for slot in job.slots:
        busy = slot.function or slot.busy
        table.add_row(
            str(slot.slot),
            slot.state,
            slot.host,
            str(slot.pid or ""),
            "" if slot.heartbeat_age_ms < 0 else f"{spoken(slot.heartbeat_age_ms)} ago",
            f"{slot.restarts:,}",
            f"{busy} for {spoken(slot.busy_ms)}" if busy and slot.busy_ms >= 1_000 else busy,
        )
    return table


def _checkpoints(job: JobDetails) -> Table:
    from ftlayer.monitor.rules.names import spoken

    numbers = ("checkpoint", "took", "written")
    table = new_table("checkpoint", "kind", "state", "triggered", "took", "written", "what", numbers=numbers)
    for checkpoint in sorted(job.checkpoints, key=lambda checkpoint: -checkpoint.number)[:SHOWN]:
        table.add_row(
            str(checkpoint.number),
            checkpoint.kind,
            checkpoint.state,
            time_text(checkpoint.triggered_ms),
            spoken(checkpoint.duration_ms),
            size_text(checkpoint.total.written_bytes),
            checkpoint.failure or checkpoint.location,
        )
    return table


def _batches(job: JobDetails) -> Table:
    from ftlayer.monitor.rules.names import spoken

    numbers = ("batch", "rows", "from vertex", "failed", "dead", "took")
    table = new_table(*numbers, "phases", numbers=numbers)
    for batch in job.batches[-SHOWN:]:
        phases = ", ".join(f"{name} {spoken(round(phase))}" for name, phase in batch.phases_ms.items())
        counts = [f"{each:,}" for each in (batch.rows_in, batch.delivered, batch.failed, batch.dead)]
        table.add_row(str(batch.batch), *counts, spoken(round(batch.duration_ms)), phases)
    return table


def _circuits(job: JobDetails) -> Table:
    table = new_table("circuit", "state", "opened", "failed", numbers=("opened", "failed"))
    for name, status in sorted(job.circuits.items()):
        failed = f"{status.failed:,} of {status.records:,}"
        table.add_row(name or job.name, str(status.state), f"{status.opened:,}", failed)
    return table


def _incidents(announced: AnnouncedJob) -> Iterator[PrintedLine]:
    if announced.incidents:
        yield PrintedLine("what happened", "bold")
    for incident in announced.incidents[-SHOWN:]:
        # What a loss says begins with its slot.
        is_said = incident.slot < 0 or incident.text.startswith("slot ")
        where = "" if is_said else f"slot {incident.slot}: "
        yield PrintedLine(f"  {time_text(incident.at_ms)}  {incident.kind}  {where}{incident.text}")
