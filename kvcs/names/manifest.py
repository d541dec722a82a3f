"""The manifest of a publication: reading, checking, writing (KVCS "Manifest Track").

A manifest arrives as the JSON octets of one Object of the track "manifest". What the
track "manifest.cose" carries is a signed envelope around the same octets: once it has
been opened and its signature verified, `Manifest.parse` reads its payload.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvcs.names.codes import (
    MANIFEST_VERSION,
    MAX_BLOCKS_PER_SEGMENT,
    MAX_MANIFEST_OCTETS,
    MAX_SEGMENTS,
    MAX_TOKENS,
    PUBLICATION_ID_OCTETS,
    TRACKS_PER_SEGMENT,
    Component,
    ManifestTrack,
)
from kvcs.names.limits import reached
from kvcs.names.manifest_text import (
    ManifestReader,
    Text,
    Written,
    group_text,
    with_strings,
)
from kvcs.names.namespace import PublicationNamespace
from kvcs.names.tracks import DataTrack, of_unknown_component, parse_track_name
from kvsp.names import ijson
from kvsp.names.codes import HASH_OCTETS, SCOPE_ID_OCTETS, Codec, DecodeErrorName
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor, parse_hex

_REQUIRED: Final = ("kvcs", "compat", "layers", "block_tokens", "deterministic", "segments")
_SEGMENT_REQUIRED: Final = (
    "segment",
    "first_block",
    "blocks",
    "block_keys_sha256",
    "tracks",
    "complete",
)
_DIGESTS = re.compile(r"[0-9a-f]*")
_EVERY_CODEC: Final = frozenset(Codec)

_TOLD: Final = 8
"""Encodings that an error names."""


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """One element of "segments"."""

    segment: int
    first_block: int
    """Absolute index of the segment's first block."""

    blocks: int
    block_keys_sha256: bytes
    tracks: tuple[DataTrack, ...]
    complete: bool
    object_digests: Mapping[DataTrack, tuple[bytes, ...]] | None
    """Per data track, per completed Group from 0: its Objects' digests, 32 octets each,
    in Object order, as one string of octets. None when the manifest lists none."""

    other_tracks: tuple[str, ...] = ()
    """Tracks of components that are not known here."""

    @property
    def offered(self) -> str:
        """The encodings it is offered in, for people, who read no more than the first ones: the
        name of a codec, after `kv.` for K and V in one track; tracks of other components."""
        names = [*map(_encoding_name, selections(self.tracks)), *self.other_tracks]
        more = [f"{len(names) - _TOLD} more"] if len(names) > _TOLD else []
        return ", ".join([*names[:_TOLD], *more])

    def listed_groups(self, track: DataTrack) -> int:
        """How many Groups of `track`, from 0, have their digests listed."""
        return len(self.object_digests.get(track, ())) if self.object_digests else 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version of a publication's manifest, checked; unknown members are dropped."""

    compat: Descriptor
    deterministic: bool
    segments: tuple[SegmentEntry, ...]
    publication: bytes | None = None
    """The Publication ID, when the manifest repeats it."""

    scope_id: bytes | None = None
    """The Scope ID, when the manifest repeats it."""

    @classmethod
    def parse(
        cls,
        data: Text,
        namespace: PublicationNamespace | None = None,
        max_segments: int = MAX_SEGMENTS,
        max_octets: int = MAX_MANIFEST_OCTETS,
    ) -> Manifest:
        """Read manifest JSON and compare it with the namespace it was found under.

        A long one is given to a `ManifestReader` as it comes, and that is given here. One of more
        than `max_segments` segments or `max_octets` octets is not read, and warned of.

        Raises DecodeError, first fault first: `not-i-json`, `duplicate-member`,
        `not-an-object`, `missing-member`, `wrong-type`, `bad-version`, `bad-hex`,
        `bad-track-name`, the errors of the descriptor, `compat-mismatch`,
        `bad-manifest` (too large, inconsistent, or naming another publication).
        """
        if isinstance(data, ManifestReader):
            reader = data
        else:
            reader = ManifestReader(max_octets, max_segments)
            reader.feed(data)
        tree = reader.tree()
        if not isinstance(tree, dict):
            raise DecodeError(DecodeErrorName.NOT_AN_OBJECT, "a manifest is a JSON object")
        _check_members(tree)
        _check_types(tree)
        _check_tracks(tree, max_segments * TRACKS_PER_SEGMENT)
        if tree["kvcs"] != MANIFEST_VERSION:
            raise DecodeError(DecodeErrorName.BAD_VERSION, f"'kvcs' is not {MANIFEST_VERSION}")
        publication = _optional_hex(tree, "publication", PUBLICATION_ID_OCTETS)
        scope_id = _optional_hex(tree, "scope_id", SCOPE_ID_OCTETS)
        keys = [
            _hex(entry["block_keys_sha256"], HASH_OCTETS, f"segments[{index}].block_keys_sha256")
            for index, entry in enumerate(tree["segments"])
        ]
        digests = [_parse_digests(entry.get("object_digests")) for entry in tree["segments"]]
        tracks = [_parse_tracks(entry["tracks"]) for entry in tree["segments"]]
        digests_by_track = [
            None
            if groups is None
            else dict(zip(_parse_tracks(groups), groups.values(), strict=True))
            for groups in digests
        ]
        compat = Descriptor.parse(with_strings(tree["compat"]))
        if namespace is not None and compat.compat_id != namespace.compat_id:
            raise DecodeError(
                DecodeErrorName.COMPAT_MISMATCH,
                "the Compatibility ID of 'compat' is not that of the namespace",
            )
        if tree["layers"] != compat.layers or tree["block_tokens"] != compat.block_tokens:
            raise _bad_manifest("'layers' or 'block_tokens' is not that of 'compat'")
        manifest = cls(
            compat=compat,
            deterministic=tree["deterministic"],
            segments=tuple(
                SegmentEntry(
                    segment=int(entry["segment"]),
                    first_block=int(entry["first_block"]),
                    blocks=int(entry["blocks"]),
                    block_keys_sha256=keys[index],
                    tracks=tracks[index],
                    complete=entry["complete"],
                    object_digests=digests_by_track[index],
                    other_tracks=tuple(filter(of_unknown_component, with_strings(entry["tracks"]))),
                )
                for index, entry in enumerate(tree["segments"])
            ),
            publication=publication,
            scope_id=scope_id,
        )
        check_consistency(manifest, max_segments)
        if namespace is not None:
            if publication not in (None, namespace.publication_id):
                raise _bad_manifest("'publication' is not the Publication ID of the namespace")
            if scope_id not in (None, namespace.scope_id):
                raise _bad_manifest("'scope_id' is not the Scope ID of the namespace")
        return manifest

    def to_json(self) -> bytes:
        """The manifest as canonical JSON octets. Raises KvcsError as `pieces`."""
        return b"".join(self.pieces())

    def pieces(
        self,
        texts: Mapping[DataTrack, Sequence[bytes]] | None = None,
        max_segments: int = MAX_SEGMENTS,
        max_octets: int = MAX_MANIFEST_OCTETS,
    ) -> list[bytes]:
        """The manifest as canonical JSON octets, in pieces, of which those of digests are shared
        with `texts`: those of the Groups of a track, as `group_text` writes them, all but the
        first after a comma.

        Raises KvcsError for one that is larger than what consumers take, with these limits.
        """
        written = Written(max_segments, max_octets)
        tree: dict[str, Any] = {
            "kvcs": MANIFEST_VERSION,
            "compat": self.compat.to_dict(),
            "layers": self.compat.layers,
            "block_tokens": self.compat.block_tokens,
            "deterministic": self.deterministic,
            "segments": [_segment_tree(entry, written, texts) for entry in self.segments],
        }
        if self.publication is not None:
            tree["publication"] = self.publication.hex()
        if self.scope_id is not None:
            tree["scope_id"] = self.scope_id.hex()
        return written.pieces(tree)

    @property
    def blocks(self) -> int:
        """Blocks of all segments together."""
        return sum(entry.blocks for entry in self.segments)

    def segment_of(self, track: DataTrack) -> SegmentEntry | None:
        """The entry that lists `track`, or None."""
        if track.segment >= len(self.segments):
            return None
        entry = self.segments[track.segment]
        return entry if track in entry.tracks else None

    def is_listed(self, track: DataTrack, group: int) -> bool:
        """Whether the digests of Group `group` (layer) of `track` are listed."""
        entry = self.segment_of(track)
        return entry is not None and 0 <= group < entry.listed_groups(track)

    def expected_digest(self, track: DataTrack, group: int, object_id: int) -> bytes | None:
        """The listed Data Digest of an Object, 32 octets, or None when none is listed."""
        entry = self.segment_of(track)
        if entry is None or entry.object_digests is None:
            return None
        if not 0 <= group < entry.listed_groups(track) or not 0 <= object_id < entry.blocks:
            return None
        start = object_id * HASH_OCTETS
        return entry.object_digests[track][group][start : start + HASH_OCTETS]

    def is_segment_complete(self, segment: int) -> bool:
        """Whether the manifest marks `segment` complete; False for one it does not know."""
        return 0 <= segment < len(self.segments) and self.segments[segment].complete

    def select_tracks(
        self,
        segment: int,
        *,
        codecs: Collection[Codec] = _EVERY_CODEC,
        allow_lossy: bool = False,
        prefer: Sequence[Codec] | None = None,
    ) -> tuple[DataTrack, ...]:
        """The tracks to get a segment from: one `kv` track, or `k` and `v` of one codec.

        The pair in codec raw first, then `kv.raw`, then lossless codecs among `codecs`,
        then, if `allow_lossy`, the others among them, each in the order of "tracks".
        With `prefer` only codecs in it, in its order, a pair of tracks before a joint one.
        Raises DecodeError `codec-unsupported` when none fits, LookupError for a segment
        that is not listed.
        """
        if not 0 <= segment < len(self.segments):
            raise LookupError(f"the manifest lists no segment {segment}")
        entry = self.segments[segment]
        choices = selections(entry.tracks)

        def rank(choice: tuple[DataTrack, ...]) -> int | None:
            codec = choice[0].known_codec
            if codec is None or codec not in codecs or (not codec.lossless and not allow_lossy):
                return None
            if prefer is not None:
                return 2 * prefer.index(codec) + (len(choice) == 1) if codec in prefer else None
            if codec is Codec.RAW:
                return 0 if len(choice) == 2 else 1
            return 2 if codec.lossless else 3

        ranked = [(r, index) for index, c in enumerate(choices) if (r := rank(c)) is not None]
        if not ranked:
            raise DecodeError(
                DecodeErrorName.CODEC_UNSUPPORTED,
                f"segment {segment} is offered only as {entry.offered}",
            )
        return choices[min(ranked)[1]]

    def check_keys(self, block_keys: Sequence[bytes], anchor_key: bytes) -> int:
        """Confirm that the publication covers the consumer's tokens.

        `block_keys` are the keys of the consumer's own tokens, `anchor_key` is that of
        the namespace. Segment 0 must end with the Anchor Key and hash to its
        `block_keys_sha256`. Returns how many leading blocks are confirmed: those of
        segment 0 and of the later segments that continue with the consumer's tokens. 0
        means that segment 0 is longer than the tokens known, so that nothing can be said.

        Raises DecodeError `keys-mismatch`.
        """
        first = self.segments[0]
        if anchor_key in block_keys and block_keys.index(anchor_key) + 1 != first.blocks:
            raise _keys_mismatch(
                f"segment 0 has {first.blocks} blocks, "
                f"but the Anchor Key is that of block {block_keys.index(anchor_key)}"
            )
        if first.blocks > len(block_keys):
            return 0
        if block_keys[first.blocks - 1] != anchor_key:
            raise _keys_mismatch("the last block of segment 0 has another key than the Anchor Key")
        if keys_digest(block_keys[: first.blocks]) != first.block_keys_sha256:
            raise _keys_mismatch("segment 0 covers other tokens")
        return self.continued(block_keys, 1)

    def continued(self, block_keys: Sequence[bytes], segment: int) -> int:
        """How many leading blocks have these keys, when those before `segment` have them: a
        segment that goes on with other tokens, or beyond them, ends it."""
        confirmed = sum(entry.blocks for entry in self.segments[:segment])
        for entry in self.segments[segment:]:
            end = confirmed + entry.blocks
            if end > len(block_keys):
                break
            if keys_digest(block_keys[confirmed:end]) != entry.block_keys_sha256:
                break
            confirmed = end
        return confirmed


