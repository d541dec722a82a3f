"""Every registry of MOQT draft-22, each member named with the draft's own word."""

from __future__ import annotations

from enum import IntEnum, IntFlag

MAX_VI64 = (1 << 64) - 1

MAX_NAMESPACE_FIELDS = 32
MAX_FULL_TRACK_NAME = 4096
MAX_REASON_PHRASE = 1024
MAX_GOAWAY_URI = 8192
MAX_KVP_VALUE = 65535
MAX_MESSAGE_BODY = 65535

DEFAULT_PRIORITY = 128


class MessageType(IntEnum):
    """Control message types (MOQT "Control Messages")."""

    REQUEST_UPDATE = 0x02
    SUBSCRIBE = 0x03
    SUBSCRIBE_OK = 0x04
    REQUEST_ERROR = 0x05
    PUBLISH_NAMESPACE = 0x06
    REQUEST_OK = 0x07
    NAMESPACE = 0x08
    PUBLISH_DONE = 0x0B
    TRACK_STATUS = 0x0D
    NAMESPACE_DONE = 0x0E
    PUBLISH_SKIPPED = 0x0F
    GOAWAY = 0x10
    FETCH = 0x16
    FETCH_OK = 0x18
    PUBLISH = 0x1D
    PUBLISH_STATE_NOTIFY = 0x22
    SUBSCRIBE_NAMESPACE = 0x50
    SUBSCRIBE_TRACKS = 0x51
    SETUP = 0x2F00


REQUEST_OPENERS = frozenset(
    {
        MessageType.SUBSCRIBE,
        MessageType.PUBLISH,
        MessageType.FETCH,
        MessageType.TRACK_STATUS,
        MessageType.PUBLISH_NAMESPACE,
        MessageType.SUBSCRIBE_NAMESPACE,
        MessageType.SUBSCRIBE_TRACKS,
    }
)


class SetupOptionType(IntEnum):
    PATH = 0x01
    AUTHORIZATION_TOKEN = 0x03
    MAX_AUTH_TOKEN_CACHE_SIZE = 0x04
    AUTHORITY = 0x05
    MAX_FILTER_RANGES = 0x06
    MOQT_IMPLEMENTATION = 0x07
    MAX_REQUEST_UPDATES = 0x08
    RELAY_ID = 0x4B5700
    """Of this implementation: who sends it is a relay, and understands RELAY_PATH."""
    FIRST_HAND = 0x4B5702
    """Of this implementation: a relay that wants what its peer has itself, nobody else asked."""


class ParameterType(IntEnum):
    OBJECT_DELIVERY_TIMEOUT = 0x02
    AUTHORIZATION_TOKEN = 0x03
    RENDEZVOUS_TIMEOUT = 0x04
    SUBGROUP_DELIVERY_TIMEOUT = 0x06
    EXPIRES = 0x08
    LARGEST_OBJECT = 0x09
    FILL_TIMEOUT = 0x0A
    FORWARD = 0x10
    SUBSCRIBER_PRIORITY = 0x20
    LOCATION_FILTER = 0x21
    GROUP_ORDER = 0x22
    FILL_PARAMETERS = 0x23
    SUBGROUP_FILTER = 0x25
    OBJECTID_FILTER = 0x26
    PRIORITY_FILTER = 0x27
    OBJECT_PROPERTY_FILTER = 0x28
    TRACK_PROPERTY_FILTER = 0x29
    NEW_GROUP_REQUEST = 0x32
    TRACK_NAMESPACE_PREFIX = 0x34
    INCLUDE_PROPERTIES = 0x35
    RELAY_PATH = 0x4B5705
    """Of this implementation, where the peer's RELAY_ID has come: the relays that wait for the
    answer."""


class PropertyType(IntEnum):
    OBJECT_DELIVERY_TIMEOUT = 0x02
    MAX_CACHE_DURATION = 0x04
    SUBGROUP_DELIVERY_TIMEOUT = 0x06
    IMMUTABLE_PROPERTIES = 0x0B
    DEFAULT_PUBLISHER_PRIORITY = 0x0E
    DEFAULT_PUBLISHER_GROUP_ORDER = 0x22
    DYNAMIC_GROUPS = 0x30
    PRIOR_GROUP_ID_GAP = 0x3C
    PRIOR_OBJECT_ID_GAP = 0x3E


class LocationFilterType(IntEnum):
    NONE = 0x00
    RELATIVE_START = 0x01
    ABSOLUTE_START = 0x02
    ABSOLUTE_START_GROUP_END = 0x03
    ABSOLUTE_RANGE = 0x04
    NEXT_OBJECT = 0x05


class GroupOrder(IntEnum):
    ASCENDING = 1
    DESCENDING = 2


class ObjectStatus(IntEnum):
    NORMAL = 0x0
    END_OF_GROUP = 0x3
    END_OF_TRACK = 0x4


class AliasType(IntEnum):
    """Authorization Token alias types (MOQT "Authorization Token Compression")."""

    DELETE = 0
    REGISTER = 1
    USE_ALIAS = 2
    USE_VALUE = 3


