"""A store for several Index Service processes: one Valkey or Redis server (extra `redis`).

All keys of a scope carry the scope as hash tag, so that a scope lives on one node of a
cluster. Per scope there is one hash per Block Key (its replicas), one set of all
replicas ordered by expiry, one ordered by key, and one by expiry per holder; each lives
no longer than its last record. The total over all scopes is bounded by the server's
`maxmemory`. The clocks of the index processes have to agree to within what a TTL may be
off by.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import redis

from kvsp.index.store import (
    Entry,
    Listed,
    Replica,
    StoreCounts,
    StoreError,
    StoreFull,
    StoreLimits,
    listed,
)
from kvsp.names.uris import BlockId

T = TypeVar("T")

_STAMP = 16
"""Decimal digits of an expiry in front of a value; a holder's name follows, then the data."""
_HOLDER = 16
_BLOCK = 32
_COMPAT = 32
_KEYS_PER_BATCH = 512

_REMOVE = """
local function remove(prefix, member)
  local block = prefix .. 'r:' .. string.sub(member, 1, 32)
  local field = string.sub(member, 33)
  local value = redis.call('HGET', block, field)
  redis.call('ZREM', prefix .. 'e', member)
  redis.call('ZREM', prefix .. 'k', member)
  if not value then return false end
  redis.call('HDEL', block, field)
  redis.call('ZREM', prefix .. 'h:' .. string.sub(value, 17, 32), member)
  return value
end
"""
# KEYS: expiry set (its name without the last letter is the prefix of the scope)
# ARGV: member, value, expires, now, ttl with linger, cap of the scope, cap of the block
_PUT = (
    _REMOVE
    + """
local prefix = string.sub(KEYS[1], 1, -2)
local member, value, expires = ARGV[1], ARGV[2], tonumber(ARGV[3])
local block, field = prefix .. 'r:' .. string.sub(member, 1, 32), string.sub(member, 33)
local evicted, fresh = 0, 1
local old = remove(prefix, member)
if old and tonumber(string.sub(old, 1, 16)) > tonumber(ARGV[4]) then fresh = 0 end
while redis.call('HLEN', block) >= tonumber(ARGV[7]) do
  local first, soonest = nil, nil
  local all = redis.call('HGETALL', block)
  for i = 1, #all, 2 do
    local stamp = string.sub(all[i + 1], 1, 16)
    if not soonest or stamp < soonest then first, soonest = all[i], stamp end
  end
  remove(prefix, string.sub(member, 1, 32) .. first)
  evicted = evicted + 1
end
redis.call('HSET', block, field, value)
local holder = prefix .. 'h:' .. string.sub(value, 17, 32)
redis.call('ZADD', KEYS[1], expires, member)
redis.call('ZADD', holder, expires, member)
redis.call('ZADD', prefix .. 'k', 0, member)
for _, key in ipairs({block, KEYS[1], holder, prefix .. 'k'}) do
  if redis.call('PTTL', key) < tonumber(ARGV[5]) then redis.call('PEXPIRE', key, ARGV[5]) end
end
local excess = redis.call('ZCARD', KEYS[1]) - tonumber(ARGV[6])
if excess > 0 then
  for _, old_member in ipairs(redis.call('ZRANGE', KEYS[1], 0, excess - 1)) do
    remove(prefix, old_member)
    evicted = evicted + 1
  end
end
return {fresh, evicted}
"""
)
_DELETE = (
    _REMOVE
    + """
local value = remove(string.sub(KEYS[1], 1, -2), ARGV[1])
if value and tonumber(string.sub(value, 1, 16)) > tonumber(ARGV[2]) then return 1 end
return 0
"""
)
# ARGV: name of the set without the prefix, highest score or +inf, limit
_SWEEP = (
    _REMOVE
    + """
local prefix = string.sub(KEYS[1], 1, -2)
local set = prefix .. ARGV[1]
local members = redis.call('ZRANGEBYSCORE', set, '-inf', ARGV[2], 'LIMIT', 0, ARGV[3])
for _, member in ipairs(members) do
  remove(prefix, member)
  redis.call('ZREM', set, member)
end
return #members
"""
)


