"""One publication while it arrives: every Object verified, every layer put together.

Pure logic: manifests and Objects go in, usable layers come out (KVCS "Verification and
Recovery"). Who asks for the Objects is `kvcs.retrieving.retrieval`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Final

from kvcs.keeping.resume_file import Origin, key_of
from kvcs.names.codes import Component
from kvcs.names.errors import Unsupported, VerificationFailed
from kvcs.names.manifest import Manifest, SegmentEntry, check_progress
from kvcs.names.namespace import PublicationNamespace
from kvcs.names.payload import PayloadForm, data_digest
from kvcs.names.tracks import DataTrack, raw_octets
from kvcs.retrieving.destinations import Destination, Resumable
from kvcs.retrieving.layers import Facts, Kept, LayerBuffer, Verdict
from kvcs.retrieving.open_layer import halves
from kvcs.retrieving.stats import Stats
from kvsp.blocks.layout import Octets
from kvsp.names.codes import HASH_OCTETS, Codec, DecodeErrorName
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor
from moqt.values.names import Location

if TYPE_CHECKING:
    from kvsp.records.records import ReplicaRecord

MAX_BAD_OBJECTS: Final = 3
"""Bad Objects after which another publication is used (KVCS "Verification and Recovery")."""

NOT_NEEDED: Final = "not-needed"
"""Why an Object was discarded that is outside the layers and blocks asked for."""

OTHER_TOKENS: Final = "other-tokens"
"""Why an Object was discarded that is not what the index service has a record of."""

OTHER_PRODUCTION: Final = "other-production"
"""Why a block of a holder was discarded that is right, but not the one of the publication."""


class Assembly(LayerBuffer):
    """The layers asked for, of one publication: of all its segments that are of our tokens.

    The first manifest tells what is usable of it (`blocks`); nothing is written before
    `prepare`.

    `manifest` is the last good version. A layer is handed over, in order, through `ready`,
    as soon as every needed Object of it is verified in every selected track and none
    contradicts the manifest, nor the index service's record of a block whose key the manifest
    does not confirm. Objects that came before the manifest lists them are compared
    when it does: only their digests are kept for that. With `require_listed` a layer waits
    for it.

    Blocks may also come from holders over HTTP (`block_received`): in place of Objects, if
    they are the same production as far as anybody can tell, and after the last block of
    the publication.

    Methods raise VerificationFailed when the publication is not to be used any further:
    its first manifest is not acceptable, there were more than `max_bad` bad Objects, a block
    is not the one that the index service has a record of, or a layer that was handed over is
    not what the manifest lists; Unsupported when there is no track that can be read; and
    whatever `destination` raises.
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
        records: Sequence[ReplicaRecord] = (),
        elsewhere: Callable[[int, int], bool] | None = None,
    ) -> None:
        """`keys` are the Block Keys of the tokens the consumer knows, None for one that knows
        no tokens and tells blocks apart otherwise, `blocks` how many
        blocks it needs at most. `records` are those of the index service for the leading
        `keys`: of a publication that goes on with other tokens no manifest can show which of
        its blocks are ours, so they are compared with the records. `elsewhere(layer, block)` is
        asked, for an Object that came and is bad, whether it will be had over HTTP; then it is
        not asked for again.
        """
        super().__init__(descriptor, layers, destination, stats)
        self.namespace = namespace
        self.manifest: Manifest | None = None
        self.version = -1
        self.blocks = 0
        """Blocks needed of the publication, known from the first manifest on."""
        self.bad = 0
        """Bad Objects and manifests of this publication."""
        self.promised: set[tuple[int, int]] = set()
        """(layer, block) of bad Objects that are to come over HTTP."""
        self._keys = keys
        self._records = records
        self._proven: set[int] = set()
        """Blocks that holders have of the production of this publication."""
        self._elsewhere = elsewhere
        self._most_blocks = blocks
        self._require_listed = require_listed
        self._max_bad = max_bad
        self._facts: dict[DataTrack, Facts] = {}
        self._bound: dict[int, Sequence[bytes]] = {}
        """The layer digests of blocks whose keys only the index service vouches for."""
        self._unconfirmed: dict[tuple[DataTrack, int], bytearray] = {}
        self._taken_back: list[tuple[DataTrack, Location]] = []
        self._reasons: Counter[str] = Counter()
        self._refused: set[Location] = set()
        self._notes: Resumable | None = None
        self.resumed = False
        """Whether Objects were there already, from an earlier retrieval."""

    # -- what is known -------------------------------------------------------------------

    @property
    def publication(self) -> bytes:
        return self.namespace.publication_id

    @property
    def tracks(self) -> tuple[DataTrack, ...]:
        """The tracks that are retrieved, segment by segment."""
        return tuple(self._facts)

    def entry(self, track: DataTrack) -> SegmentEntry:
        """The manifest's entry of the segment of a track."""
        assert self.manifest is not None
        return self.manifest.segments[track.segment]

    def needed(self, track: DataTrack) -> int:
        """How many Objects of each Group of a track are needed, from 0."""
        return self._facts[track].blocks

    @property
    def complete(self) -> bool:
        """Whether the manifest marks every segment that is retrieved complete."""
        return self.manifest is not None and all(self.entry(t).complete for t in self._facts)

    @property
    def settled(self) -> bool:
        """Whether a later manifest can say nothing more of what was handed over."""
        return all(
            self.entry(track).complete or self.entry(track).object_digests is None
            for track in self._facts
        )

    @property
    def confirmed(self) -> bool:
        """Whether every Object held is listed in the manifest."""
        return not self._unconfirmed

    @property
    def manifest_refused(self) -> bool:
        """Whether a later version of the manifest was not acceptable."""
        return bool(self._refused)

    def missing(self, track: DataTrack, layer: int) -> list[int]:
        """The Objects of `layer` that `track` has still to bring, by Object ID."""
        if not self.needs(layer):
            return []
        held, facts = self._open.get(layer), self._facts[track]
        within = range(facts.first, facts.first + facts.blocks)
        return [
            block - facts.first
            for block in (within if held is None else held.missing(track.component, within))
            if (layer, block) not in self.promised
        ]

    def from_holders(self, has: Callable[[int, int], bool]) -> Iterator[tuple[int, int]]:
        """What is lacking, each block after what shows that it is of this production; one of
        which holders have nothing that shows it is foreign."""
        proofs: set[tuple[int, int]] = set()
        for layer, block in self.lacking():
            proof = None if block in self.foreign else self._proof_of(layer, block)
            if proof is not None and not has(proof, block):
                self.foreign.add(block)
            if block in self.foreign:
                continue
            if proof is not None and (proof, block) not in proofs:
                proofs.add((proof, block))
                yield proof, block
            yield layer, block

    def _proof_of(self, layer: int, block: int) -> int | None:
        """A layer of which a holder's block shows whether it is of this production, when
        nothing is known of the Objects of `layer` to compare it with. None when no proof is
        needed, or nothing has come that would be one."""
        if block >= self.blocks or block in self._proven:
            return None
        tracks = [t for t, f in self._facts.items() if f.first <= block < f.first + f.blocks]
        if any(self._known_digest(track, layer, block) is not None for track in tracks):
            return None
        listed = min(len(self._facts[tracks[0]].listed), self.layers.stop) - 1
        if listed >= self.layers.start:
            return listed
        for track, other in reversed(self._unconfirmed):
            over_http = (block, other) in self._stats.over_http
            if track in tracks and not over_http and self._known_digest(track, other, block):
                return other
        return None

    def take_back(self) -> list[tuple[DataTrack, Location]]:
        """Objects that a manifest refused after they were written, once each."""
        taken, self._taken_back = self._taken_back, []
        return taken

    def keep(self) -> Kept | None:
        """What another publication may continue from."""
        if self.manifest is None or not self.total:
            return None
        return Kept(
            self.manifest.deterministic,
            self.namespace.anchor_key,
            self._spans,
            self.total,
            self.ready[0].index if self.ready else self._next,
            dict(self._unconfirmed),
            {track: facts.listed for track, facts in self._facts.items()},
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
            if self.manifest is not None:
                check_progress(self.manifest, manifest)
            if not self.total:
                self._judge(manifest)
        except DecodeError as error:
            self._stats.discarded[error.name] += 1
            if self.manifest is None and error.name is DecodeErrorName.CODEC_UNSUPPORTED:
                raise Unsupported(f"{self._publication}: {error.detail}") from None
            if self.manifest is None:
                raise VerificationFailed(f"the manifest is not acceptable: {error}") from None
            self._refused.add(location)
            self._count_bad(error.name)
            return
        self.manifest, self.version = manifest, version
        for track, facts in self._facts.items():
            digests = self.entry(track).object_digests
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
        layer, number = location
        facts = self._facts[track]
        if layer not in self.layers or number >= facts.blocks:
            self._stats.discarded[NOT_NEEDED] += 1
            return Verdict.EXTRA
        block = facts.first + number
        held = self._open.get(layer)
        if not self.needs(layer) if held is None else held.has(track.component, block):
            if again or (block, layer) in self._stats.over_http:
                self._stats.discarded[NOT_NEEDED] += 1
            else:
                self._stats.duplicates += 1
            return Verdict.EXTRA
        expected = facts.digest(layer, number)
        try:
            data, digest = facts.form.check(payload, layer, number, expected)
        except DecodeError as error:
            self._bad_object(layer, block, error.name)
            return Verdict.BAD
        if held is None:
            held = self._held(layer)
        held.write(track.component, block, *data)
        stats = self._stats
        stats.objects_verified += 1
        stats.octets += facts.form.raw_octets
        if expected is None:
            self._remember(track, layer, number, digest)
        else:
            stats.objects_confirmed += 1
        if self._notes is not None:
            raw = digest if track.known_codec is Codec.RAW else data_digest(*data)
            self._notes.note(track, layer, block, digest, raw)
        if block in self._bound and held.has(Component.KV, block):
            self._check_bound(layer, block, *held.sections(block))
        if held.complete:
            self._hand_over()
        return Verdict.NEW

    def object_refused(self, track: DataTrack, location: Location, reason: str) -> bool:
        """An Object was thrown away unread; True when it was one that is needed."""
        layer, number = location
        facts = self._facts[track]
        if not self.needs(layer) or number >= facts.blocks:
            self._stats.discarded[NOT_NEEDED] += 1
            return False
        self._bad_object(layer, facts.first + number, reason)
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
        same = block not in self._bound or data_digest(k, v) == self._bound[block][layer]
        for track, facts in self._facts.items():
            if not facts.first <= block < facts.first + facts.blocks:
                continue
            data = [sections[half] for half in halves(track.component)]
            digests[track] = digest = data_digest(*data)
            known = self._known_digest(track, layer, block)
            same &= known in (None, digest)
            if known == digest and (block, layer) not in self._stats.over_http:
                self._proven.add(block)
        if not same:
            self._stats.discarded[OTHER_PRODUCTION] += 1
            self._proven.discard(block)
            self.foreign.add(block)
            return Verdict.BAD
        if self._proof_of(layer, block) is not None:
            return Verdict.EXTRA  # not before it is known to be of the same production
        verdict = super().block_received(block, layer, k, v, source)
        if verdict is Verdict.NEW:
            for track, digest in digests.items():
                facts = self._facts[track]
                if facts.digest(layer, block - facts.first) is None:
                    self._remember(track, layer, block - facts.first, digest)
        return verdict

    def release(self) -> None:
        """Let go of every array and digest."""
        super().release()
        self._unconfirmed.clear()

    # -- the first manifest --------------------------------------------------------------

    def prepare(self, over_http: int = 0, kept: Kept | None = None) -> None:
        """This publication is retrieved now: prepare the arrays, once its manifest is known.

        `over_http` is how many leading blocks holders have: those the publication lacks come
        from there. `kept` is of an earlier publication: its layers are not asked for again if
        both are deterministic, made of the same parts and list nothing that differs, otherwise
        all come again.
        """
        assert self.manifest is not None
        most = self._most(self.manifest.blocks if self._keys is None else len(self._keys))
        total = max(self.blocks, min(over_http, most))
        if (
            kept is not None
            and kept.deterministic
            and self.manifest.deterministic
            and (kept.anchor_key, kept.spans, kept.total)
            == (self.namespace.anchor_key, self._spans, total)
            and kept.agrees(self._facts, self.layers)
        ):
            self.total = total
            self._say(total)
            self._next = kept.next_layer
            self._unconfirmed.update(
                (key, digests) for key, digests in kept.unconfirmed.items() if key[1] < self._next
            )
            self._stats.layers = self._next - self.layers.start
            self._confirm()
        else:
            self.begin(total)
            if isinstance(self._destination, Resumable):
                self._take_up(self._destination)

    def _take_up(self, destination: Resumable) -> None:
        """Objects that an earlier retrieval left are there already, where they are those of this
        publication as far as anybody can tell."""
        assert self.manifest is not None
        namespace = self.namespace
        kept = destination.take_up(
            Origin(
                namespace.publication_id.hex(),
                namespace.anchor_key.hex(),
                self.manifest.deterministic,
            )
        )
        self._notes = destination
        for track, facts in self._facts.items() if kept else ():
            for layer, number in product(self.layers, range(facts.blocks)):
                block = facts.first + number
                digest, listed = kept.get(key_of(track, layer, block)), facts.digest(layer, number)
                if digest is None or listed not in (None, digest):
                    continue
                self._adopt(track.component, layer, block)
                if listed is None:
                    self._remember(track, layer, number, digest)
                held = self._open[layer]
                if block in self._bound and held.has(Component.KV, block):
                    self._check_bound(layer, block, *held.sections(block))
        self.resumed = self._stats.objects_resumed > 0
        self._hand_over()

    def _judge(self, manifest: Manifest) -> None:
        """Check that it is for our tokens, and choose segments and tracks."""
        covered = manifest.blocks
        bound: dict[int, Sequence[bytes]] = {}
        if self._keys is not None:
            confirmed, bound = self._of_ours(manifest, self._keys)
            covered = max([confirmed, *(block + 1 for block in bound)])
        needed = self._most(min(covered, manifest.blocks))
        facts: dict[DataTrack, Facts] = {}
        for entry in manifest.segments:
            if entry.first_block >= needed:
                break
            try:
                tracks = manifest.select_tracks(entry.segment, codecs={Codec.RAW})
            except DecodeError as error:
                if not facts:
                    raise
                # what stands before it is as good as a shorter publication
                self._stats.discarded[error.name] += 1
                needed = entry.first_block
                break
            blocks = min(entry.blocks, needed - entry.first_block)
            for track in tracks:
                facts[track] = Facts(self._form(track, entry), entry.first_block, blocks)
        self.blocks, self._facts = needed, facts
        self._bound = {block: each for block, each in bound.items() if block < needed}

    def _of_ours(
        self, manifest: Manifest, keys: Sequence[bytes]
    ) -> tuple[int, dict[int, Sequence[bytes]]]:
        """How many leading blocks have our keys as the manifest shows it, and the layer digests
        of those after them that the index service has records of."""
        anchor = self.namespace.anchor_key
        # a publication that goes on with other tokens: the manifest cannot show where
        known = keys if anchor in keys else keys[: len(self._records)]
        confirmed = manifest.check_keys(known, anchor)
        bound: dict[int, Sequence[bytes]] = {}
        for block in range(confirmed, len(self._records)):
            record = self._records[block]
            if record.codec != Codec.RAW or record.layer_digests is None:
                break
            bound[block] = record.layer_digests
        if not confirmed and not bound:
            raise DecodeError(
                DecodeErrorName.KEYS_MISMATCH,
                "it has more blocks than there are tokens, and no record of an index service "
                "shows which of them are theirs",
            )
        return confirmed, bound

    def _most(self, blocks: int) -> int:
        """At most as many blocks as are wanted."""
        return min(blocks, self._most_blocks or blocks)

    @property
    def _spans(self) -> list[tuple[DataTrack, int, int]]:
        return [(track, facts.first, facts.blocks) for track, facts in self._facts.items()]

    @property
    def _publication(self) -> str:
        return f"publication {self.namespace.publication_id.hex()}"

    def _form(self, track: DataTrack, entry: SegmentEntry) -> PayloadForm:
        codec = track.known_codec
        assert codec is not None
        descriptor = self.descriptor
        return PayloadForm(
            track.component,
            codec,
            entry.first_block,
            descriptor.block_tokens,
            raw_octets(descriptor, track.component),
        )

    # -- inside --------------------------------------------------------------------------

    def _check_bound(self, layer: int, block: int, k: Octets, v: Octets) -> None:
        """Raises VerificationFailed for a block that is not the one of the record."""
        if data_digest(k, v) != self._bound[block][layer]:
            self._stats.discarded[OTHER_TOKENS] += 1
            raise VerificationFailed(
                f"{self._publication}: layer {layer} of block {block} is not what the index "
                "service has a record of: it is the cache of other tokens, or the record is wrong"
            )

    def _remember(self, track: DataTrack, layer: int, number: int, digest: bytes) -> None:
        """Keep a digest until a manifest lists it."""
        digests = self._unconfirmed.get((track, layer))
        if digests is None:
            size = HASH_OCTETS * self._facts[track].blocks
            digests = self._unconfirmed[track, layer] = bytearray(size)
        digests[number * HASH_OCTETS : (number + 1) * HASH_OCTETS] = digest

    def _known_digest(self, track: DataTrack, layer: int, block: int) -> bytes | None:
        """The digest of an Object: as the manifest lists it, or as it came."""
        facts = self._facts[track]
        number = block - facts.first
        listed = facts.digest(layer, number)
        came = self._unconfirmed.get((track, layer))
        if listed is not None or came is None:
            return listed
        held = self._open.get(layer)
        if held is not None and not held.has(track.component, block):
            return None
        return bytes(came[number * HASH_OCTETS : (number + 1) * HASH_OCTETS])

    def _bad_object(self, layer: int, block: int, reason: str) -> None:
        self._stats.discarded[reason] += 1
        if self._elsewhere is not None and self._elsewhere(layer, block):
            self.promised.add((layer, block))
        self._count_bad(reason)

    def _count_bad(self, reason: str) -> None:
        self.bad += 1
        self._reasons[reason] += 1
        if self.bad > self._max_bad:
            raise VerificationFailed(self.describe_bad())

    def describe_bad(self) -> str:
        """The bad Objects of this publication, in words."""
        reasons = ", ".join(f"{name} {count}" for name, count in self._reasons.items())
        return f"{self._publication}: {self.bad} bad Objects ({reasons})"

    def _confirm(self) -> None:
        """Compare what came before the manifest listed it."""
        for (track, layer), digests in list(self._unconfirmed.items()):
            facts = self._facts[track]
            if layer >= len(facts.listed):
                continue
            del self._unconfirmed[track, layer]
            expected = facts.listed[layer][: len(digests)]
            held = self._open.get(layer)
            if held is None:
                self._stats.objects_confirmed += sum(
                    (facts.first + number, layer) not in self._stats.over_http
                    for number in range(facts.blocks)
                )
                if digests != expected:
                    self._stats.discarded[DecodeErrorName.DIGEST_MISMATCH] += 1
                    raise VerificationFailed(
                        f"{self._publication}: layer {layer}, "
                        f"handed over before it was listed, is not what the manifest lists"
                    )
                continue
            for number in range(facts.blocks):
                block = facts.first + number
                if not held.has(track.component, block):
                    continue
                part = slice(number * HASH_OCTETS, (number + 1) * HASH_OCTETS)
                over_http = (block, layer) in self._stats.over_http
                if digests[part] == expected[part]:
                    self._stats.objects_confirmed += not over_http
                    continue
                held.take_back(track.component, block)
                self._taken_back.append((track, Location(layer, number)))
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
