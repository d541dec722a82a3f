"""The extensions that strict clients ask of a certificate, for the tests that make their own."""

from __future__ import annotations

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

Key = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


def identified(
    builder: x509.CertificateBuilder, key: Key, issuer: Key, *, authority: bool
) -> x509.CertificateBuilder:
    """Add both key identifiers and what the key is for (RFC 5280 section 4.2.1).

    Python 3.13 refuses a certificate of an authority without them.
    """
    return (
        builder.add_extension(
            x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True
        )
        .add_extension(
            x509.KeyUsage(
                digital_signature=True,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                key_cert_sign=authority,
                crl_sign=False,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()), False
        )
    )
