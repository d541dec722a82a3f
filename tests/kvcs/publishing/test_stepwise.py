"""Publishing a layer step by step, beside others on the event loop."""

from __future__ import annotations

import asyncio

import pytest

from kvcs import aput_layer
from kvcs.names.errors import MisuseError
from kvcs.publishing import stepwise
from kvcs.publishing.publication import Publication
from tests.kvcs.support import DESCRIPTOR, SCOPE, TOKENS, kv, manifests, produced


@pytest.mark.parametrize("threads", [False, True])
async def test_a_layer_put_step_by_step_is_the_same_and_leaves_before_it_is_all_hashed(
    threads, monkeypatch
):
    monkeypatch.setattr(stepwise, "STEP_BLOCKS", 2)
    monkeypatch.setattr(stepwise, "LEAST_IN_THREAD", 0 if threads else 1 << 30)
    publication, at_once, seen = Publication(SCOPE, DESCRIPTOR, TOKENS), produced(), []

    async def watch():
        while not publication.complete:
            seen.append(publication.next_object)
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    for layer, (k, v) in enumerate(kv()):
        await aput_layer(publication, layer, k, v)
    await watching
    # others had their turn within a layer, with a part of it published
    assert {(0, 2), (0, 4), (3, 2)} <= set(seen)
    for one, other in zip(publication.tracks[1:], at_once.tracks[1:], strict=True):
        assert [(s.location, bytes(s.payload), s.priority) for s in one.objects()] == [
            (s.location, bytes(s.payload), s.priority) for s in other.objects()
        ]
    assert manifests(publication)[-1].segments == manifests(at_once)[-1].segments


async def test_what_was_abandoned_while_a_layer_is_put_step_by_step_gets_no_more_of_it(monkeypatch):
    monkeypatch.setattr(stepwise, "STEP_BLOCKS", 2)
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    putting = asyncio.create_task(aput_layer(publication, 0, *kv()[0]))
    while publication.next_object == (0, 0):  # noqa: ASYNC110
        await asyncio.sleep(0)
    publication.abandon()
    with pytest.raises(MisuseError, match="block 2: the publication has ended"):
        await putting
    other = Publication(SCOPE, DESCRIPTOR, TOKENS)
    with pytest.raises(MisuseError, match="layer 0: k has 4 tokens"):
        await aput_layer(other, 0, *(tensor[:4] for tensor in kv()[0]))
