"""The certificate of a relay that runs: renewed before its end, exchanged without a restart."""

from __future__ import annotations

import base64
import hashlib
import logging
import ssl
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from moqt.quic.certificates import make_self_signed
from relay.service.certificate import CHECK_SECONDS, ServedCertificate

BEGIN = datetime(2030, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)
LIMIT = timedelta(days=14)
"""What browsers take of a certificate that they know by its hash."""


class Life:
    """A relay's certificate, and the calendar of its machine."""

    def __init__(self, folder, days=13):
        self.folder = folder
        self.validity = timedelta(days=days)
        self.today = BEGIN
        self.seconds = 0.0
        cert, key = self.make(BEGIN)
        self.served = ServedCertificate(cert, key, renew=self.make, clock=lambda: self.today)
        self.loaded = [self.certificate]

    def make(self, now):
        return make_self_signed(self.folder, ["relay.example"], validity=self.validity, now=now)

    @property
    def certificate(self):
        return x509.load_pem_x509_certificate((self.folder / "cert.pem").read_bytes())

    def pass_time(self, time):
        self.today += time
        self.seconds += CHECK_SECONDS
        self.served.follow(self.seconds, lambda: self.loaded.append(self.certificate))


def test_it_is_one_that_browsers_accept_by_its_hash(tmp_path):
    certificate = Life(tmp_path, days=14).certificate
    assert certificate.not_valid_after_utc - certificate.not_valid_before_utc <= LIMIT
    assert certificate.not_valid_before_utc < BEGIN  # clocks rarely agree
    assert isinstance(certificate.public_key(), ec.EllipticCurvePublicKey)
    assert isinstance(certificate.public_key().curve, ec.SECP256R1)
    assert certificate.version is x509.Version.v3


def test_a_year_of_renewals_leaves_no_day_without_a_valid_certificate(tmp_path, caplog):
    life = Life(tmp_path)
    for _ in range(4 * 365):
        life.pass_time(DAY / 4)
        served = life.loaded[-1]
        assert served == life.certificate
        assert served.not_valid_before_utc <= life.today
        assert served.not_valid_after_utc - life.today >= DAY * 3 / 4
    assert 365 // 13 <= len(life.loaded) - 1 <= 365 // 11
    assert len(caplog.records) == len(life.loaded) - 1
    assert "clients refuse" not in caplog.text


def test_a_certificate_of_a_day_is_not_renewed_at_every_look(tmp_path):
    life = Life(tmp_path, days=1)
    for _ in range(96):
        life.pass_time(timedelta(minutes=15))
    assert len(life.loaded) - 1 == 1


def test_the_hash_is_written_beside_it_printed_and_logged_as_openssl_and_browsers_want_it(
    tmp_path, caplog
):
    life = Life(tmp_path)
    for _ in range(2):
        digest = hashlib.sha256(
            ssl.PEM_cert_to_DER_cert((tmp_path / "cert.pem").read_text())
        ).digest()
        written = (tmp_path / "cert.sha256").read_text()
        assert written == base64.b64encode(digest).decode() + "\n"
        colons = ":".join(f"{octet:02X}" for octet in digest)
        assert life.served.digest == f"sha256 {colons} base64 {written.strip()}"
        said = caplog.text
        life.pass_time(DAY * 12.5)
    assert colons in said and written.strip() in said


def test_between_two_looks_nothing_is_read(tmp_path):
    life = Life(tmp_path)
    life.pass_time(DAY)
    (tmp_path / "cert.pem").unlink()
    life.served.follow(life.seconds + CHECK_SECONDS / 2, lambda: pytest.fail("loaded"))
    assert not (tmp_path / "cert.pem").exists()


def given(tmp_path, clock):
    """A pair that others take care of."""
    cert, key = make_self_signed(tmp_path, ["relay.example"], validity=13 * DAY, now=BEGIN)
    return ServedCertificate(cert, key, clock=clock)


def test_a_pair_that_others_exchange_is_loaded_and_never_renewed(tmp_path, caplog):
    served = given(tmp_path, lambda: BEGIN + 20 * DAY)
    loads = []
    served.follow(0.0, lambda: loads.append(0))
    served.follow(100.0, lambda: loads.append(1))
    assert loads == []
    (warning,) = caplog.records  # said once
    assert "clients refuse the certificate" in warning.getMessage()
    assert "was valid until 2030-01-13" in warning.getMessage()
    make_self_signed(tmp_path, ["relay.example"], now=BEGIN + 20 * DAY)
    served.follow(200.0, lambda: loads.append(2))
    served.follow(300.0, lambda: loads.append(3))
    assert loads == [2]
    assert "valid until 2031-01-20" in caplog.records[-1].getMessage()


def test_a_pair_that_is_half_written_is_tried_again_and_told_once(tmp_path, caplog):
    served = given(tmp_path, lambda: BEGIN)
    (tmp_path / "cert.pem").write_bytes(
        make_self_signed(tmp_path / "other", now=BEGIN)[0].read_bytes()
    )
    tries = []

    def load():
        tries.append(1)
        if len(tries) < 3:
            raise ValueError("the key does not belong to it")

    for second in range(0, 60, 10):
        served.follow(float(second), load)
    assert len(tries) == 3
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert said[0] == (
        "the certificate in use stays, no other can be had: the key does not belong to it"
    )
    assert len(said) == 2 and "new connections get the new certificate" in said[1]


def test_a_file_that_is_gone_leaves_the_one_in_use(tmp_path, caplog):
    served = given(tmp_path, lambda: BEGIN)
    (tmp_path / "cert.pem").unlink()
    for second in (0.0, 10.0):
        served.follow(second, lambda: pytest.fail("loaded"))
    (warning,) = caplog.records
    assert "cert.pem" in warning.getMessage()
