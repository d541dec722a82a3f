"""Publishing the KV cache of a token prefix (KVCS "Publisher Behavior").

    publication = Publication(scope, descriptor, tokens)
    await publish(session, publication)
    for layer in range(descriptor.layers):
        publication.put_layer(layer, k, v)

`Publication` owns no I/O: it fills `moqt` TrackStores, which any number of sessions serve.
"""

from __future__ import annotations

from typing import Final

from kvcs.names.codes import MAX_MANIFEST_OCTETS, Component, ManifestTrack
from kvcs.names.errors import KvcsError, MisuseError, NothingToPublish
from kvcs.names.manifest_builder import ManifestBuilder
from kvcs.names.namespace import PublicationNamespace
from kvcs.names.payload import data_digest, encode_header
from kvcs.names.tracks import MANIFEST_PRIORITY, DataTrack, publisher_priority
from kvsp.blocks.layout import Tensor, block_section, check_tensor
from kvsp.names.codes import HASH_OCTETS, Codec
from kvsp.names.identity import Descriptor, Scope, Tokens, block_keys
from moqt.aio import MoqtSession, PublishedNamespace
from moqt.track.store import TrackStore
from moqt.values.codes import ObjectStatus, PropertyType, PublishDoneCode
from moqt.values.messages import KeyValue
from moqt.values.names import FullTrackName, Location

DEFAULT_CACHE_MS: Final = 600_000
"""MAX_CACHE_DURATION unless told otherwise, in milliseconds."""

MANIFEST_EVERY: Final = 8
"""Completed layers after which a new manifest version is published (KVCS "Manifest Track"); those
of a long publication become rarer (`ManifestBuilder.worth_a_version`)."""

_SEGMENT: Final = 0
_COMPONENTS: Final = (Component.K, Component.V)
_DIGEST_TEXT: Final = 2 * HASH_OCTETS + 3
"""Octets of one digest in a manifest: its digits, two quotes and a comma."""


