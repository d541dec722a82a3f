"""Control messages and their parts as values, independent of any draft's octets.

Everything here is valid by construction when it comes from a codec; field
names are the draft's. `None` means absent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from moqt.values.codes import (
    MAX_VI64,
    AliasType,
    LocationFilterType,
    MessageType,
    ParameterType,
    SetupOptionType,
    code_name,
)
from moqt.values.names import MAX_LOCATION, Location, TrackNamespace


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A Key-Value-Pair: an integer under an even type, octets under an odd one.

    (MOQT "Key-Value-Pair Structure")
    """

    type: int
    value: int | bytes


Properties = tuple[KeyValue, ...]
"""Track or Object Properties, or Setup Options, in ascending order of type."""


def property_value(properties: Properties, type_: int) -> int | bytes | None:
    """The first value of `type_`, or None. Does not look inside IMMUTABLE_PROPERTIES."""
    for pair in properties:
        if pair.type == type_:
            return pair.value
    return None


@dataclass(frozen=True, slots=True)
class AuthorizationToken:
    """MOQT "Authorization Token Compression"; `value` is a secret and never printed."""

    alias_type: AliasType
    alias: int | None = None
    token_type: int | None = None
    value: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class LocationFilter:
    """LOCATION_FILTER of draft-22 (typed). Fields a type does not have are 0."""

    type: LocationFilterType
    start_group: int = 0
    start_object: int = 0
    end_group_delta: int = 0
    end_object: int = 0

    @classmethod
    def next_object(cls) -> LocationFilter:
        return cls(LocationFilterType.NEXT_OBJECT)

    @classmethod
    def relative_start(cls, groups: int) -> LocationFilter:
        """From the group `groups` - 1 before the current one; 1 is the current, 0 the next."""
        return cls(LocationFilterType.RELATIVE_START, start_group=groups)

    @classmethod
    def absolute_start(cls, group: int, object_: int = 0) -> LocationFilter:
        return cls(LocationFilterType.ABSOLUTE_START, group, object_)

    @classmethod
    def groups(cls, first: int, last: int) -> LocationFilter:
        """All of groups `first` to `last`, inclusive (Absolute Start, Group End)."""
        return cls.through(Location(first, 0), last)

    @classmethod
    def through(cls, start: Location, last: int) -> LocationFilter:
        """From `start` through all of group `last` (Absolute Start, Group End)."""
        kind = LocationFilterType.ABSOLUTE_START_GROUP_END
        return cls(kind, start.group, start.object, last - start.group)

    @classmethod
    def range(cls, start: Location, end: Location) -> LocationFilter:
        """From `start` through `end`, inclusive (Absolute Range)."""
        return cls(
            LocationFilterType.ABSOLUTE_RANGE,
            start.group,
            start.object,
            end.group - start.group,
            end.object,
        )

    @classmethod
    def between(cls, start: Location, end: Location) -> LocationFilter:
        """What `resolve` gives as `start` and `end`, inclusive; a group is open to its last
        possible Object ID."""
        if end.object == MAX_VI64:
            return cls.through(start, end.group)
        return cls.range(start, end)

    def resolve(self, largest: Location | None) -> tuple[Location, Location]:
        """The inclusive (start, end) this selects when `largest` is the Largest Object.

        An open end is `MAX_LOCATION`; FETCH and fill lower it to `largest`.
        """
        match self.type:
            case LocationFilterType.NEXT_OBJECT:
                start = Location(largest.group, largest.object + 1) if largest else Location(0, 0)
                return start, MAX_LOCATION
            case LocationFilterType.RELATIVE_START:
                if largest is None:
                    return Location(0, 0), MAX_LOCATION
                return Location(max(0, largest.group + 1 - self.start_group), 0), MAX_LOCATION
            case LocationFilterType.NONE:
                return Location(0, 0), MAX_LOCATION
        start = Location(self.start_group, self.start_object)
        end_group = self.start_group + self.end_group_delta
        match self.type:
            case LocationFilterType.ABSOLUTE_START_GROUP_END:
                return start, Location(end_group, MAX_VI64)
            case LocationFilterType.ABSOLUTE_RANGE:
                return start, Location(end_group, self.end_object)
        return start, MAX_LOCATION


@dataclass(frozen=True, slots=True)
class RangeFilter:
    """One range filter (0x25 to 0x29); `ranges` are absolute, inclusive, None = open end.

    An empty `ranges` removes filters of this type (REQUEST_UPDATE). Codecs do not
    judge the values: `moqt.track.filters` refuses them with INVALID_FILTER.
    """

    type: ParameterType
    set_id: int = 0
    property_type: int | None = None
    ranges: tuple[tuple[int, int | None], ...] = ()


@dataclass(frozen=True, slots=True)
class Parameters:
    """MOQT "Control Message Parameters", each under its own name; None or () = absent."""

    object_delivery_timeout: int | None = None
    authorization_tokens: tuple[AuthorizationToken, ...] = ()
    rendezvous_timeout: int | None = None
    subgroup_delivery_timeout: int | None = None
    expires: int | None = None
    largest_object: Location | None = None
    fill_timeout: int | None = None
    forward: int | None = None
    subscriber_priority: int | None = None
    location_filter: LocationFilter | None = None
    group_order: int | None = None
    fill_parameters: Parameters | None = None
    range_filters: tuple[RangeFilter, ...] = ()
    new_group_request: int | None = None
    track_namespace_prefix: TrackNamespace | None = None
    include_properties: int | None = None
    relay_path: tuple[int, ...] | None = None


NO_PARAMETERS = Parameters()


