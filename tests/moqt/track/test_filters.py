"""Range filters: what is refused, what passes, what an update leaves (MOQT "Range Filters")."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.track.filters import check_range_filters, matches, matches_track, merge_update
from moqt.values.codes import MAX_VI64, ParameterType, RequestErrorCode
from moqt.values.errors import RequestError
from moqt.values.messages import KeyValue, RangeFilter
from moqt.wire.primitives import encode_key_values

P = ParameterType
Ranges = tuple[tuple[int, int | None], ...]


def subgroup(*ranges: tuple[int, int | None], set_id: int = 0) -> RangeFilter:
    return RangeFilter(P.SUBGROUP_FILTER, set_id, None, ranges)


def object_id(*ranges: tuple[int, int | None], set_id: int = 0) -> RangeFilter:
    return RangeFilter(P.OBJECTID_FILTER, set_id, None, ranges)


def priority(*ranges: tuple[int, int | None], set_id: int = 0) -> RangeFilter:
    return RangeFilter(P.PRIORITY_FILTER, set_id, None, ranges)


def on_property(
    type_: int, *ranges: tuple[int, int | None], set_id: int = 0, track: bool = False
) -> RangeFilter:
    kind = P.TRACK_PROPERTY_FILTER if track else P.OBJECT_PROPERTY_FILTER
    return RangeFilter(kind, set_id, type_, ranges)


def passes(*filters: RangeFilter, **given: object) -> bool:
    values = {"object": 5, "subgroup": 2, "priority": 128, "properties": b"", **given}
    return matches(filters, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("filters", "why"),
    [
        ((object_id((1, 2)), object_id((5, 6))), "twice"),
        ((on_property(16, (1, 2)), on_property(16, (3, 4))), "twice"),
        ((priority((0, 256)),), "above 255"),
        ((priority((256, None)),), "above 255"),
        ((priority((1, 2), (3, 300)),), "above 255"),
        ((object_id((0, MAX_VI64 + 1)),), "above"),
        ((object_id((MAX_VI64 + 1, None)),), "above"),
        ((on_property(17, (1, 2)),), "not an integer"),
        ((on_property(17, (1, 2), track=True),), "not an integer"),
        ((object_id((1, 2), (4, 5)), subgroup((1, 2), (4, 5))), "MAX_FILTER_RANGES"),
    ],
)
def test_filters_that_break_a_rule_refuse_the_request(
    filters: tuple[RangeFilter, ...], why: str
) -> None:
    with pytest.raises(RequestError, match=why) as error:
        check_range_filters(filters, 3)
    assert error.value.code == RequestErrorCode.INVALID_FILTER


@pytest.mark.parametrize(
    "filters",
    [
        (),
        (object_id((1, 2)), object_id((1, 2), set_id=1), subgroup((1, None))),
        (on_property(16, (1, 2)), on_property(18, (1, 2)), on_property(16, (1, 2), track=True)),
        (priority((0, 255)), object_id((0, MAX_VI64)), subgroup((MAX_VI64, None))),
        (priority((3, None)), RangeFilter(P.OBJECTID_FILTER), RangeFilter(P.SUBGROUP_FILTER)),
    ],
)
def test_filters_within_the_rules_are_taken(filters: tuple[RangeFilter, ...]) -> None:
    check_range_filters(filters, 3)


def test_without_max_filter_ranges_only_removal_is_allowed() -> None:
    check_range_filters((RangeFilter(P.PRIORITY_FILTER),), 0)
    with pytest.raises(RequestError):
        check_range_filters((priority((1, 2)),), 0)


def test_without_filters_everything_passes() -> None:
    assert passes()
    assert passes(RangeFilter(P.OBJECTID_FILTER))


def test_ranges_of_a_filter_are_alternatives_with_inclusive_ends() -> None:
    ids = object_id((3, 5), (10, 15))
    assert [n for n in range(20) if passes(ids, object=n)] == [3, 4, 5, *range(10, 16)]


def test_an_open_range_has_no_end_and_no_value_is_walked() -> None:
    assert passes(object_id((7, None)), object=MAX_VI64)
    assert passes(object_id((0, MAX_VI64)), object=1 << 60)


def test_filters_of_one_set_must_all_pass() -> None:
    assert passes(object_id((5, 5)), subgroup((2, 2)), priority((128, 128)))
    assert not passes(object_id((5, 5)), subgroup((3, 3)), priority((128, 128)))


def test_one_set_that_passes_is_enough() -> None:
    assert passes(object_id((9, 9)), subgroup((2, 2), set_id=1))
    assert not passes(object_id((9, 9)), subgroup((3, 3), set_id=1))
    assert not passes(object_id((5, 5)), subgroup((9, 9)), subgroup((9, 9), set_id=1))


def test_a_datagram_has_no_subgroup_and_matches_no_subgroup_filter() -> None:
    assert not passes(subgroup((0, None)), subgroup=None)


def test_an_object_is_tested_by_its_integer_property() -> None:
    properties = encode_key_values((KeyValue(14, 160), KeyValue(16, 150)))
    assert passes(on_property(16, (100, 155)), properties=properties)
    assert not passes(on_property(16, (151, 200)), properties=properties)


def test_an_object_without_the_property_does_not_match() -> None:
    assert not passes(on_property(16, (0, None)))


def test_properties_inside_immutable_properties_count() -> None:
    nested = encode_key_values((KeyValue(16, 150),))
    properties = encode_key_values((KeyValue(0x0B, nested),))
    assert passes(on_property(16, (100, 200)), properties=properties)


def test_immutable_properties_that_cannot_be_parsed_do_not_match() -> None:
    properties = encode_key_values((KeyValue(0x0B, b"\x10\x05\xff"),))
    assert not passes(on_property(16, (0, None)), properties=properties)


def test_track_property_filters_choose_tracks_and_not_objects() -> None:
    filters = (on_property(14, (0, 10), track=True),)
    assert passes(*filters)
    assert matches_track(filters, (KeyValue(14, 10),))
    assert matches_track(filters, (KeyValue(0x0B, encode_key_values((KeyValue(14, 3),))),))
    assert not matches_track(filters, (KeyValue(14, 11),))
    assert not matches_track(filters, ())
    assert matches_track((object_id((9, 9)),), ())


def test_an_update_replaces_all_sets_of_the_types_it_carries() -> None:
    current = (object_id((1, 1)), object_id((2, 2), set_id=1), subgroup((3, 3)))
    assert merge_update(current, ()) == current
    assert merge_update(current, (object_id((9, 9)),)) == (subgroup((3, 3)), object_id((9, 9)))


def test_an_empty_filter_in_an_update_removes_its_type() -> None:
    current = (object_id((1, 1)), subgroup((3, 3)))
    assert merge_update(current, (RangeFilter(P.OBJECTID_FILTER),)) == (subgroup((3, 3)),)


# -- against a model that walks over the values ------------------------------------------

_RANGES = st.lists(
    st.tuples(st.integers(0, 9), st.one_of(st.none(), st.integers(0, 9))), min_size=1, max_size=3
).map(lambda pairs: tuple((a, b) for a, b in pairs if b is None or a <= b))

_FILTERS = st.lists(
    st.builds(
        lambda kind, set_id, ranges: RangeFilter(
            kind, set_id, 16 if kind is P.OBJECT_PROPERTY_FILTER else None, ranges
        ),
        st.sampled_from(
            [P.SUBGROUP_FILTER, P.OBJECTID_FILTER, P.PRIORITY_FILTER, P.OBJECT_PROPERTY_FILTER]
        ),
        st.integers(0, 2),
        _RANGES,
    ),
    max_size=5,
)


@given(
    _FILTERS,
    st.integers(0, 9),
    st.one_of(st.none(), st.integers(0, 9)),
    st.integers(0, 9),
    st.lists(st.integers(0, 9), max_size=2),
)
def test_sets_are_alternatives_filters_of_a_set_conditions_and_ranges_alternatives(
    filters: list[RangeFilter],
    object_: int,
    subgroup_: int | None,
    priority_: int,
    values: list[int],
) -> None:
    given_values: dict[P, list[int]] = {
        P.OBJECTID_FILTER: [object_],
        P.SUBGROUP_FILTER: [] if subgroup_ is None else [subgroup_],
        P.PRIORITY_FILTER: [priority_],
        P.OBJECT_PROPERTY_FILTER: values,
    }

    def allowed(each: RangeFilter) -> set[int]:
        return {
            value
            for start, end in each.ranges
            for value in range(start, 10 if end is None else end + 1)
        }

    active = [each for each in filters if each.ranges]
    expected = not active or any(
        all(
            allowed(each).intersection(given_values[each.type])
            for each in active
            if each.set_id == set_id
        )
        for set_id in {each.set_id for each in active}
    )
    properties = encode_key_values(tuple(KeyValue(16, value) for value in sorted(values)))
    assert expected == passes(
        *filters, object=object_, subgroup=subgroup_, priority=priority_, properties=properties
    )
