"""The OpenAPI document of a server, assembled from its operations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from kvsp.http.service import Operation
from kvsp.records.members import Record, schema_of
from kvsp.records.problems import PROBLEM_MEDIA_TYPE, PROBLEMS, ProblemName

_PARAMETER = re.compile(r"\{([a-z_]+)\}")
_COMMON: Final = (400, 401, 403, 404, 408, 413, 429, 431, 500, 503)


def object_schema(**properties: Any) -> dict[str, Any]:
    """The JSON Schema of an object with these members, all required."""
    return {"type": "object", "required": list(properties), "properties": properties}


def hex_schema(octets: int) -> dict[str, Any]:
    """The JSON Schema of `<hexN>` for N = `octets`."""
    return {"type": "string", "pattern": f"^[0-9a-f]{{{2 * octets}}}$"}


def document(base_uri: str, operations: Sequence[Operation]) -> dict[str, Any]:
    """An OpenAPI 3.1 document; paths are relative to `base_uri`."""
    components: dict[str, Any] = {"Problem": _PROBLEM}
    paths: dict[str, Any] = {}
    for operation in operations:
        paths.setdefault("/" + operation.path, {})[operation.method.lower()] = _operation(
            operation, components
        )
    return {
        "openapi": "3.1.0",
        "info": {"title": "Key-Value Cache Storage Protocol", "version": "1"},
        "servers": [{"url": base_uri.rstrip("/")}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "certificate": {"type": "mutualTLS"},
            },
        },
    }


_PROBLEM: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "instance": {"type": "string"},
    },
}


def _operation(operation: Operation, components: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": _identifier(operation),
        "parameters": _parameters(operation),
        "responses": _responses(operation, components),
        "security": [] if operation.public else [{"bearer": []}, {"certificate": []}],
    }
    if operation.request is not None:
        described["requestBody"] = {
            "required": True,
            "content": {
                operation.request_media_type: {"schema": _schema(operation.request, components)}
            },
        }
    return described


def _identifier(operation: Operation) -> str:
    words = re.findall(r"[a-z_]+", operation.path)
    return "-".join([operation.method.lower(), *words])


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": operation.path_parameters.get(name, {"type": "string"}),
        }
        for name in _PARAMETER.findall(operation.path)
    ] + [
        {"name": name, "in": place, "required": False, "schema": schema}
        for place, schemas in (
            ("query", operation.query_parameters),
            ("header", operation.request_headers),
        )
        for name, schema in schemas.items()
    ]


def _responses(operation: Operation, components: dict[str, Any]) -> dict[str, Any]:
    statuses = {*_COMMON, *(PROBLEMS[name].status for name in operation.problems)}
    if ProblemName.CODEC_UNSUPPORTED in operation.problems:
        statuses.add(422)
    if operation.method in ("PATCH", "POST", "PUT"):
        statuses.add(415)
    problem = {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    responses: dict[str, Any] = {
        str(status): {"description": HTTPStatus(status).phrase, "content": problem}
        for status in sorted(statuses)
    }
    for status in operation.success:
        responses[str(status)] = {"description": HTTPStatus(status).phrase}
        if operation.response is not None and status not in (204, 304):
            responses[str(status)]["content"] = {
                operation.response_media_type: {"schema": _schema(operation.response, components)}
            }
    return responses


def _schema(
    declared: Mapping[str, Any] | type[Record], components: dict[str, Any]
) -> Mapping[str, Any]:
    if isinstance(declared, Mapping):
        return declared
    components[declared.__name__] = schema_of(declared)
    return {"$ref": f"#/components/schemas/{declared.__name__}"}
