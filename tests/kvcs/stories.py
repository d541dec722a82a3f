"""Worlds drawn by lot, of publishers, relays, an index and holders, and what is true in them.

A block of a production has octets of its own, made of its Block Key, the layer and the number of
the production. So of whatever a consumer hands over it can be told whose it is: that of the
publication it names and of the tokens it was asked for, or wrong. `World.expected` says how many
blocks are to come at least and at the most.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random

import numpy as np

from kvcs.finding.candidates import OF_ONE_PREFIX
from kvcs.finding.relays import Fallback
from kvcs.names.encoding import Encoding
from kvcs.publishing.publication import Publication
from kvcs.publishing.replicas import moqt_record
from kvcs.retrieving.consumer import Consumer
from kvcs.retrieving.contest import SEATS
from kvcs.retrieving.layers import Layer as GivenLayer
from kvcs.trust.producers import ProducerKey, Producers
from kvsp.blocks.layout import block_section
from kvsp.client import Arrived, Fault, Layer, Missing, RetrievalResult
from kvsp.names.codes import CipherSuite, Codec
from kvsp.names.content_keys import ContentKey
from kvsp.names.identity import Scope, block_keys
from kvsp.records.records import LookupResponse, MatchedBlock, ReplicaRecord
from moqt.publisher import Publisher
from moqt.session import SessionHandler
from moqt.values.codes import RequestErrorCode
from moqt.values.errors import ConnectError
from tests.kvcs.lies import LIES, Lie
from tests.kvcs.support import BLOCK, descriptor, same
from tests.kvcs.support_fallback import record
from tests.kvcs.virtual import VirtualLink

DESCRIBED = descriptor(layers=3, kv_heads=1, head_dim=4)
LAYERS = DESCRIBED.layers
KEY = bytes(range(32))
CONTENT_KEY = ContentKey(0, CipherSuite.AES_128_GCM_SHA256_128, bytes(32))
SIGNER, STRANGER = ProducerKey.generate(), ProducerKey.generate()
RELAYS = [f"moqt://relay{n}.example:4443" for n in range(3)]
"""The consumer's own one first."""
HOLDER = "https://holder.example/kvsp/"
OF_HOLDERS = 0
"""The production that holders have, and that deterministic publications are of."""

Cache = list[tuple[np.ndarray, np.ndarray]]


def block_of(production: int, key: bytes, layer: int, half: int) -> np.ndarray:
    """K or V of a layer of a block."""
    name = b"%d/%d/%d/" % (production, layer, half) + key
    octets = hashlib.shake_128(name).digest(DESCRIBED.section_octets())
    shape = BLOCK, DESCRIBED.kv_heads, DESCRIBED.head_dim
    return np.frombuffer(octets, DESCRIBED.dtype).reshape(shape)


def cache_of(production: int, keys: Sequence[bytes]) -> Cache:
    """K and V of every layer of the blocks with these keys."""

    def tensor(layer: int, half: int) -> np.ndarray:
        return np.concatenate([block_of(production, key, layer, half) for key in keys])

    return [(tensor(layer, 0), tensor(layer, 1)) for layer in range(LAYERS)]


ENCODINGS = [
    [Codec.RAW],
    [Codec.X_ZSTD],
    [Encoding(Codec.RAW, joint=True)],
    [Encoding(Codec.X_ZSTD, joint=True), Codec.RAW],
]
WELL = [*["well"] * 9, "mute", "gone", "lost"]
"""How relays fare: they answer nothing, cannot be reached, or are lost on the way."""
REFUSALS = [RequestErrorCode.DOES_NOT_EXIST, RequestErrorCode.INTERNAL_ERROR]


