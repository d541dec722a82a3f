"""Self-signed certificates for tests, benchmarks and private networks."""

from __future__ import annotations

import ipaddress
import os
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DEFAULT_NAMES = ("localhost", "127.0.0.1", "::1")
VALIDITY = timedelta(days=365)


def make_self_signed(
    directory: str | os.PathLike[str], names: Sequence[str] = DEFAULT_NAMES
) -> tuple[Path, Path]:
    """Return `(cert.pem, key.pem)` in `directory`, made when absent, expired or for other names.

    `names` are DNS names and IP addresses; all become subject alternative names. The
    certificate is its own authority: clients name it as their `cafile`.
    """
    if not names:
        raise ValueError("a certificate needs at least one name")
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    cert_path, key_path = folder / "cert.pem", folder / "key.pem"
    if not _usable(cert_path, key_path, names):
        key = ec.generate_private_key(ec.SECP256R1())
        cert = _build(key, names)
        # The key goes first: a reader that sees the new certificate finds its key.
        _write(
            key_path,
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
            mode=0o600,
        )
        _write(cert_path, cert.public_bytes(serialization.Encoding.PEM), mode=0o644)
    return cert_path, key_path


def check_key_pair(certfile: str | os.PathLike[str], keyfile: str | os.PathLike[str]) -> None:
    """Raise ValueError unless the files hold a certificate and its private key, in PEM.

    Raises OSError for a file that cannot be read.
    """
    chain = Path(certfile).read_bytes()
    secret = Path(keyfile).read_bytes()
    try:
        cert = x509.load_pem_x509_certificates(chain)[0]
    except ValueError:
        raise ValueError(f"{certfile} holds no PEM certificate") from None
    try:
        key = serialization.load_pem_private_key(secret, None)
    except (ValueError, TypeError):
        raise ValueError(f"{keyfile} holds no PEM private key without a password") from None
    if cert.public_key() != key.public_key():
        raise ValueError(f"the key in {keyfile} does not belong to the certificate in {certfile}")


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _build(key: ec.EllipticCurvePrivateKey, names: Sequence[str]) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    # An hour back, because the clocks of two machines rarely agree.
    start = datetime.now(UTC) - timedelta(hours=1)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + VALIDITY)
        .add_extension(x509.SubjectAlternativeName([_general_name(n) for n in names]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .sign(key, hashes.SHA256())
    )


def _usable(cert_path: Path, key_path: Path, names: Sequence[str]) -> bool:
    """Whether both files are there, belong together, name `names` and last another day."""
    try:
        cert = x509.load_pem_x509_certificate(cert_path.read_bytes())
        key = serialization.load_pem_private_key(key_path.read_bytes(), None)
        san = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, TypeError, x509.ExtensionNotFound):
        return False
    return (
        cert.not_valid_after_utc > datetime.now(UTC) + timedelta(days=1)
        and cert.public_key() == key.public_key()
        and {_general_name(name) for name in names} <= set(san)
    )


def _write(path: Path, data: bytes, *, mode: int) -> None:
    """Replace `path` at once; the temporary file has `mode` before it has any content."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
