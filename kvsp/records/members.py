"""How JSON records are read and written: one mechanism for all of them.

A record is a dataclass whose fields say, in `Annotated`, of what Kind a member is. A
member is required when its field has no default. Unknown members are ignored; of all
faults of a document the one that stands first in kvsp-gaps "Decode errors" is raised,
with the JSON pointer of the member.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Self, TypeVar, get_type_hints

import msgspec

from kvsp.names import ijson, uris
from kvsp.names.codes import (
    DIGEST_PREFIX,
    HASH_OCTETS,
    MAX_GEOMETRY,
    MAX_SAFE_INTEGER,
    MAX_TOKEN_ID,
    SCOPE_ID_OCTETS,
    DecodeErrorName,
)
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor, parse_hex

_ORDER = {
    name: rank
    for rank, name in enumerate(
        (
            DecodeErrorName.MISSING_MEMBER,
            DecodeErrorName.WRONG_TYPE,
            DecodeErrorName.BAD_HEX,
            DecodeErrorName.BAD_URI,
            DecodeErrorName.OUT_OF_RANGE,
            DecodeErrorName.BAD_TOKEN,
            DecodeErrorName.BAD_BASE64URL,
            DecodeErrorName.TRUNCATED,
            DecodeErrorName.TRAILING_OCTETS,
            DecodeErrorName.BAD_NAMESPACE,
            DecodeErrorName.LAYER_RANGE,
            DecodeErrorName.SECTION_LENGTH,
            DecodeErrorName.DIGEST_MISMATCH,
        )
    )
}

Source = bytes | bytearray | memoryview | str | Mapping[str, Any]
"""A JSON text, or an object that `ijson.loads` made of one."""


@dataclass(slots=True)
class Reading:
    """One reading of a document: what it is read against, and its first fault so far."""

    descriptor: Descriptor | None = None
    http_loopback: bool = False
    first: DecodeError | None = None
    faults: int = 0
    records: list[tuple[Record, str]] = field(default_factory=list)
    """Every record that was read, with its pointer, inner ones first."""

    def fault(self, name: DecodeErrorName, pointer: str, detail: str) -> None:
        """Note a fault; an earlier one of the same or an earlier name stays."""
        self.faults += 1
        if self.first is None or _ORDER[name] < _ORDER[self.first.name]:
            where = f"{pointer}: " if pointer else ""
            self.first = DecodeError(name, where + detail, pointer)

    def settle(self) -> None:
        """Raise the first fault, if there is one."""
        if self.first is not None:
            raise self.first


@dataclass(frozen=True, slots=True)
class Kind:
    """What a member is: how its JSON value becomes the attribute's, and back."""

    decode: Callable[[Any, str, Reading], Any]
    encode: Callable[[Any], Any] = lambda value: value
    null: bool = False
    """Whether null is a value, and so written out."""

    many: Callable[[Sequence[Any]], tuple[Any, ...] | None] | None = None
    """A quick way through an array of them: None when an item is wrong."""

    schema: Mapping[str, Any] = field(default_factory=dict)
    """The JSON Schema of such a value: its form, not everything that is checked."""


@dataclass(frozen=True, slots=True)
class Named:
    """The member's name where the attribute cannot have it."""

    name: str


@dataclass(frozen=True, slots=True)
class _Member:
    attribute: str
    name: str
    kind: Kind
    required: bool


class Record:
    """A JSON object of KVSP with known members."""

    __slots__ = ()

    REQUIRED_WHEN: ClassVar[Mapping[str, Callable[[Mapping[str, Any]], bool]]] = {}
    """Members with a default that are required all the same when the object says so."""

    @classmethod
    def from_json(
        cls,
        source: Source,
        *,
        descriptor: Descriptor | None = None,
        http_loopback: bool = False,
    ) -> Self:
        """Read and check a record.

        `descriptor`, when known, is the one of the record's Compatibility ID: layers and
        sizes are then checked against it. `http_loopback` allows base URIs with `http` on
        loopback hosts. Raises DecodeError with the name of the first fault in the order of
        kvsp-gaps "Decode errors" and `pointer` at its member.
        """
        tree = source if isinstance(source, Mapping) else ijson.loads(source)
        if not isinstance(tree, Mapping):
            raise DecodeError(DecodeErrorName.NOT_AN_OBJECT, "a record is a JSON object")
        reading = Reading(descriptor, http_loopback)
        record = read_members(cls, tree, "", reading)
        reading.settle()
        # what depends on several members is judged when each is right by itself
        for inner, pointer in reading.records:
            inner.check(reading, pointer)
        reading.settle()
        return record

    def check(self, reading: Reading, pointer: str) -> None:
        """Note the faults of members that do not fit together."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON object; members that are absent are left out."""
        tree: dict[str, Any] = {}
        for member in members_of(type(self)):
            value = getattr(self, member.attribute)
            if value is not None:
                tree[member.name] = member.kind.encode(value)
            elif member.kind.null:
                tree[member.name] = None
        return tree

    def to_json(self) -> bytes:
        """The JSON text, members in ascending order at every level, no white space."""
        return encode_json(self.to_dict())


