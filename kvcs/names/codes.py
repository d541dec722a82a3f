"""Every registry, limit and constant of KVCS, in one table."""

from __future__ import annotations

from enum import IntEnum, StrEnum

NAMESPACE_TAG = b"kvcs-1"
PUBLICATION_ID_OCTETS = 16
NAMESPACE_FIELD_OCTETS = (len(NAMESPACE_TAG), 16, 32, 32, PUBLICATION_ID_OCTETS)
"""Lengths of the five Track Namespace Fields (KVCS "Track Namespace")."""

URI_FRAGMENT_TYPE = "kvcs:"

PAYLOAD_MAGIC = 0x4B564F31
PAYLOAD_VERSION = 1
PAYLOAD_HEADER_OCTETS = 68

MANIFEST_VERSION = 1
MAX_MANIFEST_OCTETS = 256 << 20
"""Octets of a manifest, whatever it lists; what the Objects need that it may list is less:"""
MANIFEST_BASE_OCTETS = 64 << 10
MANIFEST_OBJECT_OCTETS = 96
"""For each Object that it may list."""
MAX_MANIFEST_FRAME_OCTETS = 1 << 20
"""Octets of a manifest beside its digests,"""
MANIFEST_SEGMENT_OCTETS = 1 << 10
"""and as many more for each segment that it may have beyond `MAX_SEGMENTS`."""
MAX_SEGMENT = (1 << 32) - 1
MAX_SEGMENTS = 1024
"""Segments that a publication has at the most, and that a manifest is read with, unless told
otherwise,"""
TRACKS_PER_SEGMENT = 4
"""and so many tracks for each of them, of all segments together."""

MAX_BLOCKS_PER_SEGMENT = 1 << 32
"""Block Index has 32 bits."""

MAX_TOKENS = 1 << 64
"""Token Start has 64 bits."""


class Component(IntEnum):
    """The "KVCS Components" registry."""

    K = 1
    V = 2
    KV = 3

    # the names of a track are looked up for every Object: an enum hashes itself slowly
    __hash__ = int.__hash__

    @property
    def label(self) -> str:
        """The component's name, as in track names."""
        return self.name.lower()


class ManifestTrack(StrEnum):
    """The two reserved Track Names; a publication has exactly one of them."""

    MANIFEST = "manifest"
    MANIFEST_COSE = "manifest.cose"
