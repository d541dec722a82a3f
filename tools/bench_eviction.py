"""How much of the prompts of conversations a full holder still has, and what making room costs.

    python -m tools.bench_eviction
    python -m tools.bench_eviction --requests 20000 --rooms 2000 8000

The trace is synthetic and has the shape of published ones of chat services: conversations of a
few turns that begin with one of some system prompts, those popular by Zipf's law; each turn sends
all that was said before and a little more, and many conversations go on side by side. Hits are
the leading blocks of a prompt that are held: a block whose beginning is gone is of no use.

Prints a JSON object for each room, in blocks: the share of blocks hit when whoever stores a block
tells which one it follows, and when nobody does, which is plain LRU; and how many blocks were
visited to make room for one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvsp.blocks.container import ContainerHeader
from kvsp.holder.store import BlockInfo, MissError, Part, Store
from kvsp.names.codes import Codec, Tier
from kvsp.names.uris import BlockId

TIER = Tier.DISK
HEADER = ContainerHeader.of(Codec.RAW, 0, 16, [(1, 1)])
DIGEST = bytes(32)
PART = Part(HEADER, DIGEST)
SYSTEM_PROMPTS = 40
LIVE = 400
"""Conversations that go on side by side."""


@dataclass(frozen=True, slots=True)
class Result:
    """One run over a trace."""

    asked: int
    hit: int
    stored: int
    visits: int

    @property
    def ratio(self) -> float:
        return self.hit / max(1, self.asked)

    @property
    def visits_per_block(self) -> float:
        return self.visits / max(1, self.stored)


def trace(requests: int, seed: int = 1) -> Iterator[Sequence[bytes]]:
    """The block keys of each request's prompt."""
    numbers = random.Random(seed)
    prompts = [_keys(f"system {each}", numbers.randint(4, 64)) for each in range(SYSTEM_PROMPTS)]
    weights = [1 / (rank + 1) for rank in range(SYSTEM_PROMPTS)]
    live: list[list[bytes]] = []
    begun = 0
    for _ in range(requests):
        if len(live) < LIVE or numbers.random() < 0.25:
            begun += 1
            live.append(list(numbers.choices(prompts, weights)[0]))
        # who has just spoken is the likeliest to speak again
        place = len(live) - 1 - min(int(numbers.expovariate(1 / 80)), len(live) - 1)
        talk = live.pop(place)
        talk += _keys(f"turn {begun} {len(talk)}", numbers.randint(1, 24), talk[-1])
        yield tuple(talk)
        if numbers.random() < 0.8:
            live.append(talk)


def _keys(name: str, count: int, above: bytes = b"") -> list[bytes]:
    made = []
    for number in range(count):
        above = hashlib.sha256(above + f"{name} {number}".encode()).digest()
        made.append(above)
    return made


def replay(requests: Sequence[Sequence[bytes]], room: int, *, chained: bool) -> Result:
    """Ask a store of `room` blocks for each prompt, and store what it lacks."""
    store = Store({TIER: room * PART.octets}, lambda block, now: False)
    asked = hit = stored = 0
    for keys in requests:
        blocks = [BlockId(DIGEST, DIGEST[:16], key) for key in keys]
        asked += len(blocks)
        held = next((place for place, each in enumerate(blocks) if not _read(store, each)), None)
        hit += len(blocks) if held is None else held
        if held is None:
            continue
        for prior, block in zip([None, *keys][held:], blocks[held:], strict=False):
            if block in store:
                continue
            reservation, steps = store.reserve(TIER, PART.octets, 0.0)
            for step in steps:
                store.dropped(step)
            info = BlockInfo(Codec.RAW, 2, DIGEST, (DIGEST,), prior if chained else None)
            store.commit(block, reservation, info, PART)
            stored += 1
    return Result(asked, hit, stored, store.order.visits)


def _read(store: Store, block: BlockId) -> bool:
    """Whether a block is there; it is used then."""
    try:
        store.find(block)
    except MissError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--rooms", type=int, nargs="+", default=[1000, 4000, 16_000])
    options = parser.parse_args()
    requests = list(trace(options.requests))
    for room in options.rooms:
        with_chain = replay(requests, room, chained=True)
        without = replay(requests, room, chained=False)
        row = {
            "room_blocks": room,
            "requests": len(requests),
            "blocks_asked": with_chain.asked,
            "hit_chain": round(with_chain.ratio, 4),
            "hit_lru": round(without.ratio, 4),
            "visits_per_stored_block": round(with_chain.visits_per_block, 2),
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main()
