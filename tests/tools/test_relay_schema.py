"""The schema of a relay's file of settings is what its options and limits say."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from relay.service.cli import settings
from relay.service.limits import LIMITS
from relay.service.settings import read
from tools.relay_schema import FILE, text

EXAMPLE = FILE.with_name("kvcs-relay.toml")


def test_the_schema_is_the_one_that_the_options_make():
    assert FILE.read_text() == text(), "run `make docs`"


def test_the_schema_names_every_setting_and_limit():
    properties = json.loads(FILE.read_text())["properties"]
    assert set(properties) == {*settings(), "limits"}
    assert set(properties["limits"]["properties"]) == set(LIMITS)


def test_the_example_is_a_file_that_is_taken_and_fits_the_schema():
    found = read(EXAMPLE, settings())
    properties = json.loads(FILE.read_text())["properties"]
    kinds = {"string": str, "boolean": bool, "integer": int, "number": int | float}
    for key, value in tomllib.loads(EXAMPLE.read_text()).items():
        if key != "limits":
            types = properties[key]["type"]
            one = types if isinstance(types, str) else types[0]
            assert isinstance(value, kinds[one])
    assert found.limits
    assert Path(found.values["cert"]) == EXAMPLE.parent / "tls" / "cert.pem"
