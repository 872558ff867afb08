from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from cryptography.hazmat.primitives import serialization
from pyarrow import flight
from typer.testing import CliRunner

from ftlayer.cli.main import app, parse_size
from ftlayer.errors import ConfigError, VertexUnavailableError
from ftlayer.transport.tls import make_certificate
from ftlayer.vertex import calls
from ftlayer.vertex.client.client import VertexClient

TOKEN = "a-token-of-some-length"


def ftlayer(*arguments: object, answer: str | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=answer)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture(autouse=True)
def no_token_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FTLAYER_TOKEN", raising=False)
    # Commands set it where it is missing.
    monkeypatch.setenv("GRPC_VERBOSITY", "ERROR")
    # Wide, so that no word is cut off in the frames of usage errors.
    monkeypatch.setenv("COLUMNS", "200")
    # No driver of another test is found.
    monkeypatch.setattr("ftlayer.monitor.sources.socket_directories", tuple)


@dataclass
class Served:
    """A vertex that ``ftlayer serve`` runs."""

    address: str
    store: Path
    token_file: Path
    process: subprocess.Popen[str]

    def client(self) -> VertexClient:
        return VertexClient(self.address, TOKEN)

    def dead(self, command: str, *arguments: object, answer: str | None = None) -> tuple[int, str]:
        place = ("--address", self.address, "--token-file", self.token_file)
        return ftlayer("dead", command, *arguments, *place, answer=answer)

    def make_dead_letters(self, texts: list[str]) -> list[str]:
        """Make a dead letter of each text; return their keys."""
        roots = np.arange(1, len(texts) + 1, dtype=np.uint64)
        with self.client() as client:
            opened = client.call(calls.OpenStream("s", calls.StreamOptions(max_attempts=1)))
            assert isinstance(opened, calls.StreamOpened)
            payload = pa.record_batch({"text": texts})
            client.call(calls.Persist("s", payload, roots, roots))
            failures = [
                calls.Failure(int(root), f"ValueError: [{root}] is broken", "parse", "Traceback: here")
                for root in roots
            ]
            client.call(calls.Fail(tuple(failures), opened.incarnation))
            found = client.call(calls.ListRecords("dead"))
            assert isinstance(found, calls.RecordList)
            return [record.key.hex() for record in found.records]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN + "\n")
    token_file.chmod(0o600)
    store = tmp_path / "store"
    command = [sys.executable, "-m", "ftlayer.cli.main", "serve", str(store), "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*command, "--token-file", str(token_file), "--max-store", "64MiB"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("ftlayer vertex at "), line + process.communicate()[1]
    yield Served(line.split(",")[0].split()[-1], store, token_file, process)
    process.kill()
    process.communicate()


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from ftlayer.cli.main import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'pyspark', 'pyarrow', 'numba', 'numpy', 'pandas', 'lmdb'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    for command in ("demo", "serve", "inspect", "dead", "version"):
        assert command in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo", "--kill", "cat"], "none"),
        (["demo", "--lines", "1"], "--lines"),
        (["inspect"], "Missing argument"),
        (["inspect", "x", "--list", "everything"], "pending"),
        (["dead", "list"], "FTLAYER_TOKEN"),
        (["dead", "list", "--token-file", "/nowhere/token"], "/nowhere/token cannot be read"),
        (["serve", "x", "--max-store", "many"], "--max-store"),
        (["nothing"], "nothing"),
    ],
)
def test_usage_errors_have_exit_code_2(arguments: list[str], said: str) -> None:
    code, output = ftlayer(*arguments)
    assert code == 2
    assert said in output
    assert "Traceback" not in output


def test_an_input_that_is_not_there_is_a_usage_error_and_leaves_nothing_behind(tmp_path: Path) -> None:
    code, output = ftlayer("demo", "--input", tmp_path / "*.log", "--dir", tmp_path / "run")
    assert code == 2
    assert "no file matches" in output
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    code, output = ftlayer("demo", "--dir", tmp_path / "full")
    assert code == 2
    assert "not empty" in output


def test_a_token_that_is_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("short")
    (tmp_path / "token").chmod(0o600)
    code, output = ftlayer("serve", tmp_path / "store", "--token-file", tmp_path / "token")
    assert code == 2
    assert output.startswith("ftlayer: --token-file (or FTLAYER_TOKEN): expected 16 to")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o606])
def test_a_token_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(mode)
    for arguments in (("serve", tmp_path / "store"), ("dead", "list")):
        code, output = ftlayer(*arguments, "--token-file", tmp_path / "token")
        assert code == 2
        assert f"chmod 600 {tmp_path / 'token'}" in output.replace("\n", "")


