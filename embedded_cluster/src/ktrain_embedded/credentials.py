"""Credentials of the embedded cluster: a certificate, created at start, and a kubeconfig with the admin's token."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import os
import ssl
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = datetime.timedelta(days=365)


def make_tls(directory: Path) -> tuple[bytes, ssl.SSLContext]:
    """Create a self-signed certificate for localhost and 127.0.0.1. Returns it as PEM, and its SSLContext.

    The certificate cannot sign others. The key isn't stored: it is written to a file in `directory` with mode 0600,
    because ssl reads only files, and the file is deleted.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    public, now = key.public_key(), datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ktrain")])
    serial, since = x509.random_serial_number(), now - datetime.timedelta(hours=1)
    names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder(subject, subject, public, serial, since, now + LIFETIME)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    public_pem, path = certificate.public_bytes(pem), directory / "server.pem"
    write_private(path, public_pem + key.private_bytes(pem, pkcs8, serialization.NoEncryption()))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(path)
    path.unlink()
    return public_pem, context


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read. It is created with mode 0600."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def kubeconfig(url: str, ca: bytes, token: str) -> bytes:
    """A kubeconfig with the context `ktrain`, namespace default."""
    cluster = {"server": url, "certificate-authority-data": base64.b64encode(ca).decode()}
    context = {"cluster": "ktrain", "user": "ktrain-admin", "namespace": "default"}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "ktrain", "cluster": cluster}],
        "users": [{"name": "ktrain-admin", "user": {"token": token}}],
        "contexts": [{"name": "ktrain", "context": context}],
        "current-context": "ktrain",
    }
    return yaml.safe_dump(config, sort_keys=False).encode()
