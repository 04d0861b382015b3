"""TLS of listeners and channels: certificates out of files, checked at the start, read again when they change.

gRPC speaks TLS 1.2 and 1.3 alone. A listener looks at its files at each handshake, a channel when it is asked for.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from services.common.errors import StartError
from services.common.reloaded import Reloaded

if TYPE_CHECKING:
    from cryptography import x509

EXPIRY_NOTICE = timedelta(days=7)
"""Before a certificate's end, from when on its reading warns."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pair:
    """PEM of a key, and of its certificate with what is between that and its CA."""

    key: bytes
    chain: bytes


@dataclass(frozen=True)
class ServerTls:
    """Files of a listener. With `client_ca`, a client must show a certificate of it."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """That follow the files. Raises StartError for files that cannot serve."""
        paths = [self.cert, self.key] + ([self.client_ca] if self.client_ca is not None else [])
        files = Reloaded(paths, self._read)

        def fetch() -> Any:
            if not files.refreshed():
                return None  # gRPC keeps what it has
            log.info("certificate %s was read again", self.cert)
            return files.value

        return grpc.dynamic_ssl_server_credentials(files.value, fetch, self.client_ca is not None)

    def _read(self) -> Any:
        pair = read_pair("tls_cert", self.cert, "tls_key", self.key)
        roots = read_authorities("tls_client_ca", self.client_ca) if self.client_ca is not None else None
        return grpc.ssl_server_certificate_configuration([(pair.key, pair.chain)], roots)


@dataclass(frozen=True)
class PeerTls:
    """Files of a channel: whose certificates it trusts, and its own where the peer asks for one. `server_name` is what
    the peer's certificate must name; empty: the host that is dialled. `option` is how an operator's names of the files
    begin, for errors."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None
    server_name: str = ""
    option: str = "peer_"

    def options(self) -> list[tuple[str, Any]]:
        """Of the channel."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []

    def files(self) -> Reloaded[grpc.ChannelCredentials]:
        """Credentials that follow the files. Raises StartError."""
        return Reloaded([path for path in (self.ca, self.cert, self.key) if path is not None], self._read)

    def _read(self) -> grpc.ChannelCredentials:
        roots = read_authorities(f"{self.option}ca", self.ca)
        if self.cert is None or self.key is None:
            return grpc.ssl_channel_credentials(roots)
        pair = read_pair(f"{self.option}cert", self.cert, f"{self.option}key", self.key)
        return grpc.ssl_channel_credentials(roots, pair.key, pair.chain)


def read_pair(cert_name: str, cert: Path, key_name: str, key: Path) -> Pair:
    """A certificate chain and its key; the names are what an operator set. Raises StartError: unreadable, no PEM, not
    of one another, expired. Warns of a key that everybody may read, and of an end that is near."""
    from cryptography.hazmat.primitives import serialization

    key_pem, chain_pem = _read(key_name, key), _read(cert_name, cert)
    leaf = _certificates(cert_name, cert, chain_pem)[0]
    try:
        private = serialization.load_pem_private_key(key_pem, password=None)
    except TypeError:
        raise StartError(f"{key_name}: {key} is encrypted; give a key without a passphrase") from None
    except ValueError as error:
        raise StartError(f"{key_name}: {key} holds no private key in PEM ({error})") from None
    public = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    if private.public_key().public_bytes(*public) != leaf.public_key().public_bytes(*public):
        raise StartError(
            f"{key_name}: {key} is not the key of the certificate {cert}; give the two that belong together"
        )
    _check_dates(cert_name, cert, leaf)
    if key.stat().st_mode & 0o004:
        log.warning("%s: every user of this machine may read %s; chmod 600 (in Kubernetes: defaultMode)", key_name, key)
    return Pair(key_pem, chain_pem)


def read_authorities(name: str, path: Path) -> bytes:
    """PEM of certificates that are trusted. Raises StartError where there is none, or each has expired."""
    pem = _read(name, path)
    found = _certificates(name, path, pem)
    now = datetime.now(UTC)
    if all(one.not_valid_after_utc < now for one in found):
        raise StartError(f"{name}: the certificates of {path} have expired, the last at {_last(found)}; renew them")
    return pem


def _certificates(name: str, path: Path, pem: bytes) -> list[x509.Certificate]:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise StartError(f"{name}: {path} holds no certificate in PEM ({error})") from None


def _last(found: list[x509.Certificate]) -> str:
    return f"{max(one.not_valid_after_utc for one in found):%Y-%m-%d %H:%M} UTC"


def _check_dates(name: str, path: Path, leaf: x509.Certificate) -> None:
    now, end = datetime.now(UTC), leaf.not_valid_after_utc
    if end < now:
        raise StartError(f"{name}: the certificate {path} expired at {end:%Y-%m-%d %H:%M} UTC; renew it")
    if leaf.not_valid_before_utc > now:
        log.warning("%s: %s is not valid before %s UTC", name, path, f"{leaf.not_valid_before_utc:%Y-%m-%d %H:%M}")
    if end - now < EXPIRY_NOTICE:
        log.warning("%s: the certificate %s expires at %s UTC", name, path, f"{end:%Y-%m-%d %H:%M}")


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartError(f"{name}: cannot read {path}: {error.strerror}") from None
