"""Why a handshake failed, in words for people.

aioquic's reasons are meant for its developers: they lack what one needs to mend the fault, and some
are the text of Python objects. They reach our log, our exceptions and, in CONNECTION_CLOSE, the
peer. Here they are put into words where they arise.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping, Sequence
from datetime import UTC, datetime
from typing import Any

from aioquic import tls
from aioquic._buffer import Buffer
from aioquic.quic.packet import QuicErrorCode
from OpenSSL import crypto

from moqt.quic.certificates import is_for, names_in, validity_fault

_CERTIFICATE_ALERTS = frozenset(
    {
        tls.AlertDescription.bad_certificate,
        tls.AlertDescription.unsupported_certificate,
        tls.AlertDescription.certificate_revoked,
        tls.AlertDescription.certificate_expired,
        tls.AlertDescription.certificate_unknown,
        tls.AlertDescription.unknown_ca,
    }
)

MAX_NAMES = 6
"""Names of a certificate, or protocols of a client, that a sentence lists."""

VERSION_NAMES = {0x1: "1", 0x6B3343CF: "2"}


class _Demoted(logging.LoggerAdapter[logging.Logger]):
    """aioquic's log, all of it at DEBUG: what matters of it is said by us, once and in words."""

    def isEnabledFor(self, level: int) -> bool:
        return self.logger.isEnabledFor(logging.DEBUG)

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        super().log(logging.DEBUG, msg, *args, **kwargs)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, kwargs


AIOQUIC_LOG = _Demoted(logging.getLogger("moqt.quic.aioquic"), {})


class PlainContext(tls.Context):
    """aioquic's TLS, whose alerts say what did not suit, and that knows no early data: it could be
    sent again by anybody who has seen it (RFC 8446 section 8)."""

    _max_early_data = property(lambda self: None, lambda self, value: None)
    early_data_accepted = property(lambda self: False, lambda self, value: None)

    @property
    def update_traffic_key_cb(self) -> Any:
        return self._update_traffic_key

    @update_traffic_key_cb.setter
    def update_traffic_key_cb(self, callback: Any) -> None:
        self.__dict__["update_traffic_key_cb"] = callback

    def _update_traffic_key(
        self,
        direction: tls.Direction,
        epoch: tls.Epoch,
        cipher_suite: tls.CipherSuite,
        secret: bytes,
    ) -> None:
        if epoch is not tls.Epoch.ZERO_RTT:
            self.__dict__["update_traffic_key_cb"](direction, epoch, cipher_suite, secret)

    def _server_handle_hello(
        self, input_buf: Buffer, initial_buf: Buffer, output_buf: Buffer
    ) -> None:
        try:
            super()._server_handle_hello(input_buf, initial_buf, output_buf)
        except tls.AlertNoApplicationProtocol as alert:
            hello = tls.pull_client_hello(Buffer(data=input_buf.data))
            raise tls.AlertNoApplicationProtocol(
                f"the client offers {listed(hello.alpn_protocols or ())}; "
                f"spoken here: {listed(self._alpn_protocols or ())}"
            ) from alert

    def _client_handle_certificate_verify(self, input_buf: Buffer) -> None:
        try:
            super()._client_handle_certificate_verify(input_buf)
        except (tls.AlertBadCertificate, tls.AlertCertificateExpired) as alert:
            raise type(alert)(self._certificate_fault(alert)) from alert

    def _certificate_fault(self, alert: tls.Alert) -> str:
        """What is wrong with the server's certificate, which aioquic has refused with `alert`."""
        cert, name = self._peer_certificate, self._server_name
        assert cert is not None
        now = datetime.now(UTC)
        fault = validity_fault(cert, now)
        if fault is not None:
            return f"it {fault}"
        if name is not None and not is_for(cert, name):
            return f"it is for {listed(names_in(cert))}, not for {name}"
        chained = alert.__context__
        if not isinstance(chained, crypto.X509StoreContextError):
            return str(alert)
        failed = chained.certificate.to_cryptography()
        fault = validity_fault(failed, now)
        if fault is not None:
            return f"that of its authority, {failed.subject.rfc4514_string()}, {fault}"
        return f"no authority trusted here has signed it: {alert} (does cafile name its authority?)"


def listed(names: Sequence[str]) -> str:
    """Names in a sentence, not all if there are many."""
    shown = [name[:80] for name in names[:MAX_NAMES]]
    if len(names) > MAX_NAMES:
        shown.append(f"{len(names) - MAX_NAMES} more")
    return ", ".join(shown) or "none"


def versions(numbers: Sequence[int]) -> str:
    """QUIC versions in a sentence."""
    return listed([VERSION_NAMES.get(number, f"{number:#010x}") for number in numbers])


def explain(
    code: int, reason: str, *, is_client: bool, by_peer: bool = False, offered: Sequence[str] = ()
) -> str:
    """A reason a person understands for a transport error `code` (RFC 9000 section 20.1).

    `by_peer` tells who closed, `offered` are the protocols of a client.
    """
    if QuicErrorCode.CRYPTO_ERROR <= code < QuicErrorCode.CRYPTO_ERROR + 0x100:
        number = code - QuicErrorCode.CRYPTO_ERROR
        try:
            alert = tls.AlertDescription(number)
        except ValueError:
            return f"TLS alert {number}: {reason}" if reason else f"TLS alert {number}"
        if alert in _CERTIFICATE_ALERTS:
            whose = "our" if by_peer else "the server's" if is_client else "the client's"
            what = f"{whose} certificate was not accepted"
        elif alert is tls.AlertDescription.no_application_protocol:
            what = "no common application protocol (ALPN)"
            if is_client and offered:
                what += f", offered were {listed(offered)}"
        else:
            what = "the TLS handshake failed"
        return f"{what}: {reason or alert.name} (TLS alert {alert.name})"
    if reason:
        return reason
    try:
        return QuicErrorCode(code).name
    except ValueError:
        return f"QUIC error {code:#x}"
