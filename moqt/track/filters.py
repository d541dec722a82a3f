"""Range filters as pure logic (MOQT "Range Filters"): refuse, match, update.

Ranges are intervals throughout. Their bounds come from the peer and may be
2^64-1 apart, so nothing here walks over the values between them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

from moqt.values.codes import MAX_VI64, ParameterType, RequestErrorCode
from moqt.values.errors import RequestError
from moqt.values.messages import Properties, RangeFilter
from moqt.wire.primitives import iter_key_values, with_immutable

_MAX_VALUE = defaultdict(lambda: MAX_VI64, {ParameterType.PRIORITY_FILTER: 255})

RangeFilters = tuple[RangeFilter, ...]
Range = tuple[int, int | None]
Pairs = Iterable[tuple[int, int | bytes]]


def check_range_filters(filters: Iterable[RangeFilter], max_ranges: int) -> None:
    """Raises RequestError(INVALID_FILTER) unless `filters` may be active in one request.

    `max_ranges` is the MAX_FILTER_RANGES this endpoint announced. After a
    REQUEST_UPDATE check both what it carries and what `merge_update` makes of it.
    """
    seen = set()
    ranges = 0
    for each in filters:
        key = (each.type, each.set_id, each.property_type)
        if key in seen:
            raise _invalid(each, f"twice in set {each.set_id}")
        seen.add(key)
        if each.property_type is not None and each.property_type & 1:
            raise _invalid(each, f"property {each.property_type:#x} is not an integer")
        limit = _MAX_VALUE[each.type]
        # Bounds ascend as they are sums of deltas, so the last one is the largest.
        if each.ranges and max(bound for bound in each.ranges[-1] if bound is not None) > limit:
            raise _invalid(each, f"a value above {limit}")
        ranges += len(each.ranges)
    if ranges > max_ranges:
        raise RequestError(
            RequestErrorCode.INVALID_FILTER, f"{ranges} ranges, MAX_FILTER_RANGES is {max_ranges}"
        )


def _invalid(filter_: RangeFilter, why: str) -> RequestError:
    return RequestError(RequestErrorCode.INVALID_FILTER, f"{filter_.type.name}: {why}")


def merge_update(current: RangeFilters, update: RangeFilters) -> RangeFilters:
    """The filters in force after a REQUEST_UPDATE carrying `update` (MOQT "REQUEST_UPDATE").

    A type that is in `update` replaces all of its type; an empty one removes them.
    """
    replaced = {each.type for each in update}
    kept = (each for each in current if each.type not in replaced)
    return (*kept, *(each for each in update if each.ranges))


def update_to(current: RangeFilters, wanted: RangeFilters) -> RangeFilters:
    """What a REQUEST_UPDATE carries so that `wanted` takes the place of `current`."""
    gone = {each.type for each in current} - {each.type for each in wanted}
    return (*wanted, *(RangeFilter(type_) for type_ in sorted(gone)))


def either(first: RangeFilters, second: RangeFilters) -> RangeFilters:
    """Filters of Objects that let through what one of the two does. () lets everything through,
    and TRACK_PROPERTY_FILTERs do not count. What is alike is said once, in one order."""
    alone: dict[tuple[ParameterType, int | None], list[Range]] = {}
    together: set[frozenset[RangeFilter]] = set()
    for filters in (first, second):
        sets: dict[int, list[RangeFilter]] = {}
        for each in filters:
            if each.type != ParameterType.TRACK_PROPERTY_FILTER and each.ranges:
                sets.setdefault(each.set_id, []).append(each)
        if not sets:
            return ()
        for conditions in sets.values():
            if len(conditions) == 1:
                key = conditions[0].type, conditions[0].property_type
                alone.setdefault(key, []).extend(conditions[0].ranges)
            else:
                together.add(frozenset(replace(each, set_id=0) for each in conditions))
    found = [
        [RangeFilter(type_, property_type=of, ranges=_merged(ranges))]
        for (type_, of), ranges in alone.items()
    ]
    found += [sorted(conditions, key=_order) for conditions in together]
    found.sort(key=lambda conditions: [_order(each) for each in conditions])
    return tuple(
        replace(each, set_id=set_id)
        for set_id, conditions in enumerate(found)
        for each in conditions
    )


def _order(each: RangeFilter) -> tuple[int, ...]:
    of = -1 if each.property_type is None else each.property_type
    bounds = (MAX_VI64 if bound is None else bound for both in each.ranges for bound in both)
    return (each.type, of, *bounds)


def _merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same values in as few ranges as there can be, ascending."""
    merged: list[Range] = []
    for start, end in sorted(ranges, key=lambda each: each[0]):
        if merged:
            low, high = merged[-1]
            if high is None:
                break
            if start <= high + 1:
                merged[-1] = low, None if end is None else max(high, end)
                continue
        merged.append((start, end))
    return tuple(merged)


def matches(
    filters: RangeFilters,
    *,
    object: int,
    subgroup: int | None,
    priority: int,
    properties: bytes = b"",
) -> bool:
    """Whether an Object passes: some SetID of which every filter has a range it is in.

    `subgroup` is None for a datagram, which no SUBGROUP_FILTER matches.
    `priority` is the effective one. `properties` are well-formed Key-Value-Pairs.
    """
    tested = {
        ParameterType.SUBGROUP_FILTER: () if subgroup is None else (subgroup,),
        ParameterType.OBJECTID_FILTER: (object,),
        ParameterType.PRIORITY_FILTER: (priority,),
    }

    def values(each: RangeFilter) -> Iterable[int]:
        if each.type == ParameterType.OBJECT_PROPERTY_FILTER:
            return _property_values(each, iter_key_values(properties))
        return tested[each.type]

    return _some_set_passes(
        [each for each in filters if each.type != ParameterType.TRACK_PROPERTY_FILTER], values
    )


def matches_track(filters: RangeFilters, properties: Properties) -> bool:
    """Whether a Track with these Track Properties passes the TRACK_PROPERTY_FILTERs."""
    return _some_set_passes(
        [each for each in filters if each.type == ParameterType.TRACK_PROPERTY_FILTER],
        lambda each: _property_values(each, ((pair.type, pair.value) for pair in properties)),
    )


def _property_values(filter_: RangeFilter, pairs: Pairs) -> Iterable[int]:
    return (
        value
        for type_, value in with_immutable(pairs)
        if type_ == filter_.property_type and isinstance(value, int)
    )


def _some_set_passes(
    filters: list[RangeFilter], values: Callable[[RangeFilter], Iterable[int]]
) -> bool:
    sets: dict[int, bool] = {}
    for each in filters:
        if each.ranges and sets.get(each.set_id, True):
            sets[each.set_id] = any(_contains(each, value) for value in values(each))
    return any(sets.values()) if sets else True


def _contains(filter_: RangeFilter, value: int) -> bool:
    return any(start <= value and (end is None or value <= end) for start, end in filter_.ranges)