def encode_json(tree: Any) -> bytes:
    """A JSON text with members in ascending order at every level and no white space."""
    return msgspec.json.encode(tree, order="sorted")


_R = TypeVar("_R", bound=Record)


_KNOWN: dict[type[Record], tuple[_Member, ...]] = {}


def members_of(cls: type[Record]) -> tuple[_Member, ...]:
    """The members of a record class, in the order of its fields."""
    if (known := _KNOWN.get(cls)) is not None:
        return known
    hints = get_type_hints(cls, include_extras=True)
    members = []
    for item in dataclasses.fields(cls):  # type: ignore[arg-type]  # every subclass is a dataclass
        extras = hints[item.name].__metadata__
        names = [extra.name for extra in extras if isinstance(extra, Named)]
        (kind,) = (extra for extra in extras if isinstance(extra, Kind))
        required = item.default is dataclasses.MISSING
        members.append(_Member(item.name, names[0] if names else item.name, kind, required))
    return _KNOWN.setdefault(cls, tuple(members))


def schema_of(cls: type[Record]) -> dict[str, Any]:
    """The JSON Schema of a record, for API documents."""
    members = members_of(cls)
    return {
        "type": "object",
        "properties": {member.name: dict(member.kind.schema) for member in members},
        "required": [member.name for member in members if member.required],
    }


def read_members(cls: type[_R], tree: Mapping[str, Any], pointer: str, reading: Reading) -> _R:
    """Read an object's members; the record is only to be used when nothing was faulty."""
    values: dict[str, Any] = {}
    for member in members_of(cls):
        at = f"{pointer}/{member.name}"
        if member.name in tree:
            values[member.attribute] = member.kind.decode(tree[member.name], at, reading)
            continue
        condition = cls.REQUIRED_WHEN.get(member.name)
        if member.required or (condition is not None and condition(tree)):
            reading.fault(DecodeErrorName.MISSING_MEMBER, at, "the member is missing")
            values[member.attribute] = None
    record = cls(**values)
    reading.records.append((record, pointer))
    return record


# --- kinds ---------------------------------------------------------------------------


def _wrong(reading: Reading, at: str, wanted: str) -> None:
    reading.fault(DecodeErrorName.WRONG_TYPE, at, f"must be {wanted}")


def _outside(reading: Reading, at: str, detail: str) -> None:
    reading.fault(DecodeErrorName.OUT_OF_RANGE, at, detail)


def _checked(
    check: Callable[[str, Reading], Any], encode: Callable[[Any], Any] = str, **schema: Any
) -> Kind:
    """A string that `check` converts or refuses with DecodeError."""

    def decode(value: Any, at: str, reading: Reading) -> Any:
        if not isinstance(value, str):
            _wrong(reading, at, "a string")
            return None
        try:
            return check(value, reading)
        except DecodeError as error:
            reading.fault(error.name, at, error.detail)
            return None

    return Kind(decode, encode, schema={"type": "string", **schema})


_USER = re.compile(r"^((?:[A-Za-z][A-Za-z0-9+.-]*:)?//)?[^/?#]*@")
_SHOWN_CHARACTERS = 200


