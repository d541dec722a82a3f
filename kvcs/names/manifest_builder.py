"""Building the manifests of a publication, version by version, and what one version may make of
the one before it (KVCS "Manifest Track").

A version may leave out the digests of a segment that is complete when an earlier one lists them
all: of a publication in many segments all versions would have, together, half as many times the
octets of the last as there are segments. Whoever has come late asks for the earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvcs.names.codes import MAX_MANIFEST_OCTETS, MAX_SEGMENTS, Component
from kvcs.names.manifest import (
    Manifest,
    SegmentEntry,
    check_consistency,
    group_texts,
    keys_digest,
    selections,
)
from kvcs.names.namespace import PublicationNamespace
from kvcs.names.tracks import DataTrack
from kvsp.names.codes import HASH_OCTETS, Codec, DecodeErrorName
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor


class ManifestBuilder:
    """What a publisher tells about its publication, version by version.

    Segments are added in order and completed Groups in Group order; `build` checks the
    whole like a consumer does.
    """

    def __init__(
        self,
        compat: Descriptor,
        namespace: PublicationNamespace,
        *,
        deterministic: bool = False,
        max_segments: int = MAX_SEGMENTS,
        max_octets: int = MAX_MANIFEST_OCTETS,
    ) -> None:
        """Raises ValueError when `namespace` is of another Compatibility ID."""
        if namespace.compat_id != compat.compat_id:
            raise ValueError("the namespace is of another Compatibility ID than the descriptor")
        self._compat = compat
        self._namespace = namespace
        self._deterministic = deterministic
        self._max_segments = max_segments
        self._max_octets = max_octets
        self._segments: list[_OpenSegment] = []
        self._listed_before = 0
        """Digests that the versions so far which list all have listed together."""
        self.lists_all = True
        """Whether the last version, or the one that was made last, lists all digests there are."""

    def add_segment(
        self, block_keys: Sequence[bytes], tracks: Iterable[tuple[Component, Codec]]
    ) -> int:
        """Add the next segment and return its number.

        `block_keys` are the keys of its blocks, `tracks` the components and codecs it is
        offered in. Raises ValueError without blocks, or when segment 0 does not end with
        the namespace's Anchor Key.
        """
        number = len(self._segments)
        if not block_keys:
            raise ValueError("a segment has at least one block")
        if number == 0 and block_keys[-1] != self._namespace.anchor_key:
            raise ValueError("the last block of segment 0 has another key than the Anchor Key")
        names = tuple(DataTrack(component, codec.label, number) for component, codec in tracks)
        if not selections(names) or len(set(names)) != len(names):
            raise ValueError("a segment has a kv track, or k and v tracks of one codec, each once")
        self._segments.append(
            _OpenSegment(
                first_block=sum(segment.blocks for segment in self._segments),
                blocks=len(block_keys),
                block_keys_sha256=keys_digest(block_keys),
                digests={name: [] for name in names},
                texts={name: [] for name in names},
            )
        )
        return number

    def take_back_segment(self) -> None:
        """The segment that was added last is none after all."""
        self._segments.pop()

    def add_group(self, track: DataTrack, group: int, digests: Sequence[bytes]) -> None:
        """List the Data Digests of a completed Group, in Object order.

        Raises ValueError unless it is the track's next Group and every Object is there,
        LookupError for a track that was not added.
        """
        if track.segment >= len(self._segments):
            raise LookupError(f"no segment {track.segment} was added")
        segment = self._segments[track.segment]
        if track not in segment.digests:
            raise LookupError(f"segment {track.segment} has no track {track}")
        groups = segment.digests[track]
        if group != len(groups) or group >= self._compat.layers:
            raise ValueError(f"group {group} is not the next group of {track}, {len(groups)}")
        if len(digests) != segment.blocks or any(len(d) != HASH_OCTETS for d in digests):
            raise ValueError(
                f"group {group} of {track} needs {segment.blocks} digests of {HASH_OCTETS} octets"
            )
        groups.append(b"".join(digests))

    def complete(self, segment: int) -> None:
        """Mark a segment complete. Raises ValueError unless every Group is listed."""
        if not 0 <= segment < len(self._segments):
            raise ValueError(f"no segment {segment} was added")
        state = self._segments[segment]
        for track, groups in state.digests.items():
            if len(groups) != self._compat.layers:
                raise ValueError(f"{track} has {len(groups)} of {self._compat.layers} groups")
        state.complete = True

    @property
    def listed(self) -> int:
        """Digests that the manifest lists as it stands."""
        return sum(
            segment.blocks * len(groups)
            for segment in self._segments
            for groups in segment.digests.values()
        )

    @property
    def worth_a_version(self) -> bool:
        """Whether it lists as much as all versions before it that list everything: a manifest
        grows with every layer, and such versions become rarer. With the last one, which is
        published in any case, all of them list together at most three times what that does."""
        return self.listed >= self._listed_before

    def version(self, *, last: bool = False) -> list[bytes]:
        """The octets of the next version: the manifest as it stands, in pieces. Those of Groups
        are the ones of the versions before, so that a version costs what is new in it. Call
        `published` when it is.

        Unless it is the `last`, or lists more than all those before it together that list all, it
        leaves out the digests of segments of which a version before has listed all. So all
        versions have at most four times the octets of the last, however many segments there are.

        Takes the time that the new ones need, in whatever thread while nothing is added. Raises
        KvcsError for one that is larger than what consumers take, DecodeError `bad-manifest`
        without a segment.
        """
        for segment in self._segments:
            segment.write()
        texts = {track: each for segment in self._segments for track, each in segment.texts.items()}
        every = last or self.listed > self._listed_before
        self.lists_all = every or not any(segment.told for segment in self._segments)
        return self.build(every=every).pieces(texts, self._max_segments, self._max_octets)

    def published(self) -> None:
        """There is a version as it was made last, and nothing has been added since."""
        if self.lists_all:
            self._listed_before += self.listed
        for segment in self._segments:
            segment.told = segment.complete

    def build(self, *, every: bool = True) -> Manifest:
        """The manifest as it stands; with `every` digest, or without those of segments of which
        all were published. Raises DecodeError `bad-manifest` without a segment."""
        manifest = Manifest(
            compat=self._compat,
            deterministic=self._deterministic,
            segments=tuple(
                SegmentEntry(
                    segment=number,
                    first_block=segment.first_block,
                    blocks=segment.blocks,
                    block_keys_sha256=segment.block_keys_sha256,
                    tracks=tuple(segment.digests),
                    complete=segment.complete,
                    object_digests={
                        track: tuple(groups) for track, groups in segment.digests.items()
                    }
                    if every or not segment.told
                    else None,
                )
                for number, segment in enumerate(self._segments)
            ),
            publication=self._namespace.publication_id,
            scope_id=self._namespace.scope_id,
        )
        check_consistency(manifest, self._max_segments)
        return manifest


@dataclass(slots=True)
class _OpenSegment:
    first_block: int
    blocks: int
    block_keys_sha256: bytes
    digests: dict[DataTrack, list[bytes]]
    texts: dict[DataTrack, list[bytes]]
    """The same as they stand in a manifest, of those that a version has listed: a piece for each
    Group, one for all of a segment that is whole."""
    complete: bool = False
    written: bool = False
    """All of them are written."""
    told: bool = False
    """A version that was published lists all of them."""

    def write(self) -> None:
        """Bring `texts` up to date."""
        if self.written:
            return
        for track, groups in self.digests.items():
            written = self.texts[track]
            written += group_texts(groups[len(written) :], len(written))
            if self.complete:
                self.texts[track] = [b"".join(written)]
        self.written = self.complete


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
