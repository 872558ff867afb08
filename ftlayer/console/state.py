"""What all requests of a console share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ftlayer.clock import Now
from ftlayer.console.login import Sessions, Throttle, Users
from ftlayer.console.metrics import Traffic
from ftlayer.console.options import ConsoleOptions
from ftlayer.console.watch import Watch
from ftlayer.console.works import Works
from ftlayer.monitor.gather import Gatherer


@dataclass(frozen=True)
class Console:
    """A console: who may use it, and what it shows.

    Attributes:
        options: how it is reached.
        users: who may log in.
        sessions: who is logged in.
        throttle: who has guessed too often.
        clock: the time now.
        cookie: name of the session's cookie.
        watch: what is known of vertices and jobs.
        works: what operators have it do to many letters.
        traffic: the requests that it has answered.
        closing: set when it ends, so that streams of news end first.
    """

    options: ConsoleOptions
    users: Users
    sessions: Sessions
    throttle: Throttle
    clock: Callable[[], Now]
    cookie: str
    watch: Watch
    works: Works
    traffic: Traffic
    closing: asyncio.Event

    @classmethod
    def of(
        cls, options: ConsoleOptions, gatherer: Gatherer, clock: Callable[[], Now], port: int = 0
    ) -> Console:
        """Return a console that listens on ``port``. Raises `ConfigError` for a login file that is none."""
        # Cookies of one host know no ports: two consoles on this machine need two names.
        cookie = "__Host-ftlayer" if options.has_tls else f"ftlayer-{port}"
        watch = Watch(gatherer, clock)
        works = Works(watch, clock)
        return cls(
            options,
            options.users(),
            Sessions(clock),
            Throttle(clock),
            clock,
            cookie,
            watch,
            works,
            Traffic(),
            asyncio.Event(),
        )