@dataclass
class Made:
    """A publication, and what becomes of it."""

    world: World
    tokens: list[int]
    common: int
    """How many of its leading blocks are of our tokens."""
    sizes: list[int]
    """Blocks of its segments."""
    production: int
    state: str
    """`whole`; `live`, which goes on while it is retrieved; `stalled`, `abandoned`."""
    forged: bool
    """Made by somebody who has not what the consumer requires."""
    relays: dict[int, Lie | str]
    """What each relay makes of it: `as it is`, `silent`, `refused`, or a lie."""
    encodings: list[Codec | Encoding]
    recorded: int | None = None
    """The relay that the index names it at, when that is true."""
    named: int | None = None
    said: int = 0
    """The relay that the index names it at, and how many blocks of ours it says that it has."""
    last_layer: int = LAYERS - 1
    publication: Publication = field(init=False)
    steps: list[Callable[[], None]] = field(init=False)

    def __post_init__(self) -> None:
        self.publication, self.steps = self._produced(self.tokens, self.production)
        put = {"whole": len(self.steps), "live": 1}.get(self.state)
        if put is None:
            put = self.world.random.randrange(len(self.steps) - 1)
        self.put(put)
        if self.state == "abandoned":
            self.publication.abandon("the power failed")

    def put(self, steps: int) -> None:
        now, self.steps = self.steps[:steps], self.steps[steps:]
        for step in now:
            step()

    def again(self, tokens: list[int]) -> Publication:
        """Another production of as many tokens, whole."""
        publication, steps = self._produced(tokens, 999)
        for step in steps:
            step()
        return publication

    def _produced(self, tokens: list[int], production: int):
        world = self.world
        keys = block_keys(world.scope, DESCRIBED, tokens)
        cache = cache_of(production, keys)
        signer = world.signer if not self.forged else STRANGER if world.signer else None
        scope = Scope(KEY) if self.forged else world.scope
        publication = Publication(
            scope,
            DESCRIBED,
            tokens[: self.sizes[0] * BLOCK],
            growing=True,
            signer=signer,
            deterministic=production == OF_HOLDERS,
            manifest_every=1,
            encodings=self.encodings,
        )
        steps: list[Callable[[], None]] = []
        first = 0
        for number, size in enumerate(self.sizes):
            rows = slice(first * BLOCK, (first + size) * BLOCK)
            if number:
                steps.append(lambda rows=rows: publication.extend(tokens[rows]))
            steps += [
                lambda layer=layer, rows=rows: publication.put_layer(
                    layer, *(tensor[rows] for tensor in cache[layer])
                )
                for layer in range(LAYERS)
            ]
            first += size
        steps.append(publication.finish)
        return publication, steps

    @property
    def anchored(self) -> int:
        """Blocks of ours that its Anchor Key shows; 0 for one that no listing finds."""
        return self.sizes[0] if self.sizes[0] <= self.common else 0

    @property
    def confirmed(self) -> int:
        """Blocks of ours that its manifest shows."""
        blocks = 0
        for size in self.sizes:
            if blocks + size > self.common:
                break
            blocks += size
        return blocks

    @property
    def sure(self) -> int:
        """Blocks of ours that are surely had of it, although it may grow later."""
        # one is chosen by what it has then, and without `follow` it is retrieved so far
        grows = self.state == "live" and not (self.world.follow and len(self.world.made) == 1)
        return min(self.sizes[0], self.confirmed) if grows else self.confirmed

    def obtainable(self, relay: int) -> bool:
        """Whether all of it can be had of a relay."""
        good = not self.forged and self.state in ("whole", "live")
        well = self.world.fares.get(relay) == "well"
        return good and well and self.relays.get(relay) == "as it is"

    def may_be_had(self, relay: int) -> bool:
        """Whether some of its layers may be had of a relay, or of the one that the index names."""
        ways = {self.relays.get(each) for each in (relay, self.recorded) if each is not None}
        return not self.forged and not ways <= {None, "silent", "refused"}


