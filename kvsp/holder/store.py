"""What a holder holds, where, and what has to go: the core without I/O.

A block has at most one part per tier, a part is a container of consecutive layers.
Room is reserved before octets are written; what must leave for it is named in steps
that the shell carries out and confirms, a withdrawal always before the eviction
(KVSP "Publishing and Withdrawing Replicas"). Time is a parameter, in seconds.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from kvsp.blocks.container import ContainerHeader
from kvsp.holder.order import EvictionOrder
from kvsp.holder.rooms import NoRoomError, Reservation, Room
from kvsp.names.codes import Codec, Tier
from kvsp.names.errors import KvspError
from kvsp.names.uris import BlockId

_GROWTH_SHARE: Final = 16
"""A tier that was shrunk grows by this fraction of its budget at a time."""

GHOSTS: Final = 4096
"""Blocks remembered after they went, to say why they are missing."""


class MissReason(StrEnum):
    """Why a block or some layers cannot be served."""

    UNKNOWN_KEY = "unknown-key"
    OTHER_COMPAT = "other-compat"
    EVICTED = "evicted"
    LOST = "lost"
    LAYERS = "layers"
    UNAUTHORIZED = "unauthorized"


class MissError(KvspError):
    """The block, or one of the layers asked for, is not here. `available`: layers held."""

    def __init__(self, reason: MissReason, available: tuple[range, ...] = ()) -> None:
        super().__init__(reason.value)
        self.reason = reason
        self.available = available


class BlockExistsError(KvspError):
    """The block is held already, or was stored by someone else meanwhile."""


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """What is known of a block whatever part of it is held.

    `layer_digests` cover all layers of the descriptor, layer 0 first.
    """

    codec: Codec
    size: int
    digest: bytes
    layer_digests: tuple[bytes, ...]
    prior: bytes | None = None
    """Key of the block before it in its prompt, as whoever stored it said."""

    position: int = 0
    """Blocks before it in its prompt, as far as they were here when it came."""

    @property
    def layers(self) -> int:
        return len(self.layer_digests)


class Segment(NamedTuple):
    """Consecutive layers to be read from one tier, as octets of the part's container."""

    tier: Tier
    layers: range
    offset: int
    octets: int


@dataclass(frozen=True, slots=True)
class Part:
    """A container of consecutive layers in one tier."""

    header: ContainerHeader
    container_digest: bytes

    @property
    def layers(self) -> range:
        return self.header.layers

    @property
    def octets(self) -> int:
        return self.header.total_octets

    def segment(self, tier: Tier, layers: range) -> Segment:
        """Where the sections of some of its layers are."""
        lengths = [k + v for k, v in self.header.lengths]
        first = layers.start - self.layers.start
        start = len(self.header.encoded) + sum(lengths[:first])
        return Segment(tier, layers, start, sum(lengths[first : first + len(layers)]))


@dataclass(slots=True)
class Entry:
    """One block that is held."""

    info: BlockInfo
    parts: dict[Tier, Part] = field(default_factory=dict)
    leaving: set[Tier] = field(default_factory=set)
    reads: int = 0

    def held(self, without: Tier | None = None) -> set[int]:
        """The layers that are here, in any tier but `without`."""
        return {
            layer
            for tier, part in self.parts.items()
            if tier is not without
            for layer in part.layers
        }

    def staying(self, without: Tier | None = None) -> set[int]:
        """The layers that are here and not about to leave."""
        return {
            layer
            for tier, part in self.parts.items()
            if tier is not without and tier not in self.leaving
            for layer in part.layers
        }


class Found(NamedTuple):
    """Where the layers asked for are, in ascending order, as it was at that moment."""

    info: BlockInfo
    layers: range
    segments: tuple[Segment, ...]
    parts: Mapping[Tier, Part]
    """All parts of the block, in the order they came."""

    reads: int

    def header(self) -> ContainerHeader:
        """The header of the container of these layers."""
        lengths: list[tuple[int, int]] = []
        for segment in self.segments:
            held = self.parts[segment.tier]
            first = segment.layers.start - held.layers.start
            lengths += held.header.lengths[first : first + len(segment.layers)]
        tokens = self.parts[self.segments[0].tier].header.token_count
        return ContainerHeader.of(self.info.codec, self.layers.start, tokens, lengths)

    def container_digest(self) -> bytes | None:
        """SHA-256 of that container, when one part is just that."""
        for part in self.parts.values():
            if part.layers == self.layers:
                return part.container_digest
        return None