def shown_uri(text: str) -> str:
    """A URI for messages: without what may be a credential in it, and not too long."""
    text, query, _ = _USER.sub(r"\1", text).partition("?")
    text += "?…" if query else ""
    return repr(text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…")


def _uri(check: Callable[..., Any], pattern: str) -> Kind:
    """A URI that `check` takes; a refusal says which one it was."""

    def checked(text: str, reading: Reading) -> Any:
        try:
            return check(text, http_loopback=reading.http_loopback)
        except DecodeError as error:
            raise DecodeError(error.name, f"{shown_uri(text)}: {error.detail}") from None

    return _checked(checked, pattern=pattern)


def _digest(text: str, reading: Reading) -> bytes:
    if not text.startswith(DIGEST_PREFIX):
        raise DecodeError(DecodeErrorName.BAD_HEX, f"a digest starts with {DIGEST_PREFIX}")
    return parse_hex(text.removeprefix(DIGEST_PREFIX), HASH_OCTETS)


def string(pattern: str = r".{1,1024}") -> Kind:
    """A string that matches a pattern as a whole; `out-of-range` otherwise."""
    compiled = re.compile(pattern, re.DOTALL)

    def check(text: str, reading: Reading) -> str:
        if not compiled.fullmatch(text):
            raise DecodeError(DecodeErrorName.OUT_OF_RANGE, "empty, too long or of another form")
        return text

    # here a dot is any character, in JSON Schema it is none that ends a line
    return _checked(check, pattern="^" + pattern.replace(".{", r"[\s\S]{") + "$")


def one_of(values: type[StrEnum]) -> Kind:
    """A member of an enumeration; `out-of-range` otherwise."""
    known = {str(value): value for value in values}

    def check(text: str, reading: Reading) -> StrEnum:
        if text not in known:
            raise DecodeError(DecodeErrorName.OUT_OF_RANGE, f"must be one of {', '.join(known)}")
        return known[text]

    return _checked(check, enum=list(known))


def integer(low: int = 0, high: int = MAX_SAFE_INTEGER) -> Kind:
    """An integer of a range, both ends included; `out-of-range` otherwise."""

    def decode(value: Any, at: str, reading: Reading) -> int | None:
        if not ijson.is_integer(value):
            _wrong(reading, at, "an integer")
            return None
        if not low <= value <= high:
            _outside(reading, at, f"must be from {low} to {high}")
        return int(value)

    return Kind(decode, schema={"type": "integer", "minimum": low, "maximum": high})


def number(low: float = 0, high: float = math.inf) -> Kind:
    """A number of a range, both ends included; `out-of-range` otherwise."""

    def decode(value: Any, at: str, reading: Reading) -> float | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            _wrong(reading, at, "a number")
            return None
        if not low <= value <= high:
            _outside(reading, at, f"must be from {low} to {high}")
        return value

    bounds = {"minimum": low} if math.isinf(high) else {"minimum": low, "maximum": high}
    return Kind(decode, schema={"type": "number", **bounds})


def array(kind: Kind, *, least: int = 0) -> Kind:
    """An array of at least `least` items of one kind, as a tuple.

    Its first item that is wrong ends the reading of it: a long array of wrong items is not
    worth more work.
    """

    def decode(value: Any, at: str, reading: Reading) -> tuple[Any, ...] | None:
        if not isinstance(value, list | tuple):
            _wrong(reading, at, "an array")
            return None
        if len(value) < least:
            _outside(reading, at, f"must have at least {least} items")
        if kind.many is not None and (items := kind.many(value)) is not None:
            return items
        return tuple(_items(kind, value, at, reading))

    schema = {"type": "array", "items": dict(kind.schema)} | ({"minItems": least} if least else {})
    return Kind(decode, lambda items: [kind.encode(item) for item in items], schema=schema)


def _items(kind: Kind, value: Iterable[Any], at: str, reading: Reading) -> Iterator[Any]:
    before = reading.faults
    for index, item in enumerate(value):
        yield kind.decode(item, f"{at}/{index}", reading)
        if reading.faults > before:
            return


def record(cls: type[Record]) -> Kind:
    """An object that is a record of its own."""

    def decode(value: Any, at: str, reading: Reading) -> Record | None:
        if not isinstance(value, Mapping):
            _wrong(reading, at, "an object")
            return None
        return read_members(cls, value, at, reading)

    return Kind(decode, lambda value: value.to_dict(), schema=schema_of(cls))


def nullable(kind: Kind) -> Kind:
    """The kind, or null, which is written out."""

    def decode(value: Any, at: str, reading: Reading) -> Any:
        return None if value is None else kind.decode(value, at, reading)

    schema = {"anyOf": [dict(kind.schema), {"type": "null"}]}
    return Kind(decode, kind.encode, null=True, schema=schema)


def _pair(value: Any, at: str, reading: Reading) -> tuple[int, int] | None:
    if isinstance(value, list | tuple) and len(value) == 2 and all(map(ijson.is_integer, value)):
        return int(value[0]), int(value[1])
    _wrong(reading, at, "an array of two integers")
    return None


def _layers(value: Any, at: str, reading: Reading) -> range | None:
    if (pair := _pair(value, at, reading)) is None:
        return None
    first, last = pair
    if not 0 <= first <= last < MAX_GEOMETRY:
        reading.fault(DecodeErrorName.LAYER_RANGE, at, "layers [a, b] have 0 <= a <= b")
    return range(first, last + 1)


def _tokens(value: Any, at: str, reading: Reading) -> range | None:
    if (pair := _pair(value, at, reading)) is None:
        return None
    start, end = pair
    if not 0 <= start < end <= MAX_SAFE_INTEGER:
        _outside(reading, at, "tokens [a, b] have 0 <= a < b")
    return range(start, end)


def _token_ids(value: Any, at: str, reading: Reading) -> tuple[int, ...] | None:
    if not isinstance(value, list | tuple):
        _wrong(reading, at, "an array of token ids")
        return None
    # most arrays are right: look at them in three quick passes
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= MAX_TOKEN_ID:
        return tuple(value)
    return tuple(_items(TOKEN_ID, value, at, reading))


def _token_id(value: Any, at: str, reading: Reading) -> int:
    if ijson.is_integer(value) and 0 <= value <= MAX_TOKEN_ID:
        return int(value)
    # the id itself is never told
    detail = f"a token id is an integer from 0 to {MAX_TOKEN_ID}"
    reading.fault(DecodeErrorName.BAD_TOKEN, at, detail)
    return 0


def _boolean(value: Any, at: str, reading: Reading) -> bool | None:
    if isinstance(value, bool):
        return value
    _wrong(reading, at, "true or false")
    return None


def _json_object(value: Any, at: str, reading: Reading) -> dict[str, Any] | None:
    if isinstance(value, Mapping):
        return dict(value)
    _wrong(reading, at, "an object")
    return None


_HEX_DIGITS = re.compile(r"[0-9a-f]*")


def _hex(octets: int) -> Kind:
    pattern = f"^[0-9a-f]{{{2 * octets}}}$"
    one = _checked(lambda text, _: parse_hex(text, octets), bytes.hex, pattern=pattern)

    def many(value: Sequence[Any]) -> tuple[bytes, ...] | None:
        if not all(isinstance(item, str) and len(item) == 2 * octets for item in value):
            return None
        text = "".join(value)
        if not _HEX_DIGITS.fullmatch(text):
            return None
        joined = bytes.fromhex(text)
        return tuple(joined[at : at + octets] for at in range(0, len(joined), octets))

    return Kind(one.decode, one.encode, many=many, schema=one.schema)


HEX16 = _hex(SCOPE_ID_OCTETS)
HEX32 = _hex(HASH_OCTETS)
DIGEST = _checked(
    _digest, lambda octets: DIGEST_PREFIX + octets.hex(), pattern=f"^{DIGEST_PREFIX}[0-9a-f]{{64}}$"
)
UUID = _checked(lambda text, _: uris.check_uuid(text), format="uuid")
BASE_URI = _uri(uris.check_base_uri, "^https?://[^?#]+/$")
HOLDER_URI = _uri(uris.check_holder_uri, "^(https?|moqt)://[^?#]+$")
SOURCE_URI = _uri(uris.check_source_uri, "^(https?|moqt)://[^?]+$")
TEXT = _checked(lambda text, _: text)
BOOLEAN = Kind(_boolean, schema={"type": "boolean"})
JSON_OBJECT = Kind(_json_object, schema={"type": "object"})
_PAIR = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 2}
LAYERS = Kind(_layers, lambda layers: [layers.start, layers.stop - 1], schema=_PAIR)
"""An inclusive range of layers in JSON, a `range` in Python."""

TOKEN_RANGE = Kind(_tokens, lambda tokens: [tokens.start, tokens.stop], schema=_PAIR)
"""A half-open range of token positions."""

TOKEN_ID = Kind(_token_id, schema={"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID})
TOKEN_IDS = Kind(_token_ids, list, schema={"type": "array", "items": TOKEN_ID.schema})