class Publication:
    """One production of the KV cache of a token prefix, as three tracks.

    `k.raw.s0` and `v.raw.s0` get one Group per layer and one Object per block, `manifest`
    one Group per version. The first manifest version is there from the beginning. Objects
    are put in layer order, and in block order within a layer; each can be sent at once.
    The arrays are kept by reference, never copied: they must not change any more.
    """

    namespace: PublicationNamespace
    """Its Track Namespace, with a fresh random Publication ID."""

    blocks: int
    """Complete blocks of the prefix."""

    tracks: tuple[TrackStore, ...]
    """The stores of manifest, K and V, to be served by any `moqt` Publisher."""

    def __init__(
        self,
        scope: Scope,
        descriptor: Descriptor,
        tokens: Tokens,
        *,
        cache_ms: int = DEFAULT_CACHE_MS,
        deterministic: bool = False,
        manifest_every: int = MANIFEST_EVERY,
    ) -> None:
        """`tokens` are the ids of the prefix; those after the last complete block are not
        published. `cache_ms` is how long relays may keep the Objects. `deterministic` is a
        promise that every publication of this prefix has bit-identical Objects.

        Raises NothingToPublish without a complete block, DecodeError `bad-token` or
        `codec-unsupported`, KvcsError when the manifest would be too large, ValueError for
        a setting out of range.
        """
        if cache_ms < 1 or manifest_every < 1:
            raise ValueError("cache_ms and manifest_every are at least 1")
        self._section = descriptor.section_octets()
        keys = block_keys(scope, descriptor, tokens)
        if not keys:
            raise NothingToPublish(
                f"nothing to publish: {len(tokens)} tokens fill no block of "
                f"{descriptor.block_tokens} tokens"
            )
        self.descriptor = descriptor
        self.blocks = len(keys)
        self.complete = False
        """Whether every layer is there and the tracks have ended."""
        _check_manifest_size(descriptor, self.blocks)
        self.namespace = PublicationNamespace.create(scope.scope_id, descriptor.compat_id, keys[-1])
        self._manifest_every = manifest_every
        self._builder = ManifestBuilder(descriptor, self.namespace, deterministic=deterministic)
        self._builder.add_segment(keys, [(component, Codec.RAW) for component in _COMPONENTS])
        properties = (KeyValue(PropertyType.MAX_CACHE_DURATION, cache_ms),)

        def store(name: bytes) -> TrackStore:
            return TrackStore(FullTrackName(self.namespace.fields, name), properties)

        self._manifest = store(ManifestTrack.MANIFEST.encode())
        self._data = {
            DataTrack(component, Codec.RAW.label, _SEGMENT): store(
                DataTrack(component, Codec.RAW.label, _SEGMENT).name
            )
            for component in _COMPONENTS
        }
        self.tracks = (self._manifest, *self._data.values())
        self._version = 0
        self._layer = 0
        self._block = 0
        self._ended = False
        self._digests: dict[DataTrack, list[bytes]] = {track: [] for track in self._data}
        self._publish_manifest()

    @property
    def tokens(self) -> int:
        """Tokens published: those of the complete blocks."""
        return self.blocks * self.descriptor.block_tokens

    @property
    def next_object(self) -> tuple[int, int] | None:
        """(layer, block) to be put next, or None when the publication has ended."""
        return None if self._ended else (self._layer, self._block)

    def put_block(self, layer: int, block: int, k: Tensor, v: Tensor) -> None:
        """Publish one block of one layer; its two Objects can go out at once.

        `k` and `v` are `[block_tokens, kv_heads, head_dim]`, C-contiguous, little-endian,
        of the descriptor's element type; they are referred to, not copied.
        Raises MisuseError, naming layer and block, when another Object is due or an array
        does not fit; nothing is published then.
        """
        for name, tensor in (("k", k), ("v", v)):
            self._check(tensor, f"layer {layer}, block {block}: {name}")
            if tensor.shape[0] != self.descriptor.block_tokens:
                raise MisuseError(
                    f"layer {layer}, block {block}: {name} has {tensor.shape[0]} tokens, "
                    f"a block has {self.descriptor.block_tokens}"
                )
        self._put(layer, block, block_section(k, 0, len(k)), block_section(v, 0, len(v)))

    def put_layer(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Publish a whole layer: `k` and `v` are `[tokens, kv_heads, head_dim]`.

        Rows after the last complete block are left out. Raises MisuseError as `put_block`.
        """
        for name, tensor in (("k", k), ("v", v)):
            self._check(tensor, f"layer {layer}: {name}")
            if tensor.shape[0] < self.tokens:
                raise MisuseError(
                    f"layer {layer}: {name} has {tensor.shape[0]} tokens, "
                    f"{self.tokens} are to be published"
                )
        rows = self.descriptor.block_tokens
        for block in range(self.blocks):
            self._put(layer, block, block_section(k, block, rows), block_section(v, block, rows))

    def abandon(self, reason: str = "the publication was stopped") -> None:
        """Stop a publication that will not be completed; harmless after its end.

        Subscribers are told with PUBLISH_DONE INTERNAL_ERROR. A corrected production is a
        new Publication, with another Publication ID.
        """
        if self._ended:
            return
        self._ended = True
        for store in self.tracks:
            store.finish(PublishDoneCode.INTERNAL_ERROR, reason)

    # -- inside --------------------------------------------------------------------------

    def _check(self, tensor: Tensor, where: str) -> None:
        try:
            check_tensor(tensor, self.descriptor)
        except ValueError as error:
            raise MisuseError(f"{where}: {error}") from None

    def _put(self, layer: int, block: int, k: memoryview, v: memoryview) -> None:
        if self._ended:
            raise MisuseError(f"layer {layer}, block {block}: the publication has ended")
        if (layer, block) != (self._layer, self._block):
            raise MisuseError(
                f"layer {layer}, block {block} is out of order: "
                f"layer {self._layer}, block {self._block} is due"
            )
        descriptor = self.descriptor
        priority = publisher_priority(layer, descriptor.layers)
        for (track, store), data in zip(self._data.items(), (k, v), strict=True):
            digest = data_digest(data)
            header = encode_header(
                component=track.component,
                layer=layer,
                block=block,
                token_start=block * descriptor.block_tokens,
                token_count=descriptor.block_tokens,
                codec=Codec.RAW,
                data_length=self._section,
                data_digest=digest,
            )
            store.append(layer, block, (header, data), priority=priority)
            self._digests[track].append(digest)
        self._block += 1
        if self._block == self.blocks:
            self._end_layer(priority)

    def _end_layer(self, priority: int) -> None:
        layer = self._layer
        for track, store in self._data.items():
            _end_group(store, Location(layer, self.blocks), priority)
            self._builder.add_group(track, layer, self._digests[track])
            self._digests[track] = []
        self._layer, self._block = layer + 1, 0
        if self._layer == self.descriptor.layers:
            self._end()
        elif self._layer % self._manifest_every == 0 and self._builder.worth_a_version:
            self._publish_manifest()

    def _end(self) -> None:
        """The final manifest first, then the end of every track."""
        self._builder.complete(_SEGMENT)
        self._publish_manifest()
        self._ended = self.complete = True
        for store, group in (
            *((store, self._layer) for store in self._data.values()),
            (self._manifest, self._version),
        ):
            store.mark_end(Location(group, 0), ObjectStatus.END_OF_TRACK)
            store.finish_subgroup(group, 0)
            store.finish(PublishDoneCode.TRACK_ENDED)

    def _publish_manifest(self) -> None:
        text = self._builder.version()
        self._manifest.append(self._version, 0, text, priority=MANIFEST_PRIORITY)
        _end_group(self._manifest, Location(self._version, 1), MANIFEST_PRIORITY)
        self._version += 1


async def publish(session: MoqtSession, publication: Publication) -> PublishedNamespace:
    """Serve a publication on a session and announce its five-field namespace.

    It stays announced until `unpublish`, or the session ends; on a new session, publish it
    again. Raises moqt RequestError when the peer refuses the namespace, SessionClosed,
    MisuseError when the session has no Publisher; nothing is served then.
    """
    publisher = session.publisher
    for store in publication.tracks:
        publisher.add_track(store)
    try:
        return await session.publish_namespace(publication.namespace.fields)
    except BaseException:
        unpublish(session, publication)
        raise


def unpublish(
    session: MoqtSession, publication: Publication, announced: PublishedNamespace | None = None
) -> None:
    """Serve the publication to no new request of the session, and let go of its arrays.

    `announced` is what `publish` returned: its namespace is withdrawn.
    """
    if announced is not None:
        announced.withdraw()
    for store in publication.tracks:
        session.publisher.remove_track(store.name)


def _end_group(store: TrackStore, location: Location, priority: int) -> None:
    store.mark_end(location, ObjectStatus.END_OF_GROUP, priority=priority)
    store.finish_subgroup(location.group, 0)


def _check_manifest_size(descriptor: Descriptor, blocks: int) -> None:
    # known now, and better said now than after the last layer
    digests = len(_COMPONENTS) * descriptor.layers * blocks
    octets = digests * _DIGEST_TEXT + len(descriptor.jcs)
    if octets > MAX_MANIFEST_OCTETS:
        raise KvcsError(
            f"the manifest would list {digests} Objects and have about {octets} octets, "
            f"{MAX_MANIFEST_OCTETS} are allowed; use larger blocks or publish fewer tokens"
        )
