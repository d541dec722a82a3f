"""Control messages as fields and as lines, for logs that people and tools read.

What may be a secret is never shown: of tokens, and of every value that is not known to be
harmless, there is only the length.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from moqt.values.codes import (
    AliasType,
    LocationFilterType,
    ParameterType,
    PropertyType,
    PublishDoneCode,
    RequestErrorCode,
    SetupOptionType,
    code_name,
)
from moqt.values.errors import escaped
from moqt.values.messages import (
    AuthorizationToken,
    KeyValue,
    LocationFilter,
    Message,
    Parameters,
    Properties,
    PublishDone,
    RangeFilter,
    Redirect,
    RequestErrorMessage,
    Setup,
)
from moqt.values.names import Location

Fields = dict[str, Any]

_FIELD_NAMES = {
    "namespace": "track_namespace",
    "prefix": "track_namespace_prefix",
    "suffix": "track_namespace_suffix",
    "name": "track_name",
    "uri": "new_session_uri",
    "timeout_ms": "timeout",
    "properties": "track_properties",
    "options": "setup_parameters",
}
_TEXT_OPTIONS = frozenset({SetupOptionType.PATH, SetupOptionType.AUTHORITY})


def octets(value: bytes) -> Fields:
    """A `MOQTByteString`: as text where it is readable, else in hexadecimal."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return {"value_bytes": value.hex()}
    return {"value": text} if text.isprintable() else {"value_bytes": value.hex()}


def without_secrets(uri: str) -> str:
    """`uri` without user information, query and fragment, where people put tokens."""
    kept, mark, _ = uri.partition("?")
    kept, fragment, _ = kept.partition("#")
    head, slashes, rest = kept.rpartition("//")
    authority, slash, path = rest.partition("/")
    shown = f"{head}{slashes}{authority.rpartition('@')[2]}{slash}{path}"
    return escaped(shown) + ("?..." if mark or fragment else "")


def _token(token: AuthorizationToken) -> Fields:
    shown: Fields = {"alias_type": code_name(AliasType, token.alias_type).lower()}
    if token.alias is not None:
        shown["token_alias"] = token.alias
    if token.token_type is not None:
        shown["token_type"] = token.token_type
    if token.value is not None:
        shown["token_value"] = {"length": len(token.value)}
    return shown


def _option(pair: KeyValue) -> Fields:
    """A Setup Option; only what is known to be public is shown as it is."""
    known = pair.type in tuple(SetupOptionType)
    shown: Fields = {
        "name": code_name(SetupOptionType, pair.type).lower() if known else "unknown",
    }
    if not known:
        shown["name_bytes"] = pair.type
    if isinstance(pair.value, int):
        shown["value"] = pair.value
    elif pair.type in _TEXT_OPTIONS:
        shown["value"] = without_secrets(pair.value.decode(errors="replace"))
    elif pair.type == SetupOptionType.MOQT_IMPLEMENTATION:
        shown["value"] = escaped(pair.value.decode(errors="replace"))
    else:
        shown["length"] = len(pair.value)
    return shown


def _property(pair: KeyValue) -> Fields:
    shown: Fields = {"header_type": pair.type}
    if isinstance(pair.value, int):
        shown["header_value"] = pair.value
    else:
        shown["header_length"] = len(pair.value)
    if pair.type in tuple(PropertyType):
        shown["name"] = code_name(PropertyType, pair.type).lower()
    return shown


def location_fields(at: Location) -> Fields:
    return {"group": at.group, "object": at.object}


def _location_filter(chosen: LocationFilter) -> Fields:
    shown: Fields = {"filter_type": code_name(LocationFilterType, chosen.type).lower()}
    for name in ("start_group", "start_object", "end_group_delta", "end_object"):
        if value := getattr(chosen, name):
            shown[name] = value
    return shown


def _range_filter(chosen: RangeFilter) -> Fields:
    shown: Fields = {"name": code_name(ParameterType, chosen.type).lower()}
    if chosen.set_id:
        shown["set_id"] = chosen.set_id
    if chosen.property_type is not None:
        shown["property_type"] = chosen.property_type
    return shown | {"ranges": [list(each) for each in chosen.ranges]}


