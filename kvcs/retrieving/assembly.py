"""One publication while it arrives: every Object verified, every layer put together.

Pure logic: manifests and Objects go in, usable layers come out (KVCS "Verification and
Recovery"). Who asks for the Objects is `kvcs.retrieving.retrieval`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvcs.keeping.resume_file import Origin
from kvcs.names.codes import Component
from kvcs.names.digests import TrackDigests, differing
from kvcs.names.encoding import LOSSLESS, Choice, digest_as_data
from kvcs.names.errors import VerificationFailed
from kvcs.names.manifest import Manifest, SegmentEntry
from kvcs.names.manifest_builder import check_progress, is_final, leaves_out, with_digests_of
from kvcs.names.namespace import PublicationNamespace
from kvcs.names.payload import data_digest
from kvcs.names.tracks import DataTrack
from kvcs.retrieving.destinations import Destination
from kvcs.retrieving.layers import Kept, LayerBuffer, Verdict
from kvcs.retrieving.open_layer import OpenLayer
from kvcs.retrieving.stats import NOT_NEEDED, OTHER_PRODUCTION, OTHER_TOKENS, BadObjects, Stats
from kvcs.trust.records import of_ours
from kvcs.trust.terms import ANY, Terms, refusal
from kvsp.blocks.layout import Octets
from kvsp.names.codes import Codec, DecodeErrorName
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor
from moqt.values.names import Location

if TYPE_CHECKING:
    from kvsp.records.records import ReplicaRecord

MAX_BAD_OBJECTS: Final = 3
"""Bad Objects after which another publication is used (KVCS "Verification and Recovery")."""


class Assembly(LayerBuffer):
    """The layers asked for, of one publication: of all its segments that are of our tokens.

    The first manifest tells what is usable of it (`blocks`); nothing is written before
    `prepare`. With `follow` later ones may add segments, as long as it is `growing`.

    `manifest` is the last good version. A layer is handed over, in order, through `ready`, as soon
    as every needed Object of it is verified in every selected track and none contradicts the
    manifest, nor the index service's record of a block whose key the manifest does not confirm.
    Objects that came before the manifest lists them are compared when it does: only their digests
    are kept for that. With `require_listed` a layer waits for it.

    Blocks may also come from holders over HTTP (`block_received`): in place of Objects, if they are
    the same production as far as anybody can tell, and after the last block of the publication.

    Methods raise VerificationFailed when the publication is not to be used any further: its first
    manifest is not acceptable, there were more than `max_bad` bad Objects, or a block is not what
    a record or the manifest lists; Unsupported when no track can be read, UnknownKey when it is
    sealed with another key; and whatever `destination` raises.
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
        follow: bool = False,
        require_listed: bool = False,
        max_bad: int = MAX_BAD_OBJECTS,
        records: Sequence[ReplicaRecord] = (),
        elsewhere: Callable[[int, int], bool] | None = None,
        choice: Choice = LOSSLESS,
        terms: Terms = ANY,
        skip: int = 0,
    ) -> None:
        """`keys` are the Block Keys of the tokens the consumer knows, None for one that knows no
        tokens and tells blocks apart otherwise, `blocks` how many blocks it needs at most. With
        `follow` segments are taken that appear later, until our keys are covered. `records` are
        those of the index service for the leading `keys`: of a publication that goes on with other
        tokens no manifest can show which of its blocks are ours, so they are compared with the
        records. `elsewhere(layer, block)` is asked, for an Object that came and is bad, whether it
        will be had over HTTP; then it is not asked for again. Strict `terms` trust no record, and
        holders with what is listed. `choice` is made among the encodings of each segment. The first
        `skip` blocks are not wanted.
        """
        super().__init__(descriptor, layers, destination, stats, skip)
        self.namespace = namespace
        self.manifest: Manifest | None = None
        self.version = -1
        self.blocks = 0
        """Blocks needed of the publication, known from the first manifest on."""
        self.bad = BadObjects(self._publication, max_bad)
        self.promised: set[tuple[int, int]] = set()
        """(layer, block) of bad Objects that are to come over HTTP."""
        self.terms = terms
        self.keys = keys
        self._records = () if terms.strict else records
        self._proven: set[int] = set()
        """Blocks that holders have of the production of this publication."""
        self._will_be_had = elsewhere
        self._most_blocks = blocks
        self._choice = choice
        self._follow = follow
        self._require_listed = require_listed
        self._facts: dict[DataTrack, TrackDigests] = {}
        self.segments: list[tuple[DataTrack, ...]] = []
        """The tracks that each segment is retrieved from."""
        self._bound: dict[int, Sequence[bytes]] = {}
        """The layer digests of blocks whose keys only the index service vouches for."""
        self._taken_back: list[tuple[DataTrack, Location]] = []
        self._refused: set[Location] = set()

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

    def wanted(self, track: DataTrack) -> range:
        """The Objects that are needed of each Group of a track."""
        facts = self._facts[track]
        return range(min(max(0, self.skip - facts.first), facts.blocks), facts.blocks)

    @property
    def complete(self) -> bool:
        """Whether the manifest marks every segment that is retrieved complete."""
        return self.manifest is not None and all(self.entry(t).complete for t in self._facts)

    @property
    def settled(self) -> bool:
        """Whether a later manifest can say nothing more of what was handed over."""
        return all(map(self._final, self._facts))

    def _final(self, track: DataTrack) -> bool:
        return self.manifest is not None and is_final(self.manifest, track.segment)

    @property
    def confirmed(self) -> bool:
        """Whether every Object held is listed in the manifest."""
        return not any(facts.came for facts in self._facts.values())

    @property
    def vouched(self) -> int:
        """Leading blocks of segments taken whole of which the manifest says nothing else more."""
        whole = self.ready[0].segment if self.ready else self.segment
        for segment, span in enumerate(self._spans[:whole]):
            if any(self._facts[t].came and not self._final(t) for t in self.segments[segment]):
                return span.start
        return self._spans[whole - 1].stop if whole else 0

    @property
    def left_out(self) -> frozenset[int]:
        """The segments taken of which the manifest leaves digests out that an earlier version may
        list."""
        taken = () if self.manifest is None else self.manifest.segments[: len(self.segments)]
        return frozenset(each.segment for each in taken if leaves_out(each, self.descriptor.layers))

    @property
    def manifest_refused(self) -> bool:
        """Whether a later version of the manifest was not acceptable."""
        return bool(self._refused)

    def missing(self, track: DataTrack, layer: int, within: range) -> range:
        """The first of the Objects `within` these of `layer` that `track` has still to bring, and
        those that follow it without a gap, by Object ID. Takes the same time however many."""
        if not self.needs(layer, track.segment):
            return range(0)
        there = self._there(track, layer)
        if self.promised:
            facts, there = self._facts[track], bytearray(there)
            for number, block in self.promised:
                if number == layer and block in facts.span:
                    there[block - facts.first] = 1
        start = there.find(0, max(within.start, self.wanted(track).start), within.stop)
        if start < 0:
            return range(0)
        stop = there.find(1, start, within.stop)
        return range(start, within.stop if stop < 0 else stop)

    def last_missing(self, track: DataTrack, layer: int, within: range) -> int:
        """The last of them `within` these, of which some are missing."""
        return self._there(track, layer).rfind(0, within.start, within.stop)

    def _there(self, track: DataTrack, layer: int) -> bytes | bytearray:
        """An octet for each Object of `layer` that `track` is to bring, 1 where it is there."""
        held = self._open.get((track.segment, layer))
        return bytes(self._facts[track].blocks) if held is None else held.written(track.component)

    def from_holders(self, has: Callable[[int, int], bool]) -> Iterator[tuple[int, int]]:
        """What is lacking, each block after what shows that it is of this production; one of
        which holders have nothing that shows it is foreign."""
        proofs: set[tuple[int, int]] = set()
        for layer, block in self.lacking():
            proof = None if block in self.foreign else self._proof_of(layer, block)
            if proof is not None and not has(proof, block):
                self.foreign.add(block)
            if block in self.foreign or not self._may_be_given(layer, block):
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
        tracks = self.segments[self.segment_of(block)]
        if any(self._known_digest(track, layer, block) is not None for track in tracks):
            return None
        listed = min(len(self._facts[tracks[0]].listed), self.layers.stop) - 1
        if listed >= self.layers.start:
            return listed
        for track in tracks:
            for other in reversed(self._facts[track].came):
                over_http = (block, other) in self._stats.over_http
                if not over_http and self._known_digest(track, other, block):
                    return other
        return None

    def _may_be_given(self, layer: int, block: int) -> bool:
        """Whether a holder's block may be used here: with strict terms, one that is listed."""
        if not self.terms.strict:
            return True
        if block >= self.blocks:
            return False
        given = (self._facts[track] for track in self.segments[self.segment_of(block)])
        return all(facts.digest(layer, block - facts.first) for facts in given)

    def take_back(self) -> list[tuple[DataTrack, Location]]:
        """Objects that a manifest refused after they were written, once each."""
        taken, self._taken_back = self._taken_back, []
        return taken

    def keep(self) -> Kept | None:
        """What another publication may continue from."""
        if self.manifest is None or not self.total:
            return None
        segment, layer = self.segment, self._next
        if self.ready:
            segment, layer = self.ready[0].segment, self.ready[0].index
        return Kept(
            self.manifest.deterministic,
            self.namespace.anchor_key,
            self._spans,
            segment,
            layer,
            {t: replace(facts, came=dict(facts.came)) for t, facts in self._facts.items()},
        )

    # -- what arrives --------------------------------------------------------------------

    def expects(self, location: Location) -> bool:
        """Whether a version of the manifest is to be read; its number is the Group ID."""
        if location.group == self.version:
            self._stats.duplicates += 1
        if location in self._refused:  # it is as bad as before
            return False
        # one that was overtaken says nothing more, unless the later one leaves something out
        return location.group > self.version or bool(
            location.group < self.version and self.left_out
        )

    def manifest_read(
        self, location: Location, read: Manifest | DecodeError, after: Manifest | None = None
    ) -> None:
        """A version that was read, and compared with `after`, or what is wrong with it."""
        version, object_id = location
        if location in self._refused or (version <= self.version and not self.left_out):
            return  # overtaken while it was read
        try:
            if object_id:
                detail = "a manifest is Object 0 of its Group"
                raise DecodeError(DecodeErrorName.BAD_MANIFEST, detail)
            if isinstance(read, DecodeError):
                raise read
            manifest = read
            if self.manifest is not None:
                overtaken = version < self.version
                both = (manifest, self.manifest) if overtaken else (self.manifest, manifest)
                if self.manifest is not after:
                    check_progress(*both)
                manifest, version = with_digests_of(*both), max(version, self.version)
            if not self.total:
                self._judge(manifest)
        except DecodeError as error:
            self._stats.discarded[error.name] += 1
            if self.manifest is None:
                raise refusal(self._publication, error) from None
            self._refused.add(location)
            self.bad.count(error.name)
            return
        self.manifest, self.version = manifest, version
        if self.growing:
            self._grow(manifest)
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
        block = facts.first + number
        if layer not in self.layers or number >= facts.blocks or block < self.skip:
            self._stats.discarded[NOT_NEEDED] += 1
            return Verdict.EXTRA
        segment = track.segment
        held = self._open.get((segment, layer))
        if not self.needs(layer, segment) if held is None else held.has(track.component, number):
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
            held = self._held(segment, layer)
        held.write(track.component, number, *data)
        stats = self._stats
        stats.objects_verified += 1
        stats.octets += facts.form.raw_octets
        if expected is None:
            facts.remember(layer, number, digest)
        else:
            stats.objects_confirmed += 1
        if self._notes is not None:
            raw = digest if track.known_codec is Codec.RAW else data_digest(*data)
            self._notes.note(track, layer, block, digest, raw)
        if block in self._bound:
            self._check_bound(layer, block, held, number)
        if held.complete:
            self._hand_over()
        return Verdict.NEW

    def object_refused(self, track: DataTrack, location: Location, reason: str) -> bool:
        """An Object was thrown away unread; True when it was one that is needed."""
        layer, number = location
        facts = self._facts[track]
        if not self.needs(layer, track.segment) or number not in self.wanted(track):
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
        wanted = self.manifest is not None and layer in self.layers and block < self.total
        if not wanted or not self._may_be_given(layer, block):
            return Verdict.EXTRA
        if block >= self.blocks:
            return super().block_received(block, layer, k, v, source)
        digests = {}
        same = block not in self._bound or data_digest(k, v) == self._bound[block][layer]
        for track in self.segments[self.segment_of(block)]:
            digests[track] = digest = digest_as_data(track, k, v, self.descriptor)
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
        for track, digest in digests.items() if verdict is Verdict.NEW else ():
            facts = self._facts[track]
            if facts.digest(layer, block - facts.first) is None:
                facts.remember(layer, block - facts.first, digest)
        return verdict

    def release(self) -> None:
        """Let go of every array and digest."""
        super().release()
        for facts in self._facts.values():
            facts.came.clear()

    # -- the first manifest --------------------------------------------------------------

    def prepare(self, over_http: int = 0, kept: Kept | None = None) -> None:
        """This publication is retrieved now: prepare the arrays, once its manifest is known.

        `over_http` is how many leading blocks holders have: those the publication lacks come
        from there. `kept` is of an earlier publication: its layers are not asked for again if
        both are deterministic, made of the same parts and list nothing that differs, otherwise
        all come again.
        """
        assert self.manifest is not None
        most = self.most(self.manifest.blocks if self.keys is None else len(self.keys))
        listed_only = self.growing or self.terms.strict
        total = self.blocks if listed_only else max(self.blocks, min(over_http, most))
        spans = [self._facts[tracks[0]].span for tracks in self.segments]
        spans[-1] = range(spans[-1].start, total)
        origin = Origin.of(self.namespace, self.manifest.deterministic)
        if kept is not None and self._continues(kept, spans):
            self._go_on(spans, kept.segment, kept.next_layer)
            for track, known in kept.digests.items():
                self._facts[track].came.update(
                    (layer, digests)
                    for layer, digests in known.came.items()
                    if (track.segment, layer) < (kept.segment, kept.next_layer)
                )
            self._take_up(origin, {})
            self._confirm()
        else:
            self.begin(spans, most if self.growing else None)
            self._take_up(origin, self._facts)
            self._hand_over()

    def _continues(self, kept: Kept, spans: list[range]) -> bool:
        """Whether what was kept is the beginning of this publication: both deterministic, made of
        the same parts, and the layers handed over, as far as they are listed here, the same."""
        assert self.manifest is not None
        if not (self.manifest.deterministic and kept.deterministic):
            return False
        if (self.namespace.anchor_key, spans) != (kept.anchor_key, kept.spans):
            return False
        if self._facts.keys() != kept.digests.keys():
            return False
        for track, facts in self._facts.items():
            over = self.layers
            if track.segment >= kept.segment:
                over = range(over.start, kept.next_layer if track.segment == kept.segment else 0)
            if facts.contradicts(kept.digests[track], over):
                return False
        return True

    def _judge(self, manifest: Manifest) -> None:
        """Check that it is for our tokens, and choose segments and tracks."""
        covered, self._bound = manifest.blocks, {}
        if self.keys is not None:
            anchor = self.namespace.anchor_key
            confirmed, self._bound = of_ours(manifest, anchor, self.keys, self._records)
            covered = max([confirmed, *(block + 1 for block in self._bound)])
        self._facts, self.segments = {}, []
        self._take(manifest, self.most(min(covered, manifest.blocks)))
        self._bound = {block: each for block, each in self._bound.items() if block < self.blocks}
        self.growing = (
            self._follow
            and self.keys is not None
            and self.blocks == manifest.blocks < self.most(len(self.keys))
            and not self._bound
        )

    def _take(self, manifest: Manifest, needed: int) -> None:
        """Choose the tracks of the segments that have blocks up to `needed`, from the first that
        has none so far."""
        for entry in manifest.segments[len(self.segments) :]:
            if entry.first_block >= needed:
                break
            try:
                tracks = self._choice.of(manifest, entry.segment, recorded=bool(self._bound))
            except DecodeError as error:
                if not self._facts:
                    raise
                # what stands before it is as good as a shorter publication
                self._stats.discarded[error.name] += 1
                self.growing = False
                break
            blocks = min(entry.blocks, needed - entry.first_block)
            for track in tracks:
                self._facts[track] = TrackDigests.of(self.descriptor, track, entry, blocks)
            self.segments.append(tracks)
            self.blocks = entry.first_block + blocks

    def _grow(self, manifest: Manifest) -> None:
        """Take the segments that are new and continue with our tokens."""
        assert self.keys is not None
        following = manifest.segments[len(self.segments) :]
        if not following:
            return
        self._take(manifest, self.most(manifest.continued(self.keys, following[0].segment)))
        self.growing &= self.blocks == manifest.blocks < self.most(len(self.keys))
        if self.total:
            for tracks in self.segments[len(self._spans) :]:
                self._add(self._facts[tracks[0]].span)

    def most(self, blocks: int) -> int:
        """At most as many blocks as are wanted."""
        return min(blocks, self._most_blocks or blocks)

    @property
    def _publication(self) -> str:
        return f"publication {self.namespace.publication_id.hex()}"

    # -- inside --------------------------------------------------------------------------

    def _check_bound(self, layer: int, block: int, held: OpenLayer, number: int) -> None:
        """Raises VerificationFailed for a block that is not the one of the record."""
        if block not in self._bound or not held.has(Component.KV, number):
            return
        if data_digest(*held.sections(number)) != self._bound[block][layer]:
            self._stats.discarded[OTHER_TOKENS] += 1
            raise VerificationFailed(
                f"{self._publication}: layer {layer} of block {block} is not what the index "
                "service has a record of: it is the cache of other tokens, or the record is wrong"
            )

    def _known_digest(self, track: DataTrack, layer: int, block: int) -> bytes | None:
        """The digest of an Object: as the manifest lists it, or as it came."""
        facts = self._facts[track]
        number, held = block - facts.first, self._open.get((track.segment, layer))
        return facts.known(layer, number, came=held is None or held.has(track.component, number))

    def _bad_object(self, layer: int, block: int, reason: str) -> None:
        self._stats.discarded[reason] += 1
        elsewhere = self._will_be_had if self._may_be_given(layer, block) else None
        if elsewhere is not None and elsewhere(layer, block):
            self.promised.add((layer, block))
        self.bad.count(reason)

    def _confirm(self) -> None:
        """Compare what came before the manifest listed it."""
        for track, facts in self._facts.items():
            for layer, digests, expected in facts.take_listed():
                self._compare(track, facts, layer, digests, expected)

    def _compare(
        self, track: DataTrack, facts: TrackDigests, layer: int, digests: bytearray, expected: bytes
    ) -> None:
        """Compare what has come of a layer with what is listed now, all of it in a few steps."""
        stats, skipped = self._stats, self.wanted(track).start
        held = self._open.get((track.segment, layer))
        there = bytearray(b"\1") * facts.blocks
        if held is not None:
            there = bytearray(held.written(track.component)[: facts.blocks])
        there[:skipped] = bytes(skipped)
        wrong = differing(digests, expected, there)
        elsewhere = {
            block - facts.first
            for block in self._elsewhere(track, layer)
            if block in facts.span and there[block - facts.first]
        }
        stats.objects_confirmed += there.count(1) - len(wrong) - len(elsewhere.difference(wrong))
        if wrong and held is None:
            stats.discarded[DecodeErrorName.DIGEST_MISMATCH] += 1
            raise VerificationFailed(
                f"{self._publication}: layer {layer}, "
                f"handed over before it was listed, is not what the manifest lists"
            )
        for number in wrong:
            assert held is not None
            self._taken_back.append((track, Location(layer, number)))
            if self._void(track, layer, number, held, self.segments[track.segment]):
                stats.discarded[DecodeErrorName.DIGEST_MISMATCH] += 1
                self.bad.count(DecodeErrorName.DIGEST_MISMATCH)

    def _may_go(self, segment: int, layer: int) -> bool:
        return not self._require_listed or not any(
            layer in self._facts[track].came for track in self.segments[segment]
        )
