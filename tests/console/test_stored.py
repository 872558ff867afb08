"""Checkpoints that lie in a directory: listed, with the line that restores each, or why they cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from ftlayer.console.app import create_app


def test_what_cannot_be_read_is_said(make_console: Any, tmp_path: Path) -> None:
    """A directory that is missing, and one without any, are no faults of the page."""
    (tmp_path / "empty").mkdir()
    console = make_console(checkpoints=(str(tmp_path / "missing"), str(tmp_path / "empty")))
    bearer = {"authorization": f"Bearer {console.users.first.token}"}
    with TestClient(create_app(console), "http://localhost") as client:
        text = client.get("/checkpoints", headers=bearer).text
        assert str(tmp_path / "missing") in text
        missing, empty = client.get("/api/v1/checkpoints", headers=bearer).json()["items"]
    assert missing["failure"]
    assert (missing["items"], empty["items"], empty["failure"]) == ([], [], "")
    assert "There is none" in text
