"""What guards the embedded cluster's door: a CA and certificate made at start, a kubeconfig with the admin's token."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = datetime.timedelta(days=365)
NAMES = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Tls:
    """A server certificate and the CA that signed it, in PEM."""

    ca: bytes
    certificate: bytes
    key: bytes

    def context(self, directory: Path) -> ssl.SSLContext:
        """A server's SSLContext; the key passes through a 0600 file in `directory` since ssl reads files only."""
        path = directory / "server.pem"
        write_private(path, self.certificate + self.key)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(path)
        path.unlink()
        return context


def make_tls() -> Tls:
    """A CA of its own, which signs one certificate for localhost and 127.0.0.1 and is then forgotten."""
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ktrain-ca")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ktrain")])
    ca = (
        _certificate(issuer, issuer, ca_key.public_key(), ca_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        _certificate(subject, issuer, key.public_key(), ca_key)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    return Tls(
        ca.public_bytes(pem),
        certificate.public_bytes(pem),
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, signer: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=signs, crl_sign=signs, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read, never readable by others in between."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def kubeconfig(url: str, ca: bytes, token: str) -> bytes:
    """A kubeconfig with one context, `ktrain`, in namespace default."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "ktrain", "cluster": {"server": url, "certificate-authority-data": base64.b64encode(ca).decode()}}
        ],
        "users": [{"name": "ktrain-admin", "user": {"token": token}}],
        "contexts": [
            {"name": "ktrain", "context": {"cluster": "ktrain", "user": "ktrain-admin", "namespace": "default"}}
        ],
        "current-context": "ktrain",
    }
    return yaml.safe_dump(config, sort_keys=False).encode()
