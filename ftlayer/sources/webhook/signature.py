"""Signatures that say that a request comes from somebody who knows a secret, and came whole."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ftlayer.checks import check_choice, check_text
from ftlayer.errors import ConfigError

ALGORITHMS = ("sha1", "sha256", "sha384", "sha512")
ENCODINGS = ("hex", "base64")


@dataclass(frozen=True)
class HmacSignature:
    """An HMAC (RFC 2104) of a request's body in one of its headers, as GitHub, Shopify and many others send it.

    Attributes:
        secret: what both know, or several, while one replaces the other.
        header: which header has the signature.
        prefix: what comes before it there.
        encoding: ``"hex"`` or ``"base64"``.
        algorithm: ``"sha256"``, …
    """

    secret: str | bytes | Sequence[str | bytes] = field(repr=False)
    header: str = "X-Hub-Signature-256"
    prefix: str = "sha256="
    encoding: str = "hex"
    algorithm: str = "sha256"

    def __post_init__(self) -> None:
        """Raise `ConfigError` for what cannot be checked."""
        check_text(self.header, "header", "the name of a header")
        check_choice(self.encoding, "encoding", ENCODINGS)
        check_choice(self.algorithm, "algorithm", ALGORITHMS)
        if not isinstance(self.prefix, str):
            raise ConfigError(f"prefix: expected a text, got a {type(self.prefix).__name__}")
        if not self._secrets or not all(isinstance(each, bytes) and each for each in self._secrets):
            raise ConfigError("secret: expected a text, bytes, or several of them, none of them empty")

    @property
    def _secrets(self) -> list[bytes]:
        given = [self.secret] if isinstance(self.secret, str | bytes) else list(self.secret)
        return [each.encode() if isinstance(each, str) else each for each in given]

    def is_right(self, headers: Mapping[bytes, bytes], body: bytes) -> bool:
        """Whether a request has a right signature; ``headers`` by their names in small letters."""
        given = headers.get(self.header.lower().encode("latin-1"))
        return given is not None and any(
            hmac.compare_digest(given.strip(), self._of(secret, body)) for secret in self._secrets
        )

    def _of(self, secret: bytes, body: bytes) -> bytes:
        digest = hmac.digest(secret, body, getattr(hashlib, self.algorithm)().name)
        text = digest.hex() if self.encoding == "hex" else base64.b64encode(digest).decode()
        return (self.prefix + text).encode()
