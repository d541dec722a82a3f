"""Programs that do what the installed ones do not: `python -m tests.e2e.peer WHAT URL …`.

publish   a publisher that produces as many blocks as each line of standard input says,
          until one says `leave`
grow      a publisher that produces, in segments of --segments blocks, as many layers as each line
          of standard input says; it finishes after the last one
relay     `kvcs-relay` with another limit of streams
consume   a consumer with another limit of streams
read      a reader of one publication's tracks, as slow as it is told
announce  a namespace of which nothing is ever served, without a word of refusal
offer     a complete publication in segments of --segments blocks, each as --offer says
watch     a directory of what is published; says for each line how many blocks it finds
linger    sessions with a namespace and a subscription each, until killed
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import moqt
from kvcs.finding.listing import Directory
from kvcs.names.codes import Component
from kvcs.names.namespace import PublicationNamespace
from kvcs.names.payload import data_digest, encode_header
from kvcs.publishing.announcing import publish
from kvcs.publishing.publication import Publication
from kvcs.retrieving.consumer import Consumer
from kvsp.blocks.kv_files import KvFile, load_descriptor, load_tokens
from kvsp.names.codes import Codec
from kvsp.names.identity import Scope
from moqt.quic.config import MAX_DATAGRAM_SIZE
from moqt.values.names import Location
from tests.kvcs.support_segments import in_codec, segmented, with_component


def say(text: str) -> None:
    print(text, flush=True)


def quic(arguments: argparse.Namespace) -> moqt.QuicConfig:
    return moqt.QuicConfig(
        cafile=arguments.cafile,
        idle_timeout=arguments.idle,
        max_datagram_size=arguments.mtu,
        max_streams_uni=arguments.streams,
    )


def anonymous_memory() -> int:
    match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match.group(1)) << 10


class Telling(moqt.Publisher):
    """Says which requests it gets."""

    def subscribe_received(self, request) -> None:
        say(f"SUBSCRIBE {request.name.name.decode()}")
        super().subscribe_received(request)

    def fetch_received(self, request) -> None:
        say(f"FETCH {request.name.name.decode()}")
        super().fetch_received(request)


def corrupt(publication: Publication, at: str, *, forge: bool) -> None:
    """One octet of a K Object's Data is wrong; with `forge` its header says it is right."""
    layer, block = map(int, at.split(":"))
    store = next(s for s in publication.tracks if s.name.name == b"k.raw.s0")
    stored = store.get(Location(layer, block))
    header, data = map(bytes, stored.parts)
    data = bytes([data[0] ^ 1]) + data[1:]
    if forge:
        rows = publication.descriptor.block_tokens
        header = encode_header(
            component=Component.K,
            layer=layer,
            block=block,
            token_start=block * rows,
            token_count=rows,
            codec=Codec.RAW,
            data_length=len(data),
            data_digest=data_digest(data),
        )
    stored.parts[:] = [header, data]


async def run_publish(arguments: argparse.Namespace) -> None:
    descriptor = load_descriptor(arguments.compat)
    tokens = load_tokens(arguments.tokens)
    publication = Publication(Scope.load(arguments.scope_key_file), descriptor, tokens)
    cache = KvFile.open(arguments.kv, descriptor)
    rows = descriptor.block_tokens
    loop = asyncio.get_running_loop()
    async with moqt.connect(arguments.url, quic=quic(arguments), handler=Telling()) as session:
        await publish(session, publication)
        say(f"announced {publication.namespace.text}")
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            if line.strip() == "leave":
                return
            for _ in range(int(line)):
                if publication.next_object is None:
                    break
                layer, block = publication.next_object
                at = slice(block * rows, (block + 1) * rows)
                publication.put_block(layer, block, cache.k(layer)[at], cache.v(layer)[at])
                for bad in (arguments.corrupt, arguments.forge):
                    if bad == f"{layer}:{block}":
                        corrupt(publication, bad, forge=bad == arguments.forge)
            say(f"produced {publication.next_object}")
        await session.wait_closed()


