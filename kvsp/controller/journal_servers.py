"""Where the shared journal of placement controllers is: one Valkey or Redis server, the one that
Sentinels name, or the one of a cluster that has its slot (extra `redis`)."""

from __future__ import annotations

from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import redis
from redis.cluster import RedisCluster
from redis.exceptions import RedisClusterException
from redis.sentinel import Sentinel

CLUSTER: Final = {"redis+cluster": "redis", "rediss+cluster": "rediss"}
SENTINEL: Final = {"redis+sentinel": False, "rediss+sentinel": True}
"""Whether with TLS."""

_SENTINEL_PORT: Final = 26379

ServerError = (redis.RedisError, RedisClusterException, ValueError)
"""What asking a server may raise."""


class JournalServer(Protocol):
    """The server that has the journal now."""

    def primary(self) -> redis.Redis:
        """A client of it. Raises one of `ServerError`."""
        ...

    def look_again(self) -> None:
        """It did not answer, or is not the one any more."""
        ...

    def close(self) -> None: ...


def journal_server(url: str, key: str, **how: Any) -> JournalServer:
    """The server at `url` that has `key`; `how` is for its client.

    `redis://…`, `rediss://…` and `unix://…` are one server; `redis+cluster://HOST:PORT` is a node
    of a cluster, `redis+sentinel://HOST:PORT,HOST:PORT/NAME` are Sentinels and the name of the
    server that they watch (`rediss+…` with TLS). Raises one of `ServerError`.
    """
    scheme, colon, rest = url.partition(":")
    if scheme in CLUSTER:
        return _InCluster(RedisCluster.from_url(f"{CLUSTER[scheme]}{colon}{rest}", **how), key)
    if scheme in SENTINEL:
        return _One(_watched(url, SENTINEL[scheme], **how))
    return _One(redis.Redis.from_url(url, **how))


def _watched(url: str, tls: bool, **how: Any) -> redis.Redis:
    parts = urlsplit(url)
    name = parts.path.strip("/")
    if not name or not parts.netloc:
        raise ValueError(
            "say which Sentinels, and the name of the server that they watch: "
            "redis+sentinel://HOST:PORT,HOST:PORT/NAME"
        )
    places = []
    for each in parts.netloc.split(","):
        host, _, port = each.rpartition(":") if ":" in each else (each, "", str(_SENTINEL_PORT))
        places.append((host.strip("[]"), int(port)))
    if tls:
        how["ssl"] = True
    asking = {key: value for key, value in how.items() if key not in ("username", "password")}
    sentinels: Any = Sentinel
    watched: redis.Redis = sentinels(places, sentinel_kwargs=asking, **how).master_for(name)
    return watched


class _One:
    """One client: it finds its server by itself."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def primary(self) -> redis.Redis:
        return self._client

    def look_again(self) -> None:
        """A client of Sentinels asks them at every connection."""
        self._client.connection_pool.disconnect()

    def close(self) -> None:
        self._client.close()


class _InCluster:
    """The node that has the slot of a key: documents, lease and all."""

    def __init__(self, cluster: Any, key: str) -> None:
        self._cluster = cluster
        self._key = key
        self._moved = False

    def primary(self) -> redis.Redis:
        if self._moved:
            self._cluster.nodes_manager.initialize()
            self._moved = False
        node = self._cluster.get_node_from_key(self._key)
        if node is None:
            raise RedisClusterException("no node of the cluster has the slot of the journal")
        client: redis.Redis = self._cluster.get_redis_connection(node)
        return client

    def look_again(self) -> None:
        self._moved = True

    def close(self) -> None:
        self._cluster.close()