class Relay(Publisher):
    """What a relay makes of the publications that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.silent: set = set()
        self.refused: dict = {}

    def subscribe_received(self, request) -> None:
        self._serve(request, super().subscribe_received)

    def fetch_received(self, request) -> None:
        self._serve(request, super().fetch_received)

    def _serve(self, request, serve) -> None:
        namespace = request.name.namespace
        if namespace in self.refused:
            request.reject(self.refused[namespace], "no")
        elif namespace not in self.silent:
            serve(request)


class Mute(SessionHandler):
    """A relay that answers nothing."""

    def subscribe_received(self, request) -> None: ...

    def fetch_received(self, request) -> None: ...

    def subscribe_namespace_received(self, request) -> None: ...


class IndexAndHolders:
    """What a consumer's client shows of an index service, and of holders of leading blocks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.cache = cache_of(OF_HOLDERS, world.keys)
        self.records: dict[bytes, list[ReplicaRecord]] = {}
        for block in range(world.held):
            key = world.keys[block]
            self._add(record(self.cache, block, holder=HOLDER, key=key, described=DESCRIBED))

    def _add(self, record: ReplicaRecord) -> None:
        self.records.setdefault(record.block_key, []).append(record)

    def know(self, made: Made, keys: Sequence[bytes], cache: Cache, relay: int) -> None:
        """The records of a publication of which the blocks have these `keys`."""
        namespace = made.publication.namespace
        for block, key in enumerate(keys):
            self._add(moqt_record(namespace, key, cache, block, DESCRIBED, RELAYS[relay]))

    async def lookup(self, scope_id, compat_id, keys, *, descriptor):
        await asyncio.sleep(0.01)
        found = []
        for key in keys:
            if key not in self.records:
                break
            found.append(MatchedBlock(key, tuple(self.records[key])))
        return LookupResponse(len(found), tuple(found))

    async def get_blocks(self, blocks, destination, *, descriptor, wanted, deadline_s):
        arrived, missing = [], []
        for layer, block in sorted((n, block) for block, layers in wanted.items() for n in layers):
            await asyncio.sleep(0.002)
            one = range(layer, layer + 1)
            if block >= self.world.held:
                missing.append(Missing(block, one, Fault.NOT_HELD))
                continue
            k, v = (block_section(tensor, block, BLOCK) for tensor in self.cache[layer])
            destination.write(Layer(block, layer, k, v, HOLDER))
            arrived.append(Arrived(block, one, HOLDER))
        return RetrievalResult(len(blocks), tuple(arrived), tuple(missing), 0)


