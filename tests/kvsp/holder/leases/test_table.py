"""KVSP "Leases"."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvsp.holder.leases.table import LeaseQuota, LeaseQuotaError, LeaseTable
from kvsp.holder.rooms import NoRoomError, Reservation
from kvsp.holder.store import Step, Store
from kvsp.holder.tiers.tiers import MemoryTier
from tests.kvsp.holder.support import (
    DISK,
    HOST,
    OCTETS,
    World,
    block_id,
    container,
    info_and_part,
    make_world,
)
from tests.kvsp.inside import deadlines_of, rooms_of

INFO, PART = info_and_part(container(0))


@pytest.fixture
async def world() -> World:
    made = make_world([(MemoryTier(), 4 * OCTETS)], quota=LeaseQuota(octets=3 * INFO.size))
    for number in range(4):
        assert (await made.put(number)).status == 201
    return made


async def test_post_creates_a_lease_and_returns_its_identifier_and_the_exact_ttl(
    world: World,
) -> None:
    answer = await world.lease(0, 1, 9, 1, ttl_ms=1234)
    assert answer.status == 201
    lease = answer.json["lease"]
    assert answer.headers["location"] == f"https://h1.example/kvsp/leases/{lease}"
    assert answer.json == {
        "lease": lease,
        "ttl_ms": 1234,
        "leased": [block_id(number).block_key.hex() for number in (0, 1)],
        "missing": [block_id(9).block_key.hex()],
    }
    world.clock.now += 0.234
    assert (await world.client.get(f"leases/{lease}")).json["ttl_ms"] == 1000
    world.clock.now += 0.999
    assert (await world.client.get(f"leases/{lease}")).status == 200
    world.clock.now += 0.002
    assert (await world.client.get(f"leases/{lease}")).status == 404


async def test_a_lease_lasts_a_minute_at_most_and_a_client_leases_a_quarter_of_a_holder() -> None:
    world = make_world([(MemoryTier(), 8 * OCTETS)])
    for number in range(4):
        await world.put(number)
    quarter = 8 * OCTETS // 4
    refused = await world.lease(0, ttl_ms=60_001)
    assert (refused.problem, refused.json["max_ttl_ms"]) == ("kvsp-lease-quota", 60_000)
    assert (await world.lease(0, ttl_ms=60_000)).status == 201
    refused = await world.lease(0, 1, 2, 3, ttl_ms=1000)
    assert (refused.problem, refused.json["max_octets"]) == ("kvsp-lease-quota", quarter)
    assert refused.json["available_octets"] == quarter - INFO.size


async def test_put_on_the_lease_renews_it_and_delete_releases_it(world: World) -> None:
    lease = (await world.lease(0, ttl_ms=1000)).json["lease"]
    world.clock.now += 0.9
    answer = await world.client.request("PUT", f"leases/{lease}", json_body={"ttl_ms": 5000})
    assert (answer.status, answer.json["ttl_ms"]) == (200, 5000)
    world.clock.now += 4.9
    assert (await world.client.get(f"leases/{lease}")).status == 200
    assert (await world.client.request("DELETE", f"leases/{lease}")).status == 204
    for method in ("GET", "DELETE"):
        answer = await world.client.request(method, f"leases/{lease}")
        assert (answer.status, answer.problem) == (404, "kvsp-unknown-resource")
    answer = await world.client.request("PUT", f"leases/{lease}", json_body={"ttl_ms": 5000})
    assert answer.status == 404


async def test_while_a_lease_is_valid_the_holder_must_not_evict_the_leased_replicas(
    world: World,
) -> None:
    await world.lease(0, 1, ttl_ms=1000)
    for number in (10, 11):
        assert (await world.put(number)).status == 201
    assert [(await world.get(number)).status for number in (0, 1, 2, 3)] == [200, 200, 404, 404]
    answer = await world.client.request("DELETE", f"blocks/{block_id(0).path}")
    assert (answer.status, answer.problem) == (409, "kvsp-leased")
    assert answer.json["ttl_ms"] == 1000
    # the lease vanished with its client: its time ends it
    world.clock.now += 1
    for number in (12, 13, 14, 15):
        assert (await world.put(number)).status == 201
    assert (await world.get(0)).status == 404


async def test_a_lease_of_blocks_that_are_not_held_is_404(world: World) -> None:
    answer = await world.lease(8, 9)
    assert (answer.status, answer.problem) == (404, "kvsp-unknown-resource")


async def test_the_holder_must_enforce_a_quota_on_leased_octets(world: World) -> None:
    assert (await world.lease(0, 1, ttl_ms=2500)).status == 201
    answer = await world.lease(2, 3)
    assert (answer.status, answer.problem) == (429, "kvsp-lease-quota")
    assert answer.json["max_octets"] == 3 * INFO.size
    assert answer.json["available_octets"] == INFO.size
    assert answer.json["max_ttl_ms"] == 60_000
    assert answer.headers["retry-after"] == "3"
    assert not world.holder.leases.is_leased(block_id(2), world.clock.now)
    # each replica counts once
    assert (await world.lease(0, 1, 2)).status == 201
    # another client has its own quota
    assert (await world.lease(1, 2, 3, token="reader")).status == 201
    too_much = await world.lease(0, 1, 2, 3, token="reader")
    assert too_much.status == 429 and "retry-after" in too_much.headers


async def test_a_request_that_no_waiting_helps_has_no_retry_after(world: World) -> None:
    answer = await world.lease(0, 1, 2, 3)
    assert answer.status == 429 and "retry-after" not in answer.headers


async def test_the_holder_must_enforce_a_quota_on_the_ttl_of_a_lease(world: World) -> None:
    answer = await world.lease(0, ttl_ms=60_001)
    assert (answer.status, answer.problem) == (429, "kvsp-lease-quota")
    assert "retry-after" not in answer.headers
    lease = (await world.lease(0, ttl_ms=60_000)).json["lease"]
    answer = await world.client.request("PUT", f"leases/{lease}", json_body={"ttl_ms": 60_001})
    assert answer.problem == "kvsp-lease-quota"


async def test_another_clients_lease_is_404(world: World) -> None:
    lease = (await world.lease(0)).json["lease"]
    other = world.client.as_("reader")
    assert (await other.get(f"leases/{lease}")).status == 404
    assert (await other.request("DELETE", f"leases/{lease}")).status == 404
    assert (await world.client.get(f"leases/{lease.upper()}")).status == 200
    assert (await world.client.get("leases/1")).status == 400


async def test_a_lease_needs_the_right_to_read_the_scope(world: World) -> None:
    assert (await world.lease(0, token="tenant")).problem == "kvsp-forbidden"
    assert (await world.lease(9, token="tenant")).problem == "kvsp-forbidden"


async def test_too_many_block_keys_are_413(world: World) -> None:
    answer = await world.lease(*range(3), ttl_ms=0)
    assert (answer.status, answer.json["error"]) == (400, "out-of-range")
    body = {
        "compat_id": "00" * 32,
        "scope_id": "5c" * 16,
        "block_keys": ["00" * 32] * 65_537,
        "ttl_ms": 1,
    }
    answer = await world.client.request("POST", "leases", json_body=body)
    assert (answer.status, answer.json["limit"]) == (413, 65_536)


def test_the_number_of_leases_of_a_client_is_bounded() -> None:
    table = LeaseTable(LeaseQuota(octets=100, leases=2))
    for _ in range(2):
        table.acquire("a", {block_id(1): 10}, 1000, 0.0)
    with pytest.raises(LeaseQuotaError) as caught:
        table.acquire("a", {block_id(1): 10}, 1000, 0.5)
    assert caught.value.retry_after == 0.5
    assert table.octets == 10
    table.acquire("b", {block_id(1): 10}, 1000, 0.0)
    assert table.octets == 10


def test_the_number_of_keys_in_the_leases_of_a_client_is_bounded() -> None:
    table = LeaseTable(LeaseQuota(octets=100, keys=4))
    lease = table.acquire("a", {block_id(1): 10}, 1000, 0.0, (block_id(2), block_id(3)))
    with pytest.raises(LeaseQuotaError):
        table.acquire("a", {block_id(1): 10}, 1000, 0.0, (block_id(2),))
    table.release("a", lease.lease_id, 0.0)
    assert table.acquire("a", {block_id(1): 10}, 1000, 0.0, (block_id(2),))


def test_renewals_do_not_grow_the_table() -> None:
    table = LeaseTable(LeaseQuota(octets=100))
    lease = table.acquire("a", {block_id(1): 10}, 1000, 0.0)
    for step in range(1000):
        assert table.renew("a", lease.lease_id, 1000, step / 1000)
    assert deadlines_of(table) <= 128
    assert table.get("a", lease.lease_id, 1.99) and not table.get("a", lease.lease_id, 2.0)
    assert len(table) == 0 and table.octets == 0 and table.next_end(2.0) is None


class LeasesAndEvictions(RuleBasedStateMachine):
    """Leases against a model, and a store that must never lose what one covers."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        numbers = itertools.count()
        self.table = LeaseTable(
            LeaseQuota(octets=4 * INFO.size, ttl_ms=3000),
            lambda: f"lease {next(numbers):06}",
            on_free=lambda block: self.store.freed(block),
        )
        self.store = Store({HOST: 3 * PART.octets, DISK: 4 * PART.octets}, self.table.is_leased)
        self.model: dict[str, tuple[str, set[int], float]] = {}
        self.steps: list[Step] = []
        self.reserved: list[Reservation] = []

    blocks = st.integers(0, 7)
    clients = st.sampled_from(["a", "b"])

    def live(self) -> dict[str, tuple[str, set[int], float]]:
        return {key: each for key, each in self.model.items() if each[2] > self.now}

    @rule(number=blocks, tier=st.sampled_from([HOST, DISK]))
    def put(self, number: int, tier: object) -> None:
        if block_id(number) in self.store:
            return
        try:
            room, steps = self.store.reserve(tier, PART.octets, self.now)  # type: ignore[arg-type]
        except NoRoomError:
            return
        for step in steps:
            self.perform(step)
        self.store.commit(block_id(number), room, INFO, PART)

    @rule(tier=st.sampled_from([HOST, DISK]))
    def begin_to_make_room(self, tier: object) -> None:
        try:
            room, steps = self.store.reserve(tier, PART.octets, self.now)  # type: ignore[arg-type]
        except NoRoomError:
            return
        self.steps += steps
        self.reserved.append(room)

    @precondition(lambda self: self.steps)
    @rule(done=st.booleans())
    def end_making_room(self, done: bool) -> None:
        step = self.steps.pop(0)
        if done:
            self.perform(step)
        else:
            self.store.stays(step)
            room = next(each for each in self.reserved if each.tier is step.tier)
            room.release()
            self.reserved.remove(room)

    def perform(self, step: Step) -> None:
        if not self.store.applies(step):
            self.store.stays(step)
            return
        if step.demotion is not None:
            assert self.store.moved(step.block, step.demotion, step.part)
        elif self.store.only_here(step):
            assert not self.covered(step.block), "a leased block was to be evicted"
        self.store.dropped(step)

    def covered(self, block: object) -> bool:
        return any(block in map(block_id, held) for _, held, _ in self.live().values())

    @rule(client=clients, numbers=st.sets(blocks, min_size=1, max_size=4), ttl=st.integers(1, 4000))
    def acquire(self, client: str, numbers: set[int], ttl: int) -> None:
        sizes = {number: self.store.leasable(block_id(number)) for number in numbers}
        held = {number for number, size in sizes.items() if size is not None}
        if not held:
            return
        mine = set().union(*(each[1] for each in self.live().values() if each[0] == client))
        allowed = ttl <= 3000 and len(mine | held) <= 4
        blocks = {block_id(number): INFO.size for number in held}
        try:
            lease = self.table.acquire(client, blocks, ttl, self.now)
        except LeaseQuotaError:
            assert not allowed
        else:
            assert allowed
            self.model[lease.lease_id] = (client, held, self.now + ttl / 1000)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), client=clients)
    def release(self, data: st.DataObject, client: str) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.model)))
        mine = lease_id in self.live() and self.model[lease_id][0] == client
        assert self.table.release(client, lease_id, self.now) == mine
        if mine:
            del self.model[lease_id]

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.5, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: len(self.store))
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        self.store.find(data.draw(st.sampled_from(sorted(self.store.blocks()))))

    @invariant()
    def leased_blocks_are_there(self) -> None:
        for _, held, _ in self.live().values():
            for number in held:
                assert self.store.find(block_id(number))

    @invariant()
    def leases_and_octets_are_those_of_the_model(self) -> None:
        self.table.expire(self.now)
        assert len(self.table) == len(self.live())
        held = set().union(*(each[1] for each in self.live().values()))
        assert self.table.octets == len(held) * INFO.size

    @invariant()
    def no_budget_is_exceeded(self) -> None:
        for tier in (HOST, DISK):
            room = rooms_of(self.store)[tier]
            assert room.budget is not None
            assert room.used + room.reserved - room.leaving <= room.budget
            assert min(room.used, room.reserved, room.leaving) >= 0

    def teardown(self) -> None:
        while self.steps:
            self.end_making_room(True)
        for room in self.reserved:
            room.release()
        assert all(not room.reserved and not room.leaving for room in rooms_of(self.store).values())


LeasesAndEvictions.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None
)
TestLeasesAndEvictions = LeasesAndEvictions.TestCase
