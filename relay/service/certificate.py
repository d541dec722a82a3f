"""The certificate a relay serves, followed while it runs: renewed, exchanged, run out."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from moqt.quic.certificates import fingerprint, validity_fault

logger = logging.getLogger("relay")

CHECK_SECONDS = 5.0
"""How often the files are looked at."""


class ServedCertificate:
    """A pair of files. Who writes a new pair there, this relay or others, need not restart it.

    `renew(now)` makes a new pair when the one there has little time left; None leaves that to
    others. `clock` is the calendar's.
    """

    def __init__(
        self,
        cert: Path,
        key: Path,
        *,
        renew: Callable[[datetime], object] | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.cert, self.key = cert, key
        self._renew = renew
        self._clock = clock
        self._served = cert.read_bytes()
        self._next = 0.0
        self._fault: str | None = None
        self._expired = False
        self.expires: datetime | None = None
        """When clients begin to refuse the one that is served, once it has been looked at."""

    @property
    def digest(self) -> str:
        """Its SHA-256, as openssl prints it and as browsers' serverCertificateHashes has it."""
        digest = fingerprint(self.cert)
        return f"sha256 {digest.hex(':').upper()} base64 {base64.b64encode(digest).decode()}"

    def look(self) -> None:
        """Let the next `follow` look at the files, however lately it did."""
        self._next = 0.0

    def follow(self, now: float, load: Callable[[], None]) -> None:
        """Renew it if it is time, and `load` what is new; `now` is a clock that only runs on.

        What cannot be read or does not do is logged once, and the one in use stays.
        """
        if now < self._next:
            return
        self._next = now + CHECK_SECONDS
        moment = self._clock()
        try:
            if self._renew is not None:
                self._renew(moment)
            found = self.cert.read_bytes()
            if found != self._served:
                load()
                self._served = found
                self._expired = False
                self._tell(x509.load_pem_x509_certificate(found))
            self._fault = None
        except (OSError, ValueError) as error:
            if str(error) != self._fault:
                logger.warning("the certificate in use stays, no other can be had: %s", error)
            self._fault = str(error)
        served = x509.load_pem_x509_certificate(self._served)
        self.expires = served.not_valid_after_utc
        fault = validity_fault(served, moment)
        if fault is not None and not self._expired:
            logger.warning("clients refuse the certificate in %s: it %s", self.cert, fault)
        self._expired = fault is not None

    def _tell(self, cert: x509.Certificate) -> None:
        logger.warning(
            "new connections get the new certificate in %s, valid until %s UTC: %s",
            self.cert,
            f"{cert.not_valid_after_utc:%Y-%m-%d %H:%M}",
            self.digest,
        )