class World:
    """A scope and what its writers, relays and index make of it."""

    def __init__(self, seed: int) -> None:
        random = self.random = Random(seed)
        self.mode = random.choice(["plain", "plain", "signed", "sealed"])
        self.signer = SIGNER if self.mode == "signed" else None
        self.scope = Scope(KEY, (CONTENT_KEY,) if self.mode == "sealed" else ())
        self.blocks = random.randint(1, 4)
        rest = random.randrange(BLOCK)
        self.tokens = [random.randrange(1 << 32) for _ in range(self.blocks * BLOCK + rest)]
        self.keys = block_keys(self.scope, DESCRIBED, self.tokens)
        self.discovery = random.choice(["listing", "listing", "probe"])
        self.way = random.choice(["auto", "auto", "live"])
        self.wanted = random.choice([None, None, random.randint(1, self.blocks)])
        first = random.randrange(LAYERS)
        self.layers = random.choice(
            [range(LAYERS), range(first, random.randint(first, LAYERS - 1) + 1)]
        )
        self.follow = random.random() < 0.3
        self.relays = random.choice([1, 1, 2, 3])
        self.fares = {n: random.choice(WELL) for n in range(self.relays)}
        self.connections = random.choice([1, 1, 1, 2, 3])
        self.listed = random.random() < 0.2
        self.index = random.random() < 0.5
        self.held = random.choice([0, 0, random.randint(1, self.blocks)]) if self.index else 0
        self.client = IndexAndHolders(self) if self.index else None
        self.made = [self._publication(number) for number in range(random.randint(1, 6))]

    def _publication(self, number: int) -> Made:
        random = self.random
        common = random.randint(1, self.blocks)
        beyond = random.choice([0, 0, 0, 1, 2])
        others = [random.randrange(1 << 32) for _ in range(beyond * BLOCK)]
        sizes = [common + beyond]
        while random.random() < 0.4 and sizes[-1] > 1:
            last = random.randint(1, sizes[-1] - 1)
            sizes[-1:] = [sizes[-1] - last, last]
        state = random.choice(["whole", "whole", "whole", "live", "stalled", "abandoned"])
        forged = self.mode != "plain" and random.random() < 0.2
        ways: list[Lie | str] = [*["as it is"] * 4, "silent", "refused"]
        if state == "whole":
            ways += [random.choice(LIES), random.choice(LIES)]
        relays = {n: random.choice(ways) for n in range(self.relays) if random.random() < 0.8}
        made = Made(
            self,
            self.tokens[: common * BLOCK] + others,
            common,
            sizes,
            random.choice([OF_HOLDERS, number + 1]),
            "whole" if forged else state,
            forged,
            relays,
            random.choice(ENCODINGS),
        )
        if self.client is not None and random.random() < 0.6:
            made.named = random.randrange(self.relays)
            keys, production = self.keys[:common], made.production
            if random.random() < 0.2:
                # the index says that it is of all our tokens, and what it records is nowhere
                keys, production = self.keys, 998
            else:
                made.recorded = made.named
            made.said = len(keys)
            blocks = block_keys(self.scope, DESCRIBED, made.tokens)
            cache = cache_of(production, (blocks + self.keys)[: max(len(blocks), len(keys))])
            self.client.know(made, keys, cache, made.named)
        return made

    # -- what is to come of it ---------------------------------------------------------------

    @property
    def strict(self) -> bool:
        return self.mode != "plain"

    def expected(self) -> tuple[int, int]:
        """Blocks that are handed over at least, and at the most.

        What the consumer's own relay has, or the index names, comes before what another relay
        lists (KVCS "Verification and Recovery", in the order of the README).
        """
        honest = [made.common for made in self.made if not made.forged]
        most = max([self.held, *honest])
        least, perhaps, near = 0, self.blocks, True
        for relay in range(self.relays):
            sure = [blocks for made in self.made if (blocks := self._least(made, relay))]
            if sure:
                least = min(sure) if self._hidden(relay) else max(sure)
                # what does not come in time is taken from holders, asked or not
                near = not relay or not self.held
                break
            # of what is spoilt the layers asked for may be whole: then no further relay is asked
            spoilt = [made for made in self.made if made.may_be_had(relay)]
            perhaps = min([perhaps, *(made.anchored or 1 for made in spoilt)])
        least = min(least, perhaps)
        if not self.strict and not (least and self._hidden(0)):
            # what may grow is waited for, and holders are not asked for what may come of it
            grows = self.follow and any(made.may_be_had(n) for made in self.made for n in range(3))
            least = max(least if near else 0, 0 if grows else self.held)
        wanted = self.wanted or self.blocks
        return min(least, wanted), min(most, wanted)

    def _least(self, made: Made, relay: int) -> int:
        """Blocks of a publication that are surely found when the relays up to one are asked."""
        if made.obtainable(relay) and made.anchored:
            return made.sure if len(self.made) <= SEATS else made.anchored
        named = relay == 0 and made.recorded is not None
        if named and any(made.obtainable(each) for each in {0, made.recorded}):
            return made.sure if made.anchored else 0 if self.strict else made.common
        return 0

    def _hidden(self, relay: int) -> bool:
        """Whether so many publications of one prefix, as they or the index say, may be of no use
        that shorter ones have their turn first."""
        said: Counter[int] = Counter()
        for made in self.made:
            asked = {(relay, made.anchored)} if relay in made.relays else set()
            asked |= {
                (each, made.said) for each in {0, made.named} if each is not None and made.said
            }
            said.update(blocks for _, blocks in asked)
        return any(count > OF_ONE_PREFIX for count in said.values())

    # -- the consumer ------------------------------------------------------------------------

    @asynccontextmanager
    async def consumer(self) -> AsyncIterator[Consumer]:
        """A consumer of it, and what is in production going on."""
        async with AsyncExitStack() as stack:
            links = {}
            for number in range(self.relays):
                links[RELAYS[number]] = await stack.enter_async_context(
                    VirtualLink(self._relay(number))
                )

            async def connect(url: str):
                await asyncio.sleep(0.01)
                if self.fares[RELAYS.index(url)] == "gone":
                    raise ConnectError(f"{url} cannot be reached")
                return links[url].session

            own, *others = links
            further = [
                await stack.enter_async_context(VirtualLink(self._relay(0)))
                for _ in range(self.connections - 1)
            ]

            async def connect_again(link: VirtualLink):
                await asyncio.sleep(0.01)
                if self.random.random() < 0.2:
                    raise ConnectError("no further connection")
                return link.session

            for going_on in (self._produce(), self._lose(links)):
                stack.callback(asyncio.ensure_future(going_on).cancel)
            consumer = Consumer(
                None if self.fares[0] == "gone" else links[own].session,
                self.scope,
                DESCRIBED,
                self.tokens,
                layers=self.layers,
                blocks=self.wanted,
                mode=self.way,
                follow=self.follow,
                discovery=self.discovery,
                producers=Producers([SIGNER.public]) if self.mode == "signed" else None,
                fallback=Fallback(
                    self.client,
                    relay=own,
                    connect=connect,
                    relays=others,  # type: ignore[arg-type]
                ),
                others=[connect_again(link) for link in further],
                require_listed=self.listed,
                timeout=60,
            )
            async with consumer:
                yield consumer

    def _relay(self, number: int) -> SessionHandler:
        if self.fares[number] == "mute":
            return Mute()
        relay = Relay()
        for made in self.made:
            way = made.relays.get(number)
            if way is None:
                continue
            namespace = made.publication.namespace.fields
            if callable(way):
                for store in way(made):
                    relay.add_track(store)
                continue
            made.publication.serve(relay)
            if way == "silent":
                relay.silent.add(namespace)
            elif way == "refused":
                relay.refused[namespace] = self.random.choice(REFUSALS)
        return relay

    async def _lose(self, links) -> None:
        for number, link in enumerate(links.values()):
            if self.fares[number] == "lost":
                await asyncio.sleep(self.random.uniform(0, 0.1))
                link.pair.server.close(reason="the relay is lost")

    async def _produce(self) -> None:
        while True:
            await asyncio.sleep(self.random.uniform(0.01, 0.5))
            for made in self.made:
                if made.state == "live":
                    made.put(1)

    # -- what it handed over -------------------------------------------------------------------

    def check(self, layers: Sequence[GivenLayer]) -> int:
        """Every layer is true, and a segment of one production. Returns the blocks of those that
        came since it began for the last time, when they are all that was asked for, else 0."""
        came: set[tuple[int, int]] = set()
        of: dict[int, set[tuple[int, int]]] = {}
        before: tuple[int, int] | None = None
        for layer in layers:
            place = layer.segment, layer.index
            if before is not None and place <= before:
                came.clear()  # it has begun again
                of.clear()
            before = place
            first, blocks = layer.first_token // BLOCK, len(layer.k) // BLOCK
            assert blocks * BLOCK == len(layer.k) == len(layer.v)
            span = range(first, first + blocks)
            may_be = of.get(layer.segment, self._may_be(layer, span))
            of[layer.segment] = {
                (production, end)
                for production, end in may_be
                if all(
                    self._is(layer, block, production if block < end else OF_HOLDERS)
                    for block in span
                )
            }
            assert of[layer.segment], f"layer {layer.index} of segment {layer.segment} is wrong"
            came |= {(layer.index, block) for block in span}
        total = max((block for _, block in came), default=-1) + 1
        return total if len(came) == total * len(self.layers) else 0

    def _may_be(self, layer: GivenLayer, span: range) -> set[tuple[int, int]]:
        """The productions that a layer may be of, each up to which block: after the end of a
        segment, or where the publication goes on with other tokens, it may be of holders."""
        made = {made.publication.namespace.publication_id: made for made in self.made}.get(
            layer.publication
        )
        assert made is None or not made.forged, "it is forged"
        held = self.held if not self.strict else 0
        may_be = {(OF_HOLDERS, span.stop)} if span.stop <= held else set()
        if made is None:
            return may_be
        ends = {*accumulate(made.sizes), made.common} if span.stop <= held else set()
        ends = {end for end in ends if span.start < end < span.stop} | {span.stop}
        return may_be | {(made.production, end) for end in ends}

    def _is(self, layer: GivenLayer, block: int, production: int) -> bool:
        """Whether a block of a layer is that of a production, and of our tokens."""
        at_ = block * BLOCK - layer.first_token
        halves = (half[at_ : at_ + BLOCK] for half in (layer.k, layer.v))
        key = self.keys[block]
        return all(
            same(half, block_of(production, key, layer.index, n)) for n, half in enumerate(halves)
        )

    def __str__(self) -> str:
        lines = [
            f"{self.mode}, {self.blocks} blocks, wanted {self.wanted}, layers {self.layers}, "
            f"relays {[*self.fares.values()]}, connections {self.connections}, "
            f"{self.discovery}, {self.way}, follow {self.follow}, listed {self.listed}, "
            f"index {self.index}, held {self.held}: expected {self.expected()}"
        ]
        for made in self.made:
            relays = {n: getattr(way, "__name__", way) for n, way in made.relays.items()}
            lines.append(
                f"  {made.state}{' forged' if made.forged else ''}, common {made.common}, "
                f"segments {made.sizes}, production {made.production}, at {relays}, "
                f"index {made.recorded} {made.named} {made.said}, "
                f"{made.publication.namespace.publication_id.hex()[:6]}"
            )
        return "\n".join(lines)