def parameter_list(parameters: Parameters) -> list[Fields]:
    """Each parameter that is present, by its registered name."""
    listed: list[Fields] = []
    for field in fields(parameters):
        value = getattr(parameters, field.name)
        match value:
            case None | ():
                continue
            case int():
                listed.append({"name": field.name, "value": value})
            case Location():
                listed.append({"name": field.name, "value": location_fields(value)})
            case LocationFilter():
                listed.append({"name": field.name, **_location_filter(value)})
            case Parameters():
                listed.append({"name": field.name, "value": parameter_list(value)})
            case _ if field.name == "authorization_tokens":
                listed += [{"name": "authorization_token", **_token(token)} for token in value]
            case (int(), *_):
                listed.append({"name": field.name, "value": list(value)})
            case _ if field.name == "range_filters":
                listed += [_range_filter(each) for each in value]
            case _:
                listed.append({"name": field.name, "value": [octets(part) for part in value]})
    return listed


def _value(name: str, value: Any) -> Any:
    match value:
        case Redirect():
            return {
                "new_session_uri": without_secrets(value.uri),
                "track_namespace": [octets(part) for part in value.namespace],
                "track_name": octets(value.name),
            }
        case Location():
            return location_fields(value)
        case bytes():
            return octets(value)
        case str():
            return without_secrets(value) if name == "uri" else escaped(value)
        case bool() | int():
            return int(value)
    assert isinstance(value, tuple)
    if name == "options":
        return [_option(pair) for pair in value]
    if name == "properties":
        properties: Properties = value
        return [_property(pair) for pair in properties]
    return [octets(part) for part in value]


def describe(message: Message) -> Fields:
    """`message` as the `$MOQTControlMessage` of its events, without anything secret."""
    shown: Fields = {"type": message.TYPE.name.lower()}
    for field in fields(message):
        value = getattr(message, field.name)
        if isinstance(value, Parameters):
            listed = parameter_list(value)
            shown |= {"number_of_parameters": len(listed), "parameters": listed}
        elif value is None or (value == () and field.name in ("properties", "options")):
            continue
        elif field.name == "code":
            shown |= _code(message, value)
        else:
            name = _FIELD_NAMES.get(field.name, field.name)
            shown[name] = _value(field.name, value)
    if isinstance(message, Setup):
        shown["number_of_parameters"] = len(message.options)
    return shown


def _code(message: Message, value: int) -> Fields:
    match message:
        case RequestErrorMessage():
            return {"error_code": value, "error": code_name(RequestErrorCode, value).lower()}
        case PublishDone():
            return {"status_code": value, "status": code_name(PublishDoneCode, value).lower()}
    return {"code": value}


def _text(value: Any) -> str:
    match value:
        case {"value": inner}:
            return _text(inner)
        case {"value_bytes": str() as inner}:
            return f"0x{inner}"
        case {"group": group, "object": object_id}:
            return f"{group}/{object_id}"
        case dict():
            return "(" + " ".join(f"{k}={_text(v)}" for k, v in value.items()) + ")"
        case list():
            return "[" + ", ".join(_text(each) for each in value) + "]"
    return str(value)


def _parameter_text(shown: Fields) -> str:
    rest = {k: v for k, v in shown.items() if k not in ("name", "header_type")}
    name = shown.get("name") or hex(shown["header_type"])
    if shown.get("name") == "unknown":
        name = hex(rest.pop("name_bytes"))
    inner = rest.get("value", rest.get("header_value"))
    if isinstance(inner, list) and inner and isinstance(inner[0], dict) and "name" in inner[0]:
        return f"{name}=({' '.join(_parameter_text(each) for each in inner)})"
    if len(rest) == 1 and inner is not None:
        return f"{name}={_text(inner)}"
    return f"{name}={_text(rest)}"


def line(message: Message) -> str:
    """`message` on one line: SUBSCRIBE request_id=0 track_namespace=[a, b] ..."""
    shown = describe(message)
    words = [shown.pop("type").upper()]
    for name, value in shown.items():
        if name in ("parameters", "track_properties", "setup_parameters"):
            words += [_parameter_text(each) for each in value]
        elif name not in ("number_of_parameters", "error_code", "status_code") and value != "":
            words.append(f"{name}={_text(value)}")
    return " ".join(words)