class RedisStore:
    """A ReplicaStore in Valkey or Redis at `url` (`redis://…`, `rediss://…`, `unix://…`).

    Raises StoreError when the server cannot be reached. `prefix` separates deployments
    that share a server.
    """

    def __init__(
        self,
        url: str,
        limits: StoreLimits | None = None,
        *,
        prefix: str = "kvsp",
        timeout_s: float = 5.0,
        threads: int = 8,
        username: str | None = None,
        password: str | None = None,
        cafile: Path | None = None,
    ) -> None:
        self.limits = limits or StoreLimits()
        self.threads = threads
        self._prefix = prefix.encode()
        tls = {} if cafile is None else {"ssl_ca_certs": str(cafile)}
        with self._errors():
            self._redis: Any = redis.Redis.from_url(
                url,
                username=username,
                password=password,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                **tls,
            )
            self._redis.ping()
            self._put: Callable[..., Any] = self._redis.register_script(_PUT)
            self._delete: Callable[..., Any] = self._redis.register_script(_DELETE)
            self._sweep: Callable[..., Any] = self._redis.register_script(_SWEEP)

    def put(self, entries: Sequence[Entry], now_ms: int) -> list[bool]:
        fresh: list[bool] = []
        with self._errors():
            for part in _slices(entries):
                pipe = self._redis.pipeline(transaction=False)
                for entry in part:
                    self._put_one(pipe, entry, now_ms)
                pipe.sadd(self._key(b"scopes"), *{entry.block.scope_id for entry in part})
                results = pipe.execute()[: len(part)]
                fresh += [bool(new) for new, _ in results]
                if evicted := sum(count for _, count in results):
                    self._redis.incrby(self._key(b"evicted"), evicted)
        return fresh

    def _put_one(self, pipe: Any, entry: Entry, now_ms: int) -> None:
        stamp = b"%0*d" % (_STAMP, entry.expires_ms)
        self._put(
            keys=[self._scope(entry.block.scope_id) + b"e"],
            args=[
                _member(entry.block, entry.replica_id),
                stamp + _holder_name(entry.holder) + entry.data,
                entry.expires_ms,
                now_ms,
                entry.expires_ms - now_ms + self.limits.linger_ms,
                self.limits.records_per_scope,
                self.limits.replicas_per_block,
            ],
            client=pipe,
        )

    def get(
        self, scope_id: bytes, compat_id: bytes, keys: Sequence[bytes], now_ms: int
    ) -> list[list[Replica]]:
        prefix = self._scope(scope_id) + b"r:"
        found: list[list[Replica]] = []
        with self._errors():
            for part in _slices(keys):
                pipe = self._redis.pipeline(transaction=False)
                for key in part:
                    pipe.hgetall(prefix + key)
                for fields in pipe.execute():
                    replicas = [
                        _replica(value)
                        for field, value in fields.items()
                        if field.startswith(compat_id)
                    ]
                    found.append([r for r in replicas if r.expires_ms > now_ms])
        return found

    def list_keys(self, scope_id: bytes, compat_id: bytes, after: bytes, limit: int) -> Listed:
        # above every member that starts with `after`
        lowest = b"(" + after + b"\xff" * (_COMPAT + 1) if after else b"-"
        with self._errors():
            members = self._redis.zrangebylex(
                self._scope(scope_id) + b"k", lowest, b"+", start=0, num=limit
            )
        return listed(
            [(each[:_BLOCK], each[_BLOCK : _BLOCK + _COMPAT] == compat_id) for each in members],
            limit,
        )

    def delete(self, block: BlockId, replica_id: str, now_ms: int) -> bool:
        with self._errors():
            removed = self._delete(
                keys=[self._scope(block.scope_id) + b"e"],
                args=[_member(block, replica_id), now_ms],
            )
        return bool(removed)

    def delete_holder(self, holder: str, scopes: Collection[bytes] | None) -> int:
        name = b"h:" + _holder_name(holder)
        with self._errors():
            chosen: Iterable[bytes] = self._scopes() if scopes is None else scopes
            return sum(self._sweep_all(scope, name, b"+inf") for scope in chosen)

    def _sweep_all(self, scope_id: bytes, name: bytes, highest: bytes) -> int:
        total = 0
        while True:
            removed = int(
                self._sweep(
                    keys=[self._scope(scope_id) + b"e"], args=[name, highest, _KEYS_PER_BATCH]
                )
            )
            total += removed
            if removed < _KEYS_PER_BATCH:
                return total

    def expire(self, now_ms: int, limit: int) -> int:
        highest = b"%d" % (now_ms - self.limits.linger_ms)
        total = 0
        with self._errors():
            for scope in self._scopes():
                if total >= limit:
                    break
                key = self._scope(scope) + b"e"
                total += int(self._sweep(keys=[key], args=[b"e", highest, limit - total]))
                if not self._redis.exists(key):
                    self._redis.srem(self._key(b"scopes"), scope)
            if total:
                self._redis.incrby(self._key(b"expired"), total)
        return total

    def traces(self, scope_id: bytes, block_key: bytes) -> list[tuple[bytes, Replica]]:
        with self._errors():
            fields = self._redis.hgetall(self._scope(scope_id) + b"r:" + block_key)
        return [(field[:_COMPAT], _replica(value)) for field, value in fields.items()]

    def has_replicas(self, holder: str, now_ms: int) -> bool:
        name = b"h:" + _holder_name(holder)
        with self._errors():
            pipe = self._redis.pipeline(transaction=False)
            for scope in self._scopes():
                pipe.zcount(self._scope(scope) + name, b"(%d" % now_ms, b"+inf")
            return any(pipe.execute())

    def put_descriptor(self, compat_id: bytes, text: bytes) -> bool:
        key = self._key(b"descriptors")
        with self._errors():
            if not self._redis.hexists(key, compat_id):
                count = self._redis.hlen(key)
                if count >= self.limits.descriptors:
                    raise StoreFull(f"{count} Compatibility Descriptors are stored: the limit")
            return bool(self._redis.hsetnx(key, compat_id, text))

    def descriptor(self, compat_id: bytes) -> bytes | None:
        with self._errors():
            text: bytes | None = self._redis.hget(self._key(b"descriptors"), compat_id)
        return text

    def counts(self) -> StoreCounts:
        with self._errors():
            pipe = self._redis.pipeline(transaction=False)
            pipe.get(self._key(b"evicted"))
            pipe.get(self._key(b"expired"))
            for scope in self._scopes():
                pipe.zcard(self._scope(scope) + b"e")
            evicted, expired, *records = pipe.execute()
        return StoreCounts(sum(records), int(evicted or 0), int(expired or 0))

    def close(self) -> None:
        self._redis.close()

    def _scopes(self) -> Iterator[bytes]:
        scopes: Iterator[bytes] = self._redis.sscan_iter(self._key(b"scopes"))
        return scopes

    def _key(self, name: bytes) -> bytes:
        return self._prefix + b":" + name

    def _scope(self, scope_id: bytes) -> bytes:
        return self._prefix + b":{" + scope_id.hex().encode() + b"}:"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (redis.RedisError, ValueError) as error:
            raise StoreError(f"the Valkey or Redis server of the index: {error}") from error


def _member(block: BlockId, replica_id: str) -> bytes:
    return block.block_key + block.compat_id + replica_id.encode()


def _holder_name(holder: str) -> bytes:
    return hashlib.sha256(holder.encode()).digest()[:_HOLDER]


def _replica(value: bytes) -> Replica:
    return Replica(int(value[:_STAMP]), value[_STAMP + _HOLDER :])


def _slices(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for first in range(0, len(items), _KEYS_PER_BATCH):
        yield items[first : first + _KEYS_PER_BATCH]
