"""ftlayer's console over a run of the demo: its vertex, or its driver's board, and nothing else of the user's."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ftlayer.demo.layout import RunDirectory
from ftlayer.demo.supervisor import Supervisor

if TYPE_CHECKING:
    from ftlayer.monitor.sources import VertexSource


@contextmanager
def in_browser(supervisor: Supervisor, directory: RunDirectory) -> Iterator[str]:
    """Serve the console while the block runs; gives the link to it.

    It is a thread of the screen's process, which knows the driver of the moment: that is killed and started again.
    Raises `MachineError` where the extra ``console`` is not installed.
    """
    # Read when gRPC loads: the console says itself what does not answer.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from ftlayer.console.options import ConsoleOptions, check_extra

    check_extra()
    from ftlayer.console.serve import serve
    from ftlayer.monitor.sources import sources_here

    def look() -> tuple[VertexSource, ...]:
        store = str(directory.store)
        return tuple(
            source
            for source in sources_here().sources
            if source.path == store or source.pid == supervisor.driver_pid
        )

    stop = threading.Event()
    started: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            serve(ConsoleOptions("127.0.0.1:0"), look, on_ready=started.put, stop=stop)
        except BaseException as error:
            started.put(error)
            raise

    thread = threading.Thread(target=run, name="demo-console", daemon=True)
    thread.start()
    link = started.get()
    if isinstance(link, BaseException):
        raise link
    try:
        yield link
    finally:
        stop.set()
        thread.join()
