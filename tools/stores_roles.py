"""The processes of `tools.bench_stores`, which run in `tools.environments.stores`: one gives octets
in pieces, another takes them, by NIXL over UCX/TCP or by a Redis server.

Nothing is encrypted here, and nothing is checked while it comes: that all of it is right is looked
at in the end. Each says `ready` with what the other one needs; the taker begins at a line, and ends
with a JSON object.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import resource
import sys
import time
from typing import Any

import numpy as np

BATCH = 64
"""Values of one request to Redis."""


def cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def contents(octets: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What is moved: the same in both processes, and not zeros."""
    once = np.random.default_rng(1).integers(0, 256, 1 << 20, dtype=np.uint8)
    return np.resize(once, octets)


def tell(memory: np.ndarray[Any, np.dtype[np.uint8]], began: float, before: float) -> None:
    """What a taker has measured, when all has come; looking at it takes no part in that."""
    seconds, used = time.perf_counter() - began, cpu() - before
    failed = "" if (memory == contents(memory.nbytes)).all() else "other octets came than were sent"
    told = {"octets": memory.nbytes, "seconds": seconds, "cpu": used, "failed": failed}
    print(json.dumps(told), flush=True)


# --- NIXL ----------------------------------------------------------------------------------


def agent(name: str) -> Any:
    """One that has UCX, over TCP alone."""
    os.environ["UCX_TLS"] = "tcp"
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def pieces(address: int, octets: int, size: int) -> list[tuple[int, int, int]]:
    return [(address + at, min(size, octets - at), 0) for at in range(0, octets, size)]


def nixl_give(options: argparse.Namespace) -> None:
    memory, giver = contents(options.octets), agent("giver")
    giver.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    told = base64.b64encode(giver.get_agent_metadata()).decode()
    print("ready", told, memory.ctypes.data, flush=True)
    before = cpu()
    sys.stdin.readline()
    print(json.dumps({"cpu": cpu() - before}), flush=True)


def nixl_take(options: argparse.Namespace) -> None:
    memory, taker = np.ones(options.octets, np.uint8), agent("taker")
    taker.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    print("ready", flush=True)
    metadata, address = sys.stdin.readline().split()
    before, began = cpu(), time.perf_counter()
    giver = taker.add_remote_agent(base64.b64decode(metadata))
    descriptors = (
        taker.get_xfer_descs(pieces(at, memory.nbytes, options.object), "DRAM")
        for at in (memory.ctypes.data, int(address))
    )
    handle = taker.initialize_xfer("READ", *descriptors, giver)
    state = taker.transfer(handle)
    while state == "PROC":
        time.sleep(0.0002)  # of two cores one is the giver's
        state = taker.check_xfer_state(handle)
    tell(memory, began, before)


# --- Redis -----------------------------------------------------------------------------------


def redis_give(options: argparse.Namespace) -> None:
    import redis

    memory, client = contents(options.octets), redis.Redis(port=options.port)
    for number, (at, size, _) in enumerate(pieces(0, memory.nbytes, options.object)):
        client.set(f"piece {number}", memory[at : at + size].data)
    print("ready", flush=True)


def redis_take(options: argparse.Namespace) -> None:
    import redis

    memory, client = np.ones(options.octets, np.uint8), redis.Redis(port=options.port)
    client.ping()
    print("ready", flush=True)
    sys.stdin.readline()
    before, began = cpu(), time.perf_counter()
    count, at = len(pieces(0, memory.nbytes, options.object)), 0
    for first in range(0, count, BATCH):
        names = [f"piece {number}" for number in range(first, min(count, first + BATCH))]
        for value in client.mget(names):
            memory[at : at + len(value)] = np.frombuffer(value, np.uint8)
            at += len(value)
    tell(memory, began, before)


ROLES = {
    "nixl-give": nixl_give,
    "nixl-take": nixl_take,
    "redis-give": redis_give,
    "redis-take": redis_take,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--octets", type=int, required=True)
    parser.add_argument("--object", type=int, required=True)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    ROLES[options.role](options)


if __name__ == "__main__":
    main()
