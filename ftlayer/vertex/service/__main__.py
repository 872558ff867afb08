"""``python -m ftlayer.vertex.service``: the child process of an `EmbeddedVertex`.

The first line of stdin is a JSON object (`ftlayer.vertex.service.embedded.ChildOrder`); the line printed tells how the
start went. The vertex stops when stdin ends, or when its parent is not its parent any more.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import NoReturn

from ftlayer.config import ServeOptions
from ftlayer.errors import FTLayerError
from ftlayer.vertex.service.embedded import ChildOrder, ChildReport, watch_parent


def main() -> int:
    parent = os.getppid()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    options = ChildOrder.from_line(sys.stdin.buffer.readline()).options
    stop = threading.Event()
    threading.Thread(target=watch_parent, args=(parent, stop), name="ftlayer-watch", daemon=True).start()
    try:
        return _serve(options, stop)
    except FTLayerError as error:
        logging.getLogger(__name__).error("%s", error)
        ChildReport(error=error.code, message=str(error)).tell()
        return 1


def _serve(options: ServeOptions, stop: threading.Event) -> int:
    # Late, so that a driver that is gone already is noticed during these imports.
    from ftlayer.vertex.service.directory import check_limits

    check_limits(options.vertex)
    from ftlayer.vertex.service.serve import serve

    return serve(options, on_ready=lambda address: ChildReport(address=address).tell(), stop=stop)


def _exit() -> NoReturn:
    try:
        code = main()
    except BaseException:
        logging.getLogger(__name__).exception("the vertex has failed")
        code = 1
    logging.shutdown()
    # Threads that wait in open streams would hold up an ordinary exit.
    os._exit(code)


if __name__ == "__main__":
    _exit()
