"""Certificates for these tests, made in a moment."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gradring import TlsFiles

NOW = datetime.datetime.now(datetime.timezone.utc)
DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Certificate:
    """A certificate in files, and the variables that make a rank use it."""

    path: Path
    key: Path
    authority: Path

    def files(self) -> TlsFiles:
        return TlsFiles(str(self.authority), str(self.path), str(self.key))

    def variables(self) -> dict[str, str]:
        return {
            "GRADRING_TLS_CA": str(self.authority),
            "GRADRING_TLS_CERT": str(self.path),
            "GRADRING_TLS_KEY": str(self.key),
        }


class Authority:
    """Signs certificates into a directory; they are valid for a while before and after a moment."""

    def __init__(
        self, directory: Path, name: str = "authority", validity: datetime.timedelta = DAY
    ) -> None:
        self._directory, self._validity = directory, validity
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.path = directory / f"{name}.pem"
        certificate = self._sign(self._name, self._key, x509.BasicConstraints(True, None), NOW)
        self.path.write_bytes(certificate)

    def certify(
        self, name: str, *hosts: str, start: datetime.datetime = NOW, trusting: Path | None = None
    ) -> Certificate:
        """A certificate for names and addresses, valid around ``start``.

        Its user trusts this authority, or the one in ``trusting``.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
        uses = x509.ExtendedKeyUsage(
            [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        )
        path, key_path = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        path.write_bytes(self._sign(subject, key, names, start, uses))
        key_path.touch(mode=0o600)
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return Certificate(path, key_path, trusting or self.path)

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        extension: x509.ExtensionType,
        start: datetime.datetime,
        *extensions: x509.ExtensionType,
    ) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start - self._validity)
            .not_valid_after(start + self._validity)
        )
        for one in (extension, *extensions):
            builder = builder.add_extension(one, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        return certificate.public_bytes(serialization.Encoding.PEM)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