class Step(NamedTuple):
    """A part that is to leave a tier. The shell looks whether it still is (`Store.applies`);
    copies it into `demotion` if there is room promised below; withdraws the record when
    nothing else has its layers (`Store.only_here`); calls `Store.dropped`; deletes."""

    block: BlockId
    tier: Tier
    part: Part
    demotion: Reservation | None = None


@dataclass(slots=True)
class StoreCounters:
    """Totals since the start."""

    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    reads_refused: int = 0
    stored: int = 0
    stores_rejected: Counter[str] = field(default_factory=Counter)
    evictions: Counter[str] = field(default_factory=Counter)
    demotions: int = 0
    promotions: int = 0
    adopted: int = 0
    lost: int = 0
    quarantined: int = 0
    shrunk: Counter[str] = field(default_factory=Counter)
    """Times a medium was full before the budget of its tier was."""

    verified: Counter[str] = field(default_factory=Counter)
    """Copies read to verify them, by what came of it: `sound`, `lost`."""

    octets_verified: int = 0
    octets_read: Counter[str] = field(default_factory=Counter)


class Store:
    """The table of blocks. `is_leased` says whether an unexpired lease covers a block."""

    def __init__(
        self,
        budgets: Mapping[Tier, int | None],
        is_leased: Callable[[BlockId, float], bool],
    ) -> None:
        """`budgets` in octets, fastest tier first; None for no bound."""
        if not budgets:
            raise ValueError("a holder has at least one tier")
        self.tiers = tuple(budgets)
        self.counters = StoreCounters()
        self._rooms = {tier: Room(tier, budget) for tier, budget in budgets.items()}
        self._is_leased = is_leased
        self.order = EvictionOrder(self.tiers)
        self.watch: Callable[[BlockId, int], None] = lambda block, by: None
        """Called with each block that has come, and 1, or has gone, and -1."""
        self._entries: dict[BlockId, Entry] = {}
        self._compats: Counter[bytes] = Counter()
        self._ghosts: OrderedDict[BlockId, MissReason] = OrderedDict()
        self._rates: dict[Tier, float] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._entries

    def blocks(self) -> Iterable[BlockId]:
        """The blocks held, in the order in which they came."""
        return tuple(self._entries)

    def entry(self, block: BlockId) -> Entry | None:
        return self._entries.get(block)

    def used(self, tier: Tier) -> int:
        """Octets stored or reserved in a tier."""
        room = self._rooms[tier]
        return room.used + room.reserved

    def budget(self, tier: Tier) -> int | None:
        return self._rooms[tier].budget

    def limit(self, tier: Tier) -> int | None:
        """What a tier may hold now: its budget, or less when its medium has less room."""
        return self._rooms[tier].limit

    def may_hold(self, tier: Tier, octets: int) -> bool:
        """Whether a part so large can be in a tier at all."""
        limit = self._rooms[tier].limit
        return limit is None or octets <= limit

    def is_shrunk(self, tier: Tier) -> bool:
        """Whether the medium of a tier has shown to hold less than the budget."""
        return self._rooms[tier].ceiling is not None

    @property
    def capacity(self) -> int | None:
        """What all tiers hold together: their budgets, or what their media have; None when
        one is not bounded."""
        limits = [room.limit for room in self._rooms.values()]
        return None if None in limits else sum(limit or 0 for limit in limits)

    # --- reading ---------------------------------------------------------------------

    def find(self, block: BlockId, layers: range | None = None) -> Found:
        """Where `layers` (all when None) are; the fastest tier wins. Raises MissError.

        Counts as a use of the block.
        """
        entry = self._entries.get(block)
        if entry is None:
            raise self.miss(block)
        wanted = layers if layers is not None else range(entry.info.layers)
        places: list[tuple[Tier, range]] = []
        for layer in wanted[: entry.info.layers + 1]:
            tier = self._tier_of(entry, layer)
            if tier is None:
                raise self._miss(MissReason.LAYERS, ranges_of(entry.held()))
            if places and places[-1][0] is tier:
                places[-1] = (tier, range(places[-1][1].start, layer + 1))
            else:
                places.append((tier, range(layer, layer + 1)))
        self.order.use(block)
        entry.reads += 1
        for tier, _ in places:
            self.counters.hits[tier] += 1
        segments = tuple(entry.parts[tier].segment(tier, held) for tier, held in places)
        return Found(entry.info, wanted, segments, dict(entry.parts), entry.reads)

    def lacks(self, tier: Tier, octets: int) -> bool:
        """Whether something would have to leave a tier for a part so large."""
        return self._rooms[tier].lacks(octets)

    def holds(self, block: BlockId, tier: Tier, part: Part) -> bool:
        """Whether this very part is still the block's in that tier."""
        entry = self._entries.get(block)
        return entry is not None and entry.parts.get(tier) is part

    def residency(self, block: BlockId) -> list[tuple[Tier, range]]:
        """Disjoint, ascending layer ranges and the fastest tier of each."""
        entry = self._entries[block]
        places: list[tuple[Tier, range]] = []
        for layer in sorted(entry.held()):
            tier = self._tier_of(entry, layer)
            assert tier is not None
            if places and places[-1][0] is tier and places[-1][1].stop == layer:
                places[-1] = (tier, range(places[-1][1].start, layer + 1))
            else:
                places.append((tier, range(layer, layer + 1)))
        return places

    def read(self, tier: Tier, octets: int, seconds: float) -> None:
        """Octets were read from a tier in that time; keeps its mean rate."""
        self.counters.octets_read[tier] += octets
        if octets and seconds > 0:
            rate = octets * 8 / 1e6 / seconds
            before = self._rates.get(tier, rate)
            self._rates[tier] = before + (rate - before) / 8

    def read_mbit_per_s(self, tier: Tier) -> int | None:
        """The measured rate of a tier; None before the first read."""
        rate = self._rates.get(tier)
        return None if rate is None else max(1, round(rate))

    def _tier_of(self, entry: Entry, layer: int) -> Tier | None:
        for tier in self.tiers:
            part = entry.parts.get(tier)
            if part is not None and layer in part.layers:
                return tier
        return None

    def miss(self, block: BlockId) -> MissError:
        """Why a block is not here; counts as a miss."""
        return self._miss(self._why(block))

    def _why(self, block: BlockId) -> MissReason:
        if (ghost := self._ghosts.get(block)) is not None:
            return ghost
        if self._compats and block.compat_id not in self._compats:
            return MissReason.OTHER_COMPAT
        return MissReason.UNKNOWN_KEY

    def _miss(self, reason: MissReason, available: tuple[range, ...] = ()) -> MissError:
        self.counters.misses[reason] += 1
        return MissError(reason, available)

    # --- room ------------------------------------------------------------------------

    def reserve(self, tier: Tier, octets: int, now: float) -> tuple[Reservation, list[Step]]:
        """Reserve room and say what has to leave first. Raises NoRoomError.

        Never names a leased block unless another tier keeps what it has.
        """
        room = self._rooms[tier]
        if not self.may_hold(tier, octets):
            raise NoRoomError(tier, octets)
        steps = self._leaving(room, octets, now)
        return room.promise(octets), [self._demotion(step) for step in steps]

    def shrink(self, tier: Tier, octets: int, now: float) -> list[Step]:
        """The medium of a tier is full before its budget is, `octets` of what is promised
        there do not fit: what has to leave for them. Raises NoRoomError.

        From now on it holds that much less, until `grow`.
        """
        room = self._rooms[tier]
        room.shrink(octets)
        self.counters.shrunk[tier] += 1
        return [self._demotion(step) for step in self._leaving(room, 0, now)]

    def grow(self, tier: Tier, free: int) -> bool:
        """The medium of a tier has `free` octets; a tier that was shrunk holds more again,
        a little at a time. True when its budget is whole again."""
        room = self._rooms[tier]
        return room.grow(free, max(1 << 20, (room.budget or 0) // _GROWTH_SHARE))

    def fit(self, tier: Tier, octets: int) -> None:
        """The medium of a tier holds at most so many octets in all, whatever the budget."""
        room = self._rooms[tier]
        if room.budget is not None and octets < room.budget:
            room.ceiling = octets

    def _leaving(self, room: Room, octets: int, now: float) -> list[Step]:
        """What leaves so that a room has `octets` free. Raises NoRoomError: nothing leaves."""
        steps: list[Step] = []
        tier = room.tier
        if (parked := self.order.parked) is not None:
            self._is_leased(parked, now)  # those whose leases have ended are freed by it
        while room.lacks(octets) and (block := self.order.first(tier)) is not None:
            step = Step(block, tier, self._entries[block].parts[tier])
            if self.only_here(step) and self._is_leased(block, now):
                self.order.park(block, tier)
                continue
            steps.append(step)
            self._leave(step)
        if room.lacks(octets):
            for step in reversed(steps):
                self.stays(step)
            raise NoRoomError(tier, octets)
        return steps

    def freed(self, block: BlockId) -> None:
        """No lease covers a block any more."""
        self.order.free(block)

    def evict(self, block: BlockId) -> list[Step]:
        """What has to happen for the whole block to go. Raises MissError.

        The caller has made sure that it is not leased, and that nobody else is at it.
        """
        entry = self._entries.get(block)
        if entry is None:
            raise self.miss(block)
        steps = [Step(block, tier, part) for tier, part in entry.parts.items()]
        for step in steps:
            self._leave(step)
        return steps

    def leasable(self, block: BlockId) -> int | None:
        """Octets a lease on the block holds; None when it, or some layers, are about to go."""
        entry = self._entries.get(block)
        if entry is None:
            return None
        return entry.info.size if entry.staying() == entry.held() else None

    def applies(self, step: Step) -> bool:
        """Whether the part of a step is still there and to leave."""
        entry = self._entries.get(step.block)
        return self.holds(step.block, step.tier, step.part) and (
            entry is not None and step.tier in entry.leaving
        )

    def only_here(self, step: Step) -> bool:
        """Whether some layers of the part of a step stay in no other tier."""
        entry = self._entries[step.block]
        return not entry.staying(without=step.tier).issuperset(step.part.layers)

    def dropped(self, step: Step) -> None:
        """A part was let go (and its record withdrawn before, where nothing else has it)."""
        if not self.applies(step):
            return
        self._remove_part(step.block, step.tier)
        if step.demotion is not None:
            self.counters.demotions += 1
        else:
            self.counters.evictions[step.tier] += 1
        if not self._entries[step.block].parts:
            self._forget(step.block, MissReason.EVICTED)

    def stays(self, step: Step) -> bool:
        """A step is called off, or is over: what was promised for it is given back. True
        when the part stays."""
        if step.demotion is not None:
            step.demotion.release()
        if not self.applies(step):
            return False
        self._entries[step.block].leaving.remove(step.tier)
        self._rooms[step.tier].leaving -= step.part.octets
        self.order.put_back(step.block, step.tier)
        return True

    def _leave(self, step: Step) -> None:
        entry = self._entries[step.block]
        if step.tier not in entry.leaving:
            entry.leaving.add(step.tier)
            self._rooms[step.tier].leaving += step.part.octets
            self.order.take(step.block, step.tier)

    def _demotion(self, step: Step) -> Step:
        if not self.only_here(step):
            return step
        entry = self._entries[step.block]
        for tier in self.tiers[self.tiers.index(step.tier) + 1 :]:
            room = self._rooms[tier]
            if tier not in entry.parts and not room.lacks(step.part.octets):
                return step._replace(demotion=room.promise(step.part.octets))
        return step

    # --- writing ---------------------------------------------------------------------

    def commit(self, block: BlockId, reservation: Reservation, info: BlockInfo, part: Part) -> None:
        """A new block's part was written into reserved room. Raises BlockExistsError.

        The reservation is used up by it, and kept when it raises.
        """
        if block in self._entries:
            raise BlockExistsError
        self._new(block, info)
        self._place(block, reservation, part)
        if info.prior is not None and block._replace(block_key=info.prior) in self._ghosts:
            self.order.orphan(block)
        self.counters.stored += 1

    def moved(self, block: BlockId, reservation: Reservation, part: Part) -> bool:
        """A copy of a held block's part was written into reserved room of another tier.

        False when there is no such block any more, or a part of it there already.
        """
        entry = self._entries.get(block)
        if entry is None or reservation.tier in entry.parts:
            return False
        promoted = reservation.tier is self.tiers[0]
        self._place(block, reservation, part, used=promoted)
        self.counters.promotions += promoted
        return True

    def recovered(
        self, block: BlockId, tier: Tier, info: BlockInfo, part: Part, *, leased: bool = False
    ) -> bool:
        """A part was found at start-up. False when it contradicts, or there is no room, which
        one of a leased block needs not."""
        room = self._rooms[tier]
        entry = self._entries.get(block)
        if (room.lacks(part.octets) and not leased) or (
            entry is not None and (entry.info != info or tier in entry.parts)
        ):
            return False
        if entry is None:
            self._new(block, info)
        self._place(block, room.promise(part.octets), part)
        return True

    def lost(self, block: BlockId, tier: Tier, part: Part) -> bool:
        """A fault took a part away. True when layers of the block are gone with it.

        Harmless for a part that had left already.
        """
        if not self.holds(block, tier, part):
            return False
        entry = self._entries[block]
        gone = not entry.held(without=tier).issuperset(part.layers)
        self.counters.lost += 1
        self._remove_part(block, tier)
        if not entry.parts:
            self._forget(block, MissReason.LOST)
        return gone

    def refused(self) -> None:
        """A read was refused because its client has so many under way."""
        self.counters.reads_refused += 1

    def rejected(self, reason: str) -> None:
        """A store was refused."""
        self.counters.stores_rejected[reason] += 1

    def after(self, block: BlockId, prior: bytes | None) -> int:
        """Blocks before one in its prompt, as far as they are here."""
        entry = None if prior is None else self._entries.get(block._replace(block_key=prior))
        return 0 if entry is None else entry.info.position + 1

    def _new(self, block: BlockId, info: BlockInfo) -> None:
        self._entries[block] = Entry(info)
        self._ghosts.pop(block, None)
        self.watch(block, 1)
        above = None if info.prior is None else block._replace(block_key=info.prior)
        self.order.add(block, above if above != block else None)
        self._compats[block.compat_id] += 1

    def _place(
        self, block: BlockId, reservation: Reservation, part: Part, *, used: bool = True
    ) -> None:
        reservation.use(part.octets)
        self._entries[block].parts[reservation.tier] = part
        (self.order.place if used else self.order.demote)(block, reservation.tier)

    def _remove_part(self, block: BlockId, tier: Tier) -> None:
        entry = self._entries[block]
        octets = entry.parts.pop(tier).octets
        self.order.take(block, tier)
        room = self._rooms[tier]
        room.used -= octets
        if tier in entry.leaving:
            entry.leaving.remove(tier)
            room.leaving -= octets

    def _forget(self, block: BlockId, why: MissReason) -> None:
        del self._entries[block]
        self.watch(block, -1)
        self.order.forget(block)
        self._compats[block.compat_id] -= 1
        if not self._compats[block.compat_id]:
            del self._compats[block.compat_id]
        self._ghosts[block] = why
        self._ghosts.move_to_end(block)
        while len(self._ghosts) > GHOSTS:
            self._ghosts.popitem(last=False)


def ranges_of(layers: Iterable[int]) -> tuple[range, ...]:
    """Layer numbers as ascending, disjoint ranges."""
    ranges: list[range] = []
    for layer in sorted(layers):
        if ranges and ranges[-1].stop == layer:
            ranges[-1] = range(ranges[-1].start, layer + 1)
        else:
            ranges.append(range(layer, layer + 1))
    return tuple(ranges)
