"""From one version of a manifest to another of the same publication (KVCS "Manifest Track").

A version may leave out the digests of a segment that is complete when an earlier one lists them
all: of a publication in many segments all versions would have, together, half as many times the
octets of the last as there are segments. Whoever has come late asks for the earlier ones.
"""

from __future__ import annotations

from dataclasses import replace

from kvcs.names.manifest import Manifest, SegmentEntry
from kvsp.names.codes import DecodeErrorName
from kvsp.names.errors import DecodeError


def check_progress(previous: Manifest, following: Manifest) -> None:
    """Check a later version against an earlier one of the same publication.

    A version may add; what was listed is never changed, nor removed but for the digests of a
    segment that is complete, and "complete" never goes back. Raises DecodeError `bad-manifest`:
    keep `previous` and count the fault.
    """
    if following.compat != previous.compat:
        raise _bad_manifest("a later version changes 'compat'")
    if following.deterministic != previous.deterministic:
        raise _bad_manifest("a later version changes 'deterministic'")
    for member in ("publication", "scope_id"):
        before = getattr(previous, member)
        if before is not None and getattr(following, member) != before:
            raise _bad_manifest(f"a later version changes {member!r}")
    if len(following.segments) < len(previous.segments):
        raise _bad_manifest("a later version removes a segment")
    for old, new in zip(previous.segments, following.segments, strict=False):
        where = f"segment {old.segment}"
        if (old.first_block, old.blocks, old.block_keys_sha256) != (
            new.first_block,
            new.blocks,
            new.block_keys_sha256,
        ):
            raise _bad_manifest(f"a later version changes the blocks of {where}")
        if not set(old.tracks) <= set(new.tracks):
            raise _bad_manifest(f"a later version removes a track of {where}")
        if old.complete and not new.complete:
            raise _bad_manifest(f"a later version takes back that {where} is complete")
        if old.object_digests is None:
            continue
        for track, groups in old.object_digests.items():
            later = (new.object_digests or {}).get(track, ())
            listed = len(groups)
            if leaves_out(new, following.compat.layers):
                listed = min(listed, len(later))
            if later[:listed] != groups[:listed]:
                raise _bad_manifest(f"a later version changes the digests of {track}")


def leaves_out(entry: SegmentEntry, layers: int) -> bool:
    """Whether a segment is complete of which not all digests are listed: those that are not,
    an earlier version may have listed."""
    return entry.complete and any(entry.listed_groups(track) < layers for track in entry.tracks)


def is_final(manifest: Manifest, segment: int) -> bool:
    """Whether no later version says more of the Objects of a segment."""
    entry = manifest.segments[segment]
    if leaves_out(entry, manifest.compat.layers):
        # a publisher that lists digests at all lists those, at the latest in the end
        return not any(each.object_digests for each in manifest.segments)
    return entry.complete or entry.object_digests is None


def with_digests_of(other: Manifest, manifest: Manifest) -> Manifest:
    """`manifest`, with the digests that it leaves out and `other`, an earlier version, lists."""
    layers, segments = manifest.compat.layers, list(manifest.segments)
    for number, (theirs, ours) in enumerate(zip(other.segments, segments, strict=False)):
        if theirs.object_digests is not None and leaves_out(ours, layers):
            listed = {**theirs.object_digests, **(ours.object_digests or {})}
            for track, groups in theirs.object_digests.items():
                listed[track] = max(groups, listed[track], key=len)
            segments[number] = replace(ours, object_digests=listed)
    return replace(manifest, segments=tuple(segments))


def _bad_manifest(detail: str) -> DecodeError:
    return DecodeError(DecodeErrorName.BAD_MANIFEST, detail)
