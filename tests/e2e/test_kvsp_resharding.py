"""Three instances move a shard map; one of them stops answering in the middle."""

from __future__ import annotations

import signal
import uuid

from kvsp.names.uris import block_path
from tests.e2e.kvsp_support import BLOCK_TOKENS, Model, Server, start
from tests.e2e.support import eventually

TOKENS = [(5 * number + 1) % 256 for number in range(48)]
BLOCKS = len(TOKENS) // BLOCK_TOKENS


def test_a_member_that_does_not_acknowledge_aborts_the_plan_and_nothing_is_lost(tmp_path):
    model = Model(tmp_path)
    core = Server(tmp_path, "core", "index,controller,holder", controller={"recovery_ms": 60_000})
    peers = {"index": core.base, "placement": core.base}
    members = [
        # statuses that last, so that it is the plan's deadline that notices
        Server(tmp_path, f"i{number}", "instance", peers=peers, instance={"status_ttl_ms": 60_000})
        for number in range(3)
    ]
    start(core, *members)
    keys = model.store(core, core, TOKENS)

    def held(member: Server) -> set[int]:
        """The blocks a member serves."""
        paths = [block_path(model.block_id(key)) for key in keys]
        return {place for place, path in enumerate(paths) if member.ask("HEAD", path)[0] == 200}

    def version(member: Server) -> tuple[int, str] | None:
        status, answer = member.ask("GET", "reshard/m")
        return (answer["version"], answer["state"]) if status == 200 else None

    thirds = [range(4), range(4, 8), range(8, 12)]
    for member, blocks in zip(members, thirds, strict=True):
        directive = {
            "directive": str(uuid.uuid4()),
            "scope_id": model.scope.scope_id.hex(),
            "compat_id": model.descriptor.compat_id.hex(),
            "blocks": [
                {"block_key": keys[place].hex(), "sources": [core.base]} for place in blocks
            ],
            "deadline_ms": 20_000,
            "lease_ms": 5000,
        }
        status, _ = member.ask("POST", "prefetch", directive)
        assert status == 202

        def loaded(member=member, name=directive["directive"]) -> bool:
            return member.ask("GET", f"prefetch/{name}")[1]["state"] == "complete"

        eventually(loaded, "the member's own blocks")

    def shard_map(number: int, ends: list[int]) -> dict:
        starts = [0, *ends[:-1]]
        return {
            "map": "m",
            "version": number,
            "shards": [
                {"tokens": [a, b], "instance": member.base}
                for a, b, member in zip(starts, ends, members, strict=True)
            ],
            "compat_id": model.descriptor.compat_id.hex(),
            "scope_id": model.scope.scope_id.hex(),
            "block_tokens": BLOCK_TOKENS,
            "block_keys": [key.hex() for key in keys],
        }

    def mapped() -> bool:
        # a member that was there before the controller has to report once more
        return core.ask("PUT", "maps/m", shard_map(1, [16, 32, 48]))[0] == 201

    eventually(mapped, "every member is active")
    third = members[2].process
    third.signal(signal.SIGSTOP)
    assert core.ask("PUT", "maps/m?deadline_ms=700", shard_map(2, [16, 24, 48]))[0] == 202
    # the first two prepare; the third, which is to fetch, does not answer in time
    eventually(lambda: version(members[1]) == (1, "stable"), "the abort at the second member")
    third.signal(signal.SIGCONT)

    eventually(lambda: version(members[2]) == (1, "stable"), "the abort at the third member")
    assert core.ask("GET", "maps/m")[1]["version"] == 1
    for member, blocks in zip(members, thirds, strict=True):
        assert held(member) == set(blocks)

    def again() -> bool:
        return core.ask("PUT", "maps/m?deadline_ms=20000", shard_map(2, [16, 24, 48]))[0] == 202

    eventually(again, "a stable map")
    eventually(lambda: version(members[2]) == (2, "stable"), "the commit")
    eventually(lambda: version(members[1]) == (2, "stable"), "the commit")
    # released after the commit, and the new owner serves what it fetched
    eventually(lambda: held(members[1]) == set(range(4, 6)), "the release")
    eventually(lambda: held(members[2]) == set(range(6, 12)), "the new replicas")
    assert held(members[0]) == set(range(4))
