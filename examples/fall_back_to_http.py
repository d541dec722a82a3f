"""A consumer whose relay is gone takes the whole cache from a holder over HTTP.

Run it from a checkout, after `make install`: .venv/bin/python -m examples.fall_back_to_http

`kvsp-server --dev` is holder and index in one process; `kvsp put` stores the sample of `make demo`
there.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

import moqt
from kvcs import Consumer, Fallback, Scope, load_descriptor, load_tokens
from kvsp.client import Client

BIN = Path(sys.executable).parent
SAMPLE = Path(__file__).parents[1] / "tools" / "data"
COMPAT = SAMPLE / "smollm2-survey.compat.json"
TOKENS = SAMPLE / "smollm2-survey.tokens.json"
CACHE = SAMPLE / "smollm2-survey.safetensors"
GONE = "moqt://127.0.0.1:9"  # nobody listens there


async def run(program: str, *arguments: object) -> None:
    process = await asyncio.create_subprocess_exec(BIN / program, *map(str, arguments))
    if await process.wait() != 0:
        raise SystemExit(f"{program} has failed")


async def consume(index: str, scope: Scope) -> None:
    identity = (scope, load_descriptor(COMPAT), load_tokens(TOKENS))
    async with Client(index, http_loopback=True) as client:
        # a holder tells its index soon after it was given blocks
        for _ in range(100):
            found = await client.longest_prefix(*identity)
            if found.matched == len(found.keys):
                break
            await asyncio.sleep(0.1)
        fallback = Fallback(client, after=0.2, relay=GONE, connect=moqt.connect)
        async with Consumer(None, *identity, fallback=fallback, timeout=20) as consumer:
            async for layer in consumer.layers():
                print(f"layer {layer.index}: k and v {layer.k.shape}")
        for source in consumer.stats.sources:
            print(source)


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder, "scope.json")
        await run("kvcs-keygen", "scope", key)
        command = ("kvsp-server", "--dev", "--roles", "index,holder", "--listen", "127.0.0.1:0")
        server = await asyncio.create_subprocess_exec(
            BIN / command[0], *command[1:], stdout=asyncio.subprocess.PIPE
        )
        try:
            assert server.stdout is not None
            ready = (await server.stdout.readline()).decode()
            index = ready.partition("base=")[2].split()[0]
            identity = ("--scope-key-file", key, "--compat", COMPAT, "--tokens", TOKENS)
            await run("kvsp", "put", index, "--http-loopback", *identity, "--kv", CACHE)
            await consume(index, Scope.load(key))
        finally:
            server.terminate()
            await server.wait()


if __name__ == "__main__":
    asyncio.run(main())