def keys_digest(block_keys: Iterable[bytes]) -> bytes:
    """`block_keys_sha256`: SHA-256 of the concatenated raw Block Keys of a segment."""
    return hashlib.sha256(b"".join(block_keys)).digest()


# --- the checks of `Manifest.parse`, in their order ----------------------------------


def _check_members(tree: dict[str, Any]) -> None:
    for name in _REQUIRED:
        if name not in tree:
            raise DecodeError(DecodeErrorName.MISSING_MEMBER, f"the manifest has no {name!r}")
    if not isinstance(tree["segments"], list):
        return  # a matter of type, which is looked at next
    for index, entry in enumerate(tree["segments"]):
        if not isinstance(entry, dict):
            continue
        for name in _SEGMENT_REQUIRED:
            if name not in entry:
                raise DecodeError(
                    DecodeErrorName.MISSING_MEMBER, f"segments[{index}] has no {name!r}"
                )


def _check_types(tree: dict[str, Any]) -> None:
    for name in ("kvcs", "layers", "block_tokens"):
        _require(ijson.is_integer(tree[name]), name, "an integer")
    _require(isinstance(tree["compat"], dict), "compat", "an object")
    _require(isinstance(tree["deterministic"], bool), "deterministic", "a Boolean")
    _require(isinstance(tree["segments"], list), "segments", "an array")
    for name in ("publication", "scope_id"):
        _require(isinstance(tree.get(name, ""), str), name, "a string")
    for index, entry in enumerate(tree["segments"]):
        where = f"segments[{index}]"
        _require(isinstance(entry, dict), where, "an object")
        for name in ("segment", "first_block", "blocks"):
            _require(ijson.is_integer(entry[name]), f"{where}.{name}", "an integer")
        _require(
            isinstance(entry["block_keys_sha256"], str), f"{where}.block_keys_sha256", "a string"
        )
        _require(_is_list_of_strings(entry["tracks"]), f"{where}.tracks", "an array of strings")
        _require(isinstance(entry["complete"], bool), f"{where}.complete", "a Boolean")
        digests = entry.get("object_digests", {})
        _require(
            isinstance(digests, dict)
            and all(
                isinstance(groups, list) and all(map(_is_list_of_strings, groups))
                for groups in digests.values()
            ),
            f"{where}.object_digests",
            "an object of arrays of arrays of strings",
        )


