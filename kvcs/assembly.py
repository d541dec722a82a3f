"""One publication while it arrives: every Object verified, every layer put together.

Pure logic: manifests and Objects go in, usable layers come out (KVCS "Verification and
Recovery"). Who asks for the Objects is `kvcs.retrieval`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, Self

from kvcs.codes import PAYLOAD_HEADER_OCTETS, Component
from kvcs.errors import VerificationFailed
from kvcs.files import KvFileWriter
from kvcs.manifest import Manifest, SegmentEntry, check_progress
from kvcs.namespace import PublicationNamespace
from kvcs.payload import Octets, check_payload
from kvcs.tensors import LayerAssembly, Tensor, allocate
from kvcs.tracks import DataTrack, raw_octets
from kvsp.codes import HASH_OCTETS, Codec, DecodeErrorName
from kvsp.errors import DecodeError
from kvsp.identity import Descriptor
from moqt.names import Location

MAX_BAD_OBJECTS: Final = 3
"""Bad Objects after which another publication is used (KVCS "Verification and Recovery")."""

SEGMENT: Final = 0
"""The segment that is retrieved: the one the Anchor Key identifies."""

NOT_NEEDED: Final = "not-needed"
"""Why an Object was discarded that is outside the layers and blocks asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One usable layer: every Object of it came and was verified.

    `k` and `v` are `[tokens, kv_heads, head_dim]`. `publication` is the Publication ID;
    when it changes from one layer to the next, the retrieval has started over.
    """

    index: int
    k: Tensor
    v: Tensor
    publication: bytes


@dataclass(slots=True)
class Stats:
    """What a retrieval did. Counts of one publication, except where said otherwise."""

    tokens: int = 0
    blocks: int = 0
    layers: int = 0
    """Layers handed over."""

    octets: int = 0
    """Octets of verified Data."""

    seconds: float = 0.0
    """From the start to the end, over all publications tried."""

    first_layer_seconds: float | None = None
    """From the start to the first usable layer."""

    layer_seconds: list[float] = field(default_factory=list)
    """From the start to each usable layer, in order; with a second publication that begins
    anew, its layers follow."""

    objects_verified: int = 0
    objects_confirmed: int = 0
    """Verified Objects whose digest a manifest lists."""

    discarded: Counter[str] = field(default_factory=Counter)
    """Objects and manifests thrown away, by reason, over all publications."""

    duplicates: int = 0
    """Objects that came more often than they were asked for, over all publications."""

    recoveries: int = 0
    """FETCH requests for missing Objects, over all publications."""

    publications_tried: int = 0
    publication: str | None = None
    """Publication ID, hexadecimal."""

    source: str | None = None
    """Whom it came from, as the caller names it."""

    mode: str | None = None
    """`live` or `fetch`."""

    @property
    def megabytes_per_second(self) -> float:
        return self.octets / self.seconds / 1e6 if self.seconds else 0.0

    def begin(self, namespace: PublicationNamespace) -> None:
        """Another publication is tried."""
        self.publications_tried += 1
        self.publication = namespace.publication_id.hex()
        self.mode = None
        self.tokens = self.blocks = self.layers = self.octets = 0
        self.objects_verified = self.objects_confirmed = 0

    def as_dict(self) -> dict[str, Any]:
        """A JSON object with every number."""
        return {
            "tokens": self.tokens,
            "blocks": self.blocks,
            "layers": self.layers,
            "octets": self.octets,
            "seconds": round(self.seconds, 6),
            "megabytes_per_second": round(self.megabytes_per_second, 3),
            "layer_seconds": [round(seconds, 6) for seconds in self.layer_seconds],
            "first_layer_seconds": self.first_layer_seconds and round(self.first_layer_seconds, 6),
            "objects_verified": self.objects_verified,
            "objects_confirmed": self.objects_confirmed,
            "discarded": dict(self.discarded),
            "duplicates": self.duplicates,
            "recoveries": self.recoveries,
            "publications_tried": self.publications_tried,
            "publication": self.publication,
            "source": self.source,
            "mode": self.mode,
        }


# --- where layers are written --------------------------------------------------------


class Destination(Protocol):
    """Where the layers of a cache are written, each Object once, at its place."""

    def begin(self, tokens: int, layers: range) -> None:
        """`layers` of `tokens` tokens will be written; what was written before is void."""

    def arrays(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of `layer` to fill, `[tokens or more, kv_heads, head_dim]`, writable."""
        ...


