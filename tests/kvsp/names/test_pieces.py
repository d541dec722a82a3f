"""Large JSON texts read in pieces are what the `json` module makes of them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsp.names import pieces
from kvsp.names.pieces import parse

DECODER = json.JSONDecoder()

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.sampled_from('ab,"\\[]{}:é\u2028 '), max_size=12),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=60,
)
gaps = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t:\r")])


def small_windows(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(pieces, "WINDOW", size)


@pytest.mark.parametrize("size", [4, 7, 16, 64])
def test_a_text_in_windows_of_any_size_is_the_same_tree(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_windows(monkeypatch, size)

    @settings(max_examples=150, deadline=None)
    @given(values, gaps)
    def check(value: Any, gap: tuple[str, str]) -> None:
        text = json.dumps(value, separators=gap, ensure_ascii=False)
        assert parse(f" {text}\n", DECODER) == json.loads(text)

    check()


@pytest.mark.parametrize("size", [4, 16, 64])
def test_what_is_no_json_is_refused_where_the_module_refuses_it(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_windows(monkeypatch, size)
    numbers = random.Random(size)
    good = json.dumps([{"a": [1, -2.5e3, 'x,"y', None]}, ["\\", True, {}, []]] * 3)
    for _ in range(400):
        at = numbers.randrange(len(good))
        text = good[:at] + numbers.choice(["", ",", "]", "}", '"', "1", "\\", ":"]) + good[at + 1 :]
        try:
            expected = json.loads(text)
        except json.JSONDecodeError:
            with pytest.raises(json.JSONDecodeError):
                parse(text, DECODER)
        else:
            assert parse(text, DECODER) == expected


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(["0123456789abcdef" * 4] * 20_000),
        json.dumps({"block_keys": ["0123456789abcdef" * 4] * 20_000, "ttl_ms": 1}),
        json.dumps(list(range(300_000))),
        json.dumps([{"a": [], "b": "},"}] * 30_000),
        json.dumps({str(number): number for number in range(50_000)}),
        json.dumps([[list(range(9000))] * 3] * 3),
        json.dumps(["x" * 300_000, 1.5e300]),
    ],
    ids=["strings", "member", "numbers", "objects", "members", "arrays", "long"],
)
def test_no_call_scans_more_than_a_window_or_one_string(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanned: list[int] = []

    class Counting(json.JSONDecoder):
        def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
            value, end = super().raw_decode(s, idx)
            if not isinstance(value, str):
                scanned.append(end - idx)
            return value, end

    assert parse(text, Counting()) == json.loads(text)
    assert max(scanned, default=0) <= pieces.WINDOW + 2
    # and not much more in all than there is
    assert sum(scanned) <= 2 * len(text)
