"""The limits that what publishers, relays and indexes send comes to, at a publisher or consumer.

Whoever refuses something because of one says so to who asked, and calls `reached`: the log has it
once, `REACHED` every time. `docs/limits.md` lists them.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final, NamedTuple

from kvcs.names.codes import MAX_MANIFEST_OCTETS, MAX_SEGMENTS

logger = logging.getLogger("kvcs")

MAX_TOKENS: Final = 1 << 20
"""Tokens that a consumer of the second profile takes of one publication unless told otherwise."""

KEPT_OCTETS: Final = 1 << 30
"""Octets of publications that are kept for instances; a larger publication is refused."""


class Limit(NamedTuple):
    """One limit; its `name` is that of the setting in Python, of the log and of `REACHED`."""

    name: str
    option: str
    """Of which programs, and what it is called there."""
    default: int
    what: str
    full: str
    """What happens at it."""


LIMITS: Final = (
    Limit(
        "max_segments",
        "`kvcs-publish`, `kvcs-subscribe`: `--max-segments`",
        MAX_SEGMENTS,
        "Segments of a publication, which has four tracks for each at the most.",
        "Publishing: no further segment begins (KvcsError). Reading: the publication fails "
        "verification, and the next one is tried.",
    ),
    Limit(
        "max_manifest_octets",
        "`kvcs-publish`, `kvcs-subscribe`: `--max-manifest`",
        MAX_MANIFEST_OCTETS,
        "Octets of a manifest, 67 for each Object that it lists; of one of our tokens no more is "
        "read than listing them needs.",
        "The same.",
    ),
    Limit(
        "max_tokens",
        "`kvcs-subscribe --profile kvcache`: `--max-tokens`",
        MAX_TOKENS,
        "Tokens that a cache of the second profile may have.",
        "The cache fails verification.",
    ),
    Limit(
        "kept_octets",
        "`MoqtFetcher` of an instance",
        KEPT_OCTETS,
        "Octets of publications that are kept for the blocks of prefetch directives.",
        "One that has more is refused for `capacity`; of several the least recently used goes.",
    ),
)

REACHED: Final[Counter[str]] = Counter()
"""How often each limit was come to in this process, by name (`limits_reached` of `--json`)."""


def reached(name: str, detail: str) -> None:
    """Something came to the limit `name`; `detail` says what, for people."""
    if not REACHED[name]:
        logger.warning("%s (%s; said once, and counted)", detail, name)
    REACHED[name] += 1
