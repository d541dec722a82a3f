"""One publication while it arrives: every Object verified, every layer put together.

Pure logic: manifests and Objects go in, usable layers come out (KVCS "Verification and
Recovery"). Who asks for the Objects is `kvcs.retrieving.retrieval`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvcs.names.codes import Component
from kvcs.names.errors import VerificationFailed
from kvcs.names.manifest import Manifest, SegmentEntry, check_progress
from kvcs.names.namespace import PublicationNamespace
from kvcs.names.payload import PayloadForm, data_digest
from kvcs.names.tracks import DataTrack, raw_octets
from kvcs.retrieving.destinations import Destination
from kvcs.retrieving.layers import LayerBuffer, Verdict
from kvcs.retrieving.open_layer import halves
from kvcs.retrieving.stats import Stats
from kvsp.blocks.layout import Octets
from kvsp.names.codes import HASH_OCTETS, Codec, DecodeErrorName
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor
from moqt.values.names import Location

MAX_BAD_OBJECTS: Final = 3
"""Bad Objects after which another publication is used (KVCS "Verification and Recovery")."""

SEGMENT: Final = 0
"""The segment that is retrieved: the one the Anchor Key identifies."""

NOT_NEEDED: Final = "not-needed"
"""Why an Object was discarded that is outside the layers and blocks asked for."""

OTHER_PRODUCTION: Final = "other-production"
"""Why a block of a holder was discarded that is right, but not the one of the publication."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What may be carried over to another publication of the same prefix, if both are
    deterministic: the layers handed over."""

    deterministic: bool
    anchor_key: bytes
    blocks: int
    total: int
    next_layer: int
    unconfirmed: Mapping[tuple[DataTrack, int], bytearray]


@dataclass(slots=True)
class _Facts:
    """What is known of every Object of one track."""

    form: PayloadForm
    listed: tuple[bytes, ...] = ()
    """The digests of each layer that the manifest lists."""

    def digest(self, layer: int, block: int) -> bytes | None:
        """The digest that is listed for an Object."""
        if layer >= len(self.listed):
            return None
        return self.listed[layer][block * HASH_OCTETS : (block + 1) * HASH_OCTETS]


class Assembly(LayerBuffer):
    """The layers asked for, of one publication.

    `manifest` is the last good version. A layer is handed over, in order, through `ready`,
    as soon as every needed Object of it is verified in every selected track and none
    contradicts the manifest. Objects that came before the manifest lists them are compared
    when it does: only their digests are kept for that. With `require_listed` a layer waits
    for it.

    Blocks may also come from holders over HTTP (`block_received`): in place of Objects, if
    they are the same production as far as anybody can tell, and after the last block of
    the publication.

    Methods raise VerificationFailed when the publication is not to be used any further:
    its first manifest is not acceptable, there were more than `max_bad` bad Objects, or a
    layer that was handed over is not what the manifest lists; and whatever `destination`
    raises.
    """

    def __init__(
        self,
        namespace: PublicationNamespace,
        descriptor: Descriptor,
        keys: Sequence[bytes] | None,
        layers: range,
        destination: Destination,
        stats: Stats,
        *,
        blocks: int | None = None,
        require_listed: bool = False,
        max_bad: int = MAX_BAD_OBJECTS,
        kept: Kept | None = None,
        shared: int | None = None,
        over_http: int = 0,
        elsewhere: Callable[[int, int], bool] | None = None,
    ) -> None:
        """`keys` are the Block Keys of the tokens the consumer knows, None for one that knows
        no tokens and tells blocks apart otherwise, `blocks` how many
        blocks it needs at most. `kept` is of an earlier publication: its layers are not
        asked for again if both are deterministic, otherwise all come again. `shared` is how many
        leading blocks the publication is known to have in common with `keys`, if that is
        not all, as a manifest cannot show it for a longer publication. `over_http` is
        how many leading blocks holders have: those the publication lacks come from there.
        `elsewhere(layer, block)` is asked, for an Object that came and is bad, whether it
        will be had over HTTP; then it is not asked for again.
        """
        super().__init__(descriptor, layers, destination, stats)
        self.namespace = namespace
        self.manifest: Manifest | None = None
        self.version = -1
        self.tracks: tuple[DataTrack, ...] = ()
        self.blocks = 0
        """Blocks needed of the publication, known from the first manifest on."""
        self.bad = 0
        """Bad Objects and manifests of this publication."""
        self.promised: set[tuple[int, int]] = set()
        """(layer, block) of bad Objects that are to come over HTTP."""
        self._keys = keys
        self._shared = shared
        self._over_http = over_http
        self._elsewhere = elsewhere
        self._most_blocks = blocks
        self._require_listed = require_listed
        self._max_bad = max_bad
        self._kept = kept
        self._facts: dict[DataTrack, _Facts] = {}
        self._unconfirmed: dict[tuple[DataTrack, int], bytearray] = {}
        self._taken_back: list[tuple[DataTrack, Location]] = []
        self._reasons: Counter[str] = Counter()
        self._refused: set[Location] = set()

    # -- what is known -------------------------------------------------------------------

    @property
    def publication(self) -> bytes:
        return self.namespace.publication_id

    @property
    def entry(self) -> SegmentEntry:
        """The manifest's entry of the segment retrieved."""
        assert self.manifest is not None
        return self.manifest.segments[SEGMENT]

    @property
    def confirmed(self) -> bool:
        """Whether every Object held is listed in the manifest."""
        return not self._unconfirmed

    @property
    def manifest_refused(self) -> bool:
        """Whether a later version of the manifest was not acceptable."""
        return bool(self._refused)

    def missing(self, track: DataTrack, layer: int) -> list[int]:
        """The blocks of `layer` that `track` has still to bring."""
        if not self.needs(layer):
            return []
        held = self._open.get(layer)
        return [
            block
            for block in (range(self.blocks) if held is None else held.missing(track.component))
            if block < self.blocks and (layer, block) not in self.promised
        ]

    def unproven_blocks(self) -> Iterator[tuple[int, int]]:
        """Those of the last layer handed over, when no manifest lists it yet."""
        layer = self._next - 1
        if any((track, layer) in self._unconfirmed for track in self.tracks):
            yield from ((layer, block) for block in range(self.blocks))

    def take_back(self) -> list[tuple[DataTrack, Location]]:
        """Objects that a manifest refused after they were written, once each."""
        taken, self._taken_back = self._taken_back, []
        return taken

    def keep(self) -> Kept | None:
        """What another publication may continue from."""
        if self.manifest is None:
            return None
        return Kept(
            self.manifest.deterministic,
            self.namespace.anchor_key,
            self.blocks,
            self.total,
            self.ready[0].index if self.ready else self._next,
            dict(self._unconfirmed),
        )

    # -- what arrives --------------------------------------------------------------------

    def manifest_received(self, location: Location, payload: Octets) -> None:
        """A version of the manifest; its number is the Group ID."""
        version, object_id = location
        if version == self.version:
            self._stats.duplicates += 1
            return
        if version < self.version:
            return  # overtaken by a later version, which says all that this one does
        if location in self._refused:
            return  # Objects are immutable: asked for again, it is as bad as before
        try:
            if object_id:
                raise DecodeError(
                    DecodeErrorName.BAD_MANIFEST, "a manifest is Object 0 of its Group"
                )
            manifest = Manifest.parse(payload, self.namespace)
            if self.manifest is None:
                self._first_manifest(manifest)
            else:
                check_progress(self.manifest, manifest)
        except DecodeError as error:
            self._stats.discarded[error.name] += 1
            if self.manifest is None:
                raise VerificationFailed(f"the manifest is not acceptable: {error}") from None
            self._refused.add(location)
            self._count_bad(error.name)
            return
        self.manifest, self.version = manifest, version
        digests = self.entry.object_digests
        for track, facts in self._facts.items():
            facts.listed = digests[track] if digests is not None else ()
        self._confirm()
        self._hand_over()

    def object_received(
        self,
        track: DataTrack,
        location: Location,
        payload: Sequence[Octets],
        *,
        again: bool = False,
    ) -> Verdict:
        """An Object of a data track, its payload in one or more buffers.

        `again` is true when it may have been asked for twice, so that it is no duplicate.
        """
        layer, block = location
        if layer not in self.layers or block >= self.blocks:
            self._stats.discarded[NOT_NEEDED] += 1
            return Verdict.EXTRA
        held = self._open.get(layer)
        if not self.needs(layer) if held is None else held.has(track.component, block):
            if again or (block, layer) in self._stats.over_http:
                self._stats.discarded[NOT_NEEDED] += 1
            else:
                self._stats.duplicates += 1
            return Verdict.EXTRA
        facts = self._facts[track]
        expected = facts.digest(layer, block)
        try:
            data, digest = facts.form.check(payload, layer, block, expected)
        except DecodeError as error:
            self._bad_object(location, error.name)
            return Verdict.BAD
        if held is None:
            held = self._held(layer)
        held.write(track.component, block, *data)
        stats = self._stats
        stats.objects_verified += 1
        stats.octets += facts.form.raw_octets
        if expected is None:
            self._remember(track, layer, block, digest)
        else:
            stats.objects_confirmed += 1
        if held.complete:
            self._hand_over()
        return Verdict.NEW

    def object_refused(self, location: Location, reason: str) -> bool:
        """An Object was thrown away unread; True when it was one that is needed."""
        layer, block = location
        if not self.needs(layer) or block >= self.blocks:
            self._stats.discarded[NOT_NEEDED] += 1
            return False
        self._bad_object(location, reason)
        return True

    def block_received(self, block: int, layer: int, k: Octets, v: Octets, source: str) -> Verdict:
        """K and V of a block's layer, from a holder over HTTP.

        BAD is a block of another production: Objects of different publications are never
        combined, and neither are Objects and such a block.
        """
        self.promised.discard((layer, block))
        if self.manifest is None or layer not in self.layers or block >= self.total:
            return Verdict.EXTRA
        if block >= self.blocks:
            return super().block_received(block, layer, k, v, source)
        sections = {Component.K: k, Component.V: v}
        digests = {}
        for track in self.tracks:
            data = [sections[half] for half in halves(track.component)]
            digests[track] = digest = data_digest(*data)
            known = self._known_digest(track, layer, block)
            if known is not None and known != digest:
                self._stats.discarded[OTHER_PRODUCTION] += 1
                self.foreign.add(block)
                return Verdict.BAD
        verdict = super().block_received(block, layer, k, v, source)
        if verdict is Verdict.NEW:
            for track, digest in digests.items():
                if self._facts[track].digest(layer, block) is None:
                    self._remember(track, layer, block, digest)
        return verdict

    def release(self) -> None:
        """Let go of every array and digest."""
        super().release()
        self._unconfirmed.clear()
        self._kept = None

    # -- inside --------------------------------------------------------------------------

    def _first_manifest(self, manifest: Manifest) -> None:
        """Check that it is for our tokens, choose the tracks, and prepare the arrays."""
        known = manifest.segments[SEGMENT].blocks
        if self._keys is not None:
            known = len(self._keys)
            manifest.check_keys(self._keys[: self._shared], self.namespace.anchor_key)
        self.tracks = manifest.select_tracks(SEGMENT, codecs={Codec.RAW})
        self.manifest = manifest
        self._facts = {track: self._facts_of(track) for track in self.tracks}
        # a publication longer than our tokens is one we were told of: our part of it counts
        most = min(known, self._most_blocks or known)
        self.blocks = min(self.entry.blocks, most, self._shared or most)
        total = max(self.blocks, min(self._over_http, most))
        kept, self._kept = self._kept, None
        if (
            kept is not None
            and kept.deterministic
            and manifest.deterministic
            and (kept.anchor_key, kept.blocks, kept.total)
            == (self.namespace.anchor_key, self.blocks, total)
        ):
            self.total = total
            self._say(total)
            self._next = kept.next_layer
            self._unconfirmed.update(
                (key, digests)
                for key, digests in kept.unconfirmed.items()
                if key[0] in self.tracks and key[1] < self._next
            )
            self._stats.layers = self._next - self.layers.start
        else:
            self.begin(total)

    def _facts_of(self, track: DataTrack) -> _Facts:
        codec = track.known_codec
        assert codec is not None
        descriptor = self.descriptor
        return _Facts(
            PayloadForm(
                track.component,
                codec,
                self.entry.first_block,
                descriptor.block_tokens,
                raw_octets(descriptor, track.component),
            )
        )

    def _remember(self, track: DataTrack, layer: int, block: int, digest: bytes) -> None:
        """Keep a digest until a manifest lists it."""
        digests = self._unconfirmed.get((track, layer))
        if digests is None:
            digests = self._unconfirmed[track, layer] = bytearray(HASH_OCTETS * self.blocks)
        digests[block * HASH_OCTETS : (block + 1) * HASH_OCTETS] = digest

    def _known_digest(self, track: DataTrack, layer: int, block: int) -> bytes | None:
        """The digest of an Object: as the manifest lists it, or as it came."""
        listed = self._facts[track].digest(layer, block)
        came = self._unconfirmed.get((track, layer))
        if listed is not None or came is None:
            return listed
        held = self._open.get(layer)
        if held is not None and not held.has(track.component, block):
            return None
        return bytes(came[block * HASH_OCTETS : (block + 1) * HASH_OCTETS])

    def _bad_object(self, location: Location, reason: str) -> None:
        self._stats.discarded[reason] += 1
        if self._elsewhere is not None and self._elsewhere(*location):
            self.promised.add((location.group, location.object))
        self._count_bad(reason)

    def _count_bad(self, reason: str) -> None:
        self.bad += 1
        self._reasons[reason] += 1
        if self.bad > self._max_bad:
            raise VerificationFailed(self.describe_bad())

    def describe_bad(self) -> str:
        """The bad Objects of this publication, in words."""
        reasons = ", ".join(f"{name} {count}" for name, count in self._reasons.items())
        return (
            f"publication {self.namespace.publication_id.hex()}: {self.bad} bad Objects ({reasons})"
        )

    def _confirm(self) -> None:
        """Compare what came before the manifest listed it."""
        assert self.manifest is not None
        listed = self.entry.object_digests
        if listed is None:
            return
        for (track, layer), digests in list(self._unconfirmed.items()):
            if layer >= self.entry.listed_groups(track):
                continue
            del self._unconfirmed[track, layer]
            expected = listed[track][layer][: len(digests)]
            held = self._open.get(layer)
            if held is None:
                self._stats.objects_confirmed += sum(
                    (block, layer) not in self._stats.over_http for block in range(self.blocks)
                )
                if digests != expected:
                    self._stats.discarded[DecodeErrorName.DIGEST_MISMATCH] += 1
                    raise VerificationFailed(
                        f"publication {self.namespace.publication_id.hex()}: layer {layer}, "
                        f"handed over before it was listed, is not what the manifest lists"
                    )
                continue
            for block in range(self.blocks):
                if not held.has(track.component, block):
                    continue
                part = slice(block * HASH_OCTETS, (block + 1) * HASH_OCTETS)
                over_http = (block, layer) in self._stats.over_http
                if digests[part] == expected[part]:
                    self._stats.objects_confirmed += not over_http
                    continue
                held.take_back(track.component, block)
                self._taken_back.append((track, Location(layer, block)))
                self._stats.octets -= raw_octets(self.descriptor, track.component)
                if over_http:
                    self._stats.discarded[OTHER_PRODUCTION] += 1
                    self.foreign.add(block)
                    continue
                self._stats.objects_verified -= 1
                self._stats.discarded[DecodeErrorName.DIGEST_MISMATCH] += 1
                self._count_bad(DecodeErrorName.DIGEST_MISMATCH)

    def _may_go(self, layer: int) -> bool:
        return not self._require_listed or not any(
            (track, layer) in self._unconfirmed for track in self.tracks
        )