class PeerRelay(NamedTuple):
    """A peer that is a relay, and understands RELAY_PATH."""

    id: int | None
    """Its name among relays; it chooses it itself. None: it is not believed to be one."""
    first_hand: bool
    """It wants to be answered with what is here, and nobody else asked."""


@dataclass(frozen=True, slots=True)
class Setup:
    TYPE: ClassVar[MessageType] = MessageType.SETUP
    options: Properties = ()

    def __repr__(self) -> str:
        """Without the tokens, which are secrets."""
        shown = (
            f"{code_name(SetupOptionType, option.type)}="
            + (
                "<secret>"
                if option.type == SetupOptionType.AUTHORIZATION_TOKEN
                else repr(option.value)
            )
            for option in self.options
        )
        return f"Setup({', '.join(shown)})"


@dataclass(frozen=True, slots=True)
class Goaway:
    TYPE: ClassVar[MessageType] = MessageType.GOAWAY
    uri: str = ""
    timeout_ms: int = 0


@dataclass(frozen=True, slots=True)
class Subscribe:
    TYPE: ClassVar[MessageType] = MessageType.SUBSCRIBE
    request_id: int
    namespace: TrackNamespace
    name: bytes
    parameters: Parameters = NO_PARAMETERS


@dataclass(frozen=True, slots=True)
class SubscribeOk:
    TYPE: ClassVar[MessageType] = MessageType.SUBSCRIBE_OK
    track_alias: int
    parameters: Parameters = NO_PARAMETERS
    properties: Properties = ()


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    TYPE: ClassVar[MessageType] = MessageType.REQUEST_UPDATE
    request_id: int
    parameters: Parameters = NO_PARAMETERS


@dataclass(frozen=True, slots=True)
class RequestOk:
    TYPE: ClassVar[MessageType] = MessageType.REQUEST_OK
    parameters: Parameters = NO_PARAMETERS
    properties: Properties = ()


@dataclass(frozen=True, slots=True)
class Redirect:
    uri: str
    namespace: TrackNamespace
    name: bytes


@dataclass(frozen=True, slots=True)
class RequestErrorMessage:
    """REQUEST_ERROR; `retry_interval` is the wire value (0 = never, n = after n-1 ms)."""

    TYPE: ClassVar[MessageType] = MessageType.REQUEST_ERROR
    code: int
    retry_interval: int = 0
    reason: str = ""
    redirect: Redirect | None = None


@dataclass(frozen=True, slots=True)
class Publish:
    TYPE: ClassVar[MessageType] = MessageType.PUBLISH
    request_id: int
    namespace: TrackNamespace
    name: bytes
    track_alias: int
    parameters: Parameters = NO_PARAMETERS
    properties: Properties = ()


@dataclass(frozen=True, slots=True)
class PublishDone:
    """`stream_count` is MAX_VI64 when the sender does not know it."""

    TYPE: ClassVar[MessageType] = MessageType.PUBLISH_DONE
    code: int
    stream_count: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PublishStateNotify:
    TYPE: ClassVar[MessageType] = MessageType.PUBLISH_STATE_NOTIFY
    parameters: Parameters = NO_PARAMETERS


@dataclass(frozen=True, slots=True)
class Fetch:
    TYPE: ClassVar[MessageType] = MessageType.FETCH
    request_id: int
    namespace: TrackNamespace
    name: bytes
    parameters: Parameters = NO_PARAMETERS


@dataclass(frozen=True, slots=True)
class FetchOk:
    TYPE: ClassVar[MessageType] = MessageType.FETCH_OK
    end_of_track: bool
    end_location: Location
    parameters: Parameters = NO_PARAMETERS
    properties: Properties = ()


@dataclass(frozen=True, slots=True)
class TrackStatus:
    TYPE: ClassVar[MessageType] = MessageType.TRACK_STATUS
    request_id: int
    namespace: TrackNamespace
    name: bytes
    parameters: Parameters = NO_PARAMETERS


@dataclass(frozen=True, slots=True)
class PublishNamespace:
    TYPE: ClassVar[MessageType] = MessageType.PUBLISH_NAMESPACE
    request_id: int
    namespace: TrackNamespace
    parameters: Parameters = NO_PARAMETERS


@dataclass(frozen=True, slots=True)
class SubscribeNamespace:
    TYPE: ClassVar[MessageType] = MessageType.SUBSCRIBE_NAMESPACE
    request_id: int
    prefix: TrackNamespace
    parameters: Parameters = NO_PARAMETERS


@dataclass(frozen=True, slots=True)
class Namespace:
    TYPE: ClassVar[MessageType] = MessageType.NAMESPACE
    suffix: TrackNamespace


@dataclass(frozen=True, slots=True)
class NamespaceDone:
    TYPE: ClassVar[MessageType] = MessageType.NAMESPACE_DONE
    suffix: TrackNamespace


@dataclass(frozen=True, slots=True)
class SubscribeTracks:
    TYPE: ClassVar[MessageType] = MessageType.SUBSCRIBE_TRACKS
    request_id: int
    prefix: TrackNamespace
    parameters: Parameters = NO_PARAMETERS


@dataclass(frozen=True, slots=True)
class PublishSkipped:
    TYPE: ClassVar[MessageType] = MessageType.PUBLISH_SKIPPED
    suffix: TrackNamespace
    name: bytes


Request = (
    Subscribe
    | Publish
    | Fetch
    | TrackStatus
    | PublishNamespace
    | SubscribeNamespace
    | SubscribeTracks
)
Message = (
    Request
    | Setup
    | Goaway
    | SubscribeOk
    | RequestUpdate
    | RequestOk
    | RequestErrorMessage
    | PublishDone
    | PublishStateNotify
    | FetchOk
    | Namespace
    | NamespaceDone
    | PublishSkipped
)
