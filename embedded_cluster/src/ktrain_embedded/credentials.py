"""Credentials of the embedded cluster: certificates, created at start, and the admin's kubeconfig."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = datetime.timedelta(days=365)


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate, which cannot sign others, and its key. Both are PEM."""

    public: bytes
    key: bytes


def make_certificate(name: str, usage: x509.ObjectIdentifier) -> Certificate:
    """Create a certificate with this common name for localhost and 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    public, now = key.public_key(), datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    serial, since = x509.random_serial_number(), now - datetime.timedelta(hours=1)
    names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder(subject, subject, public, serial, since, now + LIFETIME)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return Certificate(certificate.public_bytes(pem), key.private_bytes(pem, pkcs8, serialization.NoEncryption()))


def make_tls(directory: Path) -> tuple[Certificate, Certificate, ssl.SSLContext]:
    """Create the certificates of the server and of the admin, and an SSLContext that accepts no other client's.

    The key isn't stored: it is written to a file in `directory` with mode 0600, because ssl reads only files, and the
    file is deleted.
    """
    server = make_certificate("ktrain", ExtendedKeyUsageOID.SERVER_AUTH)
    admin = make_certificate("kubernetes-admin", ExtendedKeyUsageOID.CLIENT_AUTH)
    path = directory / "server.pem"
    write_private(path, server.public + server.key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(path)
    path.unlink()
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_verify_locations(cadata=admin.public.decode())
    return server, admin, context


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read. It is created with mode 0600."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def kubeconfig(url: str, ca: bytes, user: Mapping[str, str], namespace: str) -> bytes:
    """A kubeconfig with the context `ktrain`.

    :param user: its credentials.
    """
    cluster = {"server": url, "certificate-authority-data": encoded(ca)}
    context = {"cluster": "ktrain", "user": "ktrain-admin", "namespace": namespace}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "ktrain", "cluster": cluster}],
        "users": [{"name": "ktrain-admin", "user": dict(user)}],
        "contexts": [{"name": "ktrain", "context": context}],
        "current-context": "ktrain",
    }
    return yaml.safe_dump(config, sort_keys=False).encode()


def encoded(data: bytes) -> str:
    """Base64, as in the fields `*-data` of a kubeconfig."""
    return base64.b64encode(data).decode()
