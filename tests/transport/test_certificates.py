"""What is looked at of a certificate before anybody listens with it."""

from __future__ import annotations

import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ftlayer.errors import ConfigError
from ftlayer.transport.tls import check_certificate


def certificate(until: datetime.datetime) -> tuple[bytes, bytes]:
    """Return PEM of a certificate that counts until then, and of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "vertex")])
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(until - datetime.timedelta(days=1))
        .not_valid_after(until)
        .sign(key, hashes.SHA256())
    )
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return built.public_bytes(serialization.Encoding.PEM), key.private_bytes(*form)


def test_one_that_has_expired_is_refused() -> None:
    """gRPC serves with it, and its clients refuse it one by one."""
    until = datetime.datetime(2024, 2, 29, 12, 30, tzinfo=datetime.UTC)
    with pytest.raises(ConfigError, match=r"^tls_cert: the certificate expired at 2024-02-29 12:30 UTC"):
        check_certificate(*certificate(until), cert_option="tls_cert", key_option="tls_key")


def test_one_that_still_counts_is_taken() -> None:
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=10)
    check_certificate(*certificate(until), cert_option="tls_cert", key_option="tls_key")
