"""Client libraries that are missing."""

from __future__ import annotations

import pytest

from ftlayer.clients.libraries import client_library
from ftlayer.errors import ConfigError


def test_a_library_that_is_missing_is_named_with_its_extra() -> None:
    with pytest.raises(ConfigError, match=r"Redis needs redis-py .* pip install 'ftlayer\[redis\]'"):
        client_library("no_such_library", "Redis", "redis-py", "redis")


def test_a_module_of_a_package_is_given() -> None:
    assert client_library("email.message", "Mail", "email", "mail").EmailMessage
