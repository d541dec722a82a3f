"""Strict I-JSON (RFC 7493) in, JCS (RFC 8785) out."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import rfc8785

from kvsp.codes import MAX_JSON_DEPTH, MAX_SAFE_INTEGER, DecodeErrorName
from kvsp.errors import DecodeError

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
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
    try:
        tree = json.loads(
            text,
            object_pairs_hook=reader.members,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_constant,
        )
    except json.JSONDecodeError as error:
        raise _not_i_json(f"{error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _not_i_json(f"nested deeper than {MAX_JSON_DEPTH}") from None
    _check_tree(tree, surrogates=_SURROGATE_ESCAPE.search(text) is not None)
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
    """Collects the first repeated member name, so that other faults are named first."""

    def __init__(self) -> None:
        self.duplicate: str | None = None

    def members(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs) and self.duplicate is None:
            seen: set[str] = set()
            for name, value in pairs:
                # the value that gets lost here is out of reach of the check afterwards
                _check_tree(value, surrogates=True)
                if name in seen:
                    self.duplicate = name
                seen.add(name)
        return members


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


def _check_tree(tree: Any, *, surrogates: bool) -> None:
    level: list[Any] = [tree]
    depth = 0
    while level:
        below: list[Any] = []
        nested = False
        for value in level:
            if isinstance(value, dict):
                nested = True
                below += value.values()
                if surrogates and any(_SURROGATE.search(name) for name in value):
                    raise _not_i_json("a member name holds a lone surrogate")
            elif isinstance(value, list):
                nested = True
                below += value
            elif surrogates and isinstance(value, str) and _SURROGATE.search(value):
                raise _not_i_json("a string holds a lone surrogate")
        depth += nested
        if depth > MAX_JSON_DEPTH:
            raise _not_i_json(f"nested deeper than {MAX_JSON_DEPTH}")
        level = below


def _integer(literal: str) -> int:
    # the length test comes first: converting digits is quadratic in their number
    if len(literal) > 17 or abs(value := int(literal)) > MAX_SAFE_INTEGER:
        raise _not_i_json("an integer is beyond 2^53-1")
    return value


def _number(literal: str) -> float:
    value = float(literal)
    if math.isinf(value):
        raise _not_i_json("a number is beyond the range of IEEE 754 doubles")
    if value.is_integer() and MAX_SAFE_INTEGER < abs(value) < _LEAST_EXPONENT_FORM:
        # JCS would write plain digits, which no I-JSON reader may take back
        raise _not_i_json("an integer is beyond 2^53-1")
    return value


def _constant(literal: str) -> float:
    raise _not_i_json(f"{literal} is not a JSON number")


def _not_i_json(detail: str) -> DecodeError:
    return DecodeError(DecodeErrorName.NOT_I_JSON, detail)
