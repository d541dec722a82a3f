"""What is wrong with what a client is given is said before anything is connected to."""

from __future__ import annotations

import threading

import pytest

from kvcs.client.client import Client
from kvsp.names.errors import FileError
from moqt.quic.config import QuicConfig
from tests.kvcs.support import DESCRIPTOR, SCOPE


@pytest.mark.parametrize("by", ["cafile", "quic"])
@pytest.mark.parametrize(("text", "why"), [(None, "No such file"), ("no PEM", "not a file of PEM")])
def test_a_file_of_authorities_that_is_none_is_refused_at_once(text, why, by, tmp_path):
    path = tmp_path / "ca.pem"
    if text is not None:
        path.write_text(text)
    given = {"cafile": path} if by == "cafile" else {"quic": QuicConfig(cafile=path)}
    threads = threading.active_count()
    with pytest.raises(FileError, match=f"ca.pem: {why}"):
        Client("moqt://127.0.0.1:9", scope_keys=SCOPE, descriptor=DESCRIPTOR, **given)
    assert threading.active_count() == threads
