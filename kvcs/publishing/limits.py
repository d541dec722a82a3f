"""How long a publication may be, and what its manifests cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvcs.names.codes import MAX_MANIFEST_OCTETS, MAX_SEGMENTS, TRACKS_PER_SEGMENT
from kvcs.names.encoding import Encoding
from kvcs.names.errors import KvcsError
from kvcs.names.limits import reached
from kvsp.names.codes import HASH_OCTETS, Codec
from kvsp.names.identity import Descriptor

_DIGEST_TEXT: Final = 2 * HASH_OCTETS + 3
"""Octets of one digest in a manifest: its digits, two quotes and a comma."""
_RAW: Final = (Encoding(Codec.RAW),)


def max_segments(encodings: Sequence[Encoding], most: int = MAX_SEGMENTS) -> int:
    """Segments that a publication may have where a manifest is read with `most`: it lists tracks of
    each in every encoding."""
    tracks = sum(len(each.components) for each in encodings)
    return min(most, most * TRACKS_PER_SEGMENT // tracks)


def check_manifest_size(
    descriptor: Descriptor,
    blocks: int,
    encodings: Sequence[Encoding] = _RAW,
    most: int = MAX_MANIFEST_OCTETS,
) -> None:
    """Raises KvcsError when the manifest of so many blocks would have more than `most` octets."""
    # known now, and better said now than after the last layer
    digests = _digests(descriptor, blocks, encodings)
    octets = digests * _DIGEST_TEXT + len(descriptor.jcs)
    if octets > most:
        reached("max_manifest_octets", f"a manifest of about {octets} octets is not written")
        raise KvcsError(
            f"the manifest would list {digests} Objects and have about {octets} octets, "
            f"{most} are allowed; use larger blocks, publish fewer tokens, or allow more "
            "(max_manifest_octets, --max-manifest), which those who read it have to do as well"
        )


def manifests_octets(
    descriptor: Descriptor, segments: Sequence[int], encodings: Sequence[Encoding] = _RAW
) -> int:
    """About how many octets all versions of the manifest have of a publication in segments of so
    many blocks, each begun as soon as the one before is whole, and ended with the last: a version
    lists the segment that is whole, or all (`ManifestBuilder.version`), as the last one does."""
    listed = of_those_with_all = told = 0
    for number, each in enumerate(segments, start=1):
        new = _digests(descriptor, each, encodings)
        listed += new
        every = number == len(segments) or listed > of_those_with_all
        told += listed if every else new
        of_those_with_all += listed if every else 0
    return told * _DIGEST_TEXT


def _digests(descriptor: Descriptor, blocks: int, encodings: Sequence[Encoding]) -> int:
    return sum(len(each.components) for each in encodings) * descriptor.layers * blocks
