"""Two engines without an event loop: one computes a prompt, the other uses each layer as it comes.

Run it from a checkout, after `make install`: .venv/bin/python -m examples.an_engine

The cache is the sample of `make demo`. Here both engines are threads of one process, each with a
`kvcs.Client` of its own; the relay is `kvcs-relay`, a process of its own.
"""

import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

from kvcs import Client, ClientSettings, KvFile, Scope, load_descriptor, load_tokens

RELAY = Path(sys.executable).with_name("kvcs-relay")
SAMPLE = Path(__file__).parents[1] / "tools" / "data"
MODEL = load_descriptor(SAMPLE / "smollm2-survey.compat.json")
TOKENS = load_tokens(SAMPLE / "smollm2-survey.tokens.json")
QUESTION = [*TOKENS, 1, 2, 3]  # it begins with them, so their cache is that of its beginning


def prefill(client: Client) -> None:
    """Computes the prompt, and gives each layer away as soon as it is there."""
    save = client.publish(TOKENS)  # others can find it from now on
    with KvFile.open(SAMPLE / "smollm2-survey.safetensors", MODEL) as cache:
        for layer in range(MODEL.layers):
            time.sleep(0.05)  # the model computes
            save.put_layer(layer, cache.k(layer).copy(), cache.v(layer).copy())


def decode(client: Client) -> int:
    """Returns how many tokens need not be computed."""
    while (found := client.directory.longest(QUESTION)) is None:
        time.sleep(0.01)  # a real one computes them itself instead
    load = client.load(found)
    for layer in range(MODEL.layers):
        if not load.wait_layer(layer, within=load.timeout):
            print(f"computed here instead: {load.failure()}")
            return 0
        k, _ = load.layer(layer)
        print(f"layer {layer} is used: k {k.shape}, while {load.layers} have come")
    # before a token leaves: the manifest takes nothing back
    return load.tokens if load.wait(within=load.timeout) else 0


def main() -> None:
    with tempfile.TemporaryDirectory() as tls:
        command = (RELAY, "--listen", "127.0.0.1:0", "--self-signed", tls)
        relay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert relay.stdout is not None
            url = relay.stdout.readline().split()[3]  # kvcs-relay ready on URL …
            scope = Scope.generate()  # who has its key finds the cache
            # a machine that does other work may be slow; an engine waits for 0.3 s and 0.5 s
            settings = ClientSettings(lookup_timeout=10, stall=10, timeout=30)
            client = partial(
                Client,
                cafile=Path(tls, "cert.pem"),
                scope_keys=scope,
                descriptor=MODEL,
                settings=settings,
            )
            with client(url) as here, client(url) as there:
                computing = threading.Thread(target=prefill, args=[here])
                computing.start()
                print(f"{decode(there)} of {len(QUESTION)} tokens were not computed")
                computing.join()
        finally:
            relay.terminate()
            relay.wait()


if __name__ == "__main__":
    main()
