"""The terms on which a consumer takes a publication: what must be sealed, and who must have signed.

Nothing is negotiated: a consumer has content keys and producers, or not, and takes nothing that
is less than it asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from kvcs.names.codes import MAX_MANIFEST_OCTETS, MAX_SEGMENTS, ManifestTrack
from kvcs.names.errors import RetrievalError, UnknownKey, Unsupported, VerificationFailed
from kvcs.names.manifest import Manifest
from kvcs.names.manifest_text import ManifestReader, Text
from kvcs.names.namespace import PublicationNamespace
from kvcs.trust.cose import open_message
from kvcs.trust.producers import Producers
from kvcs.trust.sealing import TrackOpener, sealed_with, unknown_key
from kvsp.names.codes import DecodeErrorName
from kvsp.names.content_keys import ContentKeys
from kvsp.names.errors import DecodeError
from moqt.values.codes import DEFAULT_PRIORITY
from moqt.values.names import FullTrackName, Location

ENVELOPE_OCTETS: Final = 512
"""Octets by which a manifest that is signed and sealed is longer at the most."""


class Came(NamedTuple):
    """How a version of the manifest came, besides its payload."""

    track: ManifestTrack = ManifestTrack.MANIFEST
    priority: int = DEFAULT_PRIORITY
    properties: bytes = b""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a consumer asks of a publication before it uses anything of it."""

    content_keys: ContentKeys = ()
    """With any, nothing is taken that is not sealed with one of them."""

    producers: Producers | None = None
    """With these, nothing is taken that one of them has not listed in a signed manifest."""

    max_segments: int = MAX_SEGMENTS
    """A manifest of more segments is not read,"""

    max_manifest_octets: int = MAX_MANIFEST_OCTETS
    """and none of more octets."""

    @property
    def strict(self) -> bool:
        """Whether somebody must vouch for all that is used: what an index service tells, and
        what holders have, counts only as far as the manifest lists it."""
        return self.producers is not None or bool(self.content_keys)

    def opener(self, name: FullTrackName) -> TrackOpener | None:
        """What opens the Objects of a track; None when they come in clear."""
        return TrackOpener(self.content_keys, name) if self.content_keys else None

    def manifest(
        self,
        location: Location,
        payload: Text,
        came: Came,
        namespace: PublicationNamespace,
    ) -> Manifest:
        """A version of the manifest: opened, its signature verified, parsed and compared with
        the namespace.

        Raises DecodeError: those of `TrackOpener.open`, `open_message` and `Manifest.parse`,
        `unknown-producer` for one that is not signed and must be, `bad-manifest` for a signed
        one that does not say which publication it is of.
        """
        opener = self.opener(FullTrackName(namespace.fields, came.track.encode()))
        if opener is not None and not isinstance(payload, ManifestReader):
            payload = opener.open(*location, came.priority, came.properties, [payload])
        try:
            manifest = self.unsealed(payload, came, namespace)
        except DecodeError:
            key_id = None if opener is not None else sealed_with(came.properties)
            if key_id is None:
                raise
            raise unknown_key(key_id, ()) from None
        if self.producers is not None and None in (manifest.publication, manifest.scope_id):
            # a signature does not cover the namespace: it might be of any other publication
            raise DecodeError(
                DecodeErrorName.BAD_MANIFEST,
                "it is signed, but does not say of which 'publication' and 'scope_id' it is",
            )
        return manifest

    def read(
        self, location: Location, payload: Text, came: Came, namespace: PublicationNamespace
    ) -> Manifest | DecodeError:
        """`manifest`, in whatever thread: what it raises is returned."""
        try:
            return self.manifest(location, payload, came, namespace)
        except DecodeError as error:
            return error

    def unsealed(self, payload: Text, came: Came, namespace: PublicationNamespace) -> Manifest:
        """`manifest`, of what was opened."""
        if came.track is ManifestTrack.MANIFEST_COSE and not isinstance(payload, ManifestReader):
            payload = open_message(payload, self.producers)
        elif self.producers is not None:
            raise DecodeError(DecodeErrorName.UNKNOWN_PRODUCER, "it is not signed")
        return Manifest.parse(payload, namespace, self.max_segments, self.max_manifest_octets)


ANY: Final = Terms()
"""Those of a consumer that takes what comes in clear, whoever made it."""


def refusal(publication: str, error: DecodeError) -> RetrievalError:
    """Why a publication is of no use whose first manifest has this error."""
    if error.name is DecodeErrorName.CODEC_UNSUPPORTED:
        return Unsupported(f"{publication}: {error.detail}")
    if error.name is DecodeErrorName.UNKNOWN_KEY_ID:
        return UnknownKey(f"{publication}: {error.detail}")
    return VerificationFailed(f"{publication}: the manifest is not acceptable: {error}")