class MemoryDestination:
    """New arrays for every layer; held no longer than the application holds them."""

    def __init__(self, descriptor: Descriptor) -> None:
        self._descriptor = descriptor
        self._tokens = 0

    def begin(self, tokens: int, layers: range) -> None:
        self._tokens = tokens

    def arrays(self, layer: int) -> tuple[Tensor, Tensor]:
        return allocate(self._descriptor, self._tokens), allocate(self._descriptor, self._tokens)


class ArrayDestination:
    """The caller's arrays, by layer; they may have more rows than the cache has tokens."""

    def __init__(self, arrays: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        self._arrays = arrays

    def begin(self, tokens: int, layers: range) -> None:
        missing = [layer for layer in layers if layer not in self._arrays]
        if missing:
            raise ValueError(f"there are no arrays for layer {missing[0]}")

    def arrays(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._arrays[layer]


class FileDestination:
    """A KV file, written through its memory map; it appears only with `commit`.

    with FileDestination("out.safetensors", descriptor) as out: ...; out.commit()
    """

    def __init__(self, path: str | Path, descriptor: Descriptor) -> None:
        self._path = Path(path)
        self._descriptor = descriptor
        self._writer: KvFileWriter | None = None

    def begin(self, tokens: int, layers: range) -> None:
        """Raises FileError when there is no room for the file."""
        self.abort()
        self._writer = KvFileWriter(self._path, self._descriptor, tokens=tokens, layers=layers)

    def arrays(self, layer: int) -> tuple[Tensor, Tensor]:
        if self._writer is None:
            raise ValueError("the file was not begun")
        return self._writer.k(layer), self._writer.v(layer)

    def commit(self) -> None:
        """Give the file its name. Raises FileError, ValueError when nothing was written."""
        if self._writer is None:
            raise ValueError("the file was not begun")
        self._writer.commit()
        self._writer = None

    def abort(self) -> None:
        """Remove what was written; harmless after `commit`."""
        if self._writer is not None:
            self._writer.abort()
            self._writer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


# --- putting layers together ---------------------------------------------------------


class _OpenLayer(LayerAssembly):
    """A layer that is not whole, or not handed over yet."""

    def has(self, component: Component, block: int) -> bool:
        if component is not Component.KV:
            return bool(self._written[component][block])
        return all(self._written[half][block] for half in _halves(component))

    def take_back(self, component: Component, block: int) -> None:
        """Block `block` turned out to be wrong: it is to be written again."""
        for half in _halves(component):
            if self._written[half][block]:
                self._written[half][block] = 0
                self._left[half] += 1


def _halves(component: Component) -> tuple[Component, ...]:
    return (Component.K, Component.V) if component is Component.KV else (component,)


class Arrival(Enum):
    """What an Object was when it came."""

    NEW = auto()
    """Needed, good, and written at its place."""
    BAD = auto()
    """Discarded: it is as missing as before."""
    EXTRA = auto()
    """Not needed, or there already."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What may be carried over to another publication of the same prefix, if both are
    deterministic: the layers handed over."""

    deterministic: bool
    anchor_key: bytes
    blocks: int
    next_layer: int
    unconfirmed: Mapping[tuple[DataTrack, int], bytearray]


class _Facts(NamedTuple):
    """What is the same for every Object of one track."""

    codec: Codec
    raw_octets: int
    first_block: int


class Assembly:
    """The layers asked for, of one publication.

    `manifest` is the last good version. A layer is handed over, in order, through `ready`,
    as soon as every needed Object of it is verified in every selected track and none
    contradicts the manifest. Objects that came before the manifest lists them are compared
    when it does: only their digests are kept for that. With `require_listed` a layer waits
    for it.

    Methods raise VerificationFailed when the publication is not to be used any further:
    its first manifest is not acceptable, there were more than `max_bad` bad Objects, or a
    layer that was handed over is not what the manifest lists; and whatever `destination`
    raises.
    """

    def __init__(
        self,
        namespace: PublicationNamespace,
        descriptor: Descriptor,
        keys: Sequence[bytes],
        layers: range,
        destination: Destination,
        stats: Stats,
        *,
        blocks: int | None = None,
        require_listed: bool = False,
        max_bad: int = MAX_BAD_OBJECTS,
        kept: Kept | None = None,
    ) -> None:
        """`keys` are the Block Keys of the tokens the consumer knows, `blocks` how many
        blocks it needs at most. `kept` is of an earlier publication: its layers are not
        asked for again if both are deterministic, otherwise all come again.
        """
        self.namespace = namespace
        self.descriptor = descriptor
        self.layers = layers
        self.ready: deque[Layer] = deque()
        self.manifest: Manifest | None = None
        self.version = -1
        self.tracks: tuple[DataTrack, ...] = ()
        self.blocks = 0
        """Blocks needed of every layer, known from the first manifest on."""
        self.bad = 0
        """Bad Objects and manifests of this publication."""
        self._keys = keys
        self._destination = destination
        self._stats = stats
        self._most_blocks = blocks
        self._require_listed = require_listed
        self._max_bad = max_bad
        self._kept = kept
        self._next = layers.start
        self._open: dict[int, _OpenLayer] = {}
        self._facts: dict[DataTrack, _Facts] = {}
        self._unconfirmed: dict[tuple[DataTrack, int], bytearray] = {}
        self._taken_back: list[tuple[DataTrack, Location]] = []
        self._reasons: Counter[str] = Counter()
        self._refused: set[Location] = set()

    # -- what is known -------------------------------------------------------------------

    @property
    def entry(self) -> SegmentEntry:
        """The manifest's entry of the segment retrieved."""
        assert self.manifest is not None
        return self.manifest.segments[SEGMENT]

    @property
    def whole(self) -> bool:
        """Whether every layer asked for has been handed over."""
        return self.manifest is not None and self._next >= self.layers.stop

    @property
    def confirmed(self) -> bool:
        """Whether every Object held is listed in the manifest."""
        return not self._unconfirmed

    @property
    def manifest_refused(self) -> bool:
        """Whether a later version of the manifest was not acceptable."""
        return bool(self._refused)

    @property
    def octets_held(self) -> int:
        """Octets of the arrays of layers begun and not handed over."""
        return sum(layer.k.nbytes + layer.v.nbytes for layer in self._open.values()) + sum(
            layer.k.nbytes + layer.v.nbytes for layer in self.ready
        )

    def needs(self, layer: int) -> bool:
        """Whether `layer` is asked for and not whole."""
        return self._next <= layer < self.layers.stop

    def missing(self, track: DataTrack, layer: int) -> list[int]:
        """The blocks of `layer` that `track` has still to bring."""
        if not self.needs(layer):
            return []
        held = self._open.get(layer)
        return list(range(self.blocks)) if held is None else held.missing(track.component)

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
        self._confirm()
        self._hand_over()

    def object_received(
        self, track: DataTrack, location: Location, payload: Octets, *, again: bool = False
    ) -> Arrival:
        """An Object of a data track.

        `again` is true when it may have been asked for twice, so that it is no duplicate.
        """
        layer, block = location
        if layer not in self.layers or block >= self.blocks:
            self._stats.discarded[NOT_NEEDED] += 1
            return Arrival.EXTRA
        held = self._open.get(layer)
        if not self.needs(layer) or (held is not None and held.has(track.component, block)):
            if again:
                self._stats.discarded[NOT_NEEDED] += 1
            else:
                self._stats.duplicates += 1
            return Arrival.EXTRA
        assert self.manifest is not None
        facts = self._facts[track]
        expected = self.manifest.expected_digest(track, layer, block)
        try:
            data = check_payload(
                payload,
                component=track.component,
                layer=layer,
                block=block,
                first_block=facts.first_block,
                block_tokens=self.descriptor.block_tokens,
                codec=facts.codec,
                raw_octets=facts.raw_octets,
                expected_digest=expected,
            )
        except DecodeError as error:
            self._stats.discarded[error.name] += 1
            self._count_bad(error.name)
            return Arrival.BAD
        if held is None:
            k, v = self._destination.arrays(layer)
            held = self._open[layer] = _OpenLayer(self.descriptor, self.blocks, k=k, v=v)
        held.write(track.component, block, data)
        self._stats.objects_verified += 1
        self._stats.octets += len(data)
        if expected is None:
            digests = self._unconfirmed.get((track, layer))
            if digests is None:
                digests = bytearray(HASH_OCTETS * self.blocks)
                self._unconfirmed[track, layer] = digests
            digests[block * HASH_OCTETS : (block + 1) * HASH_OCTETS] = memoryview(payload)[
                PAYLOAD_HEADER_OCTETS - HASH_OCTETS : PAYLOAD_HEADER_OCTETS
            ]
        else:
            self._stats.objects_confirmed += 1
        if held.complete:
            self._hand_over()
        return Arrival.NEW

    def object_refused(self, location: Location, reason: str) -> bool:
        """An Object was thrown away unread; True when it was one that is needed."""
        layer, block = location
        if not self.needs(layer) or block >= self.blocks:
            self._stats.discarded[NOT_NEEDED] += 1
            return False
        self._stats.discarded[reason] += 1
        self._count_bad(reason)
        return True

    def release(self) -> None:
        """Let go of every array and digest."""
        self.ready.clear()
        self._open.clear()
        self._unconfirmed.clear()
        self._kept = None

    # -- inside --------------------------------------------------------------------------

    def _first_manifest(self, manifest: Manifest) -> None:
        """Check that it is for our tokens, choose the tracks, and prepare the arrays."""
        manifest.check_keys(self._keys, self.namespace.anchor_key)
        self.tracks = manifest.select_tracks(SEGMENT, codecs={Codec.RAW})
        self.manifest = manifest
        self._facts = {track: self._facts_of(track) for track in self.tracks}
        # a publication longer than our tokens is one we were told of: our part of it counts
        self.blocks = min(
            self.entry.blocks, len(self._keys), self._most_blocks or self.entry.blocks
        )
        stats = self._stats
        stats.blocks, stats.tokens = self.blocks, self.blocks * self.descriptor.block_tokens
        kept, self._kept = self._kept, None
        if (
            kept is not None
            and kept.deterministic
            and manifest.deterministic
            and (kept.anchor_key, kept.blocks) == (self.namespace.anchor_key, self.blocks)
        ):
            self._next = kept.next_layer
            self._unconfirmed.update(
                (key, digests)
                for key, digests in kept.unconfirmed.items()
                if key[0] in self.tracks and key[1] < self._next
            )
            stats.layers = self._next - self.layers.start
        else:
            self._destination.begin(stats.tokens, self.layers)

    def _facts_of(self, track: DataTrack) -> _Facts:
        codec = track.known_codec
        assert codec is not None
        return _Facts(codec, raw_octets(self.descriptor, track.component), self.entry.first_block)

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
                self._stats.objects_confirmed += self.blocks
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
                if digests[part] == expected[part]:
                    self._stats.objects_confirmed += 1
                    continue
                held.take_back(track.component, block)
                self._taken_back.append((track, Location(layer, block)))
                self._stats.objects_verified -= 1
                self._stats.octets -= raw_octets(self.descriptor, track.component)
                self._stats.discarded[DecodeErrorName.DIGEST_MISMATCH] += 1
                self._count_bad(DecodeErrorName.DIGEST_MISMATCH)

    def _hand_over(self) -> None:
        """Move every layer that is next and usable to `ready`."""
        while (held := self._open.get(self._next)) is not None and held.complete:
            layer = self._next
            if self._require_listed and any(
                (track, layer) in self._unconfirmed for track in self.tracks
            ):
                return
            del self._open[layer]
            self._next += 1
            self._stats.layers += 1
            tokens = self._stats.tokens
            self.ready.append(
                Layer(layer, held.k[:tokens], held.v[:tokens], self.namespace.publication_id)
            )
