"""The directory in a Valkey or Redis server, or a cluster of them (extra `directory`).

    PREFIX:r:RELAY          the URL of a relay, for as long as it keeps it alive
    PREFIX:{SCOPE}:HASH     the relays that have a namespace of a scope, each with when that expires
    PREFIX:{SCOPE}:HASH*    those that have a longer one, that begins with it

Scope and namespace are hashed: the server sees neither. The scope is the hash tag, so that no key
is of two scopes, and one look-up goes to one node of a cluster, and another one for the URLs.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError

from moqt.values.names import printable_namespace
from relay.mesh.directory import Change, Has, Place

_CACHED = "~"
"""Behind the name of a relay that has something cached of a namespace, and no publisher."""

_BELOW = "*"
"""Behind the hash of a namespace, where what is below it is meant."""

MAX_RELAYS = 8
"""That a look-up of one namespace names."""

MAX_LISTED = 256
"""That a look-up of what is below a prefix names."""

MAX_LOOKED_AT = 64
"""Of which it is seen whether they are there, the first those that have said last what they have: a
relay that was started again has another name, and the old one stays registered for a while."""

CLUSTER = {"redis+cluster": "redis", "rediss+cluster": "rediss"}
"""Schemes of a cluster, whose URL names any of its nodes."""


class DirectoryError(Exception):
    """The server did not do what it was asked."""


def check_server(url: str) -> None:
    """Raises ValueError for a URL that no connection can be made with; makes none."""
    try:
        client = _client(url)
        if isinstance(client, Redis):
            pool: Any = client.connection_pool
            pool.make_connection()
    except (
        RedisError,
        RedisClusterException,
        TypeError,
    ) as error:  # a TypeError: of a parameter that there is not
        raise ValueError(str(error).partition("() ")[2] or str(error)) from None


def _client(url: str, **options: Any) -> Any:
    """What talks to a server, or a cluster of them; it has no connection yet."""
    scheme, colon, rest = url.partition(":")
    if scheme in CLUSTER:
        return RedisCluster.from_url(f"{CLUSTER[scheme]}{colon}{rest}", **options)
    return Redis.from_url(url, **options)


class DirectoryStore:
    """One server or cluster. Every method raises DirectoryError, within `timeout_s`."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str,
        timeout_s: float,
        password: str | None = None,
        cafile: Path | None = None,
    ) -> None:
        options: dict[str, Any] = {
            "password": password,
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "retry": Retry(NoBackoff(), 1),  # on a connection that was lost while it was idle
        }
        if cafile is not None:
            options["ssl_ca_certs"] = str(cafile)
        self._redis = _client(url, **options)
        self._prefix = prefix
        self._timeout = timeout_s

    async def close(self) -> None:
        await self._redis.aclose()

    async def stay(self, relay: str, url: str, alive_s: float) -> bool:
        """`relay` is there, at `url`, for so long; whether that was known."""
        key, milliseconds = self._of_relay(relay), int(1000 * alive_s)
        old = await self._done(self._redis.set(key, url, px=milliseconds, get=True))
        return old is not None

    async def leave(self, relay: str) -> None:
        """`relay` is not there any more."""
        await self._done(self._redis.delete(self._of_relay(relay)))

    async def tell(self, relay: str, changes: Sequence[Change], ttl_s: float) -> None:
        """What `relay` has, for so long, and what it has no more."""
        now = time.time()
        pipe = self._redis.pipeline(transaction=False)
        for change in changes:
            key = self._key(change.place)
            cached = relay + _CACHED
            if not change.has:
                pipe.zrem(key, relay, cached)
                continue
            has, other = (relay, cached) if change.has is Has.PUBLISHED else (cached, relay)
            pipe.zremrangebyscore(key, "-inf", now)
            pipe.zrem(key, other)
            pipe.zadd(key, {has: now + ttl_s})
            pipe.pexpire(key, int(1000 * ttl_s))
        await self._done(pipe.execute())

    async def find(self, asked: Sequence[Place]) -> list[list[tuple[str, str]]]:
        """For each scope and namespace the relays that have it or a prefix of it and are there,
        with their URLs: those of the longest prefix first, and of one prefix those that have a
        publisher. For a namespace and what is `below` it, those that have it or a longer one."""
        now = time.time()
        keys: dict[str, int] = {}
        wanted = []
        for place in asked:
            numbers = [keys.setdefault(self._key(each), len(keys)) for each in _places(place)]
            wanted.append((numbers, MAX_LISTED if place.below else MAX_RELAYS))
        pipe = self._redis.pipeline(transaction=False)
        for key in keys:
            most = MAX_LISTED if key.endswith(_BELOW) else MAX_LOOKED_AT
            pipe.zrevrangebyscore(key, "+inf", now, start=0, num=most)
        members = [_published_first(found) for found in await self._done(pipe.execute())]
        names = list({name for found in members for name in found})
        urls: dict[str, str] = {}
        if names:
            pipe = self._redis.pipeline(transaction=False)
            for name in names:
                pipe.get(self._of_relay(name))
            told = zip(names, await self._done(pipe.execute()), strict=True)
            urls = {name: url.decode(errors="replace") for name, url in told if url is not None}
        return [
            [
                (name, urls[name])
                for name in dict.fromkeys(each for number in numbers for each in members[number])
                if name in urls
            ][:most]
            for numbers, most in wanted
        ]

    async def _done(self, command: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout):
                return await command
        except TimeoutError:
            raise DirectoryError(f"no answer within {self._timeout:g} s") from None
        except (RedisError, RedisClusterException, OSError) as error:
            raise DirectoryError(str(error)) from error

    def _of_relay(self, relay: str) -> str:
        return f"{self._prefix}:r:{relay}"

    def _key(self, place: Place) -> str:
        namespace = _hash(printable_namespace(place.namespace))
        below = _BELOW if place.below else ""
        return f"{self._prefix}:{{{_hash(place.scope)}}}:{namespace}{below}"


def _places(asked: Place) -> list[Place]:
    """Where those are that have what is asked for."""
    scope, namespace, below = asked
    if below:
        return [Place(scope, namespace), asked]
    return [Place(scope, namespace[:length]) for length in range(len(namespace), -1, -1)]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _published_first(members: Sequence[bytes]) -> list[str]:
    names = [name.decode(errors="replace") for name in members]
    return [name.removesuffix(_CACHED) for name in sorted(names, key=lambda n: n.endswith(_CACHED))]
