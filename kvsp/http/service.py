"""A role as the application sees it: a `Service` with a table of `Operation`s."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.responses import Response

from kvsp.http.call import Call
from kvsp.records.members import Record
from kvsp.records.problems import ProblemName

Handler = Callable[[Call], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method on one resource of a role.

    `path` is below the base URI, without a leading slash, with `{name}` for a parameter.
    `request` and `response` are JSON Schemas or Record classes for the OpenAPI document;
    the `…_parameters` and `request_headers` map names to schemas. A `streaming` operation
    is bound by pace instead of time. A `shared` one leaves the resource to another role
    that has it, too.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    success: Sequence[int] = (200,)
    public: bool = False
    streaming: bool = False
    shared: bool = False
    request: Mapping[str, Any] | type[Record] | None = None
    request_media_type: str = "application/kvsp+json"
    response: Mapping[str, Any] | type[Record] | None = None
    response_media_type: str = "application/kvsp+json"
    path_parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    query_parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    request_headers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    problems: Sequence[ProblemName] = ()


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a role can serve, and what is not as it should be (a peer that is away)."""

    ready: bool
    degraded: tuple[str, ...] = ()


class Service:
    """Base of a role. Subclasses give operations; the other hooks are optional."""

    role: str

    def operations(self) -> Sequence[Operation]:
        """The table of what this role answers to."""
        raise NotImplementedError

    def register(self, registry: CollectorRegistry) -> None:
        """Put the role's own metrics into the application's registry."""

    def health(self) -> Health:
        """Independent of peers: a peer that is away degrades, it does not make unready."""
        return Health(ready=True)

    def describe(self) -> Mapping[str, Any]:
        """Members for `/.well-known/kvsp` besides the base URI, e.g. `codecs`."""
        return {}

    async def start(self) -> None:
        """Called before the first request."""

    async def drain(self) -> None:
        """Called on shutdown while requests are still answered: tell peers to go elsewhere."""

    async def stop(self) -> None:
        """Called after the last request; releases what `start` took."""
