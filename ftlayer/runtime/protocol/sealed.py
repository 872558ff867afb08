"""Pickles between the driver and its slots, sealed by the job's key, so that no others are ever unpickled."""

from __future__ import annotations

import hashlib
import hmac
import io
import pickle
from typing import Any

from ftlayer.errors import UnauthorizedError

KEY_BYTES = 32
_MAC_BYTES = 32

_MOVED = {"ftlayer.sinks.batch_log": "ftlayer.sinks.files"}
"""Modules whose classes are in checkpoints of earlier versions, and where these classes stand now."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(_MOVED.get(module, module), name)


def seal(value: Any, key: bytes) -> bytes:
    """Pickle ``value`` as Spark pickles functions (by value where need be) behind a keyed checksum."""
    from pyspark import cloudpickle

    pickled: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    return _mac(pickled, key) + pickled


def unseal(sealed: bytes, key: bytes) -> Any:
    """Return what was sealed; `UnauthorizedError`, before anything is unpickled, if the key is not the same."""
    mac, pickled = sealed[:_MAC_BYTES], sealed[_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(pickled, key)):
        raise UnauthorizedError("a message between driver and slot was not sealed by this job's key")
    return _Unpickler(io.BytesIO(pickled)).load()


def reseal(sealed: bytes, old: bytes, new: bytes) -> bytes:
    """Return what was sealed with ``old`` as sealed with ``new``; `UnauthorizedError` if it was not."""
    mac, pickled = sealed[:_MAC_BYTES], sealed[_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(pickled, old)):
        raise UnauthorizedError("a message of a checkpoint was not sealed by the key of its job")
    return _mac(pickled, new) + pickled


def _mac(pickled: bytes, key: bytes) -> bytes:
    return hmac.new(key, pickled, hashlib.sha256).digest()
