"""A journal that several controllers share: in a Valkey or Redis server, alone, watched by
Sentinels, or of a cluster (extra `redis`).

One of them leads at a time, for as long as it renews its lease there, by the server's clock.
Each term has an epoch of its own, above every one before, and each write carries it: the
server takes a write and looks at the epoch in one step, so that a controller that was stopped
and goes on after another has begun writes nothing.

Lease and documents are two keys of one hash slot. The server has to keep what it took
(`appendonly yes`, `appendfsync always`, `maxmemory-policy noeviction`): a checkpoint is
acknowledged when it has answered. Where a replica may be promoted it has to have what was
acknowledged, too: with `replicas` so many of them have to have taken a write, or it is not
acknowledged. All that may be promoted, then: one that was asked for less may lack the last ones.
It has to be 7.0 or newer.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Unpack

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvsp.controller.core.effects import Key
from kvsp.controller.journal import JournalError, TermOverError
from kvsp.controller.journal_servers import (
    CLUSTER,
    SENTINEL,
    JournalServer,
    ServerError,
    journal_server,
)
from kvsp.redis_client import Reach, options

logger = logging.getLogger("kvsp.controller")

_PAGE: Final = 256
_DURABLE: Final = {
    "appendonly": "yes",
    "appendfsync": "always",
    "maxmemory-policy": "noeviction",
}

_NOW: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
# KEYS: lease. ARGV: owner, how long a lease is. An epoch is above the time, too: also a server
# that has lost everything gives out none twice
_TAKE: Final = (
    _NOW
    + """
local held = redis.call('HMGET', KEYS[1], 'owner', 'epoch', 'until')
local left = tonumber(held[3] or 0) - now
if left > 0 and held[1] ~= ARGV[1] then return {0, left} end
local epoch = math.max(now, tonumber(held[2] or 0) + 1)
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'epoch', epoch, 'until', now + ARGV[2])
return {epoch, 0}
"""
)
_OURS: Final = """
local held = redis.call('HMGET', KEYS[1], 'owner', 'epoch')
if held[1] ~= ARGV[1] or held[2] ~= ARGV[2] then return 0 end
"""
# KEYS: lease. ARGV: owner, epoch, for how long
_RENEW: Final = (
    _OURS
    + _NOW
    + """
redis.call('HSET', KEYS[1], 'until', now + ARGV[3])
return 1
"""
)
# KEYS: lease, documents. ARGV: owner, epoch, names and texts in turn; no document is empty
_WRITE: Final = (
    _OURS
    + """
for number = 3, #ARGV, 2 do
  if ARGV[number + 1] == '' then
    redis.call('HDEL', KEYS[2], ARGV[number])
  else
    redis.call('HSET', KEYS[2], ARGV[number], ARGV[number + 1])
  end