async def run_grow(arguments: argparse.Namespace) -> None:
    descriptor, tokens = load_descriptor(arguments.compat), load_tokens(arguments.tokens)
    scope, rows = Scope.load(arguments.scope_key_file), descriptor.block_tokens
    cache = KvFile.open(arguments.kv, descriptor)
    ends = list(accumulate(rows * int(blocks) for blocks in arguments.segments.split(",")))
    chunks = [tokens[start:end] for start, end in pairwise([0, *ends])]
    publication = Publication(scope, descriptor, chunks.pop(0), growing=True)
    loop = asyncio.get_running_loop()
    async with moqt.connect(arguments.url, quic=quic(arguments), handler=Telling()) as session:
        await publish(session, publication)
        say(f"announced {publication.namespace.text}")
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            for _ in range(int(line)):
                if publication.next_object is None:
                    publication.extend(chunks.pop(0))
                layer, first = publication.next_object[0], publication.first_token
                publication.put_layer(layer, cache.k(layer)[first:], cache.v(layer)[first:])
            if publication.next_object is None and not chunks:
                publication.finish()
            say(f"produced {publication.next_object} of segment {publication.segment}")
        await session.wait_closed()


class Mute(moqt.Publisher):
    """Answers nothing that it is asked for."""

    def subscribe_received(self, request) -> None:
        say(f"SUBSCRIBE {request.name.name.decode()}")

    def fetch_received(self, request) -> None:
        say(f"FETCH {request.name.name.decode()}")


async def run_announce(arguments: argparse.Namespace) -> None:
    publication = Publication(
        Scope.load(arguments.scope_key_file),
        load_descriptor(arguments.compat),
        load_tokens(arguments.tokens),
    )
    async with moqt.connect(arguments.url, quic=quic(arguments), handler=Mute()) as session:
        await session.publish_namespace(publication.namespace.fields)
        say(f"announced {publication.namespace.text}")
        await session.wait_closed()


async def run_offer(arguments: argparse.Namespace) -> None:
    descriptor = load_descriptor(arguments.compat)
    cache = KvFile.open(arguments.kv, descriptor)
    changes = {"raw": None, "codec": in_codec("x-new", 0), "component": with_component}
    publication = segmented(
        tuple(map(int, arguments.segments.split(","))),
        [(cache.k(layer), cache.v(layer)) for layer in range(descriptor.layers)],
        tokens=load_tokens(arguments.tokens),
        described=descriptor,
        scope=Scope.load(arguments.scope_key_file),
        change=changes[arguments.offer],
    )
    async with moqt.connect(arguments.url, quic=quic(arguments), handler=Telling()) as session:
        await publish(session, publication)
        say(f"announced {publication.namespace.text}")
        await session.wait_closed()


async def run_watch(arguments: argparse.Namespace) -> None:
    scope, descriptor = Scope.load(arguments.scope_key_file), load_descriptor(arguments.compat)
    tokens = load_tokens(arguments.tokens)
    loop = asyncio.get_running_loop()
    async with (
        moqt.connect(arguments.url, quic=quic(arguments)) as session,
        Directory(session, scope, descriptor) as directory,
    ):
        say("watching")
        while await loop.run_in_executor(None, sys.stdin.readline):
            say(f"found {[blocks for blocks, _ in directory.find(tokens)]}")


async def run_consume(arguments: argparse.Namespace) -> None:
    descriptor = load_descriptor(arguments.compat)
    async with (
        moqt.connect(arguments.url, quic=quic(arguments)) as session,
        Consumer(
            session,
            Scope.load(arguments.scope_key_file),
            descriptor,
            load_tokens(arguments.tokens),
            mode=arguments.mode,
            timeout=60,
        ) as consumer,
    ):
        digests, most = [], 0
        async for layer in consumer.layers():
            digests.append(data_digest(memoryview(layer.k).cast("B")).hex())
            most = max(most, anonymous_memory())
    say(json.dumps({**consumer.stats.as_dict(), "digests": digests, "memory": most}))


