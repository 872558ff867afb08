"""Where errors are imported from."""

from __future__ import annotations

import importlib

import pytest

import ftlayer
from ftlayer import errors


@pytest.mark.parametrize("name", ["FailException", "PermanentFailure", "RetryLater", "RowsRejected"])
def test_what_functions_raise_is_found_where_it_was_with_a_warning(name: str) -> None:
    with pytest.warns(
        errors.FTLayerDeprecationWarning,
        match=f"import {name} from ftlayer, not from ftlayer.errors.*until 0.4.0",
    ) as said:
        found = getattr(errors, name)
    assert found is getattr(ftlayer, name)
    assert said[0].filename == __file__


def test_what_was_never_there_is_an_ordinary_error() -> None:
    with pytest.raises(ImportError, match="NoSuchError"):
        exec("from ftlayer.errors import NoSuchError")
    assert not hasattr(importlib.import_module("ftlayer.errors"), "PermanentError")
