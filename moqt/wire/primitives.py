"""What messages are made of (MOQT "Notational Conventions and Common Structures").

Rules that hold in both directions are `*_fault` functions: decoders turn a
fault into a SessionError, encoders into a MisuseError.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from moqt.values.codes import (
    MAX_FULL_TRACK_NAME,
    MAX_KVP_VALUE,
    MAX_NAMESPACE_FIELDS,
    MAX_REASON_PHRASE,
    MAX_VI64,
    AliasType,
    PropertyType,
    SessionErrorCode,
)
from moqt.values.errors import MisuseError, SessionError, protocol_violation
from moqt.values.messages import AuthorizationToken, KeyValue, Properties
from moqt.values.names import Location, TrackNamespace
from moqt.wire.vi64 import Truncated, decode_vi64, encode_vi64


def no_fault(fault: str | None) -> None:
    """Raises MisuseError when an encoder was given a value that breaks a rule."""
    if fault is not None:
        raise MisuseError(fault)


class Reader:
    """Fields of a bounded body; a body that ends inside one is a PROTOCOL_VIOLATION."""

    __slots__ = ("_data", "_position", "what")

    def __init__(self, data: bytes, what: str) -> None:
        self._data = data
        self._position = 0
        self.what = what

    @property
    def at_end(self) -> bool:
        return self._position == len(self._data)

    def violation(self, reason: str) -> SessionError:
        return protocol_violation(f"{self.what}: {reason}")

    def vi64(self) -> int:
        data, position = self._data, self._position
        if position < len(data) and (value := data[position]) < 0x80:
            self._position = position + 1
            return value
        try:
            value, self._position = decode_vi64(data, position)
        except Truncated:
            raise self.violation("body ends inside its fields") from None
        return value

    def u8(self) -> int:
        return self.take(1)[0]

    def take(self, size: int) -> bytes:
        end = self._position + size
        if end > len(self._data):
            raise self.violation("body ends inside its fields")
        octets = self._data[self._position : end]
        self._position = end
        return octets

    def octets(self) -> bytes:
        """Length (v), then that many octets."""
        return self.take(self.vi64())

    def rest(self) -> bytes:
        return self.take(len(self._data) - self._position)

    def finish(self) -> None:
        if not self.at_end:
            left = len(self._data) - self._position
            raise self.violation(f"body is {left} octets longer than its fields")

    def location(self) -> Location:
        return Location(self.vi64(), self.vi64())

    def namespace(self) -> TrackNamespace:
        count = self.vi64()
        if count > MAX_NAMESPACE_FIELDS:
            raise self.violation(
                f"{count} Track Namespace Fields, more than {MAX_NAMESPACE_FIELDS}"
            )
        namespace = tuple(self.octets() for _ in range(count))
        if fault := full_name_fault(namespace):
            raise self.violation(fault)
        return namespace

    def text(self, what: str, limit: int | None = None) -> str:
        """UTF-8 that is used, not merely shown: a URI."""
        length = self.vi64()
        if limit is not None and length > limit:
            raise self.violation(f"{what} of {length} octets, more than {limit}")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise self.violation(f"{what} is not UTF-8") from None

    def reason(self) -> str:
        """A Reason Phrase; octets that are not UTF-8 are replaced, as it is for people only."""
        length = self.vi64()
        if length > MAX_REASON_PHRASE:
            raise self.violation(f"Reason Phrase of {length} octets, more than {MAX_REASON_PHRASE}")
        return self.take(length).decode(errors="replace")


# Names ---------------------------------------------------------------------------------


def full_name_fault(namespace: TrackNamespace, name: bytes = b"") -> str | None:
    """Why this is no Full Track Name (or namespace), or None (MOQT "Track Naming")."""
    if not isinstance(namespace, tuple) or not isinstance(name, bytes):
        return "a Track Namespace is a tuple of bytes, and a Track Name is bytes"
    for field in namespace:
        if not isinstance(field, bytes):
            return f"a Track Namespace Field is bytes, not {type(field).__name__}"
    if len(namespace) > MAX_NAMESPACE_FIELDS:
        return f"{len(namespace)} Track Namespace Fields, more than {MAX_NAMESPACE_FIELDS}"
    if not all(namespace):
        return "empty Track Namespace Field"
    size = sum(map(len, namespace)) + len(name)
    if size > MAX_FULL_TRACK_NAME:
        return f"Full Track Name of {size} octets, more than {MAX_FULL_TRACK_NAME}"
    return None


def encode_octets(octets: bytes) -> bytes:
    return encode_vi64(len(octets)) + octets


def encode_namespace(namespace: TrackNamespace) -> bytes:
    no_fault(full_name_fault(namespace))
    return encode_vi64(len(namespace)) + b"".join(map(encode_octets, namespace))


def encode_location(location: Location) -> bytes:
    return encode_vi64(location.group) + encode_vi64(location.object)


def encode_text(text: str, what: str, limit: int | None = None) -> bytes:
    try:
        octets = text.encode()
    except UnicodeEncodeError:
        raise MisuseError(f"{what} cannot be written as UTF-8") from None
    if limit is not None and len(octets) > limit:
        raise MisuseError(f"{what} of {len(octets)} octets, more than {limit}")
    return encode_octets(octets)


def encode_reason(reason: str) -> bytes:
    """A Reason Phrase, cut to what fits: a long explanation must not stop an answer."""
    octets = reason.encode(errors="replace")
    if len(octets) > MAX_REASON_PHRASE:
        octets = octets[:MAX_REASON_PHRASE].decode(errors="ignore").encode()
    return encode_octets(octets)


# Key-Value-Pairs -----------------------------------------------------------------------


def iter_key_values(data: bytes, what: str = "properties") -> Iterator[tuple[int, int | bytes]]:
    """The (type, value) pairs that fill `data`; SessionError where they do not."""
    position, end, type_ = 0, len(data), 0
    value: int | bytes
    try:
        while position < end:
            delta, position = decode_vi64(data, position)
            type_ += delta
            if type_ > MAX_VI64:
                raise protocol_violation(f"{what}: type above 2^64-1")
            if type_ & 1:
                length, position = decode_vi64(data, position)
                if length > MAX_KVP_VALUE:
                    raise protocol_violation(f"{what}: value of {length} octets under {type_:#x}")
                stop = position + length
                if stop > end:
                    raise Truncated(stop)
                value, position = data[position:stop], stop
            else:
                value, position = decode_vi64(data, position)
            yield type_, value
    except Truncated:
        raise protocol_violation(f"{what}: a pair runs past its container") from None


def check_key_values(data: bytes, what: str = "properties") -> None:
    """Raises SessionError unless `data` is a sequence of Key-Value-Pairs."""
    for _ in iter_key_values(data, what):
        pass


def decode_key_values(data: bytes, what: str = "properties") -> Properties:
    return tuple(KeyValue(type_, value) for type_, value in iter_key_values(data, what))


def encode_key_values(pairs: Properties) -> bytes:
    """Raises MisuseError unless types ascend and values fit them (even: int, odd: octets)."""
    out, previous = [], 0
    for pair in pairs:
        if pair.type < previous:
            raise MisuseError(f"type {pair.type:#x} after {previous:#x}: types must ascend")
        out.append(encode_vi64(pair.type - previous))
        previous = pair.type
        if pair.type > MAX_VI64:
            raise MisuseError(f"type {pair.type:#x} is above 2^64-1")
        if isinstance(pair.value, int) == bool(pair.type & 1):
            raise MisuseError(
                f"type {pair.type:#x} takes {'octets' if pair.type & 1 else 'an int'}"
            )
        if isinstance(pair.value, int):
            out.append(encode_vi64(pair.value))
        elif len(pair.value) > MAX_KVP_VALUE:
            raise MisuseError(f"{len(pair.value)} octets under type {pair.type:#x}")
        else:
            out.append(encode_octets(pair.value))
    return b"".join(out)


def with_immutable(pairs: Iterable[tuple[int, int | bytes]]) -> Iterator[tuple[int, int | bytes]]:
    """`pairs` and, each after its container, those inside MOQT "Immutable Properties".

    A container that cannot be parsed makes the track malformed, not the
    session: it is passed on as it is and what parses of it is not reported.
    """
    for type_, value in pairs:
        yield type_, value
        if type_ == PropertyType.IMMUTABLE_PROPERTIES and isinstance(value, bytes):
            try:
                nested = list(iter_key_values(value))
            except SessionError:
                continue
            yield from nested


_TRACK_PROPERTY_VALUES = {
    PropertyType.DEFAULT_PUBLISHER_PRIORITY: range(256),
    PropertyType.DEFAULT_PUBLISHER_GROUP_ORDER: range(1, 3),
    PropertyType.DYNAMIC_GROUPS: range(2),
}


def track_properties_fault(pairs: Properties) -> str | None:
    """Why a known Track Property has no legal value, or None (MOQT "MOQT Properties")."""
    for type_, value in with_immutable((pair.type, pair.value) for pair in pairs):
        legal = _TRACK_PROPERTY_VALUES.get(type_)  # type: ignore[call-overload]
        if legal is not None and value not in legal:
            return f"{PropertyType(type_).name} {value!r}"
    return None


# Authorization Tokens ------------------------------------------------------------------

# Which of (Token Alias, Token Type and Value) each Alias Type has.
_TOKEN_FIELDS = {
    AliasType.DELETE: (True, False),
    AliasType.REGISTER: (True, True),
    AliasType.USE_ALIAS: (True, False),
    AliasType.USE_VALUE: (False, True),
}


def decode_token(data: bytes) -> AuthorizationToken:
    """An Authorization Token that fills `data` (MOQT "Authorization Token Compression").

    Raises SessionError(KEY_VALUE_FORMATTING_ERROR) when it does not.
    """
    alias = token_type = value = None
    try:
        number, position = decode_vi64(data, 0)
        alias_type = AliasType(number)
        has_alias, has_value = _TOKEN_FIELDS[alias_type]
        if has_alias:
            alias, position = decode_vi64(data, position)
        if has_value:
            token_type, position = decode_vi64(data, position)
            value, position = data[position:], len(data)
    except Truncated:
        raise _bad_token("ends inside its fields") from None
    except ValueError:
        raise _bad_token(f"unknown Alias Type {number}") from None
    if position != len(data):
        raise _bad_token("octets left over")
    return AuthorizationToken(alias_type, alias, token_type, value)


def _bad_token(why: str) -> SessionError:
    return SessionError(
        SessionErrorCode.KEY_VALUE_FORMATTING_ERROR, f"Authorization Token cannot be decoded: {why}"
    )


def encode_token(token: AuthorizationToken) -> bytes:
    has_alias, has_value = _TOKEN_FIELDS[token.alias_type]
    present = (token.alias is not None, token.token_type is not None, token.value is not None)
    if present != (has_alias, has_value, has_value):
        raise MisuseError(f"wrong fields for a token of Alias Type {token.alias_type.name}")
    out = encode_vi64(token.alias_type)
    if token.alias is not None:
        out += encode_vi64(token.alias)
    if token.token_type is not None and token.value is not None:
        out += encode_vi64(token.token_type) + token.value
    return out
