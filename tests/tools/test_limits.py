"""The page of limits is what the settings themselves say."""

from __future__ import annotations

import inspect
from dataclasses import fields

from kvcs.names.limits import LIMITS as LIMITS_OF_CACHES
from kvcs.programs import prompt_subscribe, publish, subscribe
from kvcs.publishing.publication import Publication
from kvcs.retrieving.block_fetcher import MoqtFetcher
from kvcs.retrieving.consumer import Consumer
from kvcs.simple.consumer import PromptConsumer
from relay.service.limits import LIMITS, Chosen
from tools.limits import PAGE, page


def test_the_page_of_limits_is_the_one_that_the_settings_make():
    assert PAGE.read_text() == page(), "run `make docs`"


def test_a_limit_has_one_name_on_the_command_line_in_python_and_in_the_log():
    for name, limit in LIMITS.items():
        assert name in {field.name for field in fields(limit.of)}
    chosen = Chosen(["max_namespaces=7", "max_namespaces_told=9"])
    assert (chosen.relay, chosen.session) == ({"max_namespaces": 7}, {"max_namespaces_told": 9})


def test_a_limit_of_caches_is_the_default_of_the_setting_that_it_names() -> None:
    takers = (Publication, Consumer, PromptConsumer, MoqtFetcher)
    settings = [inspect.signature(each.__init__).parameters for each in takers]
    for limit in LIMITS_OF_CACHES:
        named = [each[limit.name].default for each in settings if limit.name in each]
        assert named and set(named) == {limit.default}, limit.name
        for module, option in OPTIONS:
            if option in limit.option:
                parameter = inspect.signature(module.command).parameters[NAMES[option]]
                assert parameter.default == limit.default, option


OPTIONS = (
    (publish, "--max-segments"),
    (subscribe, "--max-segments"),
    (publish, "--max-manifest"),
    (subscribe, "--max-manifest"),
    (prompt_subscribe, "--max-tokens"),
)
NAMES = {
    "--max-segments": "max_segments",
    "--max-manifest": "max_manifest",
    "--max-tokens": "max_tokens",
}
