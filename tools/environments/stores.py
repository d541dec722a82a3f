"""NIXL, and a client of Redis: what `make bench` measures beside kvcs.

NIXL is made for GPUs and asks for torch, of which its own library needs nothing.
"""

from __future__ import annotations

from tools.environments.own import Environment, main


def install(environment: Environment) -> None:
    """Both."""
    environment.install("numpy", "redis")
    environment.install("--no-deps", "nixl-cu12")


if __name__ == "__main__":
    main("stores", __doc__, install)
