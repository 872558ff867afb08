"""Client libraries that are missing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ftlayer.connectors.connections import client_library
from ftlayer.errors import ConfigError

# What installs without an extra lacks, and the modules that are imported behind a look for it alone.
_EXTRAS = (
    "boto3 botocore confluent_kafka deltalake fastapi httptools httpx jinja2 markupsafe multipart nats opentelemetry "
    "paho pika psycopg pyiceberg python_multipart redis s3fs starlette uvicorn uvloop"
)
_OF_EXTRAS = (
    "ftlayer.monitor.console.",
    "ftlayer.connectors.postgres.staging",
    "ftlayer.vertex.service.otlp_data",
)
_LOOKS = {"ftlayer.monitor.console.options"}

_IMPORT_ALL = """
import importlib, json, pkgutil, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import ftlayer
failed = {}
for module in pkgutil.walk_packages(ftlayer.__path__, "ftlayer."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            failed[module.name] = error.name
print(json.dumps(failed))
"""


def test_a_library_that_is_missing_is_named_with_its_extra() -> None:
    with pytest.raises(ConfigError, match=r"Redis needs redis-py .* pip install '\.\[redis\]'"):
        client_library("Redis", "redis-py", "redis", "no_such_library")


def test_a_module_of_a_package_is_given() -> None:
    assert client_library("Mail", "email", "mail", "email.message", "email.mime").EmailMessage


def test_nothing_but_what_an_extra_is_for_needs_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_ALL, _EXTRAS], capture_output=True, text=True, check=True
    )
    failed: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    assert "ftlayer.monitor.console.serve" in failed, "libraries of extras could be imported"
    wrong = {
        name: library for name, library in failed.items() if name in _LOOKS or not name.startswith(_OF_EXTRAS)
    }
    assert not wrong
