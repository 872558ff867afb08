"""What a console needs, where it listens and who may use it, checked before anything starts."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ftlayer.common.secret_files import read_file, read_secret
from ftlayer.errors import ConfigError, FTLayerError, MachineError, error_for_code, install
from ftlayer.monitor.console.login import Users
from ftlayer.monitor.rules.plans import EditFunction, edit_function
from ftlayer.monitor.sources import VertexSource
from ftlayer.transport.address import Address, parse_listen
from ftlayer.vertex.service.embedded import ChildReport, read_line

DEFAULT_LISTEN = "127.0.0.1:7080"

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")

PACKAGES = {
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "jinja2": "jinja2",
    "python_multipart": "python-multipart",
}
"""What the extra ``console`` installs: modules, and what they are called to pip."""


def check_extra() -> None:
    """Raise `MachineError` that says what to install, where something is missing."""
    missing = [name for module, name in PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise MachineError(f"the console needs {', '.join(missing)}: {install('console')}")


@dataclass(frozen=True, slots=True)
class ConsoleOptions:
    """How a console is reached.

    Attributes:
        listen: ``host:port`` (port 0 is any free one) or ``unix:/path``.
        login_file: who may log in; None draws a token for one operator.
        tls_cert, tls_key: PEM files of the certificate chain and its private key.
        tls_client_ca: PEM file of what clients' certificates have to be signed by.
        mask_payloads: show types and lengths in place of what records hold.
        checkpoints: paths or URLs of directories whose checkpoints are listed.
        edit_with: functions, as ``module:function``, that operators may edit many dead letters by; no others.
    """

    listen: str = DEFAULT_LISTEN
    login_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    mask_payloads: bool = False
    checkpoints: tuple[str, ...] = ()
    edit_with: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise `ConfigError` for what is not safe, or makes no sense."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key belong together: give both, or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError(
                "tls_client_ca: clients show certificates over TLS alone: give tls_cert and tls_key too"
            )
        if self.address.is_here:
            return
        missing = [
            name
            for name, value in (("tls_cert", self.tls_cert), ("login_file", self.login_file))
            if value is None
        ]
        if missing:
            raise ConfigError(
                f"listen: {self.listen} can be reached from other machines, which needs TLS and users of their own: "
                f"{' and '.join(missing)} missing; or listen on 127.0.0.1"
            )

    @property
    def address(self) -> Address:
        return parse_listen(self.listen, "listen")

    @property
    def has_tls(self) -> bool:
        return self.tls_cert is not None

    def users(self) -> Users:
        """Read who may log in. Raises `ConfigError`."""
        return Users.drawn() if self.login_file is None else Users.of_file(self.login_file)

    def edit_functions(self) -> dict[str, EditFunction]:
        """Import what dead letters may be edited by. Raises `ConfigError`."""
        return {name: edit_function(name, "edit_with") for name in self.edit_with}

    def hosts(self) -> frozenset[str]:
        """Return the names that browsers may know this console by; a certificate's are among them."""
        host = self.address.host
        names = set(_LOOPBACK_NAMES) if self.address.is_here else set()
        if host:
            names.add(f"[{host}]" if ":" in host else host)
        if self.tls_cert is not None:
            names |= self._hosts_of_certificate()
        return frozenset(name.lower() for name in names)

    def check_certificates(self) -> None:
        """Raise `ConfigError` unless the files are what their options say."""
        if self.tls_cert is None or self.tls_key is None:
            return
        from ftlayer.transport.tls import check_certificate, load_certificates

        check_certificate(
            read_file(self.tls_cert, "tls_cert"),
            read_secret(self.tls_key, "tls_key"),
            cert_option="tls_cert",
            key_option="tls_key",
        )
        if self.tls_client_ca is not None:
            load_certificates(read_file(self.tls_client_ca, "tls_client_ca"), "tls_client_ca")

    def _hosts_of_certificate(self) -> set[str]:
        # Late: a console without TLS has no use for it.
        from cryptography import x509

        from ftlayer.transport.tls import load_certificates

        assert self.tls_cert is not None
        certificate = load_certificates(read_file(self.tls_cert, "tls_cert"), "tls_cert")[0]
        try:
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            return set()
        addresses = names.get_values_for_type(x509.IPAddress)
        hosts = set(names.get_values_for_type(x509.DNSName))
        return hosts | {f"[{address}]" if address.version == 6 else str(address) for address in addresses}


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
        for name in ("checkpoints", "edit_with"):
            options[name] = tuple(options[name])
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
            [sys.executable, "-P", "-m", "ftlayer.monitor.console"],
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
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already
            self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
