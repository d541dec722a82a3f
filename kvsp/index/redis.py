"""A store for several Index Service processes: one Valkey or Redis server (extra `redis`).

All keys of a scope carry the scope as hash tag, so that a scope lives on one node of a
cluster. Per scope there is one hash per Block Key (its replicas), one set of all
replicas ordered by expiry, one ordered by key, and one by expiry per holder; each lives
no longer than its last record. A record that is kept with its holder has `KEPT_MS` as its
expiry, less its position where records are ordered by it. One set for all scopes says until
when each holder lives, and one per holder in which scopes it has records, so that no request
visits the scopes of others. The total over all scopes is bounded by the server's `maxmemory`.
The clocks of the index processes have to agree to within what a TTL may be off by. Redis has to
be 7.0 or newer.

What is withdrawn leaves a mark for a while, with the server's time, so that a record that
another index process was still receiving then does not come to stay.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, Unpack

import redis

from kvsp.index.store import (
    KEPT_MS,
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
from kvsp.redis_client import Reach, options

T = TypeVar("T")

_STAMP = 16
"""Decimal digits of an expiry in front of a value; a holder's name follows, then the data."""
_KEPT_STAMP = b"%0*d" % (_STAMP, KEPT_MS)
_HOLDER = 16
_WITHDRAWN = 2
"""What a script answers for a record that was withdrawn while it arrived."""

_POSITIONS = 1 << 20
_KEPT_LOWEST = KEPT_MS - _POSITIONS
"""Scores from here on are of records that are kept."""

SCOPES_PER_PASS = 256
"""Scopes that one call visits of all there are."""

SCOPE_KEPT_MS = 600_000
"""For so long a scope in which a holder had a record is looked at, and longer while it has some."""

