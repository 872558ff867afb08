"""The commands that ask something of a running job: ``savepoint``, ``stop``, ``drain``, ``cancel``, ``stack``.

The order goes to the job's vertex; its driver takes it with its next announcement, about a second later.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ftlayer.cli.connection import EXIT_ERROR, Asking, asking, warn
from ftlayer.cli.jobs import JobName
from ftlayer.cli.printing import print_json
from ftlayer.errors import ConfigError, VertexUnavailableError
from ftlayer.printable import printable

if TYPE_CHECKING:
    from ftlayer.monitor.gather import Gatherer
    from ftlayer.monitor.names import JobKey
    from ftlayer.vertex.calls import JobOrder, OrderRecord

POLL_S = 0.1
ASK_DEADLINE_MS = 5_000

Directory = Annotated[str, typer.Option(help="Where the savepoint goes; else where the job has its own.")]
Wait = Annotated[str, typer.Option(help="How long to wait here for the end of it; it goes on behind that.")]


@asking
def savepoint(name: JobName, directory: Directory = "", wait: Wait = "10m", *, asking: Asking) -> None:
    """Take a savepoint of a running topology, and print where it is."""
    _carry_out(asking, name, "savepoint", wait, directory=directory)


@asking
def stop(name: JobName, directory: Directory = "", wait: Wait = "10m", *, asking: Asking) -> None:
    """Stop a job: a topology in barrier mode with a savepoint, a wrapped query at once (drain lets it finish)."""
    _carry_out(asking, name, "stop", wait, directory=directory)


@asking
def drain(
    name: JobName,
    timeout: Annotated[str, typer.Option(help="How long the job may take, like 5m; else as it has it.")] = "",
    wait: Wait = "10m",
    *,
    asking: Asking,
) -> None:
    """Let a job end when all that it has taken in is done."""
    from ftlayer.checks import duration_ms

    _carry_out(asking, name, "drain", wait, timeout_ms=duration_ms(timeout, "--timeout") if timeout else 0)


@asking
def cancel(
    name: JobName,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    wait: Wait = "10m",
    *,
    asking: Asking,
) -> None:
    """End a job now, whatever is under way."""
    _carry_out(asking, name, "cancel", wait, question="" if yes else "Cancel {} now?")


@asking
def stack(
    name: JobName,
    slot: Annotated[int, typer.Option(min=0, help="Which slot.")],
    wait: Wait = "1m",
    *,
    asking: Asking,
) -> None:
    """Show what a slot's threads are at: their Python stacks."""
    _carry_out(asking, name, "stack", wait, slot=slot)


def _carry_out(
    asking: Asking,
    name: str,
    action: str,
    wait: str,
    *,
    directory: str = "",
    timeout_ms: int = 0,
    slot: int = -1,
    question: str = "",
) -> None:
    """Order it, wait until it has come to an end, and print that; exit code 1 unless it is done."""
    from ftlayer.checks import duration_ms
    from ftlayer.clock import system_now
    from ftlayer.monitor.facts import order_facts
    from ftlayer.monitor.names import JobNames
    from ftlayer.monitor.sources import user_name
    from ftlayer.vertex.calls import JobKind, JobOrder, OrderAction, OrderState

    wait_ms = duration_ms(wait, "--wait", least=0)
    with asking.gatherer() as gatherer:
        names = JobNames(gatherer.views())
        key = names.find(name)
        label = names.label(key.vertex, key.owner)
        if question:
            typer.confirm(question.format(label), abort=True)
        job = gatherer.job(key.vertex, key.owner).job
        if directory and job.kind is JobKind.QUERY:
            raise ConfigError(f"--directory: {label} is a wrapped query, which takes no savepoints")
        order = JobOrder(
            id=uuid.uuid4().hex,
            owner=key.owner,
            run=job.run,
            action=OrderAction(action),
            by=user_name(),
            asked_ms=system_now().wall_ms,
            directory=directory,
            timeout_ms=timeout_ms,
            slot=slot,
        )
        record = await_end(gatherer, key, order, wait_ms)
    answer = record.answer
    if asking.as_json:
        print_json(order_facts(record))
    elif answer.state is OrderState.DONE:
        typer.echo(printable(answer.text or f"{action} of {label}: done"))
    elif answer.state.is_final:
        warn(f"{action} of {label} {_ENDS.get(answer.state, answer.state)}: {answer.text}")
    else:
        warn(f"{action} of {label} is still under way after {wait}; it goes on: see ftlayer jobs {label}")
    if answer.state is not OrderState.DONE:
        raise typer.Exit(EXIT_ERROR)


_ENDS = {"failed": "has failed", "refused": "was refused", "expired": "was not taken in time"}


def await_end(gatherer: Gatherer, key: JobKey, order: JobOrder, wait_ms: int) -> OrderRecord:
    """Ask until the order has come to an end, or the wait is over; once at least.

    The vertex of a program ends with it: where it is gone after an order that ends the job, the order was carried out.
    """
    until = time.monotonic() + wait_ms / 1_000
    record = _asked(gatherer, key, order)
    while not record.answer.state.is_final and time.monotonic() < until:
        time.sleep(POLL_S)
        try:
            record = _asked(gatherer, key, order)
        except VertexUnavailableError:
            if not _has_ended(gatherer, key.vertex):
                raise
            return _ended_with_its_program(record)
    return record


def _asked(gatherer: Gatherer, key: JobKey, order: JobOrder) -> OrderRecord:
    from ftlayer.vertex.calls import AskJob, OrderRecord

    record = gatherer.client(key.vertex).call(AskJob(order), deadline_ms=ASK_DEADLINE_MS)
    assert isinstance(record, OrderRecord)
    return record


def _has_ended(gatherer: Gatherer, vertex: str) -> bool:
    return any(view.vertex == vertex and view.is_gone for view in gatherer.gather())


def _ended_with_its_program(record: OrderRecord) -> OrderRecord:
    from ftlayer.vertex.calls import OrderAction, OrderState

    ends = record.order.action in (OrderAction.STOP, OrderAction.DRAIN, OrderAction.CANCEL)
    if ends and record.answer.state is OrderState.TAKEN:
        text = "its driver has taken the order, and its program has ended"
        return replace(record, answer=replace(record.answer, state=OrderState.DONE, text=text))
    text = "its program has ended, and what has become of the order is not known"
    return replace(record, answer=replace(record.answer, state=OrderState.FAILED, text=text))
