"""Octets to values and back: one codec per draft behind `moqt.wire.codec`, chosen by ALPN.

Nothing here knows a session or a transport. May import `moqt.values`.
"""

from __future__ import annotations

from moqt.wire.codec import Codec, codec_for
from moqt.wire.objects import DatagramObject, FetchHeader, ObjectHeader, SubgroupHeader, WholeObject

__all__ = [
    "Codec",
    "DatagramObject",
    "FetchHeader",
    "ObjectHeader",
    "SubgroupHeader",
    "WholeObject",
    "codec_for",
]
