"""Publishing the KV cache of a token prefix (KVCS "Publisher Behavior").

    publication = Publication(scope, descriptor, tokens)
    await publish(session, publication)
    for layer in range(descriptor.layers):
        await aput_layer(publication, layer, k, v)

A cache that is computed in several passes has a segment for each (KVCS "Groups"):

    publication = Publication(scope, descriptor, chunk, growing=True)
    ...                                   # every layer of the chunk, as above
    publication.extend(next_chunk)        # and every layer of that one, and so on
    publication.finish()

`Publication` owns no I/O: it fills `moqt` TrackStores, which any number of sessions serve.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from weakref import WeakSet

import numpy as np

from kvcs.names.codes import MAX_MANIFEST_OCTETS, MAX_SEGMENTS, Component, ManifestTrack
from kvcs.names.encoding import Encoding, encode_data
from kvcs.names.errors import KvcsError, MisuseError, NothingToPublish
from kvcs.names.limits import reached
from kvcs.names.manifest_builder import ManifestBuilder
from kvcs.names.namespace import PublicationNamespace
from kvcs.names.payload import data_digest, encode_header
from kvcs.names.tracks import (
    DEFAULT_CACHE_MS,
    MANIFEST_PRIORITY,
    DataTrack,
    TrackServer,
    end_group,
    end_track,
    publisher_priority,
)
from kvcs.publishing import limits
from kvcs.publishing.steps import Data, LayerStep, Payload, SegmentStep
from kvcs.trust.cose import sign
from kvcs.trust.producers import ProducerKey
from kvcs.trust.sealing import TrackSealer
from kvsp.blocks.layout import Octets, Tensor, block_section, check_tensor, octets_of
from kvsp.blocks.tensors import as_array
from kvsp.names.codes import Codec
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor, Scope, block_keys
from kvsp.names.tokens import Tokens, token_list
from moqt.track.store import TrackStore
from moqt.values.codes import PropertyType, PublishDoneCode
from moqt.values.messages import KeyValue
from moqt.values.names import FullTrackName, Location

MANIFEST_EVERY: Final = 8
"""Completed layers after which a new manifest version is published (KVCS "Manifest Track"); those
of a long publication become rarer (`ManifestBuilder.worth_a_version`)."""

_PLAIN: Final = ((Component.K, Codec.RAW), (Component.V, Codec.RAW))


@dataclass(slots=True)
class _Segment:
    """The segment in production: what is due, and the digests of its layer so far."""

    number: int
    first_block: int
    blocks: int
    stores: dict[DataTrack, TrackStore]
    """In the order of the encodings, and of their components."""
    digests: dict[DataTrack, list[bytes]]
    layer: int = 0
    block: int = 0
    ended: bool = False
    """The manifest says that it is complete, and its tracks have ended."""


class Publication:
    """One production of the KV cache of a token prefix, as tracks.

    Each segment has its own, `k.raw.s0` and `v.raw.s0` the first: one Group per layer and one
    Object per block. `manifest` (`manifest.cose` when it is signed) has one Group per version;
    the first is there from the beginning, and one that names a segment before any Object of it.
    Objects are put in layer order, and in block order within a layer; each can be sent at once. The
    arrays are kept by reference, never copied unless sealed: they must not change any more.

    There is one segment, and the publication ends with its last layer, unless it is `growing`:
    then `extend` begins the next one and `finish` ends the publication. Nothing here waits for
    anybody, but `put_layer` hashes a whole layer: `kvcs.aput_layer` lets the event loop go on.
    """

    namespace: PublicationNamespace
    """Its Track Namespace, with a fresh random Publication ID; the Anchor Key is that of the
    first segment."""

    blocks: int
    """Complete blocks of all segments so far."""

    tracks: tuple[TrackStore, ...]
    """The stores of the manifest and of every segment's K and V so far, to be served by any
    `moqt` Publisher (`serve`)."""

    def __init__(
        self,
        scope: Scope,
        descriptor: Descriptor,
        tokens: Tokens,
        *,
        growing: bool = False,
        cache_ms: int = DEFAULT_CACHE_MS,
        deterministic: bool = False,
        manifest_every: int = MANIFEST_EVERY,
        encodings: Sequence[Encoding | Codec] = (Codec.RAW,),
        signer: ProducerKey | None = None,
        max_segments: int = MAX_SEGMENTS,
        max_manifest_octets: int = MAX_MANIFEST_OCTETS,
    ) -> None:
        """`tokens` are the ids of the first segment; those after the last complete block are not
        published, or begin the next segment. `growing`: there may be further segments, until
        `finish`. `cache_ms` is how long relays may keep the Objects. `deterministic` is a
        promise that every publication of this prefix has bit-identical Objects. With `signer`
        the manifests are signed, in the track "manifest.cose". When `scope` has content keys,
        every Object is sealed with the last of them, so that no relay can read it; what is
        sealed is a copy of the arrays. `encodings` are offered side by side, a codec standing for
        tracks of K and of V; what is encoded is a copy, made when it is put (speeds:
        `tools.bench_codecs`). Whoever allows more segments, or octets of a manifest, needs readers
        that read as many.

        Raises NothingToPublish without a complete block, DecodeError `bad-token` or
        `codec-unsupported`, KvcsError when the manifest would be too large, ValueError for
        a setting out of range.
        """
        if min(cache_ms, manifest_every, max_segments, max_manifest_octets) < 1:
            raise ValueError("cache_ms, manifest_every and the limits are at least 1")
        offered = [Encoding(each) if isinstance(each, Codec) else each for each in encodings]
        if not offered or len(set(offered)) < len(offered):
            raise ValueError("give one or more encodings, each once")
        descriptor.section_octets()
        keys = block_keys(scope, descriptor, tokens)
        if not keys:
            raise NothingToPublish(
                f"nothing to publish: {len(tokens)} tokens fill no block of "
                f"{descriptor.block_tokens} tokens"
            )
        self.descriptor = descriptor
        self.blocks = 0
        self.complete = False
        """Whether every layer is there and the tracks have ended."""
        self.namespace = PublicationNamespace.create(scope.scope_id, descriptor.compat_id, keys[-1])
        self._scope = scope
        self._growing = growing
        self.encodings = tuple(offered)
        self._forms = tuple((part, each.codec) for each in offered for part in each.components)
        self._plain = self._forms == _PLAIN
        self._section = descriptor.section_octets()
        self._manifest_every = manifest_every
        self._most = limits.max_segments(offered, max_segments)
        self._max_octets = max_manifest_octets
        self._builder = ManifestBuilder(
            descriptor,
            self.namespace,
            deterministic=deterministic,
            max_segments=max_segments,
            max_octets=max_manifest_octets,
        )
        self._properties = (KeyValue(PropertyType.MAX_CACHE_DURATION, cache_ms),)
        self._cache_ms = cache_ms
        self._signer = signer
        self._sealers: dict[TrackStore, TrackSealer] = {}
        plain, signed = (each.encode() for each in ManifestTrack)
        self._manifest = self._store(plain if signer is None else signed)
        self._absent = FullTrackName(self.namespace.fields, signed if signer is None else plain)
        """The manifest track that it does not have, and never will: it has one of the two."""
        self.tracks = (self._manifest,)
        self._serving: WeakSet[TrackServer] = WeakSet()
        self._version = 0
        self.version_due = False
        """There is more to be told by the manifest than its last version does."""
        self._ended = False
        self._rest: list[int] = []
        self._last_key: bytes
        self._segment: _Segment
        SegmentStep(self, keys, tokens).put()

    @property
    def tokens(self) -> int:
        """Tokens published, of all segments so far: those of the complete blocks."""
        return self.blocks * self.descriptor.block_tokens

    @property
    def manifest_octets(self) -> int:
        """Octets of all versions of the manifest so far."""
        return self._manifest.octets

    @property
    def told_all(self) -> bool:
        """Whether the last version of the manifest tells and lists all there is."""
        return not self.version_due and self._builder.lists_all

    @property
    def segment(self) -> int:
        """The number of the segment begun last."""
        return self._segment.number

    @property
    def first_token(self) -> int:
        """The position of the first token of the segment begun last: of row 0 of its layers."""
        return self._segment.first_block * self.descriptor.block_tokens

    @property
    def segment_blocks(self) -> int:
        """Blocks of the segment begun last."""
        return self._segment.blocks

    @property
    def next_object(self) -> tuple[int, int] | None:
        """(layer, block) of the segment to be put next; None when the segment has every layer,
        and when the publication has ended."""
        segment = self._segment
        if self._ended or segment.layer == self.descriptor.layers:
            return None
        return segment.layer, segment.block

    def put_block(self, layer: int, block: int, k: Tensor, v: Tensor) -> None:
        """Publish one block of one layer; its two Objects can go out at once.

        `block` counts from the first of the segment. `k` and `v` are
        `[block_tokens, kv_heads, head_dim]`, C-contiguous, little-endian,
        of the descriptor's element type: arrays, torch tensors on the CPU, or whatever has
        `__dlpack__`; they are referred to, not copied.
        Raises MisuseError, naming layer and block, when another Object is due or an array
        does not fit; nothing is published then.
        """
        where, rows = f"layer {layer}, block {block}", self.descriptor.block_tokens
        k, v = self._checked(k, f"{where}: k"), self._checked(v, f"{where}: v")
        for name, tensor in (("k", k), ("v", v)):
            if tensor.shape[0] != rows:
                raise MisuseError(
                    f"{where}: {name} has {tensor.shape[0]} tokens, a block has {rows}"
                )
        sections = block_section(k, 0, rows), block_section(v, 0, rows)
        self.put_data(layer, block, self.data_of(layer, block, *sections))

    def put_layer(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Publish a whole layer of the segment: `k` and `v` are `[tokens, kv_heads, head_dim]`,
        row 0 being that of `first_token`.

        Rows after the last complete block are left out. Raises MisuseError as `put_block`.
        """
        k, v = self._check_layer(layer, k, v)
        for block, sections in enumerate(self._sections(k, v, range(self._segment.blocks))):
            self.put_data(layer, block, self.data_of(layer, block, *sections))

    def layer_steps(
        self, layer: int, k: Tensor, v: Tensor, *, octets: int, objects: int
    ) -> Iterator[LayerStep]:
        """`put_layer` in steps of at most so many octets and Objects, of one block at least, each
        to be prepared and then put before the next. `kvcs.aput_layer` does so beside others on an
        event loop.

        Raises MisuseError as `put_block`, at once, and when a step is put.
        """
        k, v = self._check_layer(layer, k, v)
        due = self._segment.blocks
        size = max(1, min(objects // len(self._forms), octets // (2 * self._section)))
        return (
            LayerStep(self, layer, start, self._sections(k, v, span))
            for start in range(0, due, size)
            for span in [range(start, min(start + size, due))]
        )

    def extend(self, tokens: Tokens) -> int:
        """Begin the next segment, of the tokens that follow; returns how many blocks it has.

        Tokens that filled no block so far come first: the segment begins at `first_token`, and
        so do the arrays of its layers. When all of them together fill no block, 0 is returned,
        there is no new segment, and they are kept for the next call; `finish` leaves them out.

        Raises MisuseError when the publication is not `growing` or has ended, and before the last
        layer of the segment; DecodeError `bad-token`; KvcsError when there would be more than
        `max_segments` segments or the manifest too large. Nothing has changed then.
        """
        step = self.segment_step(tokens)
        if step is not None:
            return step.put()
        if self.version_due:
            self.publish_version()
        return 0

    def following(self, tokens: Tokens) -> tuple[list[int], list[bytes]]:
        """For `segment_step`, in whatever thread: the tokens of the next segment with those that
        filled no block so far, and its Block Keys. Changes nothing. Raises as `extend`."""
        self._check_between("extended")
        following = [*self._rest, *token_list(tokens)]
        return following, block_keys(self._scope, self.descriptor, following, after=self._last_key)

    def segment_step(
        self, tokens: Tokens, made: tuple[list[int], list[bytes]] | None = None
    ) -> SegmentStep | None:
        """`extend` in steps: to be prepared, in whatever thread, and then put. None when there is
        no new segment. `made` is what `following` gave of the tokens. `kvcs.aextend` does so beside
        others on an event loop. Raises as `extend`.
        """
        self._check_between("extended")
        following, keys = made or self.following(tokens)
        if not keys:
            self._rest = following
            return None
        if self._most <= self.segment + 1:
            reached("max_segments", f"a publication is at its limit of {self._most} segments")
            raise KvcsError(
                f"the publication has {self._most} segments, and no more are allowed "
                "(max_segments): finish it, or extend it by more tokens at a time"
            )
        return SegmentStep(self, keys, following)

    def finish(self) -> None:
        """End a `growing` publication: no further segment comes. `kvcs.afinish` writes the last
        version of its manifest beside others on an event loop.

        Tokens that fill no block are not published. Raises MisuseError as `extend`.
        """
        self._check_between("finished")
        if not self.told_all:
            self.publish_version(self.version_payload(last=True))
        self._end()

    def abandon(self, reason: str = "the publication was stopped") -> None:
        """Stop a publication that will not be completed; harmless after its end.

        Subscribers are told with PUBLISH_DONE INTERNAL_ERROR. A corrected production is a
        new Publication, with another Publication ID.
        """
        if self._ended:
            return
        self._ended = True
        for store in self.tracks:
            if not store.ended:
                store.finish(PublishDoneCode.INTERNAL_ERROR, reason)

    def serve(self, publisher: TrackServer) -> None:
        """Serve every track by `publisher`, also those of segments to come."""
        self._serving.add(publisher)
        for store in self.tracks:
            publisher.add_track(store)
        publisher.set_absent(self._absent, self._cache_ms)

    def withdraw(self, publisher: TrackServer) -> None:
        """Serve nothing by `publisher` any more; harmless when it does not."""
        self._serving.discard(publisher)
        for store in self.tracks:
            publisher.remove_track(store.name)
        publisher.set_absent(self._absent, None)

    # -- inside --------------------------------------------------------------------------

    def open_segment(self, keys: Sequence[bytes]) -> int:
        """For `SegmentStep`: the next version of the manifest will name a segment."""
        blocks = self.blocks + len(keys)
        limits.check_manifest_size(self.descriptor, blocks, self.encodings, self._max_octets)
        return self._builder.add_segment(keys, self._forms)

    def close_segment(self) -> None:
        """For `SegmentStep`: it will not."""
        self._builder.take_back_segment()

    def begin_segment(
        self, number: int, keys: list[bytes], tokens: Tokens, payload: Payload
    ) -> None:
        """For `SegmentStep`: its tracks are served, and then the manifest names them."""
        if self._ended:
            raise MisuseError("the publication has ended")
        names = [DataTrack(component, codec.label, number) for component, codec in self._forms]
        rest = token_list(tokens[len(keys) * self.descriptor.block_tokens :])
        stores = {track: self._store(track.name) for track in names}
        for publisher in tuple(self._serving):
            for store in stores.values():
                publisher.add_track(store)
        self._publish_manifest(*payload)
        digests: dict[DataTrack, list[bytes]] = {track: [] for track in names}
        self._segment = _Segment(number, self.blocks, len(keys), stores, digests)
        self.blocks += len(keys)
        self._last_key, self._rest = keys[-1], rest
        self.tracks += tuple(stores.values())

    def _check_between(self, what: str) -> None:
        """Raises MisuseError unless the last segment is whole and there may be another."""
        if self._ended:
            raise MisuseError(
                f"the publication cannot be {what}: it has ended"
                + ("" if self._growing else ", with its last layer, as it is not growing=True")
            )
        if not self._growing:
            raise MisuseError(
                f"the publication cannot be {what}: it has one segment and ends with the last "
                "layer; make it with growing=True for more"
            )
        due = self.next_object
        if due is not None:
            raise MisuseError(
                f"the publication cannot be {what} yet: layer {due[0]}, block {due[1]} of segment "
                f"{self.segment} is due, and its last layer is {self.descriptor.layers - 1}"
            )

    def _store(self, name: bytes) -> TrackStore:
        store = TrackStore(FullTrackName(self.namespace.fields, name), self._properties)
        if self._scope.content_keys:
            self._sealers[store] = TrackSealer(self._scope.content_keys[-1], store.name)
        return store

    def _checked(self, tensor: Tensor, where: str) -> Tensor:
        """The tensor as an array of the same octets."""
        try:
            array = tensor if isinstance(tensor, np.ndarray) else as_array(tensor)
            check_tensor(array, self.descriptor)
        except ValueError as error:
            raise MisuseError(f"{where}: {error}") from None
        return array

    def _check_layer(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """These as arrays, which have all blocks of the segment."""
        rows, blocks = self.descriptor.block_tokens, self._segment.blocks
        k, v = self._checked(k, f"layer {layer}: k"), self._checked(v, f"layer {layer}: v")
        for name, tensor in (("k", k), ("v", v)):
            if tensor.shape[0] < blocks * rows:
                raise MisuseError(
                    f"layer {layer}: {name} has {tensor.shape[0]} tokens, "
                    f"{blocks * rows} are to be published, from token {self.first_token} on"
                )
        return k, v

    def _sections(self, k: Tensor, v: Tensor, blocks: range) -> list[tuple[memoryview, memoryview]]:
        """K and V of some blocks of a layer, as views of one: a view of its own for each would
        keep arrays beside it, more octets than small Objects have."""
        all_k, all_v = octets_of(k).toreadonly(), octets_of(v).toreadonly()
        size = self._section
        spans = [slice(block * size, (block + 1) * size) for block in blocks]
        return [(all_k[span], all_v[span]) for span in spans]

    def data_of(self, layer: int, block: int, k: memoryview, v: memoryview) -> Data:
        """The Data of each track, and its digest."""
        data = (k, v) if self._plain else self._encoded(layer, block, k, v)
        return [(each, data_digest(each)) for each in data]

    def put_data(self, layer: int, block: int, data: Data, *, later: bool = False) -> None:
        """Publish what `data_of` gave, and the version of the manifest that is due then, unless it
        is published `later`. Raises MisuseError as `put_block`."""
        segment, descriptor = self._segment, self.descriptor
        if self._ended or segment.layer == descriptor.layers:
            what = "the publication has ended"
            if not self._ended:
                what = f"segment {segment.number} has every layer: extend or finish the publication"
            raise MisuseError(f"layer {layer}, block {block}: {what}")
        if (layer, block) != (segment.layer, segment.block):
            raise MisuseError(
                f"layer {layer}, block {block} is out of order: "
                f"layer {segment.layer}, block {segment.block} is due"
            )
        priority = publisher_priority(layer, descriptor.layers)
        for (track, store), (octets, digest), (_, codec) in zip(
            segment.stores.items(), data, self._forms, strict=True
        ):
            header = encode_header(
                component=track.component,
                layer=layer,
                block=block,
                token_start=(segment.first_block + block) * descriptor.block_tokens,
                token_count=descriptor.block_tokens,
                codec=codec,
                data_length=len(octets),
                data_digest=digest,
            )
            if self._sealers:
                self._append(store, layer, block, (header, octets), priority)
            else:
                store.append(layer, block, (header, octets), priority=priority)
            segment.digests[track].append(digest)
        segment.block += 1
        if segment.block == segment.blocks:
            self._end_layer(segment, priority)
            if self.version_due and not later:
                self.publish_version()

    def _encoded(self, layer: int, block: int, k: memoryview, v: memoryview) -> list[Octets]:
        """The Data of each track. Raises MisuseError for values that a codec cannot hold."""
        try:
            parts = [encode_data(*form, k, v, self.descriptor) for form in self._forms]
        except DecodeError as error:
            raise MisuseError(f"layer {layer}, block {block}: {error.detail}") from None
        return [each[0] if len(each) == 1 else b"".join(each) for each in parts]

    def _end_layer(self, segment: _Segment, priority: int) -> None:
        layer = segment.layer
        for track, store in segment.stores.items():
            end_group(store, Location(layer, segment.blocks), priority)
            self._builder.add_group(track, layer, segment.digests[track])
            segment.digests[track] = []
        segment.layer, segment.block = layer + 1, 0
        whole = segment.layer == self.descriptor.layers
        if whole:
            self._builder.complete(segment.number)
        often = segment.layer % self._manifest_every == 0 and self._builder.worth_a_version
        self.version_due |= whole or often

    def _end(self) -> None:
        self._ended = self.complete = True
        end_track(self._manifest, self._version)

    def _append(
        self,
        store: TrackStore,
        group: int,
        object_id: int,
        parts: Sequence[Octets],
        priority: int,
    ) -> None:
        """An Object, sealed where that is due."""
        sealer = self._sealers.get(store)
        if sealer is None:
            store.append(group, object_id, parts, priority=priority)
            return
        payload = sealer.seal(group, object_id, priority, parts)
        store.append(group, object_id, payload, priority=priority, properties=sealer.properties)

    def version_payload(self, *, last: bool = False) -> Payload:
        """The next version of the manifest, signed and sealed where that is due, for
        `publish_version`; in whatever thread, while nothing else is put. The `last` of a growing
        publication lists every digest, also those that versions before have listed."""
        text: Sequence[Octets] = self._builder.version(last=last)
        if self._signer is not None:
            text = sign(text, self._signer)
        sealer = self._sealers.get(self._manifest)
        if sealer is None:
            return text, b""
        # one that is not published after all is seen by nobody: its Location may be sealed again
        return (sealer.seal(self._version, 0, MANIFEST_PRIORITY, text),), sealer.properties

    def publish_version(self, payload: Payload | None = None) -> None:
        """Publish the version of the manifest that is due, and end the tracks of a segment that it
        says to be complete. Raises MisuseError when the publication has ended."""
        if self._ended:
            raise MisuseError("the publication has ended")
        parts, properties = self.version_payload() if payload is None else payload
        self._publish_manifest(parts, properties)

    def _publish_manifest(self, parts: Sequence[Octets], properties: bytes) -> None:
        at, priority = self._version, MANIFEST_PRIORITY
        self._manifest.append(at, 0, parts, priority=priority, properties=properties)
        self._builder.published()
        end_group(self._manifest, Location(at, 1), priority)
        self._version, self.version_due = at + 1, False
        if at == 0 or self._segment.layer < self.descriptor.layers or self._segment.ended:
            return
        for store in self._segment.stores.values():
            end_track(store, self._segment.layer)
        self._segment.ended = True
        if not self._growing:
            self._end()
