"""Track Namespaces, Full Track Names and Locations (MOQT "Track Naming", "Location Structure")."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from moqt.values.codes import MAX_VI64

TrackNamespace = tuple[bytes, ...]
"""Track Namespace Fields, 0 to 32 of them, each at least one octet."""

ON_DISK: Final = b"kvcs-relay-on-disk"
"""A TRACK_STATUS for a namespace with this field before it asks `kvcs-relay` whether all of that
track is on its disk. It answers DOES_NOT_EXIST when not, with a retry interval when it is still
being written; so does, without one, any relay that does not know of this."""


class Location(NamedTuple):
    """Where an Object stands in its Track; ordered by group, then object."""

    group: int
    object: int


START = Location(0, 0)
MAX_LOCATION = Location(MAX_VI64, MAX_VI64)


def location_after(location: Location) -> Location:
    """The Location that comes next."""
    if location.object < MAX_VI64:
        return Location(location.group, location.object + 1)
    return Location(location.group + 1, 0)


def location_before(location: Location) -> Location:
    """The Location that comes directly before; there must be one."""
    if location.object:
        return Location(location.group, location.object - 1)
    return Location(location.group - 1, MAX_VI64)


class FullTrackName(NamedTuple):
    namespace: TrackNamespace
    name: bytes

    def __str__(self) -> str:
        return printable_name(self.namespace, self.name)


def is_prefix(prefix: TrackNamespace, namespace: TrackNamespace) -> bool:
    """Whether `prefix` matches `namespace`, field by field (the empty prefix matches all)."""
    return namespace[: len(prefix)] == prefix


def is_reserved(namespace: TrackNamespace) -> bool:
    """Whether the first field is exactly `.` or `.session`, which no application serves."""
    return bool(namespace) and namespace[0] in (b".", b".session")


def _printable(field: bytes) -> str:
    return re.sub(rb"[^a-zA-Z0-9_]", lambda m: b".%02x" % m.group()[0], field).decode("ascii")


def printable_namespace(namespace: TrackNamespace) -> str:
    return "-".join(_printable(field) for field in namespace)


def namespace_of(printable: str) -> TrackNamespace:
    """The namespace that `printable_namespace` shows so. Raises ValueError for what it never is."""
    if not printable:
        return ()
    fields = tuple(
        re.sub(rb"\.([0-9a-f]{2})", lambda m: bytes.fromhex(m.group(1).decode()), field)
        for field in printable.encode("ascii", "replace").split(b"-")
    )
    if printable_namespace(fields) != printable:
        raise ValueError(f"{printable!r} is no namespace as the log shows one")
    return fields


def printable_name(namespace: TrackNamespace, name: bytes) -> str:
    """The one-to-one text form of a Full Track Name for logs and file names."""
    return f"{printable_namespace(namespace)}--{_printable(name)}"
