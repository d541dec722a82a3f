"""What a relay exports, for several tests."""

from __future__ import annotations

import time
import urllib.request

import pytest
from cryptography import x509

from tests.relay.service.program import running


@pytest.fixture(scope="session")
def scraped(tmp_path_factory):
    """The exposition of a relay with a disk tier, and the certificate it serves."""
    folder = tmp_path_factory.mktemp("relay")
    with running(
        *("--listen", "127.0.0.1:0", "--self-signed", folder, "--metrics", "127.0.0.1:0"),
        *("--cache-dir", folder / "cache"),
    ) as (_, ready):
        time.sleep(0.7)  # one round of its numbers
        text = urllib.request.urlopen(ready[3]).read().decode()
    return text, x509.load_pem_x509_certificate((folder / "cert.pem").read_bytes())