def test_off_loopback_needs_tls(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    arguments = ("serve", tmp_path / "store", "--token-file", tmp_path / "token", "--listen", "0.0.0.0:0")
    code, output = ftlayer(*arguments)
    assert code == 2
    assert output.startswith("ftlayer: --listen: '0.0.0.0:0' can be reached")
    assert "give --tls-cert and --tls-key, or listen on 127.0.0.1" in output
    (tmp_path / "cert").write_text("cert")
    code, output = ftlayer(*arguments, "--tls-cert", tmp_path / "cert")
    assert (code, output) == (2, "ftlayer: --tls-cert, --tls-key: give both or none\n")


def test_files_that_are_no_certificates_are_named(tmp_path: Path) -> None:
    good, other = make_certificate(["127.0.0.1"]), make_certificate(["127.0.0.1"])
    key = serialization.load_pem_private_key(good.key, None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    files = {"none": b"no PEM", "cert": good.cert, "key": good.key, "other": other.key, "locked": locked}
    for name, text in (files | {"token": TOKEN.encode()}).items():
        (tmp_path / name).write_bytes(text)
        (tmp_path / name).chmod(0o600)
    for cert, private, ca, said in (
        ("none", "key", "cert", "--tls-cert: expected PEM of certificates"),
        ("cert", "none", "cert", "--tls-key: expected PEM of a private key"),
        ("cert", "other", "cert", "--tls-key: the key is not that of the first certificate of --tls-cert"),
        ("cert", "locked", "cert", "--tls-key: the key has a passphrase"),
        ("cert", "key", "none", "--tls-client-ca: expected PEM of certificates"),
    ):
        options = {"token-file": "token", "tls-cert": cert, "tls-key": private, "tls-client-ca": ca}
        places = [part for name, file in options.items() for part in (f"--{name}", tmp_path / file)]
        code, output = ftlayer("serve", tmp_path / "store", "--listen", "127.0.0.1:0", *places)
        assert (code, said in output) == (2, True), output
    assert not (tmp_path / "store").exists()
    for option in ("--root-certs", "--client-pem"):
        place = ("--address", "grpc+tls://127.0.0.1:1", "--token-file", tmp_path / "token")
        code, output = ftlayer("dead", "list", *place, option, tmp_path / "none")
        assert (code, output.startswith(f"ftlayer: {option}: expected PEM of certificates")) == (2, True), (
            output
        )


def test_inspect_says_what_is_wrong_with_a_path(tmp_path: Path) -> None:
    code, output = ftlayer("inspect", tmp_path)
    assert code == 2
    assert "holds no store" in output
    code, output = ftlayer("inspect", tmp_path / "gone")
    assert code == 2
    assert "is not there" in output


def test_dead_letters_are_listed_shown_requeued_and_purged(served: Served) -> None:
    keys = served.make_dead_letters(["one", "two", "three"])
    code, output = served.dead("list")
    assert code == 0
    assert all(key in output for key in keys)
    assert "(in parse) ValueError: [1] is broken" in output
    assert '{"text": "two"}' in output
    assert "3 listed" in output
    code, output = served.dead("list", "--limit", 2)
    assert output.splitlines()[-1] == "2 listed of 3; --limit shows more"

    code, output = served.dead("show", keys[1])
    assert code == 0
    assert "Traceback: here" in output
    assert "one" not in output

    code, output = served.dead("requeue", keys[0])
    assert (code, output.splitlines()[1:]) == (0, ["requeued 1 of 1"])
    assert output.startswith("ftlayer: Requeue 1 dead letter of s in 127.0.0.1")
    code, output = served.dead("requeue", keys[0], keys[0])
    assert code == 1
    assert output.startswith("requeued 0 of 1\nftlayer: 1 of the keys is of no dead letter")
    code, output = served.dead("purge", keys[0], "--yes")
    assert code == 1
    assert output.startswith("purged 0 of 1\nftlayer: 1 of the keys is of no dead letter")
    code, output = served.dead("purge", keys[1], answer="n\n")
    assert code == 1
    assert "2 listed" in served.dead("list")[1]
    code, output = served.dead("purge", "--all", "--yes")
    assert (code, output.splitlines()[1:]) == (0, ["purged 2 of 2"])
    assert "none" in served.dead("list")[1]
    code, output = served.dead("show", keys[1])
    assert code == 1
    assert "no dead letter" in output


def test_requeue_and_purge_want_keys_or_all_but_not_both(served: Served) -> None:
    for command in ("requeue", "purge"):
        assert served.dead(command)[0] == 2
        assert served.dead(command, "00", "--all")[0] == 2
        assert served.dead(command, "xyz")[0] == 2


def test_a_wrong_token_is_one_sentence(served: Served) -> None:
    served.token_file.write_text("another-token-of-some-length")
    code, output = served.dead("list")
    assert code == 1
    assert output.startswith("ftlayer: the vertex does not take the token: ")
    assert "by --token-file or FTLAYER_TOKEN" in output


def test_an_error_of_the_transport_names_options_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise VertexUnavailableError("possible cause: the certificate was not accepted: root_certs needs it")

    monkeypatch.setenv("FTLAYER_TOKEN", TOKEN)
    monkeypatch.setattr(VertexClient, "call", fail)
    code, output = ftlayer("dead", "list")
    assert (code, output.split(": ")[-1]) == (1, "--root-certs needs it\n")


def test_grpc_writes_nothing_of_its_own_about_a_certificate(tmp_path: Path) -> None:
    mine, other = make_certificate(["127.0.0.1"]), make_certificate(["127.0.0.1"])
    code = """
from ftlayer.cli import connection
from ftlayer.cli.main import main
connection.DEADLINE_MS = 1_000
main()
"""
    (tmp_path / "ca").write_bytes(other.cert)
    tls = {"tls_certificates": [(mine.cert, mine.key)]}
    with flight.FlightServerBase("grpc+tls://127.0.0.1:0", **tls) as server:
        address = f"grpc+tls://127.0.0.1:{server.port}"
        known = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
        done = subprocess.run(
            [sys.executable, "-c", code, "jobs", "--vertex", address, "--root-certs", str(tmp_path / "ca")],
            env=known | {"FTLAYER_TOKEN": TOKEN},
            capture_output=True,
            text=True,
            timeout=900,
        )
    (line,) = done.stderr.splitlines()
    assert (done.returncode, "the vertex's certificate was not accepted: --root-certs" in line) == (
        1,
        True,
    ), line


def test_a_store_that_is_held_is_said_before_a_port_that_is_taken(served: Served, tmp_path: Path) -> None:
    place = served.address.removeprefix("grpc://")
    options = ("--listen", place, "--token-file", served.token_file)
    code, output = ftlayer("serve", served.store, *options)
    assert (code, output.split(": ")[1]) == (1, f"{served.store} is held by process {served.process.pid}")
    code, output = ftlayer("serve", tmp_path / "other", *options)
    said = f"ftlayer: --listen: cannot listen on {place}: another process does; stop that, or name another port\n"
    assert (code, output) == (1, said)


def test_inspect_works_beside_a_live_vertex_and_after_it(served: Served) -> None:
    keys = served.make_dead_letters(["one", "two"])
    code, output = ftlayer("inspect", served.store)
    assert code == 0
    assert str(served.process.pid) in output
    assert "A vertex has this store open" in output

    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(600) == 0
    code, output = ftlayer("inspect", served.store)
    assert "none" in output
    assert [line.split()[-1] for line in output.splitlines() if line.startswith("dead letters")] == ["2"]
    groups = json.loads(ftlayer("inspect", served.store, "--json")[1])["groups"]
    assert [(group["count"], group["operator"], group["reason"]) for group in groups] == [
        (2, "parse", "ValueError: […] is broken")
    ]
    assert "table dead" not in output
    assert "table dead" in ftlayer("inspect", served.store, "--tables")[1]
    listed = json.loads(ftlayer("inspect", served.store, "--list", "dead", "--limit", 1, "--json")[1])
    assert ([item["record"] for item in listed["items"]], listed["total"]) == ([{"text": "one"}], 2)
    code, output = ftlayer("inspect", served.store, "--list", "dead")
    assert all(key in output for key in keys)
    code, output = ftlayer("inspect", served.store / "shard-000", "--list", "dead", "--limit", 1)
    assert output.splitlines()[-1] == "1 listed of 2; --limit shows more"
    assert "none" in ftlayer("inspect", served.store, "--list", "waiting")[1]


def test_inspect_numbers_keys_by_shard(tmp_path: Path) -> None:
    from ftlayer.cli.offline import inspect_vertex, stored_records
    from ftlayer.vertex.store.lmdb_store import LmdbStore

    for shard in range(2):
        LmdbStore.open(tmp_path / f"shard-{shard:03}", max_store_bytes=1 << 24).close()
    assert [report.dead for report in inspect_vertex(tmp_path)] == [0, 0]
    assert list(stored_records(tmp_path, "dead")) == []


@pytest.mark.parametrize(
    ("text", "size"), [("17", 17), ("64MiB", 64 << 20), ("8G", 8 << 30), ("1 kb", 1024), ("2TB", 2 << 40)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--max-store") == size


@pytest.mark.parametrize("text", ["", "G", "-1", "1.5G", "8 gallons"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--max-store"):
        parse_size(text, "--max-store")


def test_ctrl_c_ends_serve_in_order(served: Served) -> None:
    os.kill(served.process.pid, signal.SIGINT)
    assert served.process.wait(600) == 0
