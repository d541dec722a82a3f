"""Asking for the manifest of one publication, version by version (KVCS "Manifest Track").

Sans-IO over a `moqt` session. A subscription with a fill of the latest version; a FETCH, a few
times, when that does not bring what there is. First of "manifest.cose"; of "manifest" only when
the peer says that the other does not exist, and no producer is required.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

from kvcs.names.codes import ManifestTrack
from kvcs.names.errors import NotAuthorized, PublisherLost, VerificationFailed
from kvcs.names.limits import reached
from kvcs.names.manifest import Manifest
from kvcs.names.manifest_builder import check_progress
from kvcs.names.manifest_text import ManifestReader, max_octets
from kvcs.names.refusals import not_authorized, retry_delay
from kvcs.retrieving.assembly import Assembly
from kvcs.trust.pieces import in_one
from kvcs.trust.terms import ENVELOPE_OCTETS, Came
from kvsp.blocks.layout import Octets
from kvsp.names.errors import DecodeError
from moqt.receiving.receiver import (
    AcceptedFetch,
    AcceptedSubscribe,
    IncomingStream,
    ObjectReceiver,
    ReceivedObject,
    Via,
)
from moqt.requests import OutgoingFetch, OutgoingSubscribe, RequestState
from moqt.session import Session
from moqt.track.stored import Buffer
from moqt.values.codes import (
    DEFAULT_PRIORITY,
    EndOfRange,
    GroupOrder,
    ObjectStatus,
    PropertyType,
    PublishDoneCode,
    RequestErrorCode,
    code_name,
)
from moqt.values.errors import MoqtError, RequestError, SessionClosed
from moqt.values.messages import LocationFilter, Parameters, Properties, property_value
from moqt.values.names import FullTrackName, Location
from moqt.wire.objects import ObjectHeader, RangeMarker

MANIFEST_FETCHES: Final = 2
"""How often the manifest is fetched when its subscription does not bring it."""

ENCODINGS: Final = 4
"""Encodings side by side that a manifest may list our blocks in."""

ROOM_TO_GO_ON: Final = 16 << 20
"""Octets that any manifest may have: a publication may go on with segments after our tokens."""


BESIDE_OCTETS: Final = 256 << 10
"""Octets from which on judging a manifest at once takes a millisecond or more, also one that was
read as it came."""

MOST_UNREAD: Final = 2
"""Times `max_octets` that long versions have which wait while one is read; of more, that come
faster, the earliest version goes, whenever it came: a later one says all that it does, or has it
asked for again."""

LOOK_BACK_SECONDS: Final = 0.1
"""For which what a version leaves out may come by itself, as versions overtake each other."""

Read = Manifest | DecodeError
"""A version of the manifest, or what is wrong with it."""

Unread = Sequence[Octets] | ManifestReader
"""One that came, in parts, or was read as it came."""

Beside = Callable[[Callable[[], Read], Callable[[Read], None]], None]
"""Calls the first beside everything else, and then the second with what it has returned."""


class ManifestNeeds(Protocol):
    """What asking for the manifest needs of the retrieval it is a part of."""

    @property
    def over(self) -> bool:
        """Whether nothing is to be done any more."""
        ...

    def later(self, delay: float, make: Callable[[], None]) -> None:
        """Make a request in `delay` seconds, or later when there is no stream for it."""

    def version_received(self, location: Location, read: Read, after: Manifest | None) -> None:
        """A version of the manifest, which goes on from `after`, or what is wrong with it."""

    def versions_over(self) -> None:
        """No further version will come."""

    def relay_lost(self, error: SessionClosed) -> None:
        """The session has ended."""

    def fail(self, error: Exception) -> None:
        """The manifest cannot be had."""


class ManifestVersions:
    """The requests for the manifest of a publication, and what they are still to bring."""

    def __init__(
        self,
        session: Session,
        assembly: Assembly,
        retrieval: ManifestNeeds,
        beside: Beside | None = None,
        *,
        again: bool = False,
    ) -> None:
        """Long ones are read by `beside`, when it is given. `again`: the version that is there was
        brought by another session, and comes once more."""
        self._session = session
        self._beside = beside
        self.reading = False
        """Whether a version is being read."""
        self._unread: deque[tuple[Location, Unread, Came]] = deque()
        """Versions to be read after it."""
        self._missed: str | None = None
        """Why something may be missing, once they are."""
        self._again = again
        self._assembly = assembly
        self._retrieval = retrieval
        self.track = ManifestTrack.MANIFEST_COSE
        """The track that is asked for."""
        self._requests: list[OutgoingSubscribe | OutgoingFetch] = []
        self._live = False
        self._fetching = False
        self._fetches = 0
        self._fetched_from = -1
        self.said_to_end = False
        """The peer has said that the track has ended."""
        self.looks_back = False
        """Whether earlier versions are asked for, for what the last one leaves out."""
        self._back: EarlierReceiver | None = None
        self._backs = 0
        self._back_to = 0
        """The first version that may list what is left out."""
        self._nowhere: frozenset[int] = frozenset()
        """Segments of which no version lists what is left out."""
        self._latest = -1
        """The latest version that is known to have been published, when not all of it came."""
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
        self._unread.clear()
        self.looks_back, self._back = False, None

    # -- what the requests bring ---------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether the track has ended and its last version has come: none will follow."""
        return self.said_to_end and not self._behind

    @property
    def _behind(self) -> bool:
        """Whether a later version than the one there is known of, and was not brought."""
        return self._assembly.version < self._latest

    @property
    def max_octets(self) -> int:
        """The most octets that the manifest may have: what listing our blocks needs in several
        encodings, and no less than `ROOM_TO_GO_ON`. How long a publication is of which only the
        index service knows that it has our blocks, nobody can tell."""
        keys, most = self._assembly.keys, self._assembly.terms.max_manifest_octets
        if keys is None or self._assembly.namespace.anchor_key not in keys:
            return most
        objects = ENCODINGS * 2 * self._assembly.descriptor.layers * len(keys)
        return min(most, max(ROOM_TO_GO_ON, max_octets(objects, most)))

    @property
    def max_segments(self) -> int:
        """The most segments that it may have."""
        return self._assembly.terms.max_segments

    @property
    def in_clear(self) -> bool:
        """Whether its versions can be read as they come: they are neither sealed nor signed."""
        return self.track is ManifestTrack.MANIFEST and not self._assembly.terms.content_keys

    def received(self, location: Location, text: Unread, came: Came) -> None:
        """An Object of the track; one in clear was read as it came."""
        assembly = self._assembly
        if (self._again and location.group == assembly.version) or not assembly.expects(location):
            return
        octets = _octets(text)
        if self._beside is None or octets < BESIDE_OCTETS:
            after = assembly.manifest
            read = self._read(location, text, came, after, assembly.version)
            self._retrieval.version_received(location, read, after)
            self._look_back()
        else:
            self._unread.append((location, text, came))
            waiting = sum(_octets(each[1]) for each in self._unread)
            if len(self._unread) > 1 and waiting > MOST_UNREAD * self.max_octets:
                # the newest may have come first
                self._unread.remove(min(self._unread, key=lambda each: each[0]))
            if not self.reading:
                self._read_next(self._beside)

    def _read(
        self, location: Location, text: Unread, came: Came, known: Manifest | None, version: int
    ) -> Read:
        """A version, compared with the `version` that is known; in whatever thread."""
        terms, namespace = self._assembly.terms, self._assembly.namespace
        whole = text if isinstance(text, ManifestReader) else in_one(text)
        read = terms.read(location, whole, came, namespace)
        try:
            if known is not None and isinstance(read, Manifest):
                check_progress(*((known, read) if version < location.group else (read, known)))
        except DecodeError as error:
            return error
        return read

    def _read_next(self, beside: Beside) -> None:
        self.reading = bool(self._unread)
        if self._unread:
            unread, known = self._unread.popleft(), self._assembly.manifest
            told = partial(self._was_read, beside, unread[0], known)
            beside(partial(self._read, *unread, known, self._assembly.version), told)

    def _was_read(
        self, beside: Beside, location: Location, after: Manifest | None, read: Read
    ) -> None:
        self._retrieval.version_received(location, read, after)
        if self._retrieval.over:
            self._unread.clear()
        self._read_next(beside)
        self._look_back()
        self._settle()

    def too_large(self, octets: int) -> None:
        """A manifest of more than `max_octets` has begun, and is thrown away."""
        if not self._retrieval.over:
            reached("max_manifest_octets", f"a manifest of {octets} octets was not read")
            self._retrieval.fail(
                VerificationFailed(
                    f"{self._publication}: a manifest of {octets} octets is more than the "
                    f"{self.max_octets} that the Objects it may list need"
                )
            )

    def track_ended(self, last: int | None = None, *, all_came: bool = False) -> None:
        """No version will follow `last`, or those that are known when nobody says which it is;
        `all_came`: there are none but those that have come."""
        self.said_to_end = True
        if all_came:
            last = self._assembly.version
        if last is not None:
            self._latest = last

    def version_cut(self, version: int) -> None:
        """The stream of a version was reset: it is as missing as if it had never been sent."""
        self._latest = max(self._latest, version)
        if self._behind:
            self._miss("its stream was reset")

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
        elif self._is_unsigned(error):
            self._ask_for_unsigned()
        elif (delay := retry_delay(error)) is not None:
            self._retrieval.later(delay, self._fetch if fetched else self._subscribe)
        elif isinstance(error, SessionClosed):
            self._retrieval.relay_lost(error)
        else:
            self.request_over(str(error), fetched=fetched)

    # -- inside --------------------------------------------------------------------------

    def _is_unsigned(self, error: MoqtError) -> bool:
        """Whether the peer says that there is no "manifest.cose": this alone leads to the other
        track, no time-out and no error, which whoever is between could bring about."""
        return (
            self.track is ManifestTrack.MANIFEST_COSE
            and self._assembly.manifest is None
            and isinstance(error, RequestError)
            and error.code == RequestErrorCode.DOES_NOT_EXIST
        )

    def _ask_for_unsigned(self) -> None:
        if self._assembly.terms.producers is not None:
            self._retrieval.fail(
                VerificationFailed(
                    f"{self._publication}: it is not signed (there is no manifest.cose), and only "
                    "what an accepted producer has signed is taken"
                )
            )
            return
        self.cancel()
        self.track = ManifestTrack.MANIFEST
        self._live = self._fetching = self.said_to_end = False
        self._fetches, self._latest = 0, -1
        self.ask()

    def _miss(self, why: str) -> None:
        """Ask for versions that are missing and that nobody is going to bring."""
        if self.reading or self.looks_back:
            self._missed = why
            return
        manifest, version = self._assembly.manifest, self._assembly.version
        waits = self._live and manifest is not None and not self._behind
        if self._retrieval.over or self._fetching or waits:
            return
        if version > self._fetched_from:
            self._fetches, self._fetched_from = 0, version  # what is asked for now is another one
        if self._assembly.complete and (self.ended or not self._assembly.growing):
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

    def _settle(self) -> None:
        """Do what was put off until versions were read."""
        if self.reading:
            return
        if self._back is not None and self._back.over:
            self._looked_back(came=self._back.came)
        if self._missed is not None and not self.looks_back:
            missed, self._missed = self._missed, None
            self._miss(missed)

    def _look_back(self) -> None:
        """Ask for earlier versions when the last one leaves out what they list."""
        left_out = self._assembly.left_out
        if not left_out:
            self._back_to = self._assembly.version + 1
            if self._back is not None and not self._back.over:
                assert self._back.request is not None
                self._back.request.cancel()
                self._looked_back(came=True)
        elif left_out - self._nowhere and not self.looks_back and not self._retrieval.over:
            self.looks_back = True
            self._retrieval.later(LOOK_BACK_SECONDS if self._back_to else 0.0, self._fetch_earlier)

    def _fetch_earlier(self) -> None:
        last = self._assembly.version - 1
        if not self.looks_back:
            return
        if not self._assembly.left_out or last < self._back_to:
            self._looked_back(came=True)
            return
        receiver = EarlierReceiver(self, self.track, fetched=True)
        receiver.request = self._session.fetch(
            self._name,
            receiver,
            Parameters(
                location_filter=LocationFilter.groups(self._back_to, last),
                group_order=GroupOrder.DESCENDING,
            ),
        )
        self._back = receiver
        self._requests = [r for r in self._requests if r.state is not RequestState.CLOSED]
        self._requests.append(receiver.request)

    def earlier_over(self, receiver: EarlierReceiver) -> None:
        """The FETCH of earlier versions brings no more."""
        if receiver is self._back:
            self._settle()

    def _looked_back(self, *, came: bool) -> None:
        self.looks_back, self._back = False, None
        self._backs += 1
        if came or self._backs >= MANIFEST_FETCHES:
            self._backs, self._nowhere = 0, self._nowhere | self._assembly.left_out
        self._look_back()
        self._settle()

    def _subscribe(self) -> None:
        self._live = True
        self._requests.append(
            self._session.subscribe(
                self._name,
                ManifestReceiver(self, self.track, fetched=False),
                Parameters(
                    location_filter=LocationFilter.next_object(),
                    fill_parameters=Parameters(location_filter=LocationFilter.relative_start(1)),
                    # where the path is slow the newest goes first: it says all that others do
                    group_order=GroupOrder.DESCENDING,
                ),
            )
        )

    def _fetch(self) -> None:
        self._requests.append(
            self._session.fetch(
                self._name,
                ManifestReceiver(self, self.track, fetched=True),
                Parameters(
                    location_filter=LocationFilter.absolute_start(self._assembly.version + 1),
                    group_order=GroupOrder.ASCENDING,
                ),
            )
        )

    @property
    def _name(self) -> FullTrackName:
        return FullTrackName(self._assembly.namespace.fields, self.track.encode())

    @property
    def _publication(self) -> str:
        return f"publication {self._assembly.namespace.publication_id.hex()}"