end
return 1
"""
)


class SharedJournal:
    """The lease of all controllers with one `prefix` in a server, and what they have written.

    For one thread at a time; a term is for another one.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "kvsp",
        lease_ms: int = 3000,
        replicas: int = 0,
        **how: Unpack[Reach],
    ) -> None:
        """`url` as `journal_server` takes it. What is written has so many `replicas` before it
        counts. Raises JournalError when the server cannot be reached."""
        self.lease_ms = lease_ms
        self._owner = uuid.uuid4().hex
        self._lease, self._documents = (
            f"{prefix}:{{placement}}:{name}" for name in ("lease", "documents")
        )
        reach = Reach(timeout_s=1.0) | how
        self._replicas = replicas
        # half of the time for them, half for the answer
        self._wait_ms = max(1, int(500 * reach["timeout_s"]))
        self._server: JournalServer | None = None
        with self._errors():
            # once more, for a connection that was closed meanwhile; a lease does not wait
            again = Retry(NoBackoff(), 1)
            self._server = journal_server(url, self._lease, retry=again, **options(reach))
            primary = self._server.primary()
            primary.ping()
            self._take: Any = primary.register_script(_TAKE)
            self._renew: Any = primary.register_script(_RENEW)
            self._write: Any = primary.register_script(_WRITE)
            self._look_at_server(primary, url.partition(":")[0])

    def _primary(self) -> redis.Redis:
        assert self._server is not None
        return self._server.primary()

    def _look_at_server(self, primary: redis.Redis, scheme: str) -> None:
        """Say so when it may forget what it took."""
        try:
            found = primary.config_get(*_DURABLE)
        except redis.ResponseError:
            return  # not everybody may ask
        wrong = [
            f"{name} is {found[name]}, not {wanted}"
            for name, wanted in _DURABLE.items()
            if found.get(name, wanted) != wanted
        ]
        if scheme in (*CLUSTER, *SENTINEL) and not self._replicas:
            wrong.append("controller.redis.replicas is 0: one that is promoted may lack the last")
        if wrong:
            logger.warning(
                "the Valkey or Redis server of the journal may lose checkpoints that were "
                "acknowledged: %s",
                ", ".join(wrong),
            )

    def _run(self, script: Any, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Carry out a script; its replicas have what it wrote. Raises JournalError."""
        with self._errors():
            primary: Any = self._primary()
            if not self._replicas:
                return script(keys=keys, args=args, client=primary)
            # by one connection: WAIT is about what was written there
            pipe = primary.pipeline(transaction=False)
            script(keys=keys, args=args, client=pipe)
            pipe.execute_command("WAIT", self._replicas, self._wait_ms)
            result, have = pipe.execute()
            if have < self._replicas:
                raise redis.TimeoutError(f"{have} of {self._replicas} replicas have taken a write")
            return result

    def take(self) -> Term | int:
        """A new term; while another controller leads, the milliseconds that its lease has left.

        Raises JournalError.
        """
        epoch, left_ms = self._run(self._take, [self._lease], [self._owner, self.lease_ms])
        return Term(self, int(epoch)) if epoch else int(left_ms)

    def renew(self, epoch: int, ms: int) -> bool:
        """Have the term last `ms` from now; whether it is not over. Raises JournalError."""
        return bool(self._run(self._renew, [self._lease], [self._owner, epoch, ms]))

    def write(self, epoch: int, writes: Mapping[Key, bytes | None]) -> None:
        """Make writes of a term durable, all or none; None deletes.

        Raises JournalError, TermOverError when another term has begun.
        """
        args: list[Any] = [self._owner, epoch]
        for key, text in writes.items():
            args += [f"{key.kind}:{key.name}", text or b""]
        if not self._run(self._write, [self._lease, self._documents], args):
            raise TermOverError("another controller leads")

    def documents(self) -> Iterator[tuple[Key, dict[str, Any]]]:
        """Everything that was written. Raises JournalError."""
        with self._errors():
            for name, text in self._primary().hscan_iter(self._documents, count=_PAGE):
                kind, _, rest = name.decode().partition(":")
                yield Key(kind, rest), msgspec.json.decode(text)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (*ServerError, msgspec.DecodeError) as error:
            if self._server is not None:
                self._server.look_again()
            raise JournalError(f"the Valkey or Redis server of the journal: {error}") from error


class Term:
    """The journal while one controller leads: what is written is of this term alone."""

    def __init__(self, journal: SharedJournal, epoch: int) -> None:
        self.epoch = epoch
        self._journal = journal

    def renew(self) -> bool:
        """Lead for a lease longer; False when the term is over. Raises JournalError."""
        return self._journal.renew(self.epoch, self._journal.lease_ms)

    def resign(self) -> None:
        """Let another controller lead at once. Raises JournalError."""
        self._journal.renew(self.epoch, 0)

    def write(self, writes: Mapping[Key, bytes | None]) -> None:
        """Make writes durable, all or none. Raises JournalError, TermOverError."""
        self._journal.write(self.epoch, writes)

    def documents(self) -> Iterator[tuple[Key, dict[str, Any]]]:
        """Everything that was written in any term. Raises JournalError."""
        return self._journal.documents()

    def close(self) -> None:
        """The journal stays open for the next term."""
