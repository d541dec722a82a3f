"""Gaps a publisher declares with Object Properties (MOQT "MOQT Properties")."""

from __future__ import annotations

from typing import NamedTuple

from moqt.values.codes import MAX_VI64, PropertyType, is_mandatory
from moqt.values.errors import MalformedTrack, MisuseError, SessionError
from moqt.values.messages import KeyValue
from moqt.values.names import Location
from moqt.wire.primitives import encode_key_values, iter_key_values


class Gaps(NamedTuple):
    """How many groups and Objects just before an Object do not exist; None = not said."""

    groups: int | None = None
    objects: int | None = None

    def ranges(self, at: Location) -> list[tuple[Location, Location]]:
        """The closed ranges of Locations they name, for the Object `at`."""
        found = []
        if self.groups:
            found.append((Location(at.group - self.groups, 0), Location(at.group - 1, MAX_VI64)))
        if self.objects:
            found.append(
                (Location(at.group, at.object - self.objects), Location(at.group, at.object - 1))
            )
        return found


def read_gaps(at: Location, properties: bytes) -> Gaps:
    """The gaps that the Object `at` declares.

    Raises MalformedTrack for what no Object may carry: a gap twice or larger than its ID, a
    mandatory Track Property, IMMUTABLE_PROPERTIES twice, nested or unparsable.
    """
    found: dict[int, int | bytes] = {}
    immutable: list[bytes] = []
    pairs = list(iter_key_values(properties))
    for type_, value in pairs:
        if type_ == PropertyType.IMMUTABLE_PROPERTIES and isinstance(value, bytes):
            immutable.append(value)
    if len(immutable) > 1:
        raise _fault(at, "IMMUTABLE_PROPERTIES twice")
    for nested in immutable:
        try:
            inside = list(iter_key_values(nested))
        except SessionError:
            raise _fault(at, "IMMUTABLE_PROPERTIES that cannot be parsed") from None
        if any(type_ == PropertyType.IMMUTABLE_PROPERTIES for type_, _ in inside):
            raise _fault(at, "IMMUTABLE_PROPERTIES inside IMMUTABLE_PROPERTIES")
        pairs += inside
    for type_, value in pairs:
        if is_mandatory(type_):
            raise _fault(at, f"the mandatory Track Property {type_:#x}")
        if type_ in (PropertyType.PRIOR_GROUP_ID_GAP, PropertyType.PRIOR_OBJECT_ID_GAP):
            if type_ in found:
                raise _fault(at, f"{PropertyType(type_).name} twice")
            found[type_] = value
    groups = found.get(PropertyType.PRIOR_GROUP_ID_GAP)
    objects = found.get(PropertyType.PRIOR_OBJECT_ID_GAP)
    gaps = Gaps(
        groups if isinstance(groups, int) else None, objects if isinstance(objects, int) else None
    )
    if (gaps.groups or 0) > at.group:
        raise _fault(at, "a gap before group 0")
    if (gaps.objects or 0) > at.object:
        raise _fault(at, "a gap before Object 0")
    return gaps


def with_gaps(properties: bytes, gaps: Gaps) -> bytes:
    """`properties` and `gaps`; raises MisuseError when a gap is in `properties` already."""
    pairs = [KeyValue(type_, value) for type_, value in iter_key_values(properties)]
    for type_, value in (
        (PropertyType.PRIOR_GROUP_ID_GAP, gaps.groups),
        (PropertyType.PRIOR_OBJECT_ID_GAP, gaps.objects),
    ):
        if value:
            if any(pair.type == type_ for pair in pairs):
                raise MisuseError(f"{type_.name} is in the properties already")
            pairs.append(KeyValue(type_, value))
    return encode_key_values(tuple(sorted(pairs, key=lambda pair: pair.type)))


def immutable_properties(properties: bytes) -> bytes | None:
    """The octets no relay may alter, as they are; None without any."""
    for type_, value in iter_key_values(properties):
        if type_ == PropertyType.IMMUTABLE_PROPERTIES and isinstance(value, bytes):
            return value
    return None


def _fault(at: Location, what: str) -> MalformedTrack:
    return MalformedTrack(f"Object {at.group}/{at.object} has {what}")
