"""Certificates: those made for a job, and checks of those that a user gives.

A job's is self-signed, so that the certificate itself is what clients trust.
"""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ftlayer.errors import ConfigError

# Longer than a job that is not restarted; the key dies with the driver anyway.
VALID_DAYS = 1_825
# Clocks of a cluster's machines differ.
_CLOCK_SKEW = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Certificate:
    """PEM of a certificate (what clients take as ``root_certs``) and of its private key."""

    cert: bytes
    key: bytes = field(repr=False)


def make_certificate(hosts: list[str]) -> Certificate:
    """Make a key and a certificate for ``hosts``, IP addresses or names; `ConfigError` for other text."""
    if not hosts:
        raise ConfigError("hosts: a certificate needs at least one address or name")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ftlayer vertex")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private = key.private_bytes(pem, pkcs8, serialization.NoEncryption())
    return Certificate(certificate.public_bytes(pem), private)


def check_certificate(cert: bytes, key: bytes, *, cert_option: str, key_option: str) -> None:
    """Raise `ConfigError` unless these are PEM of a certificate chain and of its private key; gRPC says nothing.

    One text may hold both. The options are those that the error names.
    """
    chain = load_certificates(cert, cert_option)
    try:
        private = serialization.load_pem_private_key(key, None)
    except TypeError:
        raise ConfigError(
            f"{key_option}: the key has a passphrase, which gRPC cannot ask for: give it without one"
        ) from None
    except (ValueError, UnsupportedAlgorithm) as error:
        # The error's text may quote the key.
        raise ConfigError(f"{key_option}: expected PEM of a private key ({type(error).__name__})") from None
    if _public(private) != _public(chain[0]):
        raise ConfigError(f"{key_option}: the key is not that of the first certificate of {cert_option}")
    ended = chain[0].not_valid_after_utc
    if ended < datetime.datetime.now(datetime.UTC):
        raise ConfigError(
            f"{cert_option}: the certificate expired at {ended:%Y-%m-%d %H:%M} UTC, and clients refuse it: "
            "give a new one"
        )


def load_certificates(pem: bytes, option: str) -> list[x509.Certificate]:
    """Return the certificates of a PEM text; `ConfigError` naming ``option`` if there are none."""
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise _no_certificates(option, error) from None


def check_roots(pem: bytes, option: str) -> None:
    """Raise `ConfigError` naming ``option`` for a text without a certificate.

    Only the first is read: bundles of systems hold some that are not to the letter of the standards.
    """
    try:
        x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise _no_certificates(option, error) from None


def _no_certificates(option: str, error: ValueError) -> ConfigError:
    return ConfigError(f"{option}: expected PEM of certificates ({error})")


def _public(holder: x509.Certificate | PrivateKeyTypes) -> bytes:
    return holder.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass  # not an address, so it is a name
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError(f"hosts: {host!r} is neither an address nor a name ({error})") from None
