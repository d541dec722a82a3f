"""TLS as a client of the services uses it."""

from __future__ import annotations

import ssl
from pathlib import Path

from kvsp.names.errors import FileError


def tls_context(
    cafile: str | Path | None = None, client_cert: tuple[str | Path, str | Path] | None = None
) -> ssl.SSLContext:
    """TLS 1.3; `cafile` are the authorities (PEM) instead of the system's, `client_cert` the
    certificate and key this client shows. Raises FileError naming the file."""
    try:
        context = ssl.create_default_context(cafile=None if cafile is None else str(cafile))
    except (OSError, ssl.SSLError) as error:
        detail = error.strerror if not isinstance(error, ssl.SSLError) else None
        raise FileError(f"{cafile}: {detail or 'not a file of PEM certificates'}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if client_cert is not None:
        certificate, key = client_cert
        try:
            context.load_cert_chain(certificate, key)
        except (OSError, ssl.SSLError):
            raise FileError(
                f"{certificate}, {key}: not a certificate in PEM and its unencrypted key"
            ) from None
    return context
