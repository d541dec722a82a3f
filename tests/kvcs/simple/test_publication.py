"""Publications of the second profile: a Group for each chunk, an Object for each token."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvcs.names.errors import MisuseError
from kvcs.simple import publication as publications
from kvcs.simple.names import Compression
from kvcs.simple.publication import PromptPublication, aput_tokens
from moqt.values.codes import ObjectStatus, PropertyType, PublishDoneCode
from moqt.values.messages import KeyValue
from moqt.values.names import Location
from tests.kvcs.simple.support import CHUNK, FP16, VECTORS, layers_of, payloads, values

PROMPT = b"Hello"


def put_apart(publication: PromptPublication, *sizes: int) -> None:
    start = 0
    for size in sizes:
        publication.put_tokens(layers_of(values()[start : start + size]))
        start += size


@pytest.mark.parametrize("sizes", [(3,), (1, 1, 1), (1, 2), (2, 1)])
def test_every_compression_is_a_track_of_the_objects_of_the_vectors(sizes) -> None:
    publication = PromptPublication(FP16, PROMPT, list(Compression), chunk_tokens=CHUNK)
    put_apart(publication, *sizes)
    publication.finish()
    assert publication.complete and publication.tokens == 3
    for compression, store in zip(Compression, publication.tracks, strict=True):
        assert store.name.name == compression.track_name
        assert store.name.namespace == publication.namespace.fields
        held = {
            each.location: (each.status, bytes(each.payload))
            for group in store.groups.values()
            for each in group.objects.values()
        }
        normal = {at: octets for at, (status, octets) in held.items() if octets}
        assert normal == payloads(compression)
        ends = [at for at, (s, _) in held.items() if s is ObjectStatus.END_OF_GROUP]
        assert ends == [tuple(each) for each in VECTORS["ends"]["end_of_group"]]
        assert store.end_of_track == Location(*VECTORS["ends"]["end_of_track"])
        assert {each.subgroup for g in store.groups.values() for each in g.objects.values()} == {0}
        assert store.end_code == PublishDoneCode.TRACK_ENDED


def test_a_token_can_be_sent_as_soon_as_it_is_put() -> None:
    publication = PromptPublication(FP16, PROMPT, chunk_tokens=CHUNK)
    publication.put_tokens(layers_of(values()[:1]))
    assert publication.tracks[0].largest == Location(0, 0)
    assert publication.tracks[0].end_of_track is None


async def test_beside_others_on_the_loop_tokens_are_encoded_in_a_thread(monkeypatch) -> None:
    threads, real = [], publications.encode_tokens

    def noted(*arguments):
        threads.append(threading.get_ident())
        return real(*arguments)

    monkeypatch.setattr(publications, "encode_tokens", noted)
    publication = PromptPublication(FP16, PROMPT, list(Compression), chunk_tokens=CHUNK)
    await aput_tokens(publication, layers_of(values()))
    assert publication.tokens == 3
    assert len(threads) == len(Compression) and threading.get_ident() not in threads
    for compression, store in zip(Compression, publication.tracks, strict=True):
        sent = {each.location: bytes(each.payload) for each in store.objects() if each.length}
        assert sent == payloads(compression)


async def test_of_one_that_is_abandoned_while_tokens_are_encoded_none_is_put(monkeypatch) -> None:
    publication, real = PromptPublication(FP16, PROMPT), publications.encode_tokens

    def abandoned(*arguments):
        publication.abandon()
        return real(*arguments)

    monkeypatch.setattr(publications, "encode_tokens", abandoned)
    with pytest.raises(MisuseError, match="the publication has ended"):
        await aput_tokens(publication, layers_of(values()))
    assert not publication.tokens and publication.tracks[0].largest is None


def test_relays_may_keep_it_for_ten_minutes_or_as_long_as_was_said() -> None:
    for settings, due in (({}, 600_000), ({"cache_ms": 5}, 5)):
        (store,) = PromptPublication(FP16, PROMPT, **settings).tracks
        assert store.properties == (KeyValue(PropertyType.MAX_CACHE_DURATION, due),)


def test_arrays_that_do_not_fit_are_refused_and_nothing_is_published() -> None:
    publication = PromptPublication(FP16, PROMPT, list(Compression))
    good = layers_of(values())
    other = [(k, v.astype(np.float32)) for k, v in good]
    short = [good[0], (good[1][0], good[1][1][:-1])]
    wide = layers_of(np.full_like(values(), np.inf))
    for bad, said in (
        (good[:1], "1 layers instead of 2"),
        (other, "layer 0: v: elements of float32"),
        (short, "layer 1: v has 2 tokens instead of 3"),
        (wide, "cannot hold"),
    ):
        with pytest.raises(MisuseError, match=said):
            publication.put_tokens(bad)
    assert publication.tokens == 0 and all(not store.placed for store in publication.tracks)


def test_nothing_follows_the_end_and_there_is_no_end_before_the_first_token() -> None:
    publication = PromptPublication(FP16, PROMPT)
    with pytest.raises(MisuseError, match="no token"):
        publication.finish()
    publication.abandon("stopped")
    publication.abandon("again")
    assert [store.end_reason for store in publication.tracks] == ["stopped"]
    with pytest.raises(MisuseError, match="has ended"):
        publication.put_tokens(layers_of(values()))
    assert not publication.complete


@pytest.mark.parametrize(
    "settings",
    [
        {"chunk_tokens": 0},
        {"cache_ms": 0},
        {"compressions": ()},
        {"compressions": (Compression.FP16, Compression.FP16)},
    ],
)
def test_settings_that_cannot_be_are_refused(settings) -> None:
    with pytest.raises(ValueError, match=r"at least 1|each once"):
        PromptPublication(FP16, PROMPT, **settings)
