"""What may be set of a client."""

from __future__ import annotations

from dataclasses import fields

import pytest

from kvcs import Client, ClientSettings, MisuseError, Scope
from tests.kvcs.support import DESCRIPTOR, SCOPE


@pytest.mark.parametrize("name", [each.name for each in fields(ClientSettings)])
def test_a_value_out_of_range_is_named(name):
    with pytest.raises(ValueError, match=name):
        ClientSettings(**{name: -1})


def test_what_is_wrong_is_said_before_anything_is_connected_to(tmp_path):
    with pytest.raises(MisuseError, match="URL of a relay"):
        Client([], scope_keys=SCOPE, descriptor=DESCRIPTOR)
    with pytest.raises(Exception, match="moqt://"):
        Client("relay:4443", scope_keys=SCOPE, descriptor=DESCRIPTOR)
    with pytest.raises(Exception, match=r"scope\.json"):
        Client("moqt://127.0.0.1:9", scope_keys=tmp_path / "scope.json", descriptor=DESCRIPTOR)
    with pytest.raises(ValueError, match="stall"):
        Client("moqt://127.0.0.1:9", scope_keys=Scope.generate(), descriptor=DESCRIPTOR, stall=0)
