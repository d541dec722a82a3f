"""How the Data of an Object is encoded: one section, or K and V jointly (KVCS "Object Payload").

Data of `k` and `v` is one section of the track's codec. Data of `kv` is the K section followed by
the V section; in any codec but raw the length of the K section, a uint32, stands before them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvcs.names.codes import Component
from kvcs.names.manifest import Manifest
from kvcs.names.payload import PayloadForm, data_digest
from kvcs.names.tracks import DataTrack, raw_octets
from kvsp.blocks.codecs import decode_section, encode_section, section_bounds
from kvsp.blocks.layout import Octets
from kvsp.names.codes import HASH_OCTETS, Codec, DecodeErrorName
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor

_LENGTH: Final = struct.Struct(">I")
_JOINT: Final = "kv."
_NO_DIGEST: Final = bytes(HASH_OCTETS)
"""No Data has it, as far as anybody knows."""


class Encoding(NamedTuple):
    """One way to offer a segment: a pair of tracks, or one joint track, of a codec."""

    codec: Codec
    joint: bool = False

    @property
    def components(self) -> tuple[Component, ...]:
        return (Component.KV,) if self.joint else (Component.K, Component.V)

    @classmethod
    def parse(cls, text: str) -> Encoding:
        """A codec's name for `k` and `v` tracks, `kv.` and its name for a `kv` track. Raises
        ValueError."""
        codec = Codec.from_label(text.removeprefix(_JOINT))
        if codec is None:
            known = ", ".join(each.label for each in Codec)
            raise ValueError(f"{text!r} is none of {known}, nor kv. and one of them")
        return cls(codec, text.startswith(_JOINT))


@dataclass(frozen=True, slots=True)
class Choice:
    """Which of several encodings a consumer takes: the first of those in `codecs`; without, raw,
    else another lossless one, else with `allow_lossy` a lossy one (KVCS "Track Names").

    Raises ValueError for a lossy codec that is asked for and not allowed.
    """

    codecs: Sequence[Codec] | None = None
    allow_lossy: bool = False

    def __post_init__(self) -> None:
        if not self.allow_lossy and any(not codec.lossless for codec in self.codecs or ()):
            raise ValueError("a lossy codec is asked for, and lossy ones are not allowed")

    def of(self, manifest: Manifest, segment: int, *, recorded: bool) -> tuple[DataTrack, ...]:
        """The tracks to get a segment from. No lossy one when its blocks are `recorded`: to be
        compared with records, which are of the raw sections. Raises as `select_tracks`."""
        lossy = self.allow_lossy and not recorded
        return manifest.select_tracks(segment, prefer=self.codecs, allow_lossy=lossy)


LOSSLESS: Final = Choice()
"""Raw, else another lossless one."""


@dataclass(frozen=True, slots=True)
class EncodedForm:
    """A `PayloadForm` whose `check` gives the raw sections of what it has verified."""

    form: PayloadForm
    component: Component
    codec: Codec
    descriptor: Descriptor

    @property
    def raw_octets(self) -> int:
        return self.form.raw_octets

    def check(
        self,
        parts: Sequence[Octets],
        layer: int,
        block: int,
        expected_digest: bytes | None = None,
    ) -> tuple[list[memoryview], bytes]:
        """As `PayloadForm.check`, with the raw sections in place of Data, and the digest of Data
        as it came. Raises DecodeError `section-length` for Data that does not decode, too."""
        data, digest = self.form.check(parts, layer, block, expected_digest)
        octets = data[0] if len(data) == 1 else memoryview(b"".join(data))
        return decode_data(self.component, self.codec, octets, self.descriptor), digest


def payload_form(
    descriptor: Descriptor, track: DataTrack, first_block: int
) -> PayloadForm | EncodedForm:
    """What the payloads of a track of a known codec have in common; `check` gives raw sections."""
    codec = track.known_codec
    assert codec is not None
    octets = raw_octets(descriptor, track.component)
    form = PayloadForm(track.component, codec, first_block, descriptor.block_tokens, octets)
    if codec is Codec.RAW:
        return form
    return EncodedForm(form, track.component, codec, descriptor)


def max_data_octets(descriptor: Descriptor, track: DataTrack) -> int:
    """The most octets that Data of a track of a known codec can have."""
    codec = track.known_codec
    assert codec is not None
    section = section_bounds(codec, descriptor).stop - 1
    if track.component is not Component.KV:
        return section
    return 2 * section + (0 if codec is Codec.RAW else _LENGTH.size)


def encode_data(
    component: Component, codec: Codec, k: Octets, v: Octets, descriptor: Descriptor
) -> list[Octets]:
    """The parts of the Data of one block's layer, from its raw sections; for raw those themselves.

    Raises DecodeError as `encode_section` does.
    """
    if component is not Component.KV:
        return [encode_section(codec, k if component is Component.K else v, descriptor)]
    sections = [encode_section(codec, each, descriptor) for each in (k, v)]
    if codec is Codec.RAW:
        return [*sections]
    return [_LENGTH.pack(len(sections[0])), *sections]


def decode_data(
    component: Component, codec: Codec, data: memoryview, descriptor: Descriptor
) -> list[memoryview]:
    """The raw sections in the Data of an Object: of K, of V, or of K and V.

    Raises DecodeError `section-length` for Data that does not hold exactly them.
    """
    if component is not Component.KV:
        return [decode_section(codec, data, descriptor)]
    if codec is Codec.RAW:
        half = descriptor.section_octets()
        return [decode_section(codec, each, descriptor) for each in (data[:half], data[half:])]
    if len(data) < _LENGTH.size:
        raise DecodeError(DecodeErrorName.SECTION_LENGTH, f"{len(data)} octets hold no length of K")
    (length,) = _LENGTH.unpack_from(data)
    sections = data[_LENGTH.size :]
    if length > len(sections):
        raise DecodeError(
            DecodeErrorName.SECTION_LENGTH,
            f"the K section has {length} octets, and there are {len(sections)}",
        )
    return [
        decode_section(codec, section, descriptor)
        for section in (sections[:length], sections[length:])
    ]


def digest_as_data(track: DataTrack, k: Octets, v: Octets, descriptor: Descriptor) -> bytes:
    """The Data Digest that an Object of `track` would have, made of these raw sections here.

    One that is equal to a publisher's shows that they are of its production. One that differs shows
    nothing where the codec's library may be another one: it is never taken for more. That of
    sections which the codec cannot hold is equal to none.
    """
    codec = track.known_codec
    assert codec is not None
    try:
        return data_digest(*encode_data(track.component, codec, k, v, descriptor))
    except DecodeError:
        return _NO_DIGEST
