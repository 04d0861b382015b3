"""Certificates for tests: authorities of their own, and what they sign."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)
SERVER = "triptych.test"


@dataclass(frozen=True)
class Files:
    """PEM files of a certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """Signs; `ca` is the file of its own certificate."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.now(UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + 30 * DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(made.public_bytes(serialization.Encoding.PEM))

    def issue(
        self, name: str, *names: str, lasts: timedelta = 30 * DAY, files: Files | None = None, begins: timedelta = -DAY
    ) -> Files:
        """A certificate for DNS names and URIs (by default loopback's and `SERVER`), in `files` or ones called `name`.
        Files are put in place as Kubernetes and certbot do, whole: by a rename."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        alternative = [_general(one) for one in names or (SERVER, "localhost", "127.0.0.1")]
        made = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(min(now + begins, now + lasts - DAY))
            .not_valid_after(now + lasts)
            .add_extension(x509.SubjectAlternativeName(alternative), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        files = files or Files(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        place(
            files.key,
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )
        place(files.cert, made.public_bytes(serialization.Encoding.PEM))
        return files


def place(path: Path, content: bytes) -> None:
    """Puts a file in place at once, readable by its owner alone."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    new.chmod(0o600)
    os.replace(new, path)


def _general(name: str) -> x509.GeneralName:
    import ipaddress

    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
