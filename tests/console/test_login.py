"""Who gets in: users, sessions, wrong tokens, forged forms, other hosts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ftlayer.errors import ConfigError
from ftlayer.monitor.console.options import (
    IDLE_MS,
    SESSION_MS,
    ConsoleOptions,
    Role,
    Sessions,
    Throttle,
    Users,
)
from ftlayer.monitor.console.pages.overview import own_path
from ftlayer.monitor.console.searching import Console
from ftlayer.monitor.gather import Gatherer
from ftlayer.transport.tls import make_certificate

TOKEN, OTHER = "a-token-of-a-login-file", "another-one-of-a-file"


def test_without_a_session_pages_lead_to_the_login(visitor: Any) -> None:
    """A page leads to the form and back; the API and the stream say 401."""
    answer = visitor.get("/dead?group=3")
    assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=%2Fdead%3Fgroup%3D3")
    assert visitor.get("/api/v1/openapi.json").status_code == 401
    assert visitor.get("/events").status_code == 401


def test_logging_in_and_out(visitor: Any) -> None:
    """The cookie is out of reach of scripts and of other sites; logging out ends the session at the server too."""
    answer = visitor.client.post(
        "/login",
        data={"token": visitor.tokens["operator"], "next": "/dead"},
        headers={"origin": visitor.origin},
    )
    assert (answer.status_code, answer.headers["location"]) == (303, "/dead")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "path=/" in cookie
    key = visitor.client.cookies["ftlayer-0"]
    assert visitor.get("/api/v1/openapi.json").status_code == 200
    csrf = visitor.csrf
    assert (
        visitor.client.post("/logout", data={"csrf": csrf}, headers={"origin": visitor.origin}).status_code
        == 303
    )
    visitor.client.cookies.set("ftlayer-0", key)
    assert visitor.get("/api/v1/openapi.json").status_code == 401


def test_a_wrong_token_does_not_get_in_and_is_not_tried_often(visitor: Any, clock: Any) -> None:
    """Five wrong tokens a minute, from any door; the right one, from the same address, has never to wait."""
    for number in range(3):
        assert (
            visitor.client.post(
                "/login", data={"token": f"no {number}"}, headers={"origin": visitor.origin}
            ).status_code
            == 403
        )
    for number in range(2):
        answer = visitor.get("/api/v1/openapi.json", headers={"authorization": f"Bearer {number}"})
        assert answer.status_code == 401
        assert answer.json()["message"] == "no user has this token"
    origin = {"origin": visitor.origin}
    guess, known = {"authorization": "Bearer 2"}, {"authorization": "Bearer 1"}
    assert visitor.client.post("/login", data={"token": "no 3"}, headers=origin).status_code == 429
    assert visitor.get("/api/v1/openapi.json", headers=guess).status_code == 429
    assert visitor.get("/api/v1/openapi.json", headers=known).status_code == 401
    right = visitor.tokens["operator"]
    bearer = {"authorization": f"Bearer {right}"}
    assert visitor.get("/api/v1/openapi.json", headers=bearer).status_code == 200
    assert visitor.client.post("/login", data={"token": right}, headers=origin).status_code == 303
    clock.move(60_001)
    assert visitor.get("/api/v1/openapi.json", headers=guess).status_code == 401


def test_sessions_end(visitor: Any, clock: Any) -> None:
    """An hour without a request ends a session; so do twelve hours with some."""
    visitor.log_in("reader")
    clock.move(IDLE_MS - 1)
    assert visitor.get("/api/v1/openapi.json").status_code == 200
    clock.move(IDLE_MS)
    assert visitor.get("/api/v1/openapi.json").status_code == 401
    visitor.log_in("reader")
    for _ in range(SESSION_MS // IDLE_MS * 2 - 1):
        clock.move(IDLE_MS // 2)
        assert visitor.get("/api/v1/openapi.json").status_code == 200
    clock.move(IDLE_MS // 2)
    assert visitor.get("/api/v1/openapi.json").status_code == 401


def test_an_open_page_does_not_keep_its_session(clock: Any) -> None:
    """What a stream asks is not used, so that a forgotten tab ends."""
    sessions = Sessions(clock)
    key = sessions.start(Users.drawn().first)
    clock.move(IDLE_MS - 1)
    assert sessions.find(key, used=False) is not None
    clock.move(1)
    assert sessions.find(key, used=False) is None


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://evil.example"},
        {"origin": "http://localhost:6666"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_a_request_of_another_site_is_refused(visitor: Any, headers: dict[str, str]) -> None:
    """A page of another site cannot even log somebody in."""
    answer = visitor.client.post("/login", data={"token": visitor.tokens["operator"]}, headers=headers)
    assert answer.status_code == 403
    assert not visitor.client.cookies


def test_a_forged_form_does_nothing(visitor: Any) -> None:
    """The right origin is not enough: the form's token has to be the session's."""
    visitor.log_in("operator")
    for csrf in ("", "wrong", "ü"):
        answer = visitor.client.post("/logout", data={"csrf": csrf}, headers={"origin": visitor.origin})
        assert answer.status_code == 403
    assert visitor.get("/api/v1/openapi.json").status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7080", "localhost.evil.example", ""])
def test_another_host_is_refused(visitor: Any, host: str) -> None:
    """A name that somebody else has pointed at this address (DNS rebinding) is not ours."""
    assert visitor.get("/login", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost:7080", "127.0.0.1:9999", "[::1]:7080", "LOCALHOST"])
def test_names_of_this_machine_are_taken(visitor: Any, host: str) -> None:
    """Any port of them: a tunnel has another one."""
    assert visitor.get("/login", headers={"host": host}).status_code == 200


def test_headers_are_on_every_answer(visitor: Any) -> None:
    """No inline script, no frames, nothing kept; on refusals and on what is not there, too."""
    visitor.log_in("reader")
    for path in ("/login", "/nothing-here", "/api/v1/nothing", "/api/v1/openapi.json"):
        headers = visitor.get(path).headers
        assert "script-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
    assert "content-security-policy" in visitor.get("/", headers={"host": "evil.example"}).headers
    assert "no-store" not in visitor.get("/static/console.css").headers.get("cache-control", "")


def test_a_body_without_end_is_cut_off(visitor: Any) -> None:
    """The size is checked where it is said, and where it is not."""
    answer = visitor.client.post("/login", content=b"x" * (5 << 20), headers={"origin": visitor.origin})
    assert answer.status_code == 413
    pieces = (b"x" * 65_536 for _ in range(80))
    headers = {"origin": visitor.origin, "content-type": "application/x-www-form-urlencoded"}
    assert visitor.client.post("/login", content=pieces, headers=headers).status_code == 413


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ("/dead?a=b", "/dead?a=b"),
        ("//evil.example", "/"),
        ("/\\evil.example", "/"),
        ("https://evil", "/"),
        ("", "/"),
        ("/a\nb", "/"),
    ],
)
def test_the_way_back_stays_here(given: str, own: str) -> None:
    """``next`` leads to a path of this console, whatever a link says."""
    assert own_path(given) == own


def test_a_login_file(login_file: Path, visitor: Any) -> None:
    """Roles and names belong to tokens."""
    users = Users.of_file(login_file)
    ada, bob = (users.of_token(visitor.tokens[role]) for role in ("operator", "reader"))
    assert ada is not None
    assert bob is not None
    assert (ada.name, ada.role, bob.name, bob.role) == ("ada", Role.OPERATOR, "bob", Role.READER)
    assert users.of_token("") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no user"),
        ("operator ada", "line 1.*2 words"),
        (f"admin ada {TOKEN}", "role 'operator' or 'reader'"),
        ("operator ada short", "can be guessed"),
        (f"operator ada {TOKEN}\nreader ada {OTHER}", "one name twice"),
        (f"operator ada {TOKEN}\nreader bob {TOKEN}", "one token twice"),
        (f"operator {'a' * 65} {TOKEN}", "64 printable"),
    ],
)
def test_a_bad_login_file_says_where(tmp_path: Path, text: str, says: str) -> None:
    """Each line that is none is named."""
    path = tmp_path / "logins"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=says):
        Users.of_file(path)


def test_a_login_file_of_others_is_refused(login_file: Path) -> None:
    """As a token file is."""
    login_file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Users.of_file(login_file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_login_file_that_others_may_write_is_refused_whoever_owns_it(login_file: Path) -> None:
    """An administrator's, read by his group, is taken; one that anybody can put a token in is not."""
    os.chown(login_file, 12_345, 12_345)
    login_file.chmod(0o640)
    assert Users.of_file(login_file).first
    for mode in (0o660, 0o602):
        login_file.chmod(mode)
        with pytest.raises(ConfigError, match="chmod go-w"):
            Users.of_file(login_file)


