"""The page of limits is what the settings themselves say."""

from __future__ import annotations

from dataclasses import fields

from relay.service.limits import LIMITS, Chosen
from tools.limits import PAGE, page


def test_the_page_of_limits_is_the_one_that_the_settings_make():
    assert PAGE.read_text() == page(), "run `make docs`"


def test_a_limit_has_one_name_on_the_command_line_in_python_and_in_the_log():
    for name, limit in LIMITS.items():
        assert name in {field.name for field in fields(limit.of)}
    chosen = Chosen(["max_namespaces=7", "max_namespaces_told=9"])
    assert (chosen.relay, chosen.session) == ({"max_namespaces": 7}, {"max_namespaces_told": 9})
