"""Problem details (RFC 9457): the one way a KVSP service says no, from one table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from kvsp.names.errors import DecodeError, KvspError

PROBLEM_MEDIA_TYPE: Final = "application/problem+json"
TYPE_PREFIX: Final = "https://iana.org/assignments/http-problem-types#"
BLANK: Final = "about:blank"
"""The type of a problem that its status code alone describes."""


class ProblemName(StrEnum):
    """Every problem type of KVSP; `kvsp-layers-unavailable`, `kvsp-lease-quota` and
    `kvsp-stale-epoch` are the draft's, the others are decisions of this project."""

    INVALID_REQUEST = "kvsp-invalid-request"
    FORBIDDEN = "kvsp-forbidden"
    UNKNOWN_RESOURCE = "kvsp-unknown-resource"
    LAYERS_UNAVAILABLE = "kvsp-layers-unavailable"
    CODEC_UNSUPPORTED = "kvsp-codec-unsupported"
    NOT_ACTIVE = "kvsp-not-active"
    INVALID_TRANSITION = "kvsp-invalid-transition"
    STALE_EPOCH = "kvsp-stale-epoch"
    UNKNOWN_EPOCH = "kvsp-unknown-epoch"
    INSTANCE_FAILED = "kvsp-instance-failed"
    CHECKPOINT_CONFLICT = "kvsp-checkpoint-conflict"
    DIRECTIVE_CONFLICT = "kvsp-directive-conflict"
    MAP_VERSION = "kvsp-map-version"
    COMPAT_UNKNOWN = "kvsp-compat-unknown"
    LEASED = "kvsp-leased"
    BLOCK_EXISTS = "kvsp-block-exists"
    PRECONDITION_REQUIRED = "kvsp-precondition-required"
    TOO_LARGE = "kvsp-too-large"
    COMPAT_MISMATCH = "kvsp-compat-mismatch"
    INCOMPATIBLE = "kvsp-incompatible"
    INVALID_CONTAINER = "kvsp-invalid-container"
    DIGEST_MISMATCH = "kvsp-digest-mismatch"
    SAMPLER_UNSUPPORTED = "kvsp-sampler-unsupported"
    CACHE_MISS = "kvsp-cache-miss"
    LEASE_QUOTA = "kvsp-lease-quota"
    RESHARD_FAILED = "kvsp-reshard-failed"
    STORAGE_FULL = "kvsp-storage-full"


class _Kind(NamedTuple):
    status: int
    title: str


PROBLEMS: Final[Mapping[ProblemName, _Kind]] = {
    ProblemName.INVALID_REQUEST: _Kind(400, "The request is malformed"),
    ProblemName.FORBIDDEN: _Kind(403, "The principal is not allowed to do this"),
    ProblemName.UNKNOWN_RESOURCE: _Kind(404, "There is no such resource"),
    ProblemName.LAYERS_UNAVAILABLE: _Kind(404, "Some of the layers asked for are not held"),
    ProblemName.CODEC_UNSUPPORTED: _Kind(406, "The codec is not supported"),
    ProblemName.NOT_ACTIVE: _Kind(409, "The instance is not active"),
    ProblemName.INVALID_TRANSITION: _Kind(409, "The state does not follow the current one"),
    ProblemName.STALE_EPOCH: _Kind(409, "The epoch is lower than the known one"),
    ProblemName.UNKNOWN_EPOCH: _Kind(409, "The epoch was never given out"),
    ProblemName.INSTANCE_FAILED: _Kind(409, "The instance counts as failed in this epoch"),
    ProblemName.CHECKPOINT_CONFLICT: _Kind(409, "Another checkpoint has this epoch and offset"),
    ProblemName.DIRECTIVE_CONFLICT: _Kind(409, "Another directive has this identifier"),
    ProblemName.MAP_VERSION: _Kind(409, "The shard map has another version"),
    ProblemName.COMPAT_UNKNOWN: _Kind(409, "The Compatibility ID has no stored descriptor"),
    ProblemName.LEASED: _Kind(409, "The block is leased"),
    ProblemName.BLOCK_EXISTS: _Kind(412, "The block is held already"),
    ProblemName.PRECONDITION_REQUIRED: _Kind(428, "The request lacks If-None-Match: *"),
    ProblemName.TOO_LARGE: _Kind(413, "The request is over a limit"),
    ProblemName.COMPAT_MISMATCH: _Kind(422, "The Compatibility ID is not the descriptor's"),
    ProblemName.INCOMPATIBLE: _Kind(422, "The instance serves another Compatibility ID"),
    ProblemName.INVALID_CONTAINER: _Kind(422, "The KV Block Container is malformed"),
    ProblemName.DIGEST_MISMATCH: _Kind(422, "A digest does not match"),
    ProblemName.SAMPLER_UNSUPPORTED: _Kind(422, "The sampler is not supported"),
    ProblemName.CACHE_MISS: _Kind(422, "Needed blocks are held nowhere"),
    ProblemName.LEASE_QUOTA: _Kind(429, "The lease is over the quota"),
    ProblemName.RESHARD_FAILED: _Kind(503, "A range of the plan could not be loaded"),
    ProblemName.STORAGE_FULL: _Kind(507, "No data without a lease can make room"),
}


class Problem(KvspError):
    """A refusal: raised anywhere below a handler, rendered once by the application.

    `detail` names the object and what to do, never a secret. `members` are the extra
    members of the problem type. `status` is only given for the types that have two
    (`kvsp-codec-unsupported`: 406 on GET, 422 on PUT). `retry_after` is in seconds.
    """

    def __init__(
        self,
        name: ProblemName | None,
        detail: str,
        *,
        status: int | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
        **members: Any,
    ) -> None:
        super().__init__(f"{name or status}: {detail}")
        self.name = name
        self.detail = detail
        self.status = status if status is not None else PROBLEMS[_named(name)].status
        self.members = members
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after)))

    @classmethod
    def http(
        cls,
        status: int,
        detail: str,
        *,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
        **members: Any,
    ) -> Problem:
        """A problem that its HTTP status alone names (type `about:blank`)."""
        return cls(None, detail, status=status, retry_after=retry_after, headers=headers, **members)

    @classmethod
    def from_decode_error(cls, error: DecodeError, pointer: str | None = None) -> Problem:
        """`kvsp-invalid-request` for a malformed body, path or query.

        `pointer` is a JSON pointer; the error's own, where it has one, is used otherwise.
        """
        members: dict[str, Any] = {"error": str(error.name)}
        if pointer := pointer or error.pointer:
            members["pointer"] = pointer
        return cls(ProblemName.INVALID_REQUEST, error.detail, **members)

    @property
    def type(self) -> str:
        return BLANK if self.name is None else TYPE_PREFIX + self.name

    @property
    def title(self) -> str:
        return HTTPStatus(self.status).phrase if self.name is None else PROBLEMS[self.name].title

    def document(self, instance: str | None = None) -> dict[str, Any]:
        """The JSON object of the problem; `instance` names this occurrence."""
        document = {"type": self.type, "title": self.title, "status": self.status}
        document["detail"] = self.detail
        if instance is not None:
            document["instance"] = instance
        return document | self.members


def problem_name(document: Any) -> str | None:
    """The part of a problem document's `type` after `#`, which clients compare."""
    kind = document.get("type") if isinstance(document, dict) else None
    if not isinstance(kind, str):
        return None
    return kind.rpartition("#")[2] if "#" in kind else None


def _named(name: ProblemName | None) -> ProblemName:
    if name is None:
        raise TypeError("a problem has a name or a status")
    return name
