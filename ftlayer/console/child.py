"""The console as a child process of a program: started, and ended with it."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ftlayer.console.options import ConsoleOptions, check_extra
from ftlayer.errors import FTLayerError, error_for_code
from ftlayer.monitor.sources import VertexSource
from ftlayer.vertex.service.embedded import ChildReport, read_line

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
_PATHS = ("login_file", "tls_cert", "tls_key", "tls_client_ca")


@dataclass(frozen=True)
class ConsoleOrder:
    """What a console process is to show: ``sources``, or with none of them what the program that starts it serves.

    It has tokens in it, so it travels through a pipe and not in argv.
    """

    options: ConsoleOptions
    sources: tuple[VertexSource, ...] = ()

    def to_line(self) -> bytes:
        """Return the order as a line of JSON."""
        options = dataclasses.asdict(self.options)
        for name in _PATHS:
            options[name] = None if options[name] is None else str(options[name])
        sources = [dataclasses.asdict(source) for source in self.sources]
        for source in sources:
            for name in ("root_certs", "client_pem"):
                source[name] = None if source[name] is None else base64.b64encode(source[name]).decode()
        return json.dumps({"options": options, "sources": sources}).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> ConsoleOrder:
        order = json.loads(line)
        options = order["options"]
        for name in _PATHS:
            options[name] = None if options[name] is None else Path(options[name])
        options["checkpoints"] = tuple(options["checkpoints"])
        for source in order["sources"]:
            for name in ("root_certs", "client_pem"):
                source[name] = None if source[name] is None else base64.b64decode(source[name])
        return cls(ConsoleOptions(**options), tuple(VertexSource(**source) for source in order["sources"]))


class ConsoleProcess:
    """A console that ends with this process, or by `stop`.

    Attributes:
        link: what to open in a browser; a token that lets one operator in is part of it.
    """

    def __init__(self, options: ConsoleOptions, sources: tuple[VertexSource, ...] = ()) -> None:
        """Start it, and wait until it listens.

        Raises `MachineError` where the extra ``console`` is not installed, and `ConfigError` for a place where it
        cannot listen.
        """
        check_extra()
        self._process = subprocess.Popen(
            # -P: the installed package, not a source tree that happens to be the working directory.
            [sys.executable, "-P", "-m", "ftlayer.console"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C is for the program, which stops the console when it has done with it.
            start_new_session=True,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "GRPC_VERBOSITY": "NONE"},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead, and has no report
            self._process.stdin.write(ConsoleOrder(options, sources).to_line())
            self._process.stdin.flush()
        with self._process.stdout as pipe:
            report = ChildReport.from_line(read_line(pipe, START_TIMEOUT_S))
        if report is None or not report.address:
            self.stop()
            if report is not None:
                raise error_for_code(report.error)(report.message)
            raise FTLayerError(
                "the console's process ended before it listened; its words are on standard error"
            )
        self.link = report.address

    def stop(self) -> None:
        """End it. A second call does nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already
            self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