def _is_list_of_strings(value: Any) -> bool:
    # octets are digests, which are strings in the text
    return isinstance(value, list) and all(isinstance(item, str | bytes) for item in value)


def _check_tracks(tree: dict[str, Any], most: int) -> None:
    """Refuse more tracks than can be meant, before each is looked at."""
    listed = sum(
        max(len(entry["tracks"]), len(entry.get("object_digests", ())))
        for entry in tree["segments"]
    )
    if max(listed, len(tree["segments"])) > most:
        reached("max_segments", f"a manifest was not read: it has more than {most} tracks")
        raise _bad_manifest(f"there are more than {most} tracks")


def _require(valid: bool, where: str, what: str) -> None:
    if not valid:
        raise DecodeError(DecodeErrorName.WRONG_TYPE, f"{where} is {what}")


def _hex(text: str, octets: int, where: str) -> bytes:
    try:
        return parse_hex(text, octets)
    except DecodeError as error:
        raise error.within(where) from None


def _optional_hex(tree: dict[str, Any], name: str, octets: int) -> bytes | None:
    return _hex(tree[name], octets, name) if name in tree else None


def _parse_digests(digests: Any) -> dict[str, tuple[bytes, ...]] | None:
    if digests is None:
        return None
    return {
        name: tuple(
            _group_octets(group, f"group {index} of {name[:64]!r}")
            for index, group in enumerate(groups)
        )
        for name, groups in digests.items()
        if not of_unknown_component(name)
    }


