"""Asking for the manifest of one publication, version by version (KVCS "Manifest Track").

Sans-IO over a `moqt` session. A subscription with a fill of the latest version; a FETCH, a few
times, when that does not bring what there is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from kvcs.names.codes import MAX_MANIFEST_OCTETS, ManifestTrack
from kvcs.names.errors import NotAuthorized, PublisherLost, VerificationFailed
from kvcs.names.manifest_text import ManifestReader, max_octets
from kvcs.names.refusals import not_authorized, retry_delay
from kvcs.retrieving.assembly import Assembly
from moqt.receiving.receiver import (
    AcceptedSubscribe,
    IncomingStream,
    ObjectReceiver,
    Via,
)
from moqt.requests import OutgoingFetch, OutgoingSubscribe, RequestState
from moqt.session import Session
from moqt.track.stored import Buffer
from moqt.values.codes import GroupOrder, ObjectStatus, PublishDoneCode, code_name
from moqt.values.errors import MoqtError, SessionClosed
from moqt.values.messages import LocationFilter, Parameters
from moqt.values.names import FullTrackName, Location
from moqt.wire.objects import ObjectHeader

MANIFEST_FETCHES: Final = 2
"""How often the manifest is fetched when its subscription does not bring it."""

ENCODINGS: Final = 4
"""Encodings side by side that a manifest may list our blocks in."""

ROOM_TO_GO_ON: Final = 16 << 20
"""Octets that any manifest may have: a publication may go on with segments after our tokens."""


class ManifestNeeds(Protocol):
    """What asking for the manifest needs of the retrieval it is a part of."""

    @property
    def over(self) -> bool:
        """Whether nothing is to be done any more."""
        ...

    def later(self, delay: float, make: Callable[[], None]) -> None:
        """Make a request in `delay` seconds, or later when there is no stream for it."""

    def version_received(self, location: Location, text: ManifestReader) -> None:
        """An Object of the manifest track, read as it came."""

    def versions_over(self) -> None:
        """No further version will come."""

    def relay_lost(self, error: SessionClosed) -> None:
        """The session has ended."""

    def fail(self, error: Exception) -> None:
        """The manifest cannot be had."""


class ManifestVersions:
    """The requests for the manifest of a publication, and what they are still to bring."""

    def __init__(self, session: Session, assembly: Assembly, retrieval: ManifestNeeds) -> None:
        self._session = session
        self._assembly = assembly
        self._retrieval = retrieval
        self._requests: list[OutgoingSubscribe | OutgoingFetch] = []
        self._live = False
        self._fetching = False
        self._fetches = 0
        self.arrivals = 0
        """Answers and parts of Objects that have come."""

    def ask(self) -> None:
        """Subscribe, with a fill of the latest version."""
        self._retrieval.later(0.0, self._subscribe)

    def cancel(self) -> None:
        """Cancel every request; harmless when repeated."""
        for request in self._requests:
            if request.state is not RequestState.CLOSED:
                request.cancel()
        self._requests.clear()

    # -- what the requests bring ---------------------------------------------------------

    @property
    def max_octets(self) -> int:
        """The most octets that the manifest may have: what listing our blocks needs in several
        encodings, and no less than `ROOM_TO_GO_ON`. How long a publication is of which only the
        index service knows that it has our blocks, nobody can tell."""
        blocks = self._assembly.known_blocks
        if blocks is None:
            return MAX_MANIFEST_OCTETS
        objects = ENCODINGS * 2 * self._assembly.descriptor.layers * blocks
        return max(ROOM_TO_GO_ON, max_octets(objects))

    def received(self, location: Location, text: ManifestReader) -> None:
        """An Object of the track."""
        self._retrieval.version_received(location, text)

    def too_large(self, octets: int) -> None:
        """A manifest of more than `max_octets` has begun, and is thrown away."""
        if not self._retrieval.over:
            self._retrieval.fail(
                VerificationFailed(
                    f"{self._publication}: a manifest of {octets} octets is more than the "
                    f"{self.max_octets} that the Objects it may list need"
                )
            )

    def stream_ended(self, why: str, *, fetched: bool) -> None:
        """A FETCH or a fill is over."""
        if fetched:
            self.request_over(why, fetched=True)
        else:
            self._miss(why)

    def request_over(self, why: str, *, fetched: bool) -> None:
        """Nothing more will come by that request."""
        if fetched:
            self._fetching = False
        else:
            self._live = False
        self._miss(why)

    def failed(self, error: MoqtError, *, fetched: bool) -> None:
        """A request was refused, or the session has ended."""
        if self._retrieval.over:
            return
        if not_authorized(error):
            self._retrieval.fail(NotAuthorized(f"the manifest is refused: {error}"))
        elif (delay := retry_delay(error)) is not None:
            self._retrieval.later(delay, self._fetch if fetched else self._subscribe)
        elif isinstance(error, SessionClosed):
            self._retrieval.relay_lost(error)
        else:
            self.request_over(str(error), fetched=fetched)

    # -- inside --------------------------------------------------------------------------

    def _miss(self, why: str) -> None:
        """Ask for versions that are missing and that nobody is going to bring."""
        manifest = self._assembly.manifest
        if self._retrieval.over or self._fetching or (self._live and manifest is not None):
            return
        if self._assembly.complete:
            self._retrieval.versions_over()
        elif self._fetches < MANIFEST_FETCHES:
            self._fetching = True
            self._fetches += 1
            self._retrieval.later(0.0, self._fetch)
        elif not self._live:
            self._retrieval.versions_over()
            if manifest is None:
                self._retrieval.fail(
                    PublisherLost(f"{self._publication}: no manifest to be had: {why}")
                )

    def _subscribe(self) -> None:
        self._live = True
        self._requests.append(
            self._session.subscribe(
                self._name,
                ManifestReceiver(self, fetched=False),
                Parameters(
                    location_filter=LocationFilter.next_object(),
                    fill_parameters=Parameters(location_filter=LocationFilter.relative_start(1)),
                ),
            )
        )

    def _fetch(self) -> None:
        self._requests.append(
            self._session.fetch(
                self._name,
                ManifestReceiver(self, fetched=True),
                Parameters(
                    location_filter=LocationFilter.absolute_start(self._assembly.version + 1),
                    group_order=GroupOrder.ASCENDING,
                ),
            )
        )

    @property
    def _name(self) -> FullTrackName:
        return FullTrackName(self._assembly.namespace.fields, ManifestTrack.MANIFEST.encode())

    @property
    def _publication(self) -> str:
        return f"publication {self._assembly.namespace.publication_id.hex()}"


class ManifestReceiver(ObjectReceiver):
    """The manifest track, subscribed to or fetched. A version is read as it comes: at no time is
    all of a long one still to be read."""

    def __init__(self, versions: ManifestVersions, *, fetched: bool) -> None:
        self.versions = versions
        self.fetched = fetched
        self.max_object_octets = versions.max_octets

    def subscribe_accepted(self, request: AcceptedSubscribe) -> None:
        self.versions.arrivals += 1

    def object_begun(self, stream: IncomingStream, header: ObjectHeader) -> None:
        super().object_begun(stream, header)
        if stream.state is not None:
            stream.state = ManifestReader(self.max_object_octets)

    def object_part(self, stream: IncomingStream, part: Buffer) -> None:
        self.versions.arrivals += 1
        if isinstance(stream.state, ManifestReader):
            stream.state.feed(part)

    def object_ended(self, stream: IncomingStream, header: ObjectHeader) -> None:
        text, stream.state = stream.state, None
        if isinstance(text, ManifestReader) and header.status is ObjectStatus.NORMAL:
            self.versions.received(header.location, text)

    def object_too_large(self, stream: IncomingStream, header: ObjectHeader) -> None:
        self.versions.too_large(header.length)

    def stream_ended(self, stream: IncomingStream, error: int | None) -> None:
        if self.fetched or stream.via is Via.FILL:
            self.versions.stream_ended("its stream ended without it", fetched=self.fetched)

    def subscription_done(self, code: int, reason: str) -> None:
        name = code_name(PublishDoneCode, code)
        self.versions.request_over(f"its subscription ended with {name}", fetched=self.fetched)

    def request_failed(self, error: MoqtError) -> None:
        self.versions.failed(error, fetched=self.fetched)
