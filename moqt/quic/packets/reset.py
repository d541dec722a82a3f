"""Stateless resets (RFC 9000 section 10.3): what a server that has forgotten a connection says.

Its tokens come from a key and the connection id, so that a server that was restarted with the same
key knows them; who runs several servers gives each a key of its own (RFC 9000 section 21.11).
"""

from __future__ import annotations

import hmac
import logging
import os
from pathlib import Path

from moqt.private_files import create_private, read_private

log = logging.getLogger(__name__)

TOKEN_LENGTH = 16
KEY_LENGTH = 32
MIN_RESET = 5 + TOKEN_LENGTH
MAX_RESET = 42
"""As long as a short packet is: longer ones are answered with no more than that."""
BUCKETS = 64
"""Peers are counted by this many sums over their addresses: one that floods uses up the resets of
few others, and nothing is kept of any."""


def load_key(path: str | Path) -> bytes:
    """The key in `path`; made there, for its owner only, unless there is one.

    Raises OSError, PrivateFileError for what others have access to, and ValueError for what is
    no key.
    """
    try:
        key = read_private(path, KEY_LENGTH + 1)
    except FileNotFoundError:
        try:
            create_private(path, key := os.urandom(KEY_LENGTH))
        except FileExistsError:  # another process was faster, and its key is the one
            key = read_private(path, KEY_LENGTH + 1)
    if len(key) != KEY_LENGTH:
        raise ValueError(
            f"{path}: a key of stateless resets has {KEY_LENGTH} octets; remove the file, "
            "and another one is made"
        )
    return key


class Resets:
    """The tokens of one server, and its answers to packets of connections it knows nothing of.

    At most `per_second` answers in a second go to the addresses of one bucket.
    """

    def __init__(self, key: bytes, per_second: int) -> None:
        self._key = key
        self._per_second = per_second
        self._sent = [0] * BUCKETS
        self._until = 0.0
        self._told = False

    def token(self, cid: bytes) -> bytes:
        """The Stateless Reset Token of a connection id of ours."""
        return hmac.digest(self._key, cid, "sha256")[:TOKEN_LENGTH]

    def answer(self, data: bytes, cid: bytes, origin: str, now: float) -> bytes | None:
        """A Stateless Reset, shorter than the packet `data` to `cid`, which `origin` has sent.

        None for what is no 1-RTT packet, is too short, or is beyond what may be sent.
        """
        if data[0] & 0xC0 != 0x40 or len(data) <= MIN_RESET:
            return None
        if now >= self._until:
            self._until = now + 1
            self._sent = [0] * BUCKETS
        bucket = hash(origin) % BUCKETS
        if self._sent[bucket] >= self._per_second:
            if self._per_second and not self._told:
                self._told = True
                log.warning(
                    "%s sends many packets of connections there are not: beyond %d a second "
                    "(max_resets) they get no answer",
                    origin,
                    self._per_second,
                )
            return None
        self._sent[bucket] += 1
        length = min(len(data) - 1, MAX_RESET) - TOKEN_LENGTH
        first, rest = os.urandom(1), os.urandom(length - 1)
        return bytes([first[0] & 0x3F | 0x40]) + rest + self.token(cid)


def is_reset(data: bytes, token: bytes) -> bool:
    """Whether `data` ends with `token`, one that a peer has given us."""
    return len(data) >= MIN_RESET and hmac.compare_digest(data[-TOKEN_LENGTH:], token)
