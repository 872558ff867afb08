"""A job as pages and API show it to somebody."""

from __future__ import annotations

from ftlayer.console.asking import split_job
from ftlayer.console.guard import Caller
from ftlayer.console.hours import known_hour
from ftlayer.console.state import Console
from ftlayer.monitor.facts import Facts, job_facts
from ftlayer.vertex.calls import AnnouncedJob, OrderAction


def shown_job(console: Console, caller: Caller, job: str) -> tuple[AnnouncedJob, Facts]:
    """Return a job, and its facts as far as the caller may see them: a stack has lines of the program.

    Raises `ConfigError`, `UnknownJobError`, and what the vertex raises.
    """
    vertex, owner = split_job(job)
    watch = console.watch
    announced = watch.job(vertex, owner)
    view = next(view for view in watch.views() if view.vertex == vertex)
    facts = job_facts(
        view,
        announced,
        watch.names(),
        hour=known_hour(watch, vertex, owner),
        mask=console.options.mask_payloads,
    )
    facts["orders"] = [shown_order(order, caller) for order in facts["orders"]]
    return announced, facts


def shown_order(order: Facts, caller: Caller) -> Facts:
    """Return an order as the caller may see it."""
    if order["action"] == OrderAction.STACK and not caller.user.is_operator:
        return order | {"text": ""}
    return order
