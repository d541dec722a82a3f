"""KVSP "Block Retrieval and Storage" over HTTP, in memory."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from starlette.requests import ClientDisconnect

from kvsp.blocks.container import Container, decode, repr_digest_field
from kvsp.holder import holder as holder_module
from kvsp.holder.rooms import NoRoomError
from kvsp.holder.store import MissReason
from kvsp.holder.tiers.disk import DiskTier
from kvsp.holder.tiers.tiers import MemoryTier
from kvsp.names.codes import Codec
from tests.kvsp.holder.support import (
    DESCRIPTOR,
    DISK,
    HOST,
    OCTETS,
    OTHER_SCOPE,
    MemoryIndex,
    World,
    block_id,
    container,
    cut,
    info_and_part,
    make_world,
    octets,
)
from tests.kvsp.support_vectors import VECTORS, geometry

STORE = {"content-type": "application/kvsp-block", "if-none-match": "*"}


@pytest.fixture(params=["host", "disk"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    if request.param == "host":
        return make_world()
    made = make_world([(DiskTier(tmp_path), 10 * OCTETS)])
    await made.holder.start()
    return made


async def test_put_and_get_address_the_same_resource_and_give_the_same_octets(
    world: World,
) -> None:
    made = container(1)
    answer = await world.put(1)
    assert answer.status == 201
    assert answer.json == {
        "digest": "sha-256:" + hashlib.sha256(b"".join(made.layer_digests())).hexdigest(),
        "layer_digests": [digest.hex() for digest in made.layer_digests()],
        "size": made.header.data_octets,
        "codec": 1,
    }
    answer = await world.get(1)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/kvsp-block"
    assert answer.body == octets(made)


async def test_a_holder_must_include_repr_digest_of_the_returned_container(world: World) -> None:
    await world.put(1)
    for query in ("", "?layers=1-2", "?layers=0-0", "?layers=0-3", "?codec=61441"):
        answer = await world.get(1, query)
        digest = hashlib.sha256(answer.body).digest()
        assert answer.headers["repr-digest"] == repr_digest_field(digest)
        assert answer.headers["etag"] == f'"{digest.hex()}"'
        assert answer.headers["content-length"] == str(len(answer.body))


async def test_a_range_of_layers_verifies_against_the_layer_digests(world: World) -> None:
    await world.put(1)
    made = container(1)
    answer = await world.get(1, "?layers=1-2")
    assert answer.body == octets(made.select(range(1, 3)))
    header, layers = decode(answer.body, DESCRIPTOR, layer_digests=made.layer_digests(), codec=1)
    assert header.layers == range(1, 3) and len(layers) == 2


async def test_layers_that_do_not_exist_or_are_not_held_are_kvsp_layers_unavailable(
    world: World,
) -> None:
    await world.put(1)
    for query in ("?layers=0-4", "?layers=4-4", "?layers=9-4294967295"):
        answer = await world.get(1, query)
        assert (answer.status, answer.problem) == (404, "kvsp-layers-unavailable")
        assert answer.json["available"] == [[0, 3]]


async def test_a_holder_of_some_layers_says_which_and_serves_those() -> None:
    tier = MemoryTier()
    world = make_world([(tier, 10 * OCTETS)])
    made = container(1)
    part = made.select(range(2, 4))
    info, _ = info_and_part(made)
    _, some = info_and_part(part)
    writer = await tier.create()
    await writer.write(octets(part))
    await writer.commit(block_id(1), info, some)
    room, _ = world.holder.store.reserve(HOST, some.octets, 0.0)
    world.holder.store.commit(block_id(1), room, info, some)
    assert (await world.get(1)).json["available"] == [[2, 3]]
    assert (await world.get(1, "?layers=1-2")).problem == "kvsp-layers-unavailable"
    assert (await world.get(1, "?layers=3-3")).body == octets(made.select(range(3, 4)))
    assert (await world.get(1, "?layers=2-3")).body == octets(part)
    record = world.holder.record(block_id(1), 1000)
    assert record is not None and record.residency is not None
    assert [entry.layers for entry in record.residency] == [range(2, 4)]
    assert len(record.layer_digests or ()) == 4


@pytest.mark.parametrize(
    "text", [case["text"] for case in VECTORS["layers_parameter"]["malformed"]]
)
async def test_a_malformed_layers_parameter_is_400(text: str) -> None:

    world = make_world()
    await world.put(1)
    answer = await world.get(1, f"?layers={quote(text)}")
    assert (answer.status, answer.problem) == (400, "kvsp-invalid-request")


@pytest.mark.parametrize("text", ["", "-1", "01", "1.0", "raw", "65536", "1&codec=1"])
async def test_a_malformed_codec_parameter_is_400(text: str) -> None:
    world = make_world()
    await world.put(1)
    assert (await world.get(1, f"?codec={text}")).status == 400


async def test_a_holder_may_transcode_between_lossless_codecs(world: World) -> None:
    await world.put(1)
    answer = await world.get(1, "?codec=61441&layers=1-3")
    header, layers = decode(answer.body, DESCRIPTOR)
    assert header.codec is Codec.X_ZLIB and header.layers == range(1, 4)
    plain = container(1).select(range(1, 4))
    for layer, (k, v) in zip(layers, plain.sections, strict=True):
        assert layer.decode(header.codec, DESCRIPTOR) == (k, v)
    assert (await world.get(1, "?codec=1")).body == octets(container(1))


async def test_a_lossy_codec_is_406_unless_the_operator_allows_it() -> None:
    world = make_world()
    await world.put(1)
    for codec in (int(Codec.X_Q8), 0, 2, 61443 + 7):
        answer = await world.get(1, f"?codec={codec}")
        assert (answer.status, answer.problem) == (406, "kvsp-codec-unsupported")
        assert answer.json["codecs"] == [1, 61441, 61443]
    allowed = make_world(lossy_transcoding=True)
    await allowed.put(1)
    header, _ = decode((await allowed.get(1, f"?codec={int(Codec.X_Q8)}")).body, DESCRIPTOR)
    assert header.codec is Codec.X_Q8


async def test_block_representations_are_private_immutable_and_no_older_than_the_record(
    world: World,
) -> None:
    await world.put(1)
    assert "max-age=0" in (await world.get(1)).headers["cache-control"]
    world.index.ttl_ms = 5500
    await world.publisher.step()
    world.clock.now += 2
    answer = await world.get(1)
    assert answer.headers["cache-control"] == "private, immutable, no-transform, max-age=3"
    assert answer.headers["accept-ranges"] == "none"
    assert "content-encoding" not in answer.headers


async def test_if_none_match_gives_304_and_head_the_fields_of_get(world: World) -> None:
    await world.put(1)
    whole = await world.get(1)
    for field in (
        whole.headers["etag"],
        "W/" + whole.headers["etag"],
        "*",
        f'"x", {whole.headers["etag"]}',
    ):
        answer = await world.get(1, **{"if-none-match": field})
        assert (answer.status, answer.body) == (304, b"")
    assert (await world.get(1, **{"if-none-match": '"other"'})).status == 200
    head = await world.client.request("HEAD", f"blocks/{block_id(1).path}")
    assert (head.status, head.body) == (200, b"")
    for name in ("content-length", "repr-digest", "etag", "content-type", "cache-control"):
        assert head.headers[name] == whole.headers[name]


async def test_an_unknown_block_is_404_with_the_reason(world: World) -> None:
    await world.put(1)
    answer = await world.get(2)
    assert (answer.status, answer.problem) == (404, "kvsp-unknown-resource")
    assert answer.json["reason"] == "unknown-key"
    other = block_id(1, descriptor=geometry(layers=5))
    assert (await world.client.get(f"blocks/{other.path}")).json["reason"] == "other-compat"
    await world.client.request("DELETE", f"blocks/{block_id(1).path}")
    assert (await world.get(1)).json["reason"] == "evicted"
    assert world.holder.store.counters.misses == {
        "unknown-key": 1,
        "other-compat": 1,
        "evicted": 1,
    }


# --- storing -------------------------------------------------------------------------


async def test_a_put_without_if_none_match_star_is_428(world: World) -> None:
    path = f"blocks/{block_id(1).path}"
    for headers in ({}, {"if-none-match": '"x"'}):
        answer = await world.client.request(
            "PUT", path, b"", {"content-type": "application/kvsp-block"} | headers
        )
        assert (answer.status, answer.problem) == (428, "kvsp-precondition-required")


async def test_a_holder_that_has_the_key_returns_412_and_keeps_its_copy(world: World) -> None:
    await world.put(1)
    path = f"blocks/{block_id(1).path}"
    answer = await world.client.request("PUT", path, octets(container(2)), STORE)
    assert (answer.status, answer.problem) == (412, "kvsp-block-exists")
    assert (await world.get(1)).body == octets(container(1))
    assert world.holder.store.counters.stores_rejected == {"exists": 1}


async def test_of_concurrent_puts_of_one_key_one_gets_201_and_the_others_412(
    world: World,
) -> None:
    path = f"blocks/{block_id(1).path}"
    answers = await asyncio.gather(
        *(
            world.client.request("PUT", path, cut(octets(container(number)), 97), STORE)
            for number in range(5)
        )
    )
    assert sorted(answer.status for answer in answers) == [201, 412, 412, 412, 412]
    (winner,) = [number for number, answer in enumerate(answers) if answer.status == 201]
    assert (await world.get(1)).body == octets(container(winner))
    assert world.holder.store.used(world.holder.store.tiers[0]) == OCTETS


async def test_the_holder_must_reject_a_put_of_a_client_not_authorized_for_the_scope(
    world: World,
) -> None:
    path = f"blocks/{block_id(1).path}"
    for token in ("reader", "tenant", "operator"):
        answer = await world.client.as_(token).request("PUT", path, octets(container(1)), STORE)
        assert (answer.status, answer.problem) == (403, "kvsp-forbidden")
    assert (await world.client.as_(None).request("PUT", path, b"", STORE)).status == 401
    assert block_id(1) not in world.holder.store


async def test_without_a_right_existing_and_missing_blocks_look_the_same(world: World) -> None:
    await world.put(1)
    tenant = world.client.as_("tenant")
    documents = []
    for number in (1, 2):
        for method in ("GET", "HEAD", "DELETE"):
            answer = await tenant.request(method, f"blocks/{block_id(number).path}?layers=9-9")
            assert answer.status == 403
            if method == "GET":
                documents.append({**answer.json, "instance": ""})
    assert documents[0] == documents[1]
    assert world.holder.store.counters.misses == {MissReason.UNAUTHORIZED: 6}


async def test_a_container_that_is_malformed_or_not_whole_is_422_and_leaves_nothing(
    world: World,
) -> None:
    good = octets(container(1))
    cases: dict[str, bytes] = {
        "truncated": good[:-1],
        "trailing-octets": good + b"x",
        "bad-magic": b"KVB2" + good[4:],
        "bad-version": good[:4] + b"\x02" + good[5:],
        "layer-range": octets(container(1).select(range(3))),
        "section-length": good[:20] + (SECTION_PLUS_ONE + good[28:]),
        "token-count": good[:16] + b"\x00\x00\x00\x05" + good[20:],
    }
    path = f"blocks/{block_id(1).path}"
    for error, data in cases.items():
        for size in (len(data) or 1, 13):
            answer = await world.client.request("PUT", path, cut(data, size), STORE)
            assert (answer.status, answer.problem) == (422, "kvsp-invalid-container"), error
            assert answer.json["error"] == error
    assert (await world.client.request("PUT", path, b"", STORE)).json["error"] == "truncated"
    assert world.holder.store.used(world.holder.store.tiers[0]) == 0
    assert (await world.put(1)).status == 201


SECTION_PLUS_ONE = (DESCRIPTOR.section_octets() + 1).to_bytes(8)


async def test_an_unknown_codec_in_a_put_is_422_with_the_known_ones(world: World) -> None:
    data = octets(container(1))
    data = data[:6] + b"\x00\x09" + data[8:]
    answer = await world.client.request("PUT", f"blocks/{block_id(1).path}", data, STORE)
    assert (answer.status, answer.problem) == (422, "kvsp-codec-unsupported")
    assert answer.json["codecs"] == [1, 61441, 61442, 61443]


async def test_sections_of_a_codec_must_decode_to_the_raw_length(world: World) -> None:
    made = container(1, Codec.X_ZLIB)
    path = f"blocks/{block_id(1).path}"
    sections = [*made.sections[:3], (made.sections[3][0], memoryview(b"no zlib"))]
    bad = Container.build(DESCRIPTOR, sections, codec=Codec.X_ZLIB)
    answer = await world.client.request("PUT", path, octets(bad), STORE)
    assert answer.json["error"] == "section-length"
    assert (await world.client.request("PUT", path, octets(made), STORE)).status == 201
    assert (await world.get(1)).body == octets(made)
    assert (await world.get(1, "?codec=1")).body == octets(container(1))


async def test_a_repr_digest_of_a_put_is_checked(world: World) -> None:
    right = repr_digest_field(hashlib.sha256(octets(container(1))).digest())
    wrong = repr_digest_field(bytes(32))
    answer = await world.put(1, **{"repr-digest": wrong})
    assert (answer.status, answer.problem) == (422, "kvsp-digest-mismatch")
    assert (await world.put(1, **{"repr-digest": "sha-256=:x:"})).status == 400
    assert block_id(1) not in world.holder.store
    assert (await world.put(1, **{"repr-digest": right})).status == 201


async def test_flags_are_ignored_on_receipt_and_sent_as_zero(world: World) -> None:
    data = octets(container(1))
    flagged = data[:5] + b"\xff" + data[6:]
    path = f"blocks/{block_id(1).path}"
    assert (await world.client.request("PUT", path, cut(flagged, 7), STORE)).status == 201
    answer = await world.get(1)
    assert answer.body == data
    assert answer.headers["repr-digest"] == repr_digest_field(hashlib.sha256(data).digest())


async def test_a_block_of_an_unknown_compatibility_id_is_409(world: World) -> None:
    other = block_id(1, descriptor=geometry(layers=5))
    answer = await world.client.request("PUT", f"blocks/{other.path}", b"", STORE)
    assert (answer.status, answer.problem) == (409, "kvsp-compat-unknown")
    world.index.up = False
    answer = await world.client.request("PUT", f"blocks/{other.path}", b"", STORE)
    assert answer.status == 503


async def test_a_holder_gives_the_descriptors_it_knows(world: World) -> None:
    answer = await world.client.get(f"compat/{DESCRIPTOR.compat_id.hex()}")
    assert (answer.status, answer.body) == (200, DESCRIPTOR.jcs)
    assert (await world.client.get(f"compat/{bytes(32).hex()}")).status == 404
    assert (await world.client.as_(None).get(f"compat/{bytes(32).hex()}")).status == 401


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.X_ZLIB])
async def test_digests_and_size_of_a_block_in_another_codec_are_of_what_is_stored(
    world: World, codec: Codec
) -> None:
    made = container(1, codec)
    answer = await world.client.request("PUT", f"blocks/{block_id(1).path}", octets(made), STORE)
    assert answer.json["codec"] == codec
    assert answer.json["size"] == sum(len(k) + len(v) for k, v in made.sections)
    assert answer.json["layer_digests"] == [
        hashlib.sha256(bytes(k) + bytes(v)).hexdigest() for k, v in made.sections
    ]


async def test_a_container_over_the_limit_is_413_by_its_own_table() -> None:
    world = make_world(max_container_octets=OCTETS - 1)
    answer = await world.put(1)
    assert (answer.status, answer.problem) == (413, "kvsp-too-large")
    assert answer.json["limit"] == OCTETS - 1
    data = cut(octets(container(1)), 1000)
    answer = await world.client.request("PUT", f"blocks/{block_id(1).path}", data, STORE)
    assert answer.status == 413
    # the table says so before the rest comes, if it ever does
    head = octets(container(1))[:200]
    answer = await world.client.request("PUT", f"blocks/{block_id(1).path}", cut(head, 50), STORE)
    assert (answer.status, answer.problem) == (413, "kvsp-too-large")
    assert world.holder.store.used(HOST) == 0


async def test_another_media_type_is_415(world: World) -> None:
    answer = await world.put(1, **{"content-type": "application/octet-stream"})
    assert answer.status == 415


async def test_a_malformed_path_is_400(world: World) -> None:
    answer = await world.client.get(f"blocks/{block_id(1).path.upper()}")
    assert answer.json["error"] == "bad-hex"


async def test_delete_withdraws_and_evicts(world: World) -> None:
    await world.put(1)
    await world.publisher.step()
    assert world.index.lists(block_id(1))
    path = f"blocks/{block_id(1).path}"
    assert (await world.client.request("DELETE", path)).status == 204
    assert not world.index.lists(block_id(1))
    assert (await world.get(1)).status == 404
    assert (await world.client.request("DELETE", path)).status == 404
    assert world.holder.store.used(world.holder.store.tiers[0]) == 0


async def test_a_full_holder_is_507_with_retry_after_while_leases_last() -> None:
    world = make_world([(MemoryTier(), 2 * OCTETS)])
    await world.put(1)
    await world.put(2)
    assert (await world.lease(1, 2, ttl_ms=4500)).status == 429
    world.holder.leases.quota = type(world.holder.leases.quota)(octets=10 * OCTETS)
    assert (await world.lease(1, 2, ttl_ms=4500)).status == 201
    answer = await world.put(3)
    assert (answer.status, answer.problem) == (507, "kvsp-storage-full")
    assert answer.headers["retry-after"] == "5"
    assert world.holder.store.counters.stores_rejected["capacity"] == 1
    world.clock.now += 5
    assert (await world.put(3)).status == 201


class SlowUpload:
    """A block whose octets come in two pieces, the second after `release`."""

    def __init__(self) -> None:
        self.started, self.release = asyncio.Event(), asyncio.Event()

    async def octets(self) -> AsyncIterator[bytes]:
        data = octets(container(1))
        yield data[:100]
        self.started.set()
        await self.release.wait()
        yield data[100:]


async def test_more_uploads_than_allowed_are_503_with_retry_after() -> None:
    world = make_world(uploads=1)
    upload = SlowUpload()
    first = asyncio.ensure_future(world.holder.put(block_id(1), DESCRIPTOR, upload.octets()))
    await upload.started.wait()
    answer = await world.put(2)
    assert answer.status == 503 and "retry-after" in answer.headers
    upload.release.set()
    await first
    assert (await world.put(2)).status == 201


async def test_a_client_has_its_share_of_the_uploads_and_others_have_theirs() -> None:
    world = make_world(uploads=3, uploads_per_client=1)
    upload = SlowUpload()
    first = asyncio.ensure_future(
        world.holder.put(block_id(1), DESCRIPTOR, upload.octets(), client="writer")
    )
    await upload.started.wait()
    answer = await world.put(2)
    assert (answer.status, answer.headers["retry-after"]) == (429, "1")
    assert world.holder.store.counters.stores_rejected == {"client-busy": 1}
    path = f"blocks/{block_id(2, scope=OTHER_SCOPE).path}"
    other = await world.client.as_("tenant").request("PUT", path, octets(container(2)), STORE)
    assert other.status == 201
    upload.release.set()
    await first
    assert (await world.put(2)).status == 201


async def test_a_client_has_its_share_of_the_transcodings(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(transcodings=2)
    await world.put(1)
    began, go_on = asyncio.Event(), asyncio.Event()
    transcode = holder_module.transcode

    async def slow(*values: Any) -> Any:
        began.set()
        await go_on.wait()
        return await transcode(*values)

    monkeypatch.setattr(holder_module, "transcode", slow)
    first = asyncio.ensure_future(world.get(1, "?codec=61441"))
    await began.wait()
    refused = await world.get(1, "?codec=61441")
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    assert world.holder.store.counters.reads_refused == 1
    assert (await world.get(1)).status == 200  # as it is stored, it costs nothing
    path = f"blocks/{block_id(1).path}?codec=61441"
    other = asyncio.ensure_future(world.client.as_("reader").get(path))
    await asyncio.sleep(0)
    go_on.set()
    assert [(await each).status for each in (first, other)] == [200, 200]


async def test_metrics_show_reads_by_tier_and_rejections_by_reason(world: World) -> None:
    await world.put(1)
    await world.put(1)
    await world.get(1)
    await world.get(2)
    text = (await world.client.as_("operator").get("/metrics")).body.decode()
    tier = world.holder.store.tiers[0]
    assert 'kvsp_holder_stores_rejected_total{reason="exists"} 1.0' in text
    assert f'kvsp_holder_hits_total{{tier="{tier}"}} 1.0' in text
    assert 'kvsp_holder_misses_total{reason="unknown-key"} 1.0' in text
    assert f'kvsp_holder_tier_octets{{tier="{tier}"}} {float(OCTETS)}' in text
    assert tier in (HOST, DISK)


async def _whole(text: bytes) -> AsyncIterator[bytes]:
    yield text


async def test_room_is_made_for_the_octets_that_come_not_for_those_a_header_claims() -> None:
    wide = geometry(layers=4, kv_heads=8, head_dim=256, block_tokens=256)
    made = container(99, descriptor=wide)
    claimed = made.header.total_octets
    assert claimed > 8 << 20
    world = make_world([(MemoryTier(), claimed + OCTETS)], index=MemoryIndex(descriptors=[wide]))
    world.index.descriptors.append(DESCRIPTOR)
    filling = 3
    for number in range(filling):
        assert (await world.put(number)).status == 201
    text = octets(made)
    sent, go_on = asyncio.Event(), asyncio.Event()

    async def stalling() -> AsyncIterator[bytes]:
        yield text[: 100 << 10]
        sent.set()
        await go_on.wait()
        raise ClientDisconnect

    block = block_id(99, descriptor=wide)
    put = asyncio.ensure_future(world.holder.put(block, wide, stalling()))
    await sent.wait()
    assert len(world.holder.store) == filling
    go_on.set()
    with pytest.raises(ClientDisconnect):
        await put
    assert world.holder.store.used(HOST) == filling * OCTETS
    # as it comes it gets all it needs
    assert await world.holder.put(block, wide, _whole(text))
    assert world.holder.store.used(HOST) == claimed + OCTETS
    assert (await world.client.get(f"blocks/{block.path}")).body == text
    # one that no tier can hold is refused before anything has left for it
    small = make_world([(MemoryTier(), 4 * OCTETS)], index=world.index)
    await small.put(1)
    with pytest.raises(NoRoomError):
        await small.holder.put(block, wide, _whole(text))
    assert len(small.holder.store) == 1