def test_off_loopback_needs_tls_and_users(login_file: Path, tmp_path: Path) -> None:
    """One of the two is not enough."""
    with pytest.raises(ConfigError, match="tls_cert and login_file missing"):
        ConsoleOptions(listen="0.0.0.0:7080")
    with pytest.raises(ConfigError, match="tls_cert missing"):
        ConsoleOptions(listen="0.0.0.0:7080", login_file=login_file)
    pem = tmp_path / "cert.pem"
    with pytest.raises(ConfigError, match="login_file missing"):
        ConsoleOptions(listen="0.0.0.0:7080", tls_cert=pem, tls_key=pem)
    with pytest.raises(ConfigError, match="belong together"):
        ConsoleOptions(tls_cert=pem)
    with pytest.raises(ConfigError, match="tls_client_ca"):
        ConsoleOptions(tls_client_ca=pem)


def test_a_certificate_names_the_hosts(login_file: Path, tmp_path: Path, clock: Any) -> None:
    """Over TLS browsers may use the names that the certificate has; the cookie is then bound to the host."""
    made = make_certificate(["console.example", "10.1.2.3"])
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(made.cert)
    key.write_bytes(made.key)
    key.chmod(0o600)
    options = ConsoleOptions("0.0.0.0:7080", login_file, cert, key)
    options.check_certificates()
    assert {"console.example", "10.1.2.3"} <= options.hosts()
    assert "localhost" not in options.hosts()
    assert Console.of(options, Gatherer(list), clock).cookie.startswith("__Host-")


def test_the_throttle_forgets_peers(clock: Any) -> None:
    """Failures are counted for a minute, by peer."""
    throttle = Throttle(clock)
    for number in range(5):
        assert throttle.failed("one", f"guess {number}") == 0
        clock.move(1_000)
    assert throttle.failed("one", "guess 5") == 55_000
    assert throttle.failed("other", "guess 5") == 0
    clock.move(55_000)
    assert throttle.failed("one", "guess 5") == 0


def test_one_outdated_token_locks_nobody_out(visitor: Any) -> None:
    """A scraper that has not heard of the new one guesses nothing."""
    for _ in range(20):
        assert visitor.get("/metrics", headers={"authorization": "Bearer outdated"}).status_code == 401
    bearer = {"authorization": f"Bearer {visitor.tokens['reader']}"}
    assert visitor.get("/metrics", headers=bearer).status_code == 200


def test_a_session_that_was_ended_is_none(clock: Any) -> None:
    """A session that has ended is no session, no matter who brings its id."""
    sessions = Sessions(clock)
    key = sessions.start(Users.drawn().first)
    assert sessions.find(key, used=True) is not None
    sessions.end(key)
    assert sessions.find(key, used=True) is None
    assert sessions.find("", used=True) is None