def _group_octets(group: list[str | bytes], where: str) -> bytes:
    if len(group) == 1 and isinstance(group[0], bytes):
        return group[0]
    strings: list[str] = with_strings(group)
    text = "".join(strings)
    digits = 2 * HASH_OCTETS
    if any(len(digest) != digits for digest in strings) or not _DIGESTS.fullmatch(text):
        raise DecodeError(
            DecodeErrorName.BAD_HEX, f"{where}: a digest is {digits} lower-case hexadecimal digits"
        )
    return bytes.fromhex(text)


def _parse_tracks(names: Iterable[str]) -> tuple[DataTrack, ...]:
    tracks = []
    for name in with_strings(list(names)):
        if of_unknown_component(name):
            continue
        track = parse_track_name(name)
        if isinstance(track, ManifestTrack):
            raise DecodeError(DecodeErrorName.BAD_TRACK_NAME, f"{track.value} is no data track")
        tracks.append(track)
    return tuple(tracks)


def check_consistency(manifest: Manifest, max_segments: int = MAX_SEGMENTS) -> None:
    """Check that the segments agree with each other and with the descriptor.

    Raises DecodeError `bad-manifest`.
    """
    if not manifest.segments:
        raise _bad_manifest("there is no segment")
    if (segments := len(manifest.segments)) > max_segments:
        reached(
            "max_segments",
            f"a manifest was not read: it has {segments} segments, and at most {max_segments} are",
        )
        raise _bad_manifest(
            f"it has {segments} segments, and at most {max_segments} are read: allow more "
            "(--max-segments) if its publisher is to be trusted with that"
        )
    next_block = 0
    for number, entry in enumerate(manifest.segments):
        where = f"segments[{number}]"
        if entry.segment != number:
            raise _bad_manifest(f"{where} is numbered {entry.segment}")
        if entry.first_block != next_block:
            raise _bad_manifest(f"{where} starts at block {entry.first_block}, not {next_block}")
        if not 1 <= entry.blocks <= MAX_BLOCKS_PER_SEGMENT:
            raise _bad_manifest(f"{where} has {entry.blocks} blocks")
        next_block += entry.blocks
        if next_block * manifest.compat.block_tokens > MAX_TOKENS:
            raise _bad_manifest(f"{where} ends past the last token position there is")
        if any(track.segment != number for track in entry.tracks):
            raise _bad_manifest(f"{where} lists a track of another segment")
        if len(set(entry.tracks)) != len(entry.tracks):
            raise _bad_manifest(f"{where} lists a track twice")
        if not selections(entry.tracks) and not entry.other_tracks:
            raise _bad_manifest(f"{where} has neither a kv track nor k and v of one codec")
        _check_digests(entry, manifest.compat.layers, where)


