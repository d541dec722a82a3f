"""What a TrackStore holds: Objects, and the logs of their Subgroups and Groups.

Records that the store writes and cursors read; what may be added to them is the store's to say.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from moqt.track.gaps import immutable_properties
from moqt.values.codes import ObjectStatus, PropertyType
from moqt.values.names import Location
from moqt.wire.primitives import iter_key_values, with_immutable

Buffer = bytes | bytearray | memoryview

MAX_IDS = 16384
"""Object IDs a Subgroup's log keeps; beyond, the oldest whose Objects are gone are forgotten."""


def buffer_length(buffer: Buffer) -> int:
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


@dataclass(slots=True, eq=False)
class StoredObject:
    """An Object, possibly still growing. `subgroup` None means Delivery Mode Datagram.

    `parts` are buffers whose lengths add up to `received`; `ends` their running sums: lists while
    more may come, and smaller once it is whole and in one piece.
    `follows` is the Object ID that came directly before on the stream that brought it; for the
    first on a stream, the one before all that the stream brings of its Subgroup (-1: it begins
    with the Subgroup's first). None where neither is known.
    """

    location: Location
    subgroup: int | None
    priority: int
    status: ObjectStatus
    properties: bytes
    length: int
    follows: int | None = None
    arrived: float = 0.0
    parts: Sequence[Buffer] = field(default_factory=list, repr=False)
    ends: Sequence[int] = field(default_factory=list, repr=False)
    received: int = 0
    gone: bool = False
    """Aborted or evicted: no longer in the store."""
    retired: bool = False
    """Too old to be begun while it still grows: who reads it goes on, nobody else finds it."""
    again: bool = False
    """Its ID was in the Subgroup's log before: it was evicted and has come back."""
    live: bool = True
    """It was published, or came through a subscription; else a fetch brought it."""
    number: int = 0
    """How many Objects the store had been given when it came, this one included."""

    @property
    def complete(self) -> bool:
        return self.received == self.length

    @property
    def payload(self) -> Buffer:
        """The payload in one piece; copies only when it is held in several."""
        if len(self.parts) == 1:
            return self.parts[0]
        return b"".join(self.parts)

    def read(self, offset: int, limit: int) -> Buffer:
        """Up to `limit` octets at `offset`, by reference; empty when none are there yet."""
        index = bisect_right(self.ends, offset)
        if index == len(self.parts):
            return b""
        part = self.parts[index]
        begin = offset - (self.ends[index - 1] if index else 0)
        if begin == 0 and self.ends[index] - offset <= limit:
            return part
        return memoryview(part).cast("B")[begin : begin + limit]

    def join(self) -> None:
        """Hold a payload that is whole in one piece, and nothing of what it came in."""
        if (
            len(self.parts) > 1
            # A view would keep the whole datagram or chunk it was cut from.
            or any(isinstance(part, memoryview) for part in self.parts)
        ):
            self.hold(b"".join(self.parts))

    def hold(self, payload: bytes) -> int:
        """`payload` is all of it; returns its length."""
        self.received = self.length
        if payload:
            self.parts, self.ends = (payload,), (self.length,)
        return self.length

    def extend(self, part: Buffer) -> int:
        """`part` follows what is there of it; returns its length."""
        if size := buffer_length(part):
            parts, ends = self.parts, self.ends
            assert isinstance(parts, list) and isinstance(ends, list)  # it is not whole
            self.received += size
            parts.append(part)
            ends.append(self.received)
        return size

    def is_alike(
        self,
        subgroup: int | None,
        priority: int,
        status: ObjectStatus,
        properties: bytes,
        length: int,
    ) -> bool:
        """Whether these may be the fields of the same Object; properties that relays may
        change do not count."""
        return (self.length, self.status, self.subgroup, self.priority) == (
            length,
            status,
            subgroup,
            priority,
        ) and (
            self.properties == properties
            or immutable_properties(self.properties) == immutable_properties(properties)
        )


@dataclass(slots=True, eq=False)
class SubgroupLog:
    """One Subgroup: its Object IDs in ascending order, and whether it has ended."""

    group: int
    subgroup: int
    priority: int
    ids: list[int] = field(default_factory=list)
    """Ascending; an id without an entry in `GroupLog.objects` was evicted."""
    first_id: int | None = None
    """The first Object ever published in the Subgroup, when known."""
    finished: bool = False
    """Every Object of the Subgroup is known: the stream ended with FIN."""
    done: bool = False
    """No more of its Objects come: it is finished, or a filter upstream left out the others."""
    sifted: bool = False
    """A filter upstream may have left out some of its older Objects."""
    broken: bool = False
    """The upstream stream was reset: more Objects may exist."""
    end_of_group: bool = False
    """It holds the largest Object of its group."""
    readers: int = 0
    """Deliveries that still need this log; it is not forgotten before they are done."""
    forgotten: int = -1
    """Up to here Object IDs may be missing from `ids`: there were too many."""
    max_ids: int = MAX_IDS
    number: int = 0
    """`StoredObject.number` of the `live` Object that came last."""
    timeouts: tuple[int, int, int] | None = None
    """(Object ID, OBJECT_DELIVERY_TIMEOUT, SUBGROUP_DELIVERY_TIMEOUT in ms, 0 = none) of the
    first Object that came, when it has such properties."""

    def begin(self, object_id: int, properties: bytes) -> None:
        """The first Object has come; only its delivery timeouts count."""
        if not properties:
            return
        found = {
            type_: value
            for type_, value in with_immutable(iter_key_values(properties))
            if isinstance(value, int)
        }
        timeouts = (
            found.get(PropertyType.OBJECT_DELIVERY_TIMEOUT, 0),
            found.get(PropertyType.SUBGROUP_DELIVERY_TIMEOUT, 0),
        )
        if any(timeouts):
            self.timeouts = (object_id, *timeouts)

    def trim(self, held: Container[int]) -> None:
        """Forget the lower IDs whose Objects are gone, those not in `held`, so that an endless
        Subgroup costs no more than what is held of it. Who still needs one of them is told by
        `forgotten`."""
        half = len(self.ids) // 2
        low = self.ids[:half]
        kept = [object_id for object_id in low if object_id in held]
        if len(kept) < half:
            self.forgotten = max(i for i in low if i not in held)
            self.ids[:half] = kept
        self.max_ids = max(MAX_IDS, 2 * len(self.ids))


@dataclass(slots=True, eq=False)
class GroupLog:
    """One Group: the Objects held of it, statuses included, and what is known of its end."""

    objects: dict[int, StoredObject] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    """The keys of `objects`, ascending."""
    statuses: int = 0
    """How many of `objects` are statuses; they stay as long as the group does."""
    subgroups: dict[int, SubgroupLog] = field(default_factory=dict)
    end: int | None = None
    """No Object ID of this group is, or will be, this large."""
    prior_gap: int | None = None
    """PRIOR_GROUP_ID_GAP of its Objects, the same on all that have one."""
