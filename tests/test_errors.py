"""Where errors are imported from."""

from __future__ import annotations

import importlib

import pytest


def test_what_was_never_there_is_an_ordinary_error() -> None:
    with pytest.raises(ImportError, match="NoSuchError"):
        exec("from ftlayer.errors import NoSuchError")
    assert not hasattr(importlib.import_module("ftlayer.errors"), "PermanentError")
