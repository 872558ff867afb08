"""Who may use the console: users with tokens and roles, their sessions, and how often somebody may guess."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from ftlayer.common.clock import Now
from ftlayer.common.secret_files import read_secret
from ftlayer.errors import ConfigError

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
        for what, values in (
            ("name", [user.name for user in users]),
            ("token", [user.token for user in users]),
        ):
            if len(set(values)) < len(values):
                raise ConfigError(
                    f"login_file: {path} has one {what} twice: each user has a {what} of their own"
                )
        return cls(tuple(users))

    def of_token(self, token: str) -> User | None:
        """Return who has this token; all are compared, so that the time it takes tells nothing."""
        given = token.encode("utf-8", "replace")
        found = None
        for user in self._users:
            if hmac.compare_digest(user.token.encode(), given):
                found = user
        return found

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
        failures = self._of(peer)
        now = self._clock().mono_ms
        digest = hashlib.sha256(token.encode("utf-8", "replace")).digest()
        if failures is None:
            if len(self._failures) >= MAX_PEERS:
                del self._failures[next(iter(self._failures))]
            failures = self._failures[peer] = deque()
        if digest in (known for _, known in failures):
            return 0
        if len(failures) == MAX_FAILURES:
            return failures[0][0] + FAILURES_WITHIN_MS - now
        failures.append((now, digest))
        return 0

    def _of(self, peer: str) -> deque[tuple[int, bytes]] | None:
        failures = self._failures.get(peer)
        if failures is None:
            return None
        now = self._clock().mono_ms
        while failures and failures[0][0] <= now - FAILURES_WITHIN_MS:
            failures.popleft()
        if not failures:
            del self._failures[peer]
            return None
        return failures
