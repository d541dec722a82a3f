"""A KV cache is published layer by layer and consumed, through a relay, meanwhile.

Run it from a checkout, after `make install`: .venv/bin/python -m examples.publish_and_consume

The cache is the sample of `make demo`. The relay is `kvcs-relay`, a process of its own; publisher
and consumer are two tasks of this one, each with its own session.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

import moqt
from kvcs import Consumer, KvFile, Publication, Scope, load_descriptor, load_tokens, publish

RELAY = Path(sys.executable).with_name("kvcs-relay")
SAMPLE = Path(__file__).parents[1] / "tools" / "data"
MODEL = load_descriptor(SAMPLE / "smollm2-survey.compat.json")
TOKENS = load_tokens(SAMPLE / "smollm2-survey.tokens.json")
SCOPE = Scope.generate()  # who has its key finds the cache


async def produce(publication: Publication) -> None:
    with KvFile.open(SAMPLE / "smollm2-survey.safetensors", MODEL) as cache:
        for layer in range(MODEL.layers):
            await asyncio.sleep(0.02)  # the model computes
            publication.put_layer(layer, cache.k(layer), cache.v(layer))
            print(f"layer {layer} is there")
        await asyncio.Event().wait()  # what is published refers to the arrays


async def through(url: str, cafile: Path) -> None:
    async with (
        moqt.connect(url, cafile=cafile) as publisher,
        moqt.connect(url, cafile=cafile) as session,
    ):
        publication = Publication(SCOPE, MODEL, TOKENS)
        await publish(publisher, publication)
        producing = asyncio.create_task(produce(publication))
        async with Consumer(session, SCOPE, MODEL, TOKENS, timeout=10) as consumer:
            async for layer in consumer.layers():
                print(f"layer {layer.index} has come: k {layer.k.shape}, v {layer.v.shape}")
        producing.cancel()
        print(f"{consumer.stats.objects_verified} Objects, each verified")


async def main() -> None:
    with tempfile.TemporaryDirectory() as tls:
        command = (RELAY, "--listen", "127.0.0.1:0", "--self-signed", tls)
        relay = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            assert relay.stdout is not None
            ready = (await relay.stdout.readline()).decode()
            await through(ready.split()[3], Path(tls, "cert.pem"))  # kvcs-relay ready on URL …
        finally:
            relay.terminate()
            await relay.wait()


if __name__ == "__main__":
    asyncio.run(main())
