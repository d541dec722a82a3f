"""A client of the index service and the holders, on aiohttp.

`Client` is the whole of it for most programs. `caller` is the one place that asks over HTTP,
for the client and for the roles that ask each other; `retrieving` gets the layers of many
blocks from many holders.

Imports `kvsp.principals`, `kvsp.records`, `kvsp.blocks` and `kvsp.names`; never a role or
`kvsp.http`, which is the serving side.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsp.client.answers import Explanation, PrefixMatch, Published, PutResult, Services
    from kvsp.client.client import Client
    from kvsp.client.errors import (
        BadAnswerError,
        ClientError,
        ConflictError,
        LeaseLostError,
        NotAuthorizedError,
        NotFoundError,
        NoTokenError,
        ProblemDetails,
        QuotaError,
        RequestRefusedError,
        RequestTimeoutError,
        UnavailableError,
        UnreachableError,
        VerificationError,
    )
    from kvsp.client.leases import Lease
    from kvsp.client.limits import ClientLimits
    from kvsp.client.policy import Fault
    from kvsp.client.retrieving.flights import Arrived, Missing
    from kvsp.client.retrieving.receiving import Layer
    from kvsp.client.retrieving.retrieval import ArrayDestination, Destination, RetrievalResult

_NAMES = {
    "kvsp.client.answers": (
        "Explanation",
        "PrefixMatch",
        "Published",
        "PutResult",
        "Services",
    ),
    "kvsp.client.client": ("Client",),
    "kvsp.client.errors": (
        "BadAnswerError",
        "ClientError",
        "ConflictError",
        "LeaseLostError",
        "NotAuthorizedError",
        "NotFoundError",
        "NoTokenError",
        "ProblemDetails",
        "QuotaError",
        "RequestRefusedError",
        "RequestTimeoutError",
        "UnavailableError",
        "UnreachableError",
        "VerificationError",
    ),
    "kvsp.client.leases": ("Lease",),
    "kvsp.client.limits": ("ClientLimits",),
    "kvsp.client.policy": ("Fault",),
    "kvsp.client.retrieving.flights": (
        "Arrived",
        "Missing",
    ),
    "kvsp.client.retrieving.receiving": ("Layer",),
    "kvsp.client.retrieving.retrieval": (
        "ArrayDestination",
        "Destination",
        "RetrievalResult",
    ),
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import on first use: a role that only asks others needs no numpy to start."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


__all__ = [
    "ArrayDestination",
    "Arrived",
    "BadAnswerError",
    "Client",
    "ClientError",
    "ClientLimits",
    "ConflictError",
    "Destination",
    "Explanation",
    "Fault",
    "Layer",
    "Lease",
    "LeaseLostError",
    "Missing",
    "NoTokenError",
    "NotAuthorizedError",
    "NotFoundError",
    "PrefixMatch",
    "ProblemDetails",
    "Published",
    "PutResult",
    "QuotaError",
    "RequestRefusedError",
    "RequestTimeoutError",
    "RetrievalResult",
    "Services",
    "UnavailableError",
    "UnreachableError",
    "VerificationError",
]