async def run_read(arguments: argparse.Namespace) -> None:
    namespace = PublicationNamespace.from_text(arguments.namespace)
    octets = {b"k.raw.s0": 0, b"v.raw.s0": 0}
    seen: dict[bytes, set] = {name: set() for name in octets}
    duplicates = 0
    slow_until = time.monotonic() + arguments.slow

    async def track(session: moqt.MoqtSession, name: bytes) -> None:
        nonlocal duplicates
        subscription = await session.subscribe(
            namespace.fields,
            name,
            location_filter=moqt.LocationFilter.next_object(),
            fill=moqt.LocationFilter.absolute_start(0),
            queue_octets=256 << 10,
        )
        async with subscription:
            async for received in subscription:
                if not received.payload:
                    continue
                octets[name] += len(received.payload)
                duplicates += received.location in seen[name]
                seen[name].add(received.location)
                if arguments.objects and len(seen[name]) >= arguments.objects:
                    return
                if time.monotonic() < slow_until:
                    await asyncio.sleep(len(received.payload) / (arguments.rate * 1e6 / 2))
                elif arguments.stop:
                    return

    async with moqt.connect(arguments.url, quic=quic(arguments)) as session:
        say("reading")
        async with asyncio.TaskGroup() as tasks:
            for name in octets:
                tasks.create_task(track(session, name))
    objects = sum(map(len, seen.values()))
    say(json.dumps({"octets": sum(octets.values()), "objects": objects, "duplicates": duplicates}))


async def run_linger(arguments: argparse.Namespace) -> None:
    sessions = []
    for number in range(3):
        session = await moqt.connect(arguments.url, quic=quic(arguments))
        namespace = (b"linger", b"%d" % number)
        session.publish_track(namespace, b"track").append(0, 0, b"x")
        await session.publish_namespace(namespace)
        sessions.append(session)
    for number, session in enumerate(sessions):
        await session.subscribe((b"linger", b"%d" % ((number + 1) % 3)), b"track")
        await session.subscribe_namespace((b"linger",))
    say("lingering")
    await asyncio.Event().wait()


def run_relay() -> None:
    """`kvcs-relay`, all its options after the limit."""
    from relay.service import cli

    limit = int(sys.argv[2])
    made = cli.QuicConfig
    cli.QuicConfig = lambda **settings: replace(made(**settings), max_streams_uni=limit)
    cli.main(sys.argv[3:])


def main() -> None:
    if sys.argv[1] == "relay":
        run_relay()
    parser = argparse.ArgumentParser()
    parser.add_argument("what")
    parser.add_argument("url")
    for name in ("cafile", "scope-key-file", "compat", "tokens", "kv"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--idle", type=float, default=30.0)
    parser.add_argument("--mtu", type=int, default=MAX_DATAGRAM_SIZE)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--corrupt", metavar="LAYER:BLOCK")
    parser.add_argument("--forge", metavar="LAYER:BLOCK")
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--namespace")
    parser.add_argument("--segments", metavar="BLOCKS,…", default="1")
    parser.add_argument("--offer", choices=("raw", "codec", "component"), default="raw")
    parser.add_argument("--rate", type=float, default=1.0, metavar="MB/s")
    parser.add_argument("--slow", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--stop", action="store_true", help="after the slow part")
    parser.add_argument("--objects", type=int, help="of each track, then leave")
    arguments = parser.parse_args()
    programs = {
        "publish": run_publish,
        "grow": run_grow,
        "announce": run_announce,
        "offer": run_offer,
        "watch": run_watch,
        "consume": run_consume,
        "read": run_read,
        "linger": run_linger,
    }
    asyncio.run(programs[arguments.what](arguments))


if __name__ == "__main__":
    main()
