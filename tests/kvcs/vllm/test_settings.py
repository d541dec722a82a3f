"""`kv_connector_extra_config`: what it may say, and what is said of what it may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcs.vllm import starting
from kvcs.vllm.settings import Settings, SettingsError, Way
from tests.kvcs.vllm.stories import descriptor_of

LEAST = {"relay": "moqt://127.0.0.1:4443", "scope_key_file": "scope.json"}


def test_a_relay_and_a_scope_file_are_enough() -> None:
    settings = Settings.parse(LEAST)
    assert settings.relays == ("moqt://127.0.0.1:4443",)
    assert settings.scope_key_file == Path("scope.json")
    assert (settings.block_tokens, settings.load, settings.stall) == (64, Way.AUTO, 0.5)
    assert hash(settings) == hash(Settings.parse(LEAST))


def test_every_setting_is_read() -> None:
    settings = Settings.parse(
        {
            **LEAST,
            "relay": ["moqt://a", "moqt://b"],
            "cafile": "ca.pem",
            "token_file": "token",
            "block_tokens": 16,
            "load": "async",
            "stall": 1,
            "timeout": 7.5,
            "min_tokens": 0,
            "only_faster": False,
            "kvsp": "https://index/",
            "keep": 1000,
        }
    )
    assert settings.relays == ("moqt://a", "moqt://b")
    assert (settings.cafile, settings.token_file) == (Path("ca.pem"), Path("token"))
    assert (settings.load, settings.stall, settings.timeout) == (Way.ASYNC, 1.0, 7.5)
    assert settings.only_faster is False
    assert (settings.min_tokens, settings.kvsp, settings.keep) == (0, "https://index/", 1000)


@pytest.mark.parametrize("name", sorted(LEAST))
def test_what_is_missing_is_named_with_what_to_write(name: str) -> None:
    with pytest.raises(SettingsError, match=f"no '{name}': give the"):
        Settings.parse({key: value for key, value in LEAST.items() if key != name})


def test_a_misspelt_setting_is_refused_and_the_one_that_was_meant_is_named() -> None:
    with pytest.raises(SettingsError, match=r"'block_token' is no setting.*'block_tokens' may be"):
        Settings.parse({**LEAST, "block_token": 16})


@pytest.mark.parametrize(
    "name, value",
    [
        ("relay", []),
        ("relay", 4443),
        ("relay", "relay.example"),
        ("scope_key_file", ""),
        ("block_tokens", 0),
        ("block_tokens", "64"),
        ("block_tokens", True),
        ("load", "eager"),
        ("stall", 0),
        ("timeout", "5"),
        ("min_tokens", -1),
        ("kvsp", 1),
        ("only_faster", 1),
        ("loads", 0),
        ("keep", 0),
    ],
)
def test_a_value_that_is_none_is_refused_with_what_it_has_to_be(name: str, value) -> None:
    with pytest.raises(SettingsError, match=rf"'{name}' is .*, and has to be "):
        Settings.parse({**LEAST, name: value})


@pytest.mark.parametrize("loads", [1, 1000])
def test_the_client_allows_the_loads_that_the_connector_does(loads: int, monkeypatch) -> None:
    made = []
    monkeypatch.setattr(starting, "Client", lambda relays, **settings: made.append(settings))
    starting.client_of(Settings.parse({**LEAST, "loads": loads}), descriptor_of(16))
    assert made[0]["settings"].most_loads >= loads
