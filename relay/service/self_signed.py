"""`--self-signed DIR`: a certificate for every name and address that this host is called by."""

from __future__ import annotations

import re
import socket
import sys
from datetime import datetime, timedelta
from pathlib import Path

from moqt.quic.certificates import DEFAULT_NAMES, make_self_signed, names_of
from relay.service.certificate import ServedCertificate
from relay.service.checks import PROGRAM, Usage, is_wildcard

_MAX_NAMES = 32
"""Of a certificate: it has to fit into the first packets."""


def self_signed_certificate(
    directory: Path, host: str, days: int | None = None
) -> ServedCertificate:
    """The pair in `directory`; a new one, which is said, when it does not do for `host`."""
    validity = None if days is None else timedelta(days=days)
    names = [*DEFAULT_NAMES, *own_names()]
    names += own_addresses() if is_wildcard(host) else [host]
    # A new certificate is for the old names, too: relays that listen on several addresses
    # and share a directory would else replace one another's at each start.
    names = list(dict.fromkeys([*names, *names_of(directory / "cert.pem")]))[:_MAX_NAMES]

    def replaced(why: str) -> None:
        text = (
            f"{PROGRAM}: made a new certificate in {directory}, because {why}; clients need "
            f"the new {directory / 'cert.pem'}"
        )
        print(" ".join(text.split()), file=sys.stderr, flush=True)

    try:
        cert, key = make_self_signed(directory, names, validity=validity, replaced=replaced)
    except OSError as error:
        raise Usage(
            f"cannot make a certificate in {directory}: {error.strerror or error}"
        ) from error
    except ValueError:
        raise Usage(f"--listen: no certificate can be made for the name {host!r}") from None

    def renew(now: datetime) -> None:
        # For the names it has by now: another relay that shares the directory may have added some.
        make_self_signed(directory, names_of(cert) or names, validity=validity, now=now)

    return ServedCertificate(cert, key, renew=renew)


def own_names() -> list[str]:
    """The host's name, when certificates can have it."""
    name = socket.gethostname()
    return [name] if re.fullmatch(r"[A-Za-z0-9._-]{1,253}", name) else []


def own_addresses() -> list[str]:
    """The IPv4 address by which other machines reach this one, if there is one.

    IPv6 addresses are left out: many change daily, and the certificate with them.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it asks for the route
            return [str(probe.getsockname()[0])]
    except OSError:
        return []