_HOLDERS_PER_PASS = 64
"""The same of holders that were not kept alive."""

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
_NOW = """
local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
"""
# KEYS: expiry set (its name without the last letter is the prefix of the scope)
# ARGV: member, value, score, now, ttl with linger, cap of the scope, cap of the block, age
_PUT = (
    _REMOVE
    + _NOW
    + """
local prefix = string.sub(KEYS[1], 1, -2)
local member, value, expires = ARGV[1], ARGV[2], tonumber(ARGV[3])
local began = clock() - tonumber(ARGV[8])
for _, of in ipairs({member, string.sub(value, 17, 32)}) do
  local gone = redis.call('GET', prefix .. 't:' .. of)
  if gone and tonumber(gone) >= began then return {2, 0} end
end
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
# ARGV: member, now, how long the mark stays
_DELETE = (
    _REMOVE
    + _NOW
    + """
redis.call('SET', string.sub(KEYS[1], 1, -2) .. 't:' .. ARGV[1], clock(), 'PX', ARGV[3])
local value = remove(string.sub(KEYS[1], 1, -2), ARGV[1])
if value and tonumber(string.sub(value, 1, 16)) > tonumber(ARGV[2]) then return 1 end
return 0
"""
)
# ARGV: name of a holder, how long the mark stays
_MARK = (
    _NOW
    + """
redis.call('SET', string.sub(KEYS[1], 1, -2) .. 't:' .. ARGV[1], clock(), 'PX', ARGV[2])
"""
)
# KEYS: the scopes of a holder. ARGV: a time, scopes that were seen empty
_FORGET = """
for number = 2, #ARGV do
  local last = redis.call('ZSCORE', KEYS[1], ARGV[number])
  if last and tonumber(last) <= tonumber(ARGV[1]) then
    redis.call('ZREM', KEYS[1], ARGV[number])
  end
end
"""
# ARGV: name of the set without the prefix, lowest and highest score, limit
_SWEEP = (
    _REMOVE
    + """
local prefix = string.sub(KEYS[1], 1, -2)
local set = prefix .. ARGV[1]
local members = redis.call('ZRANGEBYSCORE', set, ARGV[2], ARGV[3], 'LIMIT', 0, ARGV[4])
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
        threads: int = 8,
        late_ms: int = 60_000,
        **how: Unpack[Reach],
    ) -> None:
        """`late_ms` is longer than any request takes to arrive."""
        self._late_ms = late_ms
        self._cursor = 0
        """Where the pass over all scopes goes on."""

        self._passing = 0
        self._passed = 0
        """Records counted in this pass so far, and in the last one."""
        self.limits = limits or StoreLimits()
        self.threads = threads
        self._prefix = prefix.encode()
        with self._errors():
            self._redis: Any = redis.Redis.from_url(url, **options(how))
            self._redis.ping()
            self._put: Callable[..., Any] = self._redis.register_script(_PUT)
            self._delete: Callable[..., Any] = self._redis.register_script(_DELETE)
            self._sweep: Callable[..., Any] = self._redis.register_script(_SWEEP)
            self._mark: Callable[..., Any] = self._redis.register_script(_MARK)
            self._forget: Callable[..., Any] = self._redis.register_script(_FORGET)

    def put(self, entries: Sequence[Entry], now_ms: int, age_ms: int = 0) -> Sequence[bool | None]:
        fresh: list[bool | None] = []
        started = time.monotonic()
        with self._errors():
            for part in _slices(entries):
                pipe = self._redis.pipeline(transaction=False)
                age = age_ms + int(1000 * (time.monotonic() - started))
                for entry in part:
                    self._put_one(pipe, entry, now_ms, age)
                pipe.sadd(self._key(b"scopes"), *{entry.block.scope_id for entry in part})
                for holder in {each.holder for each in part}:
                    self._note_holder(pipe, [e for e in part if e.holder == holder], now_ms)
                results = pipe.execute()[: len(part)]
                fresh += [None if new == _WITHDRAWN else bool(new) for new, _ in results]
                if evicted := sum(count for _, count in results):
                    self._redis.incrby(self._key(b"evicted"), evicted)
        return fresh

    def _put_one(self, pipe: Any, entry: Entry, now_ms: int, age_ms: int) -> None:
        stamp = b"%0*d" % (_STAMP, entry.expires_ms)
        self._put(
            keys=[self._scope(entry.block.scope_id) + b"e"],
            args=[
                _member(entry.block, entry.replica_id),
                stamp + _holder_name(entry.holder) + entry.data,
                _score(entry),
                now_ms,
                entry.expires_ms - now_ms + self.limits.linger_ms,
                self.limits.records_per_scope,
                self.limits.replicas_per_block,
                age_ms,
            ],
            client=pipe,
        )

    def _note_holder(self, pipe: Any, entries: Sequence[Entry], now_ms: int) -> None:
        """Where a holder has records; of those that are kept, that they end."""
        name = _holder_name(entries[0].holder)
        lasts_ms = max(each.expires_ms for each in entries)
        scopes = self._key(b"hz:" + name)
        pipe.zadd(scopes, {each.block.scope_id: now_ms for each in entries})
        # it lives as long as the last of them
        pipe.pexpire(scopes, lasts_ms - now_ms + self.limits.linger_ms, gt=True)
        pipe.pexpire(scopes, lasts_ms - now_ms + self.limits.linger_ms, nx=True)
        if lasts_ms == KEPT_MS:
            pipe.zadd(self._key(b"ends"), {name: now_ms}, nx=True)

    def _scopes_of(self, name: bytes) -> list[bytes]:
        """The scopes in which a holder may have records."""
        return list(self._redis.zrange(self._key(b"hz:" + name), 0, -1))

    def _forget_scopes(self, name: bytes, now_ms: int) -> None:
        """The scopes in which a holder has had no records for a while are not looked at again."""
        scopes = self._key(b"hz:" + name)
        old = self._redis.zrange(
            scopes, 0, now_ms - SCOPE_KEPT_MS, byscore=True, offset=0, num=SCOPES_PER_PASS
        )
        pipe = self._redis.pipeline(transaction=False)
        for scope in old:
            pipe.exists(self._scope(scope) + b"h:" + name)
        empty = [scope for scope, has in zip(old, pipe.execute(), strict=True) if not has]
        if empty:
            self._forget(keys=[scopes], args=[now_ms - SCOPE_KEPT_MS, *empty])

    def keep_alive(self, holder: str, expires_ms: int, now_ms: int) -> int:
        name = _holder_name(holder)
        with self._errors():
            pipe = self._redis.pipeline(transaction=False)
            for scope in self._scopes_of(name):
                pipe.zcount(self._scope(scope) + b"h:" + name, _KEPT_LOWEST, KEPT_MS)
            kept: int = sum(pipe.execute())
            if kept:
                self._redis.zadd(self._key(b"ends"), {name: expires_ms})
            self._forget_scopes(name, now_ms)
        return kept

    def _replicas(self, values: Sequence[Sequence[bytes]]) -> list[list[Replica]]:
        """What stored values say, of those that are kept by when their holder ends."""
        names = {_name_in(value) for part in values for value in part if _is_kept(value)}
        alive: dict[bytes, int] = {}
        if names:
            listed = list(names)
            found = self._redis.zmscore(self._key(b"ends"), listed)
            alive = {name: int(ends or 0) for name, ends in zip(listed, found, strict=True)}
        return [
            [
                Replica(
                    alive[_name_in(value)] if _is_kept(value) else int(value[:_STAMP]),
                    value[_STAMP + _HOLDER :],
                )
                for value in part
            ]
            for part in values
        ]

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
                values = [
                    [value for field, value in fields.items() if field.startswith(compat_id)]
                    for fields in pipe.execute()
                ]
                for replicas in self._replicas(values):
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
                args=[_member(block, replica_id), now_ms, self._late_ms],
            )
        return bool(removed)

    def delete_holder(self, holder: str, scopes: Collection[bytes] | None) -> int:
        name = _holder_name(holder)
        with self._errors():
            chosen = self._scopes_of(name) if scopes is None else list(scopes)
            for scope in chosen:
                self._mark(keys=[self._scope(scope) + b"e"], args=[name, self._late_ms])
            return sum(self._sweep_all(scope, b"h:" + name) for scope in chosen)

    def _sweep_all(self, scope_id: bytes, name: bytes) -> int:
        total = 0
        while True:
            removed = int(
                self._sweep(
                    keys=[self._scope(scope_id) + b"e"],
                    args=[name, b"-inf", b"+inf", _KEYS_PER_BATCH],
                )
            )
            total += removed
            if removed < _KEYS_PER_BATCH:
                return total

    def expire(self, now_ms: int, limit: int) -> int:
        ended_ms = now_ms - self.limits.linger_ms
        with self._errors():
            total = self._expire_some(b"%d" % ended_ms, limit)
            total += self._expire_kept(ended_ms, limit - total)
            if total:
                self._redis.incrby(self._key(b"expired"), total)
        return total

    def _expire_some(self, highest: bytes, limit: int) -> int:
        """Remove what expired in the scopes that are next, and count their records."""
        name = self._key(b"scopes")
        self._cursor, found = self._redis.sscan(name, self._cursor, count=SCOPES_PER_PASS)
        scopes = list(found)
        pipe = self._redis.pipeline(transaction=False)
        for scope in scopes:
            key = self._scope(scope) + b"e"
            most = max(1, limit // len(scopes))
            self._sweep(keys=[key], args=[b"e", b"-inf", highest, most], client=pipe)
            pipe.zcard(key)
        answers = pipe.execute()
        left = answers[1::2]
        for scope, count in zip(scopes, left, strict=True):
            if not count:
                self._redis.srem(name, scope)
                if self._redis.exists(self._scope(scope) + b"e"):  # somebody came between
                    self._redis.sadd(name, scope)
        self._passing += sum(left)
        if not self._cursor:
            self._passed, self._passing = self._passing, 0
        return int(sum(answers[::2]))

    def _expire_kept(self, ended_ms: int, limit: int) -> int:
        """Remove what holders kept that were not kept alive themselves."""
        total, ends = 0, self._key(b"ends")
        for name in self._redis.zrangebyscore(ends, "-inf", ended_ms, 0, _HOLDERS_PER_PASS):
            for scope in self._scopes_of(name):
                key = self._scope(scope) + b"e"
                args = [b"h:" + name, _KEPT_LOWEST, KEPT_MS, max(0, limit - total)]
                total += int(self._sweep(keys=[key], args=args))
            if total >= limit:
                break
            self._redis.zrem(ends, name)
        return total

    def traces(self, scope_id: bytes, block_key: bytes) -> list[tuple[bytes, Replica]]:
        with self._errors():
            fields = self._redis.hgetall(self._scope(scope_id) + b"r:" + block_key)
            (replicas,) = self._replicas([list(fields.values())])
        compats = [field[:_COMPAT] for field in fields]
        return list(zip(compats, replicas, strict=True))

    def has_replicas(self, holder: str, now_ms: int) -> bool:
        name = _holder_name(holder)
        with self._errors():
            alive = int(self._redis.zscore(self._key(b"ends"), name) or 0) > now_ms
            highest = b"+inf" if alive else b"(%d" % _KEPT_LOWEST
            pipe = self._redis.pipeline(transaction=False)
            for scope in self._scopes_of(name):
                pipe.zcount(self._scope(scope) + b"h:" + name, b"(%d" % now_ms, highest)
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
            pipe.scard(self._key(b"scopes"))
            evicted, expired, scopes = pipe.execute()
            records = self._passed if scopes > SCOPES_PER_PASS else self._count()
        return StoreCounts(records, int(evicted or 0), int(expired or 0))

    def _count(self) -> int:
        """The records of a few scopes."""
        pipe = self._redis.pipeline(transaction=False)
        for scope in self._redis.smembers(self._key(b"scopes")):
            pipe.zcard(self._scope(scope) + b"e")
        return sum(pipe.execute())

    def close(self) -> None:
        self._redis.close()

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


def _score(entry: Entry) -> int:
    """What a record is ordered by: the lowest goes first where there is no room."""
    if entry.expires_ms != KEPT_MS:
        return entry.expires_ms
    return KEPT_MS - min(entry.position, _POSITIONS - 1)


def _is_kept(value: bytes) -> bool:
    return value[:_STAMP] == _KEPT_STAMP


def _name_in(value: bytes) -> bytes:
    """The holder in a stored value."""
    return value[_STAMP : _STAMP + _HOLDER]


def _slices(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for first in range(0, len(items), _KEYS_PER_BATCH):
        yield items[first : first + _KEYS_PER_BATCH]
