"""Publications as other implementations may make them: in segments, codecs and components."""

from __future__ import annotations

from types import SimpleNamespace

from kvcs.names.codes import Component
from kvcs.names.manifest_builder import ManifestBuilder
from kvcs.names.namespace import PublicationNamespace
from kvcs.names.payload import data_digest, encode_header
from kvcs.names.tracks import DataTrack
from kvcs.publishing.publication import Publication
from kvsp.blocks.layout import block_section
from kvsp.names import ijson
from kvsp.names.codes import Codec
from kvsp.names.identity import block_keys
from moqt.track.store import TrackStore
from moqt.values.codes import ObjectStatus, PublishDoneCode
from moqt.values.names import FullTrackName, Location
from tests.kvcs.support import DESCRIPTOR, SCOPE, TOKENS, kv, same


def segmented(
    sizes=(3, 2), cache=None, *, tokens=TOKENS, described=DESCRIPTOR, scope=SCOPE, change=None
) -> SimpleNamespace:
    """A complete publication in segments of `sizes` blocks; `change(tree)` changes its manifest."""
    cache = cache or kv(described, len(tokens))
    keys = block_keys(scope, described, tokens)
    namespace = PublicationNamespace.create(scope.scope_id, described.compat_id, keys[sizes[0] - 1])
    builder = ManifestBuilder(described, namespace)
    stores, rows = [], described.block_tokens
    for blocks in sizes:
        first = builder.build().blocks if stores else 0
        segment = builder.add_segment(
            keys[first : first + blocks], [(Component.K, Codec.RAW), (Component.V, Codec.RAW)]
        )
        for half, component in enumerate((Component.K, Component.V)):
            track = DataTrack(component, "raw", segment)
            store = TrackStore(FullTrackName(namespace.fields, track.name))
            for layer, tensors in enumerate(cache):
                digests = []
                for number in range(blocks):
                    data = block_section(tensors[half], first + number, rows)
                    digests.append(data_digest(data))
                    header = encode_header(
                        component=component,
                        layer=layer,
                        block=number,
                        token_start=(first + number) * rows,
                        token_count=rows,
                        codec=Codec.RAW,
                        data_length=len(data),
                        data_digest=digests[-1],
                    )
                    store.append(layer, number, (header, data), priority=0)
                end(store, layer, blocks)
                builder.add_group(track, layer, digests)
            store.finish(PublishDoneCode.TRACK_ENDED)
            stores.append(store)
        builder.complete(segment)
    tree = ijson.loads(builder.build().to_json())
    if change is not None:
        change(tree)
    manifest = TrackStore(FullTrackName(namespace.fields, b"manifest"))
    manifest.append(0, 0, ijson.canonical(tree), priority=0)
    end(manifest, 0, 1)
    manifest.finish(PublishDoneCode.TRACK_ENDED)
    return SimpleNamespace(namespace=namespace, tracks=(manifest, *stores))


def end(store: TrackStore, group: int, objects: int) -> None:
    store.mark_end(Location(group, objects), ObjectStatus.END_OF_GROUP, priority=0)
    store.finish_subgroup(group, 0)


def in_codec(name: str, *segments: int):
    """A change: these segments are offered in another codec only."""

    def change(tree) -> None:
        for segment in segments:
            entry = tree["segments"][segment]
            entry["tracks"] = [t.replace(".raw.", f".{name}.") for t in entry["tracks"]]
            entry["object_digests"] = {
                t.replace(".raw.", f".{name}."): each for t, each in entry["object_digests"].items()
            }

    return change


def with_component(tree) -> None:
    """A change: each segment also has a track of a component that nobody here knows."""
    for number, entry in enumerate(tree["segments"]):
        entry["tracks"].append(f"latent.raw.s{number}")
        entry["object_digests"][f"latent.raw.s{number}"] = []


def put_segment(publication: Publication, cache, layers=None) -> None:
    """Put the segment that is due, or only its `layers`, from the layers of the whole cache."""
    first = publication.first_token
    for layer in range(len(cache)) if layers is None else layers:
        publication.put_layer(layer, *(tensor[first:] for tensor in cache[layer]))


def grown(sizes, cache, tokens=TOKENS, *, finish=True, described=DESCRIPTOR, **settings):
    """A publication of ours in segments of `sizes` blocks, each of them whole."""
    publication, at = None, 0
    for blocks in sizes:
        chunk = tokens[at : at + blocks * described.block_tokens]
        at += len(chunk)
        if publication is None:
            publication = Publication(SCOPE, described, chunk, growing=True, **settings)
        else:
            publication.extend(chunk)
        put_segment(publication, cache)
    if finish:
        publication.finish()
    return publication


def whole(layers, cache, blocks, described=DESCRIPTOR) -> int:
    """Check that the layers come segment by segment, each in order and with its tokens, and are
    those of the first `blocks` blocks; returns how many segments there are."""
    at, ends = 0, [0]
    for number, layer in enumerate(layers):
        assert (layer.segment, layer.index) == divmod(number, len(cache))
        if not layer.index:
            at = ends[-1]
            ends.append(at + len(layer.k))
        assert layer.first_token == at and len(layer.k) == len(layer.v) == ends[-1] - at
        for got, wanted in zip((layer.k, layer.v), cache[layer.index], strict=True):
            assert same(got, wanted[at : ends[-1]])
    assert len(layers) == len(cache) * (len(ends) - 1)
    assert ends[-1] == blocks * described.block_tokens
    return len(ends) - 1
