"""Publishing a long layer, or a segment, beside other work of an event loop."""

from __future__ import annotations

import asyncio
from typing import Final

from kvcs.publishing.publication import Publication
from kvsp.blocks.layout import Tensor
from kvsp.names.tokens import Tokens

STEP_OCTETS: Final = 1 << 20
"""Octets that are encoded and hashed at a time, some milliseconds' worth,"""
STEP_OBJECTS: Final = 256
"""and Objects that are published at a time, of all encodings."""
LEAST_IN_THREAD: Final = 2048
"""Octets from which on hashing them lets other threads run."""


async def aput_layer(
    publication: Publication, layer: int, k: Tensor, v: Tensor, *, more: bool = False
) -> None:
    """`publication.put_layer(layer, k, v)`, some blocks at a time.

    They can go out before the next are encoded and hashed, which is done in a thread where that
    is worth it, and the event loop is held for some milliseconds at most. Nothing else may be put
    meanwhile. `more`: after the last layer of a segment the publication is extended, or finished,
    at once; one version of the manifest then says both. Who puts hundreds of thousands of Objects
    should call `gc.freeze()` from time to time meanwhile: a full garbage collection looks at each.
    Raises MisuseError as `put_block`, also when the publication was abandoned in between: then
    the blocks before are published.
    """
    steps = publication.layer_steps(layer, k, v, octets=STEP_OCTETS, objects=STEP_OBJECTS)
    for step in steps:
        if step.section_octets >= LEAST_IN_THREAD:
            await asyncio.to_thread(step.prepare)
        else:
            await asyncio.sleep(0)
            step.prepare()
        step.put(later=True)
    if publication.version_due and not (more and publication.next_object is None):
        publication.publish_version(await asyncio.to_thread(publication.version_payload))


async def aextend(publication: Publication, tokens: Tokens) -> int:
    """`publication.extend(tokens)`, with the Block Keys made and the manifest written, and signed,
    in a thread. Nothing may be put meanwhile. Raises as `extend`, also when the publication was
    abandoned in between."""
    made = await asyncio.to_thread(publication.following, tokens)
    step = publication.segment_step(tokens, made)
    if step is None:
        if publication.version_due:
            publication.publish_version(await asyncio.to_thread(publication.version_payload))
        return 0
    try:
        await asyncio.to_thread(step.prepare)
    except BaseException:
        step.cancel()
        raise
    return step.put()


async def afinish(publication: Publication) -> None:
    """`publication.finish()`, with the last version of the manifest, which lists every Object,
    written, and signed, in a thread. Nothing may be put meanwhile. Raises as `finish`, also when
    the publication was abandoned in between."""
    if publication.next_object is None and not publication.told_all:
        payload = await asyncio.to_thread(publication.version_payload, last=True)
        publication.publish_version(payload)
    publication.finish()
