"""The page of limits is what the settings themselves say."""

from __future__ import annotations

from tools.limits import PAGE, page


def test_the_page_of_limits_is_the_one_that_the_settings_make():
    assert PAGE.read_text() == page(), "run `make docs`"
