"""Self-signed certificates for tests, benchmarks and private networks."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import ipaddress
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DEFAULT_NAMES = ("localhost", "127.0.0.1", "::1")
VALIDITY = timedelta(days=365)
SPARE = timedelta(days=1)
"""A certificate with less time left, or less than a quarter of its time, is replaced."""

_ITS_OWN_AUTHORITY = x509.KeyUsage(
    digital_signature=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=False,
    encipher_only=False,
    decipher_only=False,
)
"""RFC 5280 section 4.2.1.3 asks this of every authority, and strict clients want it."""


def make_self_signed(
    directory: str | os.PathLike[str],
    names: Sequence[str] = DEFAULT_NAMES,
    *,
    validity: timedelta | None = None,
    now: datetime | None = None,
    replaced: Callable[[str], None] | None = None,
) -> tuple[Path, Path]:
    """Return `(cert.pem, key.pem)` in `directory`, made when absent, expired or for other names.

    `names` are DNS names and IP addresses; all become subject alternative names. The
    certificate is its own authority: clients name it as their `cafile`, and browsers its SHA-256
    in `serverCertificateHashes`, which is in `cert.sha256` as base64. For them `validity` is 14
    days at most; None takes any that is there, and makes one of a year. `now` is the time, of the
    system's clock when None. `replaced` is told why the pair that was there did not do; clients
    then need the new certificate.

    Raises ValueError for what cannot be the name of a host, OSError.
    """
    if not names:
        raise ValueError("a certificate needs at least one name")
    wanted = [_general_name(name) for name in names]
    now = now or datetime.now(UTC)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    cert_path, key_path = folder / "cert.pem", folder / "key.pem"
    with _locked(folder):
        first = not cert_path.exists() and not key_path.exists()
        unfit = _unfit(cert_path, key_path, wanted, validity, now)
        if unfit is not None:
            key = ec.generate_private_key(ec.SECP256R1())
            cert = _build(key, names[0], wanted, now, validity or VALIDITY)
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
        digest = base64.b64encode(fingerprint(cert_path)) + b"\n"
        digest_path = folder / "cert.sha256"
        if not digest_path.exists() or digest_path.read_bytes() != digest:
            _write(digest_path, digest, mode=0o644)
    if unfit is not None and not first and replaced is not None:
        replaced(unfit)
    return cert_path, key_path


def fingerprint(certfile: str | os.PathLike[str]) -> bytes:
    """The SHA-256 of the (first) certificate in a PEM file, of its DER form.

    Raises ValueError for what is no certificate, OSError.
    """
    return x509.load_pem_x509_certificate(Path(certfile).read_bytes()).fingerprint(hashes.SHA256())


def validity_fault(cert: x509.Certificate, now: datetime) -> str | None:
    """What follows "it" when a certificate is not valid at `now`; None when it is."""
    begin, end = cert.not_valid_before_utc, cert.not_valid_after_utc
    if begin <= now <= end:
        return None
    when = f"is valid from {_minute(begin)}" if now < begin else f"was valid until {_minute(end)}"
    return f"{when}; this machine's clock says {_minute(now)}"


def is_for(cert: x509.Certificate, name: str) -> bool:
    """Whether a certificate is for a host name or an IP address (RFC 9525 section 6)."""
    alternatives = _alternatives(cert)
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(name)) in alternatives
    wanted = name.lower().rstrip(".")
    own = {each.value.lower() for each in alternatives if isinstance(each, x509.DNSName)}
    return wanted in own or ("*." + wanted.partition(".")[2]) in own


def names_in(cert: x509.Certificate) -> list[str]:
    """The host names and addresses that a certificate is for."""
    return [
        str(each.value)
        for each in _alternatives(cert)
        if isinstance(each, x509.DNSName | x509.IPAddress)
    ]


def _minute(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M} UTC"


def names_of(certfile: str | os.PathLike[str]) -> list[str]:
    """The host names and addresses a certificate is for; none for what is no certificate."""
    try:
        return names_in(x509.load_pem_x509_certificate(Path(certfile).read_bytes()))
    except (OSError, ValueError):
        return []


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
    if not _signs(key):
        raise ValueError(
            f"the key in {keyfile} is of a kind that cannot sign here: RSA, ECDSA P-256 or P-384, "
            "Ed25519 and Ed448 can"
        )
    if cert.public_key() != key.public_key():
        raise ValueError(f"the key in {keyfile} does not belong to the certificate in {certfile}")


def _signs(key: object) -> bool:
    """Whether the TLS of QUIC can sign with a key."""
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return isinstance(key.curve, ec.SECP256R1 | ec.SECP384R1)
    return isinstance(key, rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey)


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _build(
    key: ec.EllipticCurvePrivateKey,
    common_name: str,
    names: Sequence[x509.GeneralName],
    now: datetime,
    validity: timedelta,
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    # An hour back, because the clocks of two machines rarely agree.
    start = now - timedelta(hours=1)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + validity)
        .add_extension(x509.SubjectAlternativeName(names), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_ITS_OWN_AUTHORITY, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), False)
        .sign(key, hashes.SHA256())
    )


def _unfit(
    cert_path: Path,
    key_path: Path,
    names: Sequence[x509.GeneralName],
    validity: timedelta | None,
    now: datetime,
) -> str | None:
    """Why a pair does not do for `names`, as what is said of it; None when it does."""
    try:
        check_key_pair(cert_path, key_path)
        cert = x509.load_pem_x509_certificate(cert_path.read_bytes())
        lacking = [name for name in names if name not in _alternatives(cert)]
    except FileNotFoundError as error:
        return f"{error.filename} was missing"
    except ValueError as error:
        return str(error)
    begin, end = cert.not_valid_before_utc, cert.not_valid_after_utc
    if now < begin:
        return f"the one there is valid from {_minute(begin)} only"
    if validity is not None and end - begin > validity:
        return f"the one there was valid for {(end - begin) / timedelta(days=1):g} days"
    if end < now + min(SPARE, (validity or VALIDITY) / 4):
        return f"the one there was valid until {_minute(end)} only"
    if lacking:
        return f"the one there was not for {', '.join(str(name.value) for name in lacking)}"
    return None


def _alternatives(cert: x509.Certificate) -> list[x509.GeneralName]:
    try:
        return list(cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        return []


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time: a key of one and a certificate of another would be of no use."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


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
