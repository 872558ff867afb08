"""``python -m ftlayer.monitor.console``: the child process of a `ftlayer.monitor.console.options.ConsoleProcess`.

The first line of stdin is its order; the line printed tells how the start went. It ends when stdin does, or when its
parent is not its parent any more.
"""

from __future__ import annotations

import logging
import os
import sys
import threading

from ftlayer.errors import FTLayerError
from ftlayer.monitor.console.options import ConsoleOrder
from ftlayer.monitor.sources import VertexSource, sources_here
from ftlayer.vertex.service.embedded import ChildReport, watch_parent


def main() -> int:
    parent = os.getppid()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    order = ConsoleOrder.from_line(sys.stdin.buffer.readline())
    stop = threading.Event()
    threading.Thread(target=watch_parent, args=(parent, stop), name="ftlayer-watch", daemon=True).start()
    # Late, so that a program that is gone already is noticed during these imports.
    from ftlayer.monitor.console.serve import serve

    def look() -> tuple[VertexSource, ...]:
        return order.sources or tuple(source for source in sources_here().sources if source.pid == parent)

    try:
        serve(order.options, look, on_ready=lambda link: ChildReport(address=link).tell(), stop=stop)
    except FTLayerError as error:
        ChildReport(error=error.code, message=str(error)).tell()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
