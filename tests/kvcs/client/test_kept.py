"""Which publications are kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcs.client.kept import Kept


def always(_) -> bool:
    return True


def test_those_used_longest_ago_make_room():
    kept = Kept(100, 10, 60)
    for name in "abc":
        assert kept.admit(name, 30, 0.0, always) == []
    kept.use("a", 1.0)
    assert kept.admit("d", 40, 2.0, always) == ["b"]
    assert kept.octets == 100
    assert "a" in kept and "b" not in kept


def test_one_in_use_does_not_make_room_and_without_room_nothing_changes():
    kept = Kept(100, 10, 60)
    kept.admit("a", 60, 0.0, always)
    kept.admit("b", 30, 0.0, always)
    assert kept.admit("c", 50, 1.0, lambda name: name != "a") is None
    assert (len(kept), kept.octets) == (2, 90)


def test_one_that_is_larger_than_the_budget_is_not_kept():
    kept = Kept(100, 10, 60)
    kept.admit("a", 60, 0.0, always)
    assert kept.admit("b", 101, 1.0, always) is None
    assert "a" in kept


def test_there_are_no_more_than_may_be():
    kept = Kept(100, 2, 60)
    assert [kept.admit(name, 1, 0.0, always) for name in "abc"] == [[], [], ["a"]]
    assert kept.admit("d", 1, 0.0, lambda _: False) is None


def test_what_was_of_no_use_for_so_long_has_expired():
    kept = Kept(100, 10, 60)
    kept.admit("a", 1, 0.0, always)
    kept.admit("b", 1, 10.0, always)
    kept.use("a", 20.0)
    assert kept.expired(69.9) == []
    assert kept.expired(70.0) == ["b"]
    assert kept.expired(80.0) == ["b", "a"]


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 60), st.booleans(), st.booleans()),
        max_size=40,
    )
)
def test_the_octets_are_always_those_of_what_is_kept_and_never_more_than_the_budget(steps):
    kept, sizes = Kept(100, 4, 60), {}
    for now, (name, octets, admits, spare) in enumerate(steps):
        if name in kept:
            kept.use(name, now) if admits else kept.drop(name)
            if not admits:
                del sizes[name]
        else:
            gone = kept.admit(name, octets, now, lambda _, spare=spare: spare)
            for each in gone or ():
                del sizes[each]
            if gone is not None:
                sizes[name] = octets
        assert kept.octets == sum(sizes.values()) <= 100
        assert len(kept) == len(sizes) <= 4
