"""A retrieval goes on from what an earlier one verified (KVCS "Verification and Recovery")."""

from __future__ import annotations

import asyncio

import pytest

from kvcs.finding.relays import Fallback
from kvcs.keeping.failures import Failures
from kvcs.keeping.resume_file import ResumeFile
from kvcs.publishing.publication import Publication
from kvsp.blocks.kv_files import KvFile
from tests.kvcs.support import (
    BLOCKS,
    DESCRIPTOR,
    LAYERS,
    SCOPE,
    TOKENS,
    Link,
    Split,
    block_by_block,
    kv,
    produced,
    publisher,
    same,
    serve_first_layers,
)
from tests.kvcs.support_fallback import FakeClient

CACHE = kv()
OBJECTS = 2 * LAYERS * BLOCKS


class Cut(ResumeFile):
    """One whose retrieval is cut short after so many Objects."""

    left: int

    def note(self, *record) -> None:
        super().note(*record)
        self.left -= 1
        if not self.left:
            raise OSError("cut")


def destination(path, objects: int | None = None):
    settings = {"scope_id": SCOPE.scope_id, "layers": range(LAYERS), "most_tokens": len(TOKENS)}
    if objects is None:
        return ResumeFile(path, DESCRIPTOR, **settings)
    cut = Cut(path, DESCRIPTOR, **settings)
    cut.left = objects
    return cut


async def cut_short(path, handler, objects: int, **settings) -> None:
    with destination(path, objects) as out:
        out.load()
        async with Link(handler) as link:
            with pytest.raises(OSError, match="cut"):
                await link.consumer(destination=out, **settings).retrieve()


async def resumed(path, handler, **settings):
    """The stats of a retrieval that goes on, and what it says."""
    with destination(path) as out:
        out.load()
        async with Link(handler) as link:
            stats = await link.consumer(destination=out, **settings).retrieve()
            await link.assert_clean()
        out.commit()
        return stats, out.said


def check(path) -> None:
    with KvFile.open(path, DESCRIPTOR) as written:
        for layer, (k, v) in enumerate(CACHE):
            assert same(written.k(layer), k) and same(written.v(layer), v)


@pytest.mark.parametrize("mode", ["live", "fetch"])
@pytest.mark.parametrize("cut", [1, 2, 9, 10, 31, OBJECTS - 1])
async def test_what_was_verified_is_not_asked_for_again(tmp_path, mode, cut):
    publication = produced(cache=CACHE)
    await cut_short(tmp_path / "out", publisher(publication), cut, mode=mode)
    handler = Split(publication)
    stats, said = await resumed(tmp_path / "out", handler, mode=mode)
    assert said is None
    assert stats.objects_resumed == cut
    assert stats.objects_verified == OBJECTS - cut
    assert stats.octets == (OBJECTS - cut) * DESCRIPTOR.section_octets()
    assert not stats.duplicates and not stats.discarded
    check(tmp_path / "out")


async def test_a_live_publication_goes_on_where_it_was(tmp_path):
    publication = produced(cache=CACHE)
    first = Split(publication)
    serve_first_layers(first, publication, 3)
    await cut_short(tmp_path / "out", first, 2 * 3 * BLOCKS - 4, mode="live")
    stats, _ = await resumed(tmp_path / "out", publisher(publication), mode="live")
    assert stats.objects_resumed == 2 * 3 * BLOCKS - 4
    assert stats.objects_verified == OBJECTS - stats.objects_resumed
    check(tmp_path / "out")


async def test_the_publication_that_was_begun_goes_before_others_as_long(tmp_path):
    begun, other = produced(cache=CACHE), produced(cache=kv(seed=7))
    await cut_short(tmp_path / "out", publisher(begun), 20)
    named = [other.namespace, begun.namespace]
    for order in (named, named[::-1]):
        async with Link(publisher(begun, other)) as link:
            with destination(tmp_path / "out") as out:
                out.load()
                consumer = link.consumer(destination=out, publications=order)
                stats = await consumer.retrieve()
                assert stats.publication == begun.namespace.publication_id.hex()
                assert stats.objects_resumed >= 20


async def test_another_production_is_never_combined_with_what_is_there(tmp_path):
    await cut_short(tmp_path / "out", publisher(produced(cache=kv(seed=7))), 20)
    stats, said = await resumed(tmp_path / "out", publisher(produced(cache=CACHE)))
    assert stats.objects_resumed == 0
    assert stats.objects_verified == OBJECTS
    assert said is not None and "anew" in said
    check(tmp_path / "out")


async def test_deterministic_productions_are_combined(tmp_path):
    first = produced(cache=CACHE, deterministic=True)
    await cut_short(tmp_path / "out", publisher(first), 20)
    stats, _ = await resumed(tmp_path / "out", publisher(produced(cache=CACHE, deterministic=True)))
    assert (stats.objects_resumed, stats.objects_verified) == (20, OBJECTS - 20)
    check(tmp_path / "out")


