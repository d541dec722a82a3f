"""MOQT "Control Messages" of draft-22: one table of layouts, read in both directions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moqt.uri import is_authority, is_path
from moqt.values.codes import (
    MAX_GOAWAY_URI,
    MAX_MESSAGE_BODY,
    MessageType,
    RequestErrorCode,
    SessionErrorCode,
    SetupOptionType,
)
from moqt.values.errors import MisuseError, SessionError, protocol_violation
from moqt.values.messages import (
    Fetch,
    FetchOk,
    Goaway,
    Message,
    Namespace,
    NamespaceDone,
    Properties,
    Publish,
    PublishDone,
    PublishNamespace,
    PublishSkipped,
    PublishStateNotify,
    Redirect,
    RequestErrorMessage,
    RequestOk,
    RequestUpdate,
    Setup,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    SubscribeTracks,
    TrackStatus,
)
from moqt.wire.draft22.parameters import ALLOWED, read_parameters, write_parameters
from moqt.wire.incremental import Incremental
from moqt.wire.primitives import (
    Reader,
    decode_key_values,
    decode_token,
    encode_key_values,
    encode_location,
    encode_namespace,
    encode_octets,
    encode_reason,
    encode_text,
    full_name_fault,
    no_fault,
    track_properties_fault,
)
from moqt.wire.vi64 import Buffer, Truncated, decode_vi64, encode_vi64

# Field encodings -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Field:
    read: Callable[[Reader], Any]
    write: Callable[[Any], bytes]


def _parameters(message: MessageType) -> _Field:
    allowed = ALLOWED[message]
    return _Field(
        lambda reader: read_parameters(reader, allowed),
        lambda parameters: write_parameters(parameters, allowed, message.name),
    )


def _read_flag(reader: Reader) -> bool:
    value = reader.u8()
    if value > 1:
        raise reader.violation(f"End Of Track {value}")
    return bool(value)


def _read_track_properties(reader: Reader) -> Properties:
    properties = decode_key_values(reader.rest(), f"{reader.what}: Track Properties")
    if fault := track_properties_fault(properties):
        raise reader.violation(fault)
    return properties


def _write_track_properties(properties: Properties) -> bytes:
    if not properties:
        return b""
    no_fault(track_properties_fault(properties))
    return encode_key_values(properties)


_REPEATABLE_OPTIONS = frozenset({SetupOptionType.AUTHORIZATION_TOKEN})
_KNOWN_OPTIONS = frozenset(SetupOptionType)


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


_OPTION_SYNTAX: dict[int, tuple[Callable[[bytes], object], SessionErrorCode]] = {
    SetupOptionType.PATH: (is_path, SessionErrorCode.MALFORMED_PATH),
    SetupOptionType.AUTHORITY: (is_authority, SessionErrorCode.MALFORMED_AUTHORITY),
    SetupOptionType.MOQT_IMPLEMENTATION: (_is_utf8, SessionErrorCode.KEY_VALUE_FORMATTING_ERROR),
}


def _check_setup_options(options: Properties) -> None:
    """What can be said of Setup Options without knowing which endpoint sent them."""
    previous = -1
    for option in options:
        repeated = option.type == previous
        previous = option.type
        if option.type not in _KNOWN_OPTIONS:
            continue
        name = SetupOptionType(option.type).name
        if repeated and option.type not in _REPEATABLE_OPTIONS:
            raise protocol_violation(f"SETUP: {name} repeated")
        if isinstance(option.value, int):
            continue
        if option.type == SetupOptionType.AUTHORIZATION_TOKEN:
            decode_token(option.value)
        elif syntax := _OPTION_SYNTAX.get(option.type):
            valid, code = syntax
            if not valid(option.value):
                raise SessionError(code, f"SETUP: {name} is {option.value!r}")


def _read_setup_options(reader: Reader) -> Properties:
    options = decode_key_values(reader.rest(), "SETUP: options")
    _check_setup_options(options)
    return options


def _write_setup_options(options: Properties) -> bytes:
    octets = encode_key_values(options)
    try:
        _check_setup_options(options)
    except SessionError as error:
        raise MisuseError(error.reason) from None
    return octets


def _read_redirect(reader: Reader) -> Redirect:
    return Redirect(reader.text("Connect URI"), reader.namespace(), reader.octets())


def _write_redirect(redirect: Redirect) -> bytes:
    no_fault(full_name_fault(redirect.namespace, redirect.name))
    return (
        encode_text(redirect.uri, "Connect URI")
        + encode_namespace(redirect.namespace)
        + encode_octets(redirect.name)
    )


_VI64 = _Field(Reader.vi64, encode_vi64)
_NAME = _Field(Reader.octets, encode_octets)
_NAMESPACE = _Field(Reader.namespace, encode_namespace)
_LOCATION = _Field(Reader.location, encode_location)
_REASON = _Field(Reader.reason, encode_reason)
_FLAG = _Field(_read_flag, lambda value: bytes([value]))
_TRACK_PROPERTIES = _Field(_read_track_properties, _write_track_properties)
_SETUP_OPTIONS = _Field(_read_setup_options, _write_setup_options)
_REDIRECT = _Field(_read_redirect, _write_redirect)
_GOAWAY_URI = _Field(
    lambda reader: reader.text("New Session URI", MAX_GOAWAY_URI),
    lambda uri: encode_text(uri, "New Session URI", MAX_GOAWAY_URI),
)
_FULL_NAME = {"namespace": _NAMESPACE, "name": _NAME}

# The catalogue -------------------------------------------------------------------------

_LAYOUTS: dict[type[Message], dict[str, _Field]] = {
    Setup: {"options": _SETUP_OPTIONS},
    Goaway: {"uri": _GOAWAY_URI, "timeout_ms": _VI64},
    Subscribe: {
        "request_id": _VI64,
        **_FULL_NAME,
        "parameters": _parameters(MessageType.SUBSCRIBE),
    },
    SubscribeOk: {
        "track_alias": _VI64,
        "parameters": _parameters(MessageType.SUBSCRIBE_OK),
        "properties": _TRACK_PROPERTIES,
    },
    RequestUpdate: {"request_id": _VI64, "parameters": _parameters(MessageType.REQUEST_UPDATE)},
    RequestOk: {
        "parameters": _parameters(MessageType.REQUEST_OK),
        "properties": _TRACK_PROPERTIES,
    },
    RequestErrorMessage: {
        "code": _VI64,
        "retry_interval": _VI64,
        "reason": _REASON,
        "redirect": _REDIRECT,
    },
    Publish: {
        "request_id": _VI64,
        **_FULL_NAME,
        "track_alias": _VI64,
        "parameters": _parameters(MessageType.PUBLISH),
        "properties": _TRACK_PROPERTIES,
    },
    PublishDone: {"code": _VI64, "stream_count": _VI64, "reason": _REASON},
    PublishStateNotify: {"parameters": _parameters(MessageType.PUBLISH_STATE_NOTIFY)},
    Fetch: {"request_id": _VI64, **_FULL_NAME, "parameters": _parameters(MessageType.FETCH)},
    FetchOk: {
        "end_of_track": _FLAG,
        "end_location": _LOCATION,
        "parameters": _parameters(MessageType.FETCH_OK),
        "properties": _TRACK_PROPERTIES,
    },
    TrackStatus: {
        "request_id": _VI64,
        **_FULL_NAME,
        "parameters": _parameters(MessageType.TRACK_STATUS),
    },
    PublishNamespace: {
        "request_id": _VI64,
        "namespace": _NAMESPACE,
        "parameters": _parameters(MessageType.PUBLISH_NAMESPACE),
    },
    SubscribeNamespace: {
        "request_id": _VI64,
        "prefix": _NAMESPACE,
        "parameters": _parameters(MessageType.SUBSCRIBE_NAMESPACE),
    },
    Namespace: {"suffix": _NAMESPACE},
    NamespaceDone: {"suffix": _NAMESPACE},
    SubscribeTracks: {
        "request_id": _VI64,
        "prefix": _NAMESPACE,
        "parameters": _parameters(MessageType.SUBSCRIBE_TRACKS),
    },
    PublishSkipped: {"suffix": _NAMESPACE, "name": _NAME},
}
_BY_TYPE: dict[int, type[Message]] = {layout.TYPE: layout for layout in _LAYOUTS}


def _is_absent(field: _Field, code: int | None) -> bool:
    """The Redirect stands exactly under code REDIRECT (MOQT "REQUEST_ERROR")."""
    return field is _REDIRECT and code != RequestErrorCode.REDIRECT


def _name_fault(values: dict[str, Any]) -> str | None:
    if "name" not in values:
        return None
    return full_name_fault(values.get("namespace", values.get("suffix", ())), values["name"])


def decode_body(type_: MessageType, body: bytes) -> Message:
    """The message of `type_` that fills `body`; SessionError when none does."""
    reader = Reader(body, type_.name)
    cls = _BY_TYPE[type_]
    values: dict[str, Any] = {}
    for name, field in _LAYOUTS[cls].items():
        if not _is_absent(field, values.get("code")):
            values[name] = field.read(reader)
    reader.finish()
    if fault := _name_fault(values):
        raise reader.violation(fault)
    if (redirect := values.get("redirect")) and (
        fault := full_name_fault(redirect.namespace, redirect.name)
    ):
        raise reader.violation(fault)
    return cls(**values)


def encode_message(message: Message) -> bytes:
    """Type (v), Length (u16), body. Raises MisuseError for what cannot be sent."""
    values = {name: getattr(message, name) for name in _LAYOUTS[type(message)]}
    if fault := _name_fault(values):
        raise MisuseError(fault)
    out = []
    for name, field in _LAYOUTS[type(message)].items():
        absent = _is_absent(field, values.get("code"))
        if absent != (values[name] is None):
            raise MisuseError("a Redirect stands exactly under code REDIRECT")
        if not absent:
            out.append(field.write(values[name]))
    body = b"".join(out)
    if len(body) > MAX_MESSAGE_BODY:
        raise MisuseError(
            f"{message.TYPE.name} of {len(body)} octets, more than {MAX_MESSAGE_BODY}"
        )
    return encode_vi64(message.TYPE) + len(body).to_bytes(2, "big") + body


class MessageDecoder(Incremental[Message]):
    """The messages of one control or request stream, in order."""

    __slots__ = ("_first",)

    def __init__(self, first: frozenset[MessageType] | None = None) -> None:
        super().__init__()
        self._first = first

    def feed(self, data: bytes) -> list[Message]:
        messages: list[Message] = []
        position, size = 0, len(data)
        while position < size:
            message, position = self._take(data, position)
            if message is not None:
                messages.append(message)
        return messages

    def _parse(self, buffer: Buffer, position: int) -> tuple[Message, int]:
        number, position = decode_vi64(buffer, position)
        if number not in _BY_TYPE:
            raise protocol_violation(f"unknown message type {number:#x}")
        type_ = MessageType(number)
        if self._first is not None and type_ not in self._first:
            raise protocol_violation(f"{type_.name} as first message of its stream")
        start = position + 2
        if start > len(buffer):
            raise Truncated(start)
        end = start + int.from_bytes(buffer[position:start], "big")
        if end > len(buffer):
            raise Truncated(end)
        message = decode_body(type_, bytes(buffer[start:end]))
        self._first = None
        return message, end