class StreamType(IntEnum):
    FETCH = 0x05
    CONTROL = 0x2F00
    PADDING = 0x132B3E28


PADDING_DATAGRAM_TYPE = 0x132B3E29


class SubgroupFlag(IntFlag):
    """Bits of a subgroup stream's type."""

    PROPERTIES = 0x01
    MODE_FIRST_OBJECT_ID = 0x02
    MODE_EXPLICIT = 0x04
    MODE_MASK = 0x06
    END_OF_GROUP = 0x08
    SUBGROUP = 0x10
    DEFAULT_PRIORITY = 0x20
    FIRST_OBJECT = 0x40


class DatagramFlag(IntFlag):
    PROPERTIES = 0x01
    END_OF_GROUP = 0x02
    ZERO_OBJECT_ID = 0x04
    DEFAULT_PRIORITY = 0x08
    STATUS = 0x20


class FetchFlag(IntFlag):
    SUBGROUP_ZERO = 0x00
    SUBGROUP_PRIOR = 0x01
    SUBGROUP_NEXT = 0x02
    SUBGROUP_EXPLICIT = 0x03
    SUBGROUP_MASK = 0x03
    OBJECT_ID = 0x04
    GROUP_ID = 0x08
    PRIORITY = 0x10
    PROPERTIES = 0x20
    DATAGRAM = 0x40


class EndOfRange(IntEnum):
    """Markers on a fetch stream: what is known of the Locations up to theirs."""

    NON_EXISTENT = 0x8C
    UNKNOWN = 0x10C
    TIMED_OUT = 0x20C


class SessionErrorCode(IntEnum):
    NO_ERROR = 0x0
    INTERNAL_ERROR = 0x1
    UNAUTHORIZED = 0x2
    PROTOCOL_VIOLATION = 0x3
    INVALID_REQUEST_ID = 0x4
    DUPLICATE_TRACK_ALIAS = 0x5
    KEY_VALUE_FORMATTING_ERROR = 0x6
    INVALID_PATH = 0x8
    MALFORMED_PATH = 0x9
    GOAWAY_TIMEOUT = 0x10
    CONTROL_MESSAGE_TIMEOUT = 0x11
    DATA_STREAM_TIMEOUT = 0x12
    AUTH_TOKEN_CACHE_OVERFLOW = 0x13
    DUPLICATE_AUTH_TOKEN_ALIAS = 0x14
    MALFORMED_AUTH_TOKEN = 0x16
    UNKNOWN_AUTH_TOKEN_ALIAS = 0x17
    EXPIRED_AUTH_TOKEN = 0x18
    INVALID_AUTHORITY = 0x19
    MALFORMED_AUTHORITY = 0x1A
    TOO_MANY_REQUEST_UPDATES = 0x1B


class RequestErrorCode(IntEnum):
    INTERNAL_ERROR = 0x0
    UNAUTHORIZED = 0x1
    TIMEOUT = 0x2
    NOT_SUPPORTED = 0x3
    MALFORMED_AUTH_TOKEN = 0x4
    EXPIRED_AUTH_TOKEN = 0x5
    GOING_AWAY = 0x6
    EXCESSIVE_LOAD = 0x9
    DOES_NOT_EXIST = 0x10
    INVALID_RANGE = 0x11
    MALFORMED_TRACK = 0x12
    UNKNOWN_AUTH_TOKEN_ALIAS = 0x17
    UNINTERESTED = 0x20
    PREFIX_OVERLAP = 0x30
    NAMESPACE_TOO_LARGE = 0x31
    UNSUPPORTED_EXTENSION = 0x33
    REDIRECT = 0x34
    CONFLICTING_FILTERS = 0x35
    INVALID_FILTER = 0x36


class PublishDoneCode(IntEnum):
    INTERNAL_ERROR = 0x0
    UNAUTHORIZED = 0x1
    TRACK_ENDED = 0x2
    GOING_AWAY = 0x4
    TOO_FAR_BEHIND = 0x5
    EXPIRED = 0x6
    UPDATE_FAILED = 0x8
    EXCESSIVE_LOAD = 0x9
    MALFORMED_TRACK = 0x12


class StreamErrorCode(IntEnum):
    """RESET_STREAM and STOP_SENDING codes."""

    INTERNAL_ERROR = 0x0
    CANCELLED = 0x1
    DELIVERY_TIMEOUT = 0x2
    SESSION_CLOSED = 0x3
    GOING_AWAY = 0x4
    TOO_FAR_BEHIND = 0x5
    UNKNOWN_OBJECT_STATUS = 0x6
    EXPIRED_AUTH_TOKEN = 0x7
    EXCESSIVE_LOAD = 0x9
    MALFORMED_TRACK = 0x12


def is_mandatory(type_: int) -> bool:
    """Whether a Track Property of this type must be understood by whoever gets the track."""
    return 0x4000 <= type_ <= 0x7FFF


def code_name(registry: type[IntEnum], value: int) -> str:
    """The registered name of `value`, or its number when a peer sent an unknown one."""
    try:
        return registry(value).name
    except ValueError:
        return hex(value)