def _octets(text: Unread) -> int:
    return text.octets if isinstance(text, ManifestReader) else sum(map(len, text))


class ManifestReceiver(ObjectReceiver):
    """A manifest track, subscribed to or fetched; silent once another one is asked for. A version
    in clear is read as it comes: at no time is all of a long one still to be read."""

    def __init__(self, versions: ManifestVersions, track: ManifestTrack, *, fetched: bool) -> None:
        self.versions = versions
        self.track = track
        self.fetched = fetched
        self.max_object_octets = versions.max_octets + ENVELOPE_OCTETS
        self._priority = DEFAULT_PRIORITY
        self._to_the_end = False
        """No version follows those of the FETCH, if it brings them all."""
        self._gaps = False
        """Of some it says that they are not to be had."""

    @property
    def _in_use(self) -> bool:
        return self.versions.track is self.track

    def subscribe_accepted(self, request: AcceptedSubscribe) -> None:
        self._accepted(request.properties)

    def fetch_accepted(self, request: AcceptedFetch) -> None:
        self._accepted(request.properties)
        self._to_the_end = request.end_of_track

    def _accepted(self, properties: Properties) -> None:
        self.versions.arrivals += 1
        value = property_value(properties, PropertyType.DEFAULT_PUBLISHER_PRIORITY)
        if isinstance(value, int):
            self._priority = value

    def object_begun(self, stream: IncomingStream, header: ObjectHeader) -> None:
        super().object_begun(stream, header)
        kept = stream.state is not None and not header.status
        if kept and self._in_use and self.versions.in_clear:
            stream.state = ManifestReader(self.max_object_octets, self.versions.max_segments)

    def object_part(self, stream: IncomingStream, part: Buffer) -> None:
        self.versions.arrivals += 1
        if isinstance(stream.state, ManifestReader):
            stream.state.feed(part)
        else:
            super().object_part(stream, part)

    def object_ended(self, stream: IncomingStream, header: ObjectHeader) -> None:
        text = stream.state
        if not isinstance(text, ManifestReader):
            super().object_ended(stream, header)
            return
        stream.state = None
        self._received(header.location, text, header.priority, header.properties)

    def object_whole(
        self, stream: IncomingStream, header: ObjectHeader, parts: list[Buffer]
    ) -> None:
        if header.status:
            super().object_whole(stream, header, parts)
        else:  # joined where it is read
            self._received(header.location, parts, header.priority, header.properties)

    def object_received(self, received: ReceivedObject) -> None:
        if received.status is ObjectStatus.NORMAL:
            location, payload = received.location, received.payload
            self._received(location, [payload], received.priority, received.properties)
        elif received.status is ObjectStatus.END_OF_TRACK and self._in_use:
            group, number = received.location
            self.versions.track_ended(group if number else group - 1)

    def _received(
        self,
        location: Location,
        text: Unread,
        priority: int | None,
        properties: bytes,
    ) -> None:
        if self._in_use:
            priority = self._priority if priority is None else priority
            self.versions.received(location, text, Came(self.track, priority, properties))

    def object_too_large(self, stream: IncomingStream, header: ObjectHeader) -> None:
        if self._in_use:
            self.versions.too_large(header.length)

    def range_marker(self, stream: IncomingStream, marker: RangeMarker) -> None:
        super().range_marker(stream, marker)
        self._gaps |= marker.kind is not EndOfRange.NON_EXISTENT

    def stream_ended(self, stream: IncomingStream, error: int | None) -> None:
        if not self._in_use:
            return
        if self.fetched or stream.via is Via.FILL:
            if self._to_the_end and error is None:
                self.versions.track_ended(all_came=not self._gaps)
            self.versions.stream_ended("its stream ended without it", fetched=self.fetched)
        elif error is not None and stream.subgroup is not None:
            self.versions.version_cut(stream.subgroup.group)

    def subscription_done(self, code: int, reason: str) -> None:
        if self._in_use:
            if code == PublishDoneCode.TRACK_ENDED:
                self.versions.track_ended()
            name = code_name(PublishDoneCode, code)
            self.versions.request_over(f"its subscription ended with {name}", fetched=self.fetched)

    def request_failed(self, error: MoqtError) -> None:
        if self._in_use:
            self.versions.failed(error, fetched=self.fetched)


class EarlierReceiver(ManifestReceiver):
    """Earlier versions, for what the last one leaves out. What is wrong with the FETCH is no
    failure of the track."""

    request: OutgoingFetch | None = None
    over = False
    """Whether nothing more will come by it."""
    came = False
    """Whether all came that there is."""

    def stream_ended(self, stream: IncomingStream, error: int | None) -> None:
        self._end(came=error is None and not self._gaps)

    def request_failed(self, error: MoqtError) -> None:
        self._end(came=False)

    def _end(self, *, came: bool) -> None:
        self.over, self.came = True, came
        self.versions.earlier_over(self)
