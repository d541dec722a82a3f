"""Strict I-JSON (RFC 7493) in, JCS (RFC 8785) out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any

import rfc8785

from kvsp.names import pieces
from kvsp.names.codes import MAX_JSON_DEPTH, MAX_SAFE_INTEGER, DecodeErrorName
from kvsp.names.errors import DecodeError

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_DIGITS = 500
_SLICE = 1 << 14  # values looked at before other threads have their turn
_LEAST_EXPONENT_FORM = 1e21  # from here on JCS writes a number with an exponent


def loads(data: bytes | bytearray | memoryview | str) -> Any:
    """Parse one I-JSON text.

    Refuses a byte order mark, invalid UTF-8, lone surrogates, NaN and infinities,
    integers beyond 2^53-1 in the form written or in the form JCS would write, and
    nesting deeper than `MAX_JSON_DEPTH`.

    Raises DecodeError: `not-i-json`, or `duplicate-member` for a text that has no
    other fault.
    """
    text = _text(data)
    reader = _Reader()
    decoder = json.JSONDecoder(
        object_pairs_hook=reader.members,
        # a call for each number makes reading many of them several times slower
        parse_int=_integer if _may_hold_digits(text) else None,
        parse_constant=_constant,
    )
    try:
        if len(text) > pieces.WINDOW:
            tree = pieces.parse(text, decoder, reader.members)
        else:
            tree = decoder.decode(text)
    except json.JSONDecodeError as error:
        raise _not_i_json(f"{error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _not_i_json(f"nested deeper than {MAX_JSON_DEPTH}") from None
    _check_trees([tree, *reader.lost], surrogates=_SURROGATE_ESCAPE.search(text) is not None)
    if reader.duplicate is not None:
        raise DecodeError(
            DecodeErrorName.DUPLICATE_MEMBER, f"member {reader.duplicate[:64]!r} is given twice"
        )
    return tree


def canonical(value: Any) -> bytes:
    """The JCS octets of a JSON value made of dict, list, tuple, str, int, float, bool, None.

    Raises DecodeError `not-i-json` for what JCS cannot represent.
    """
    try:
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, RecursionError, TypeError, AttributeError):
        # the library's message can hold the value itself
        raise _not_i_json("a value has no canonical JSON form") from None


def is_integer(value: object) -> bool:
    """Whether a parsed JSON value is an integer; `32.0` is, `true` is not."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


class _Reader:
    """Collects what repeated members hide, so that other faults are named first."""

    def __init__(self) -> None:
        self.duplicate: str | None = None
        self.lost: list[Any] = []

    def members(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            seen: dict[str, Any] = {}
            for name, value in pairs:
                if name in seen:
                    self.duplicate = self.duplicate or name
                    self.lost.append(seen[name])
                seen[name] = value
        return members


def _may_hold_digits(text: str) -> bool:
    """Whether there may be a run of `2 * _DIGITS` digits: surely when there is one.

    Such a run fills a piece of half its length; to look at pieces takes a fraction of the
    time of a search.
    """
    return any(text[at : at + _DIGITS].isdigit() for at in range(0, len(text), _DIGITS))


def _text(data: bytes | bytearray | memoryview | str) -> str:
    if isinstance(data, str):
        if _SURROGATE.search(data):
            raise _not_i_json("the text holds a lone surrogate")
        text = data
    else:
        try:
            text = str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise _not_i_json(f"octet {error.start} is not UTF-8") from None
    if text.startswith("\ufeff"):
        raise _not_i_json("the text starts with a byte order mark")
    return text


def _check_trees(trees: list[Any], *, surrogates: bool) -> None:
    """What JSON allows and I-JSON does not. Level by level and slice by slice, most of it in
    C: a text of 8 MiB can hold millions of values."""
    level = trees
    depth = 0
    while level:
        below: list[Any] = []
        nested = False
        for first in range(0, len(level), _SLICE):
            nested |= _check_slice(level[first : first + _SLICE], below, surrogates=surrogates)
        depth += nested
        if depth > MAX_JSON_DEPTH:
            raise _not_i_json(f"nested deeper than {MAX_JSON_DEPTH}")
        level = below


def _check_slice(values: list[Any], below: list[Any], *, surrogates: bool) -> bool:
    """Check some values of a level and add what is in them to `below`; whether any can hold
    others."""
    kinds = set(map(type, values))
    if int in kinds:
        _check_integers([value for value in values if type(value) is int])
    if float in kinds:
        _check_numbers([value for value in values if type(value) is float])
    if surrogates and str in kinds:
        _check_strings(value for value in values if type(value) is str)
    nested = list in kinds or dict in kinds
    for value in values if nested else ():
        if type(value) is list:
            below += value
        elif type(value) is dict:
            below += value.values()
            if surrogates:
                _check_strings(value)
    return nested


def _check_integers(values: list[int]) -> None:
    if max(values) > MAX_SAFE_INTEGER or min(values) < -MAX_SAFE_INTEGER:
        raise _not_i_json("an integer is beyond 2^53-1")


def _check_numbers(values: list[float]) -> None:
    for value in values:
        if value.is_integer() and MAX_SAFE_INTEGER < abs(value) < _LEAST_EXPONENT_FORM:
            # JCS would write plain digits, which no I-JSON reader may take back
            raise _not_i_json("an integer is beyond 2^53-1")
        if math.isinf(value):
            raise _not_i_json("a number is beyond the range of IEEE 754 doubles")


def _check_strings(values: Iterable[str]) -> None:
    if any(map(_SURROGATE.search, values)):
        raise _not_i_json("a string or member name holds a lone surrogate")


def _integer(literal: str) -> int:
    # the length test comes first: converting digits is quadratic in their number
    if len(literal) > 17:
        raise _not_i_json("an integer is beyond 2^53-1")
    return int(literal)


def _constant(literal: str) -> float:
    raise _not_i_json(f"{literal} is not a JSON number")


def _not_i_json(detail: str) -> DecodeError:
    return DecodeError(DecodeErrorName.NOT_I_JSON, detail)
