"""What an engine's configuration says of kvcs is read in whole, or refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcs.pages.settings import PagesError, PageSettings

NEEDED = {
    "kvsp": "https://kvsp.example/kvsp/",
    "holder": "https://h1.example/kvsp/",
    "scope_key_file": "scope.json",
    "descriptor": "compat.json",
}


def test_four_settings_are_needed_and_the_others_have_defaults() -> None:
    settings = PageSettings.parse(NEEDED)
    assert settings.scope_key_file == Path("scope.json")
    assert (settings.lookup_timeout, settings.timeout, settings.failed_seconds) == (0.3, 10.0, 30.0)
    assert settings.pending_octets == 256 << 20
    given = PageSettings.parse(NEEDED | {"timeout": 2, "uploads": 8, "http_loopback": True})
    assert (given.timeout, given.uploads, given.http_loopback) == (2.0, 8, True)


@pytest.mark.parametrize(
    "settings, said",
    [
        (None, 'the settings of kvcs are an object: "kvcs": {"kvsp"'),
        (NEEDED | {"time_out": 1}, "'time_out' is no setting of kvcs; 'timeout' may be meant"),
        ({"kvsp": "https://a/"}, "have no 'holder' and no 'scope_key_file' and no 'descriptor'"),
        (NEEDED | {"timeout": 0}, "timeout is 0, but it has to be a number of seconds above 0"),
        (NEEDED | {"timeout": True}, "timeout is True"),
        (NEEDED | {"uploads": 1.5}, "uploads is 1.5, but it has to be a whole number"),
        (NEEDED | {"uploads": "4"}, "uploads is '4'"),
        (NEEDED | {"descriptor": ""}, "descriptor is '', but it has to be the name of a file"),
        (NEEDED | {"http_loopback": 1}, "http_loopback is 1, but it has to be true or false"),
        (NEEDED | {"kvsp": 4}, "kvsp is 4, but it has to be a URI"),
    ],
)
def test_what_is_wrong_is_named_with_what_would_be_right(settings, said: str) -> None:
    with pytest.raises(PagesError) as error:
        PageSettings.parse(settings)
    assert said in str(error.value)