def _check_digests(entry: SegmentEntry, layers: int, where: str) -> None:
    if entry.object_digests is None:
        return
    if set(entry.object_digests) != set(entry.tracks):
        raise _bad_manifest(f"{where}: object_digests has not one member per data track")
    for track, groups in entry.object_digests.items():
        if len(groups) > layers:
            raise _bad_manifest(f"{where}: {track} lists {len(groups)} of {layers} groups")
        if entry.complete and len(groups) != layers:
            raise _bad_manifest(f"{where} is complete but {track} lists {len(groups)} groups")
        if any(len(group) != entry.blocks * HASH_OCTETS for group in groups):
            raise _bad_manifest(f"{where}: a group of {track} has not {entry.blocks} digests")


def selections(tracks: Sequence[DataTrack]) -> list[tuple[DataTrack, ...]]:
    """Every way to get a whole segment, in the order of the first track each needs."""
    listed = frozenset(tracks)
    found: dict[tuple[DataTrack, ...], None] = {}
    for track in tracks:
        if track.component is Component.KV:
            found[track,] = None
            continue
        pair = tuple(
            DataTrack(component, track.codec, track.segment)
            for component in (Component.K, Component.V)
        )
        if listed.issuperset(pair):
            found[pair] = None
    return list(found)


def _encoding_name(tracks: tuple[DataTrack, ...]) -> str:
    first = tracks[0]
    joint = "" if len(tracks) > 1 else f"{first.component.label}."
    lossy = first.known_codec is not None and not first.known_codec.lossless
    return f"{joint}{first.codec}{' (lossy)' * lossy}"


def _segment_tree(
    entry: SegmentEntry, written: Written, texts: Mapping[DataTrack, Sequence[bytes]] | None
) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "segment": entry.segment,
        "first_block": entry.first_block,
        "blocks": entry.blocks,
        "block_keys_sha256": entry.block_keys_sha256.hex(),
        "tracks": [*map(str, entry.tracks), *entry.other_tracks],
        "complete": entry.complete,
    }
    digests = entry.object_digests
    if digests is not None:
        tree["object_digests"] = {
            str(track): written.put(group_texts(digests[track]) if texts is None else texts[track])
            for track in sorted(digests, key=str)
        }
    return tree


def group_texts(groups: Sequence[bytes], first: int = 0) -> list[bytes]:
    """What `Manifest.pieces` takes of Groups from `first` on."""
    return [
        b","[not index :] + group_text(group) for index, group in enumerate(groups, start=first)
    ]


def _bad_manifest(detail: str) -> DecodeError:
    return DecodeError(DecodeErrorName.BAD_MANIFEST, detail)


def _keys_mismatch(detail: str) -> DecodeError:
    return DecodeError(DecodeErrorName.KEYS_MISMATCH, detail)
