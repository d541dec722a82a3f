"""Track Properties: which of them a Track may have, and what they say (MOQT "MOQT Properties")."""

from __future__ import annotations

from moqt.values.codes import PropertyType, RequestErrorCode, is_mandatory
from moqt.values.errors import RequestError, SessionError
from moqt.values.messages import Properties
from moqt.wire.primitives import iter_key_values, with_immutable


def check_track_properties(properties: Properties, known: frozenset[int]) -> None:
    """Raise RequestError for Track Properties that this end cannot accept.

    UNSUPPORTED_EXTENSION for a mandatory one not in `known`, MALFORMED_TRACK for
    IMMUTABLE_PROPERTIES that break their rules. (MOQT "Properties", "Immutable Properties")
    """
    immutable = [p for p in properties if p.type == PropertyType.IMMUTABLE_PROPERTIES]
    if len(immutable) > 1:
        raise _malformed("IMMUTABLE_PROPERTIES twice")
    for pair in immutable:
        try:
            nested = list(iter_key_values(pair.value if isinstance(pair.value, bytes) else b""))
        except SessionError:
            raise _malformed("IMMUTABLE_PROPERTIES that cannot be read") from None
        if any(type_ == PropertyType.IMMUTABLE_PROPERTIES for type_, _ in nested):
            raise _malformed("IMMUTABLE_PROPERTIES inside IMMUTABLE_PROPERTIES")
    for type_, _ in with_immutable((pair.type, pair.value) for pair in properties):
        if is_mandatory(type_) and type_ not in known:
            raise RequestError(
                RequestErrorCode.UNSUPPORTED_EXTENSION,
                f"the track has mandatory property {type_:#x}, which is not known here",
            )


def _malformed(what: str) -> RequestError:
    return RequestError(RequestErrorCode.MALFORMED_TRACK, f"the track has {what}")


def track_property(properties: Properties, type_: int) -> int | bytes | None:
    """The value of a Track Property, also from inside IMMUTABLE_PROPERTIES; None if absent."""
    for found, value in with_immutable((pair.type, pair.value) for pair in properties):
        if found == type_:
            return value
    return None


def max_cache_duration(properties: Properties) -> float | None:
    """For how long a cache may serve Objects of the Track, in seconds; None when it says nothing
    (MOQT "MAX_CACHE_DURATION")."""
    value = track_property(properties, PropertyType.MAX_CACHE_DURATION)
    return value / 1000 if isinstance(value, int) else None
