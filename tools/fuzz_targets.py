"""The targets of `tools.fuzz` by name."""

from __future__ import annotations

from collections.abc import Callable

from tools.fuzz_base import Case, Step, Target
from tools.fuzz_decoders import (
    Control,
    Cose,
    Data,
    Datagram,
    ManifestTarget,
    Payload,
    Sealed,
    Sections,
)
from tools.fuzz_floods import FloodTarget
from tools.fuzz_sessions import (
    RelayTarget,
    SessionTarget,
    TransportTarget,
    WebTransportTarget,
)

__all__ = ["TARGETS", "Case", "Step", "Target"]

TARGETS: dict[str, Callable[[], Target]] = {
    each.name: each
    for each in (
        Control,
        Data,
        Datagram,
        SessionTarget,
        RelayTarget,
        FloodTarget,
        TransportTarget,
        WebTransportTarget,
        Payload,
        ManifestTarget,
        Cose,
        Sealed,
        Sections,
    )
}
