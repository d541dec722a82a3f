"""Track Names and publisher priorities (KVCS "Track Names", "Objects")."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from kvcs.names.codes import MAX_SEGMENT, Component, ManifestTrack
from kvsp.names.codes import Codec, DecodeErrorName
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor
from moqt.track.store import TrackStore
from moqt.values.codes import DEFAULT_PRIORITY, ObjectStatus, PublishDoneCode
from moqt.values.names import FullTrackName, Location

_DATA_TRACK = re.compile(rb"(k|v|kv)\.([a-z0-9-]{1,32})\.s(0|[1-9][0-9]{0,9})")
_ANY_DATA_TRACK = re.compile(r"[a-z0-9-]{1,32}\.[a-z0-9-]{1,32}\.s(0|[1-9][0-9]{0,9})")
_CODEC_NAME = re.compile(r"[a-z0-9-]{1,32}")
_COMPONENTS = {component.label: component for component in Component}

MANIFEST_PRIORITY = 0

DEFAULT_CACHE_MS = 600_000
"""MAX_CACHE_DURATION of published tracks unless told otherwise, in milliseconds."""


@dataclass(frozen=True, slots=True)
class DataTrack:
    """The name of a data track: one component of one segment in one codec.

    `codec` is a KVSP codec name and need not be known here.
    Raises DecodeError `bad-track-name` when the parts cannot make a name.
    """

    component: Component
    codec: str
    segment: int

    def __post_init__(self) -> None:
        if not _CODEC_NAME.fullmatch(self.codec):
            raise _bad_track_name("a codec name is 1 to 32 of a-z 0-9 -")
        if not 0 <= self.segment <= MAX_SEGMENT:
            raise _bad_track_name(f"a segment number is from 0 to {MAX_SEGMENT}")

    def __str__(self) -> str:
        return f"{self.component.label}.{self.codec}.s{self.segment}"

    @property
    def name(self) -> bytes:
        """The octets of the Track Name."""
        return str(self).encode("ascii")

    @property
    def known_codec(self) -> Codec | None:
        """The codec, when it is in the registry."""
        return Codec.from_label(self.codec)


def parse_track_name(name: bytes | str) -> DataTrack | ManifestTrack:
    """Read a Track Name; names are compared octet by octet, lower case.

    Raises DecodeError `bad-track-name`.
    """
    octets = name.encode("utf-8", "surrogatepass") if isinstance(name, str) else name
    for manifest in ManifestTrack:
        if octets == manifest.encode("ascii"):
            return manifest
    match = _DATA_TRACK.fullmatch(octets)
    if match is None:
        raise _bad_track_name("neither a manifest track nor component.codec.s<segment>")
    component, codec, segment = (part.decode("ascii") for part in match.groups())
    return DataTrack(_COMPONENTS[component], codec, int(segment))


def of_unknown_component(name: str) -> bool:
    """Whether a name is a data track's but for its component, one registered after this was
    written ("KVCS Components"): whoever does not know it does without the track."""
    return _ANY_DATA_TRACK.fullmatch(name) is not None and name.partition(".")[0] not in _COMPONENTS


def publisher_priority(group: int, layers: int) -> int:
    """Publisher Priority of the Objects of Group `group`: earlier layers go first.

    Raises ValueError unless 0 <= group < layers.
    """
    if not 0 <= group < layers:
        raise ValueError(f"group {group} is no layer of a model with {layers} layers")
    return 128 * group // layers


def subscriber_priority(track: DataTrack) -> int | None:
    """Subscriber Priority of the requests for a track: those of an earlier segment go first.

    None is the default, 128, which segment 0 has.
    """
    return min(DEFAULT_PRIORITY + track.segment, 255) if track.segment else None


def raw_octets(descriptor: Descriptor, component: Component) -> int:
    """Octets of the raw Data of one Object: a K or V section, or both for `kv`.

    Raises DecodeError `codec-unsupported` as `Descriptor.section_octets` does.
    """
    return descriptor.section_octets() * (2 if component is Component.KV else 1)


def _bad_track_name(detail: str) -> DecodeError:
    return DecodeError(DecodeErrorName.BAD_TRACK_NAME, detail)


class TrackServer(Protocol):
    """Who serves tracks, as `moqt.Publisher` does."""

    def add_track(self, store: TrackStore) -> None:
        """Serve a track from now on."""

    def remove_track(self, name: FullTrackName) -> None:
        """Serve a track to no new request."""

    def set_absent(self, name: FullTrackName, retry_after_ms: int | None) -> None:
        """Say of a track that it does not exist and will not for so long; None: no more."""


def end_group(store: TrackStore, location: Location, priority: int | None = None) -> None:
    """Nothing follows in the Group of `location`, which is that after its last Object."""
    store.mark_end(location, ObjectStatus.END_OF_GROUP, priority=priority)
    store.finish_subgroup(location.group, 0)


def end_track(store: TrackStore, group: int) -> None:
    """The track has ended: it has no Group from `group` on."""
    store.mark_end(Location(group, 0), ObjectStatus.END_OF_TRACK)
    store.finish_subgroup(group, 0)
    store.finish(PublishDoneCode.TRACK_ENDED)
