"""Building the manifests of a publication, version by version (KVCS "Manifest Track")."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
from kvsp.names.codes import HASH_OCTETS, Codec
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