async def test_a_promise_of_determinism_that_is_broken_mixes_nothing(tmp_path):
    lying = produced(cache=kv(seed=7), deterministic=True)
    await cut_short(tmp_path / "out", publisher(lying), 20)
    stats, _ = await resumed(tmp_path / "out", publisher(produced(cache=CACHE, deterministic=True)))
    assert stats.objects_resumed == 0
    check(tmp_path / "out")


async def test_the_result_says_which_layers_were_there(tmp_path):
    publication = produced(cache=CACHE)
    await cut_short(tmp_path / "out", publisher(publication), 2 * BLOCKS, mode="fetch")
    stats, _ = await resumed(tmp_path / "out", Split(publication), mode="fetch")
    there = {(block, layer) for block, layer in stats.resumed}
    for span in stats.sources:
        (first, last), (low, high) = span["blocks"], span["layers"]
        whole = {(b, n) for b in range(first, last + 1) for n in range(low, high + 1)}
        assert (span["source"] == "resumed") == bool(whole & there)
        assert whole <= there or not whole & there


async def test_what_holders_wrote_over_is_not_what_was_there(tmp_path):
    publication = produced(cache=CACHE)
    await cut_short(tmp_path / "out", publisher(publication), 20)
    kept: list = []
    gone = asyncio.Event()

    class Late(Split):
        def subscribe_received(self, request) -> None:
            if gone.is_set():
                super().subscribe_received(request)
            else:
                kept.append(request)

    def gives(block: int, layer: int) -> bool:
        if layer < 2:
            return True
        gone.set()
        return False

    handler = Late(publication)
    with destination(tmp_path / "out") as out:
        out.load()
        async with Link(handler) as link:

            def answer(_) -> None:
                while gone.is_set() and kept:
                    handler.subscribe_received(kept.pop())

            link.on_pump = answer
            client = FakeClient(cache=kv(seed=7), gives=gives)
            stats = await link.consumer(
                destination=out,
                publications=[publication.namespace],
                fallback=Fallback(client, after=0.05, relay="moqt://relay.example"),
            ).retrieve()
            await link.assert_clean()
        out.commit()
    assert client.asked[0, 0] == 1 and stats.source == "moqt://relay.example"
    check(tmp_path / "out")


async def test_what_another_publication_goes_on_with_is_noted_too(tmp_path):
    first, second = (produced(cache=CACHE, deterministic=True) for _ in range(2))
    handler = Split(first, second)
    serve_first_layers(handler, first, 3)
    held = 2 * 3 * BLOCKS + 10
    named = [first.namespace, second.namespace]
    await cut_short(tmp_path / "out", handler, held, publications=named)
    stats, _ = await resumed(tmp_path / "out", publisher(second))
    assert (stats.objects_resumed, stats.objects_verified) == (held, OBJECTS - held)
    check(tmp_path / "out")


async def test_what_a_later_manifest_takes_back_is_no_object_that_came(tmp_path):
    first = Split(lying := produced(cache=kv(seed=7), deterministic=True))
    await cut_short(tmp_path / "out", first, 3)
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS, deterministic=True)
    steps = block_by_block(publication, CACHE)
    with destination(tmp_path / "out") as out:
        out.load()
        async with Link(publisher(publication)) as link:
            link.on_pump = lambda n: next(steps, None) if n > 20 else None
            consumer = link.consumer(destination=out, require_listed=True)
            stats = await consumer.retrieve()
        out.commit()
    assert lying.namespace.anchor_key == publication.namespace.anchor_key
    assert stats.discarded == {"other-production": 3}
    assert stats.objects_resumed == 0 and not stats.resumed
    assert stats.objects_verified == stats.objects_confirmed == OBJECTS
    assert stats.octets == OBJECTS * DESCRIPTOR.section_octets()
    check(tmp_path / "out")


async def test_what_was_there_is_not_counted_as_confirmed_when_it_is_listed(tmp_path):
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    steps = block_by_block(publication, CACHE)
    for _ in range(2 * BLOCKS):
        next(steps)
    await cut_short(tmp_path / "out", publisher(publication), 3, mode="live")
    with destination(tmp_path / "out") as out:
        out.load()
        async with Link(publisher(publication)) as link:
            link.on_pump = lambda n: next(steps, None) if n > 20 else None
            stats = await link.consumer(destination=out).retrieve()
        out.commit()
    assert stats.objects_resumed == 3 and not stats.discarded
    assert stats.objects_verified == stats.objects_confirmed == OBJECTS - 3
    check(tmp_path / "out")


async def test_what_is_gone_on_with_comes_first_though_it_failed_lately(tmp_path):
    begun, other = produced(cache=CACHE), produced(cache=kv(seed=7))
    await cut_short(tmp_path / "out", publisher(begun), 20)
    failures = Failures()
    failures.note((None, begun.namespace), 1e12)
    stats, said = await resumed(tmp_path / "out", publisher(begun, other), failures=failures)
    assert stats.publication == begun.namespace.publication_id.hex()
    assert stats.objects_resumed == 20 and said is None
