"""Protection of many packets at once (RFC 9001 section 5)."""

from __future__ import annotations

from typing import Any

from moqt.quic.packets.layout import SAMPLE_LENGTH


def header_masks(hp: Any, samples: list[bytes]) -> bytes:
    """Header-protection masks for several packets, 16 octets apart."""
    if hp._is_chacha20:
        return b"".join(hp._mask(sample) + bytes(SAMPLE_LENGTH - 5) for sample in samples)
    masks: bytes = hp._encryptor.update(b"".join(samples))
    return masks
