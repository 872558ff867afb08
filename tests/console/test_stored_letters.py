"""Dead letters of jobs without a vertex, in a console that was given their directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from starlette.testclient import TestClient

from ftlayer.checkpoint.letters import ChainLetter, LetterBatch, LetterKind
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.storage.dead_letters import StoredLetters
from ftlayer.checkpoint.storage.keys import storage_key
from ftlayer.monitor.console.options import ConsoleOptions
from ftlayer.monitor.console.searching import Console
from ftlayer.monitor.console.serve import create_app
from ftlayer.monitor.gather import Gatherer, StoredReports
from ftlayer.records.ipc import as_stream
from ftlayer.vertex.calls import Attempt


def test_letters_in_files_are_among_the_dead_letters(
    login_file: Path, manual_clock: Callable[..., Any], kit: Any, tmp_path: Path
) -> None:
    directory = str(tmp_path / "checkpoints")
    stored = StoredLetters(directory, "orders", storage_key(CheckpointConfig(directory=directory), "orders"))
    attempt = Attempt(1, 5_000, "ValueError: no number: 'x'", "parse", "slot 0", "Traceback: here")
    payload = as_stream(pa.record_batch({"line": ["a line that is no order"]})).to_pybytes()
    letter = ChainLetter(
        b"a letter's name.",
        1,
        "parse",
        0,
        0,
        LetterKind.RECORD,
        "parse",
        b"",
        payload,
        None,
        (attempt,),
        5,
        5,
    )
    stored.write(LetterBatch("run-1", (letter,)))
    clock = manual_clock()
    gatherer = Gatherer(lambda: (StoredReports(directory),), clock=clock)
    console = Console.of(ConsoleOptions(login_file=login_file, checkpoints=(directory,)), gatherer, clock)
    console.watch.refresh()
    with TestClient(create_app(console), "http://127.0.0.1:7080", follow_redirects=False) as client:
        headers = {"authorization": f"Bearer {kit.tokens['operator']}"}
        groups = client.get("/api/v1/dead/groups", headers=headers)
        assert groups.status_code == 200, groups.text
        assert [(each["stream"], each["operator"], each["count"]) for each in groups.json()["items"]] == [
            ("orders/parse", "parse", 1)
        ]
        client.post(
            "/login", data={"token": kit.tokens["operator"]}, headers={"origin": "http://127.0.0.1:7080"}
        )
        page = client.get("/dead")
        assert (page.status_code, "orders/parse" in page.text) == (200, True)
        (key,) = (each["key"] for each in client.get("/api/v1/records", headers=headers).json()["items"])
        (vertex,) = (view.vertex for view in console.watch.views())
        assert "Edit and requeue" in client.get(f"/records/{vertex}/{key}").text
        edited = client.put(
            f"/api/v1/records/{vertex}/{key}/payload", headers=headers, json={"line": "an order"}
        )
        assert (edited.status_code, edited.json()) == (200, {"changed": 1})
        (waiting,) = client.get("/api/v1/records?state=waiting", headers=headers).json()["items"]
        assert waiting["record"] == {"line": "an order"}
        assert "Requeue" not in client.get(f"/records/{vertex}/{key}").text
    console.watch.close()
