"""A certificate authority, the SuperLink's certificate, and the SuperNodes' keys, for a federation of one's own.

They are files in a folder: `ca.crt` goes to every node; `server.crt` and `server.key` stay with the SuperLink; a node's
`NAME.key` stays on the node, and its `NAME.pub` is registered with the SuperLink. The authority's own key is used once
and never written.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from undrift.errors import UndriftError, quoted, require

DAYS = 365
"""How long certificates are valid."""
LOOPBACK = ("localhost", "127.0.0.1")
"""The names under which the SuperLink's own processes reach it. Without them, no run starts."""


def make_certificates(folder: Path, hosts: list[str]) -> None:
    """Write `ca.crt`, `server.crt` and `server.key` for a SuperLink that nodes reach under these names or addresses."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    require(bool(hosts), "Name the hosts under which nodes reach the SuperLink.")
    names = x509.SubjectAlternativeName([_name(host) for host in dict.fromkeys([*hosts, *LOOPBACK])])
    files = folder / "ca.crt", folder / "server.crt", folder / "server.key"
    refuse_existing(*files)
    authority, own = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "undrift federation")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "undrift SuperLink")])  # nodes compare the names above

    def certificate(subject: Any, key: Any, *extensions: tuple[Any, bool]) -> bytes:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(minutes=5)).not_valid_after(now + timedelta(days=DAYS))
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(authority, hashes.SHA384()).public_bytes(_encoding("PEM"))

    signs = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    known = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    by = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(known)
    top = certificate(issuer, authority, (x509.BasicConstraints(True, 0), True), (signs, True), (known, False))
    serving = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    leaf = certificate(
        subject, own, (x509.BasicConstraints(False, None), True), (names, False), (serving, False), (by, False)
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_new(files[0], top)
    write_new(files[1], leaf)
    write_new(files[2], _private(own, "PKCS8"), secret=True)


def make_key(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a node's key, `NAME.key` and `NAME.pub`, and return the files."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    require(bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name)), f"{name!r} cannot be a node's name.")
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(_encoding("OpenSSH"), serialization.PublicFormat.OpenSSH)
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / f"{name}.key", folder / f"{name}.pub"
    refuse_existing(*files)
    write_new(files[0], _private(key, "OpenSSH"), secret=True)
    write_new(files[1], public + b" " + name.encode() + b"\n")
    return files


def refuse_existing(*files: Path) -> None:
    """Raise if one of the files exists: written without it, the others would not fit to it."""
    for file in files:
        if os.path.lexists(file):
            raise UndriftError(f"{file} is there already, and is not written over; remove it to make a new one.")


def write_new(file: Path, content: bytes, secret: bool = False) -> None:
    """Write a new file, which must not exist. A file with a secret is readable by its owner only."""
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    except FileExistsError:
        refuse_existing(file)
        raise
    with os.fdopen(handle, "wb") as opened:
        opened.write(content)


def _private(key: Any, form: str) -> bytes:
    from cryptography.hazmat.primitives import serialization

    formats = serialization.PrivateFormat
    kind = formats.OpenSSH if form == "OpenSSH" else formats.PKCS8
    found: bytes = key.private_bytes(_encoding("PEM"), kind, serialization.NoEncryption())
    return found


def _encoding(name: str) -> Any:
    from cryptography.hazmat.primitives import serialization

    return getattr(serialization.Encoding, name)


LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
HOST = re.compile(rf"(?=.{{1,253}}$)(\*\.)?({LABEL}\.)*(?![0-9]+$){LABEL}")
"""A host name: at most 253 letters, in labels of at most 63, of which the last is no number, as in an address."""


def _name(host: str) -> Any:
    """A host as certificates have it. Raises `UndriftError` for what nodes could never find in one."""
    from cryptography import x509

    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    if not HOST.fullmatch(host):
        raise UndriftError(
            f"{quoted(host)} is no host name or address, such as superlink.example.org or 192.0.2.7; {_advice(host)}."
        )
    return x509.DNSName(host)


def _advice(host: str) -> str:
    if not host.isascii():
        with contextlib.suppress(UnicodeError):
            return f"write it in ASCII, as {host.encode('idna').decode()}"
    return "write its name alone, without a scheme, a port or a path"
