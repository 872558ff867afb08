"""What a console needs, where it listens and who may use it, checked before anything starts."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import hmac
import json
import os
import secrets
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from ftlayer.common.clock import Now
from ftlayer.common.secret_files import read_file, read_secret
from ftlayer.errors import ConfigError, FTLayerError, MachineError, error_for_code, install
from ftlayer.monitor.rules.plans import EditFunction, edit_function
from ftlayer.monitor.sources import VertexSource
from ftlayer.transport.address import Address, parse_listen
from ftlayer.vertex.service.embedded import ChildReport, read_line

SESSION_MS = 12 * 3_600_000
IDLE_MS = 3_600_000
MAX_SESSIONS = 1_000
MAX_FAILURES = 5
FAILURES_WITHIN_MS = 60_000
MAX_PEERS = 10_000
SHORTEST_TOKEN = 16
LONGEST_NAME = 64


class Role(StrEnum):
    """What a user may do: a reader sees everything but stacks, an operator changes things too."""

    READER = "reader"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class User:
    name: str
    role: Role
    token: str = field(repr=False)

    @property
    def is_operator(self) -> bool:
        return self.role is Role.OPERATOR


class Users:
    def __init__(self, users: tuple[User, ...]) -> None:
        self._users = users

    @classmethod
    def drawn(cls) -> Users:
        return cls((User("operator", Role.OPERATOR, secrets.token_urlsafe(32)),))

    @classmethod
    def of_file(cls, path: Path) -> Users:
        """Read a login file: a line ``role name token`` a user; ``#`` begins a comment line.

        Raises `ConfigError` naming the line that is none, and for a file that other users can read.
        """
        text = read_secret(path, "login_file").decode("utf-8", "replace")
        users = [
            _user(line.split(), f"login_file: {path}, line {number}")
            for number, line in enumerate(text.splitlines(), 1)
            if line.strip() and not line.lstrip().startswith("#")
        ]
        if not users:
            raise ConfigError(
                f"login_file: {path} names no user: write lines of the form 'operator NAME TOKEN'"
            )
        for what in ("name", "token"):
            if len({getattr(user, what) for user in users}) < len(users):
                raise ConfigError(
                    f"login_file: {path} has one {what} twice: each user has a {what} of their own"
                )
        return cls(tuple(users))

    def of_token(self, token: str) -> User | None:
        """Return who has this token; all are compared, so that the time it takes tells nothing."""
        given = token.encode("utf-8", "replace")
        found = [user for user in self._users if hmac.compare_digest(user.token.encode(), given)]
        return found[0] if found else None

    @property
    def first(self) -> User:
        return self._users[0]


def _user(words: list[str], where: str) -> User:
    if len(words) != 3:
        raise ConfigError(f"{where}: expected 'role name token', got {len(words)} words")
    role, name, token = words
    if role not in tuple(Role):
        raise ConfigError(f"{where}: expected the role 'operator' or 'reader', got {role!r}")
    if len(name) > LONGEST_NAME or not name.isprintable():
        raise ConfigError(f"{where}: a name has {LONGEST_NAME} printable characters at most")
    if len(token) < SHORTEST_TOKEN:
        raise ConfigError(
            f"{where}: a token of {len(token)} characters can be guessed, it needs {SHORTEST_TOKEN}; make one with: "
            "python -c 'import secrets; print(secrets.token_urlsafe())'"
        )
    return User(name, Role(role), token)


@dataclass(frozen=True, slots=True)
class Notice:
    """What the next page says of what was done; ``kind`` is "ok", "warn" or "bad"."""

    text: str
    kind: str


@dataclass(slots=True)
class LoginSession:
    """Somebody who has logged in; ``csrf`` stands in each form of theirs, ``said`` on the next page."""

    user: User
    csrf: str = field(repr=False)
    began_ms: int
    used_ms: int
    said: Notice | None = None


class Sessions:
    """Who is logged in. Sessions end `SESSION_MS` after their beginning, and `IDLE_MS` after their last use.

    Rules: the clock is passed in. Used by the event loop alone.
    """

    def __init__(self, clock: Callable[[], Now]) -> None:
        self._clock = clock
        self._sessions: dict[str, LoginSession] = {}

    def start(self, user: User) -> str:
        """Return the id of a new session; the oldest gives way where there are too many."""
        now = self._clock().mono_ms
        self._sessions = {key: session for key, session in self._sessions.items() if _lives(session, now)}
        if len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        key = secrets.token_urlsafe(32)
        self._sessions[key] = LoginSession(user, secrets.token_urlsafe(32), now, now)
        return key

    def find(self, key: str, *, used: bool) -> LoginSession | None:
        """Return a session that has not ended; ``used`` says that its user did something."""
        now = self._clock().mono_ms
        session = self._sessions.get(key)
        if session is None:
            return None
        if not _lives(session, now):
            del self._sessions[key]
            return None
        if used:
            session.used_ms = now
        return session

    def count(self) -> int:
        now = self._clock().mono_ms
        return sum(_lives(session, now) for session in list(self._sessions.values()))

    def end(self, key: str) -> None:
        self._sessions.pop(key, None)


def _lives(session: LoginSession, now_ms: int) -> bool:
    return now_ms < session.began_ms + SESSION_MS and now_ms < session.used_ms + IDLE_MS


class Throttle:
    """How many different wrong tokens a peer may give: `MAX_FAILURES` in a minute.

    One that is given again and again, by a scraper whose token is outdated, guesses nothing. A right token is never
    asked about here: behind a proxy, or on one machine, its bearer has the address of those who guess.
    """

    def __init__(self, clock: Callable[[], Now]) -> None:
        self._clock = clock
        self._failures: dict[str, deque[tuple[int, bytes]]] = {}

    def failed(self, peer: str, token: str) -> int:
        """Note a wrong token; return how long ``peer`` has to wait with another one, 0: it is told that this is wrong.

        The peer heard of longest ago gives way where there are too many.
        """
        failures = self._failures.pop(peer, deque[tuple[int, bytes]]())
        now = self._clock().mono_ms
        while failures and failures[0][0] <= now - FAILURES_WITHIN_MS:
            failures.popleft()
        digest = hashlib.sha256(token.encode("utf-8", "replace")).digest()
        if len(self._failures) >= MAX_PEERS:
            del self._failures[next(iter(self._failures))]
        self._failures[peer] = failures
        if digest in (known for _, known in failures):
            return 0
        if len(failures) == MAX_FAILURES:
            return failures[0][0] + FAILURES_WITHIN_MS - now
        failures.append((now, digest))
        return 0


DEFAULT_LISTEN = "127.0.0.1:7080"

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")

PACKAGES = ("fastapi", "uvicorn", "jinja2", "python-multipart")
"""What the extra ``console`` installs."""


def check_extra() -> None:
    """Raise `MachineError` that says what to install, where something is missing."""
    missing = [name for name in PACKAGES if find_spec(name.replace("-", "_")) is None]
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
        missing = [name for name in ("tls_cert", "login_file") if getattr(self, name) is None]
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
        return Users.drawn() if self.login_file is None else Users.of_file(self.login_file)

    def edit_functions(self) -> dict[str, EditFunction]:
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

        cert, key = read_file(self.tls_cert, "tls_cert"), read_secret(self.tls_key, "tls_key")
        check_certificate(cert, key, cert_option="tls_cert", key_option="tls_key")
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
_BYTES = ("root_certs", "client_pem")


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
            options[name] = options[name] and str(options[name])
        sources = [dataclasses.asdict(source) for source in self.sources]
        for source in sources:
            for name in _BYTES:
                source[name] = source[name] and base64.b64encode(source[name]).decode()
        return json.dumps({"options": options, "sources": sources}).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> ConsoleOrder:
        order = json.loads(line)
        options = order["options"]
        for name in _PATHS:
            options[name] = options[name] and Path(options[name])
        for name in ("checkpoints", "edit_with"):
            options[name] = tuple(options[name])
        for source in order["sources"]:
            for name in _BYTES:
                source[name] = source[name] and base64.b64decode(source[name])
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
            | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "GRPC_VERBOSITY": "NONE"},
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
