"""What to do after a failure: one table over problem types, and one over exceptions."""

from __future__ import annotations

from enum import Enum, StrEnum, auto
from typing import Final

from kvsp.client.errors import (
    BadAnswerError,
    ClientError,
    NoTokenError,
    ProblemDetails,
    RequestRefusedError,
    UnreachableError,
    VerificationError,
)
from kvsp.records.problems import ProblemName


class Course(Enum):
    """What follows a refusal."""

    FINAL = auto()
    """The same request will be refused again, by any service that knows it."""
    WAIT = auto()
    """The same service may grant it after Retry-After."""
    NEXT = auto()
    """This service cannot; another may."""
    RETRY = auto()
    """The service failed; it or another may do better soon."""


_P = ProblemName

COURSES: Final = {
    _P.INVALID_REQUEST: Course.FINAL,
    _P.FORBIDDEN: Course.FINAL,
    _P.UNKNOWN_RESOURCE: Course.NEXT,
    _P.LAYERS_UNAVAILABLE: Course.NEXT,
    _P.CODEC_UNSUPPORTED: Course.NEXT,
    _P.NOT_ACTIVE: Course.NEXT,
    _P.INVALID_TRANSITION: Course.FINAL,
    _P.STALE_EPOCH: Course.FINAL,
    _P.UNKNOWN_EPOCH: Course.FINAL,
    _P.INSTANCE_FAILED: Course.FINAL,
    _P.CHECKPOINT_CONFLICT: Course.FINAL,
    _P.DIRECTIVE_CONFLICT: Course.FINAL,
    _P.MAP_VERSION: Course.FINAL,
    _P.COMPAT_UNKNOWN: Course.FINAL,
    _P.LEASED: Course.WAIT,
    _P.BLOCK_EXISTS: Course.FINAL,
    _P.PRECONDITION_REQUIRED: Course.FINAL,
    _P.TOO_LARGE: Course.FINAL,
    _P.COMPAT_MISMATCH: Course.FINAL,
    _P.INCOMPATIBLE: Course.NEXT,
    _P.INVALID_CONTAINER: Course.FINAL,
    _P.DIGEST_MISMATCH: Course.FINAL,
    _P.SAMPLER_UNSUPPORTED: Course.NEXT,
    _P.CACHE_MISS: Course.FINAL,
    _P.LEASE_QUOTA: Course.WAIT,
    _P.RESHARD_FAILED: Course.FINAL,
    _P.STORAGE_FULL: Course.WAIT,
}

_BY_STATUS: Final = {
    404: Course.NEXT,
    406: Course.NEXT,
    408: Course.RETRY,
    425: Course.RETRY,
    429: Course.WAIT,
    503: Course.WAIT,
}


def course(problem: ProblemDetails) -> Course:
    """What follows a problem. Where waiting helps but no time is given: 503 and 429 are
    tried again, everything else is final."""
    if problem.name is not None:
        found = COURSES[problem.name]
    else:
        default = Course.RETRY if problem.status >= 500 else Course.FINAL
        found = _BY_STATUS.get(problem.status, default)
    if found is Course.WAIT and problem.retry_after is None:
        return Course.RETRY if problem.name is None else Course.FINAL
    return found


class Fault(StrEnum):
    """How a request of layers failed, and why layers are missing in the end.

    Ordered: of several faults the last one here tells most.
    """

    NO_REPLICA = "no-replica"
    """No replica is known that holds it, or none over HTTP."""
    NOT_HELD = "not-held"
    """Every holder of it answered 404: the index was out of date."""
    CODEC = "codec"
    """There is no replica in an acceptable codec."""
    CAPACITY = "capacity"
    """There was no room for it at the receiver."""
    BUSY = "busy"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    NOT_AUTHORIZED = "not-authorized"
    VERIFICATION = "verification-failed"


SEVERITY: Final = {fault: rank for rank, fault in enumerate(Fault)}


def fault_of(error: ClientError) -> Fault:
    """How a retrieval counts an exception of one of its requests."""
    if isinstance(error, VerificationError | BadAnswerError):
        return Fault.VERIFICATION
    if isinstance(error, NoTokenError):
        return Fault.NOT_AUTHORIZED
    if not isinstance(error, RequestRefusedError):
        return Fault.UNREACHABLE if isinstance(error, UnreachableError) else Fault.TIMEOUT
    problem = error.problem
    if problem.status in (401, 403):
        return Fault.NOT_AUTHORIZED
    if problem.status == 406:
        return Fault.CODEC
    match course(problem):
        case Course.NEXT:
            return Fault.NOT_HELD
        case Course.WAIT:
            return Fault.BUSY
        case Course.RETRY:
            return Fault.UNREACHABLE
    return Fault.REFUSED
