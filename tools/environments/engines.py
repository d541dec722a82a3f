"""LMCache and SGLang, as far as their interfaces go on a CPU: `make test-engines` runs in it.

Neither is made for machines without a GPU, and each asks for a torch of its own with much around
it. Their base classes, configurations, keys and memory objects need little of that: both come
without their dependencies, and what importing these parts asks for beside them. pip is right to
complain of the rest.
"""

from __future__ import annotations

from tools.environments.own import TORCH, Environment, main

ENGINES = ("lmcache==0.5.6", "sglang==0.5.23")
FOR_THEIR_INTERFACES = (
    *("numpy<2.5", "numba", "sortedcontainers", "aiofile", "aiofiles", "py-cpuinfo", "psutil"),
    *("msgpack", "pyzmq", "pyyaml", "safetensors", "transformers>=5", "requests", "setuptools<81"),
    *("orjson", "pybase64", "triton", "pillow", "tqdm", "ipython", "pydantic", "python-dateutil<3"),
    "cachetools",
)


def install(environment: Environment) -> None:
    """Both engines, what they import, and kvcs."""
    environment.install(TORCH, *FOR_THEIR_INTERFACES)
    environment.install("--no-deps", *ENGINES)
    environment.install_kvcs()


if __name__ == "__main__":
    main("engines", __doc__, install)
