"""Asking for the manifest: what is asked for, and when it is given up, without a session."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from kvcs.names.errors import NotAuthorized, PublisherLost, VerificationFailed
from kvcs.names.limits import REACHED
from kvcs.retrieving.manifest_track import BESIDE_OCTETS, MANIFEST_FETCHES, ManifestVersions
from kvcs.trust.producers import ProducerKey, Producers
from kvcs.trust.terms import ENVELOPE_OCTETS, Terms
from moqt.receiving.receiver import IncomingStream, ReceivedObject, Via
from moqt.requests import RequestState
from moqt.values.codes import (
    EndOfRange,
    ObjectStatus,
    PropertyType,
    PublishDoneCode,
    RequestErrorCode,
    StreamErrorCode,
)
from moqt.values.errors import RequestError, SessionClosed
from moqt.values.messages import KeyValue
from moqt.values.names import Location
from moqt.wire.objects import RangeMarker, SubgroupHeader
from tests.kvcs.support import DESCRIPTOR, descriptor, produced

NAMESPACE = produced().namespace
ABSENT = RequestError(RequestErrorCode.DOES_NOT_EXIST)


@dataclass(frozen=True)
class NotingTerms(Terms):
    """Takes note of what is to be read."""

    came: list = field(default_factory=list)

    def read(self, location, payload, came, namespace):
        self.came.append((payload, came.track, came.priority))
        return f"manifest {location.group}"


class Asked:
    """A retrieval, a session and an assembly that take note."""

    def __init__(self, producers=None, *, signed: bool = False, beside=None) -> None:
        self.over = self.no_more = False
        self.error: Exception | None = None
        self.delays: list[float] = []
        self.receivers: list = []
        self.requests: list = []
        self.assembly = SimpleNamespace(
            namespace=NAMESPACE,
            manifest=None,
            version=-1,
            complete=False,
            keys=[NAMESPACE.anchor_key],
            descriptor=DESCRIPTOR,
            terms=NotingTerms(producers=producers),
            expects=lambda location: True,
            left_out=frozenset(),
        )
        self.names: list[bytes] = []
        self.came = self.assembly.terms.came
        self.read: list = []
        self.versions = ManifestVersions(self, self.assembly, self, beside)
        self.versions.ask()
        if not signed:
            self.receivers[0].request_failed(ABSENT)
            for noted in (self.delays, self.receivers, self.requests):
                del noted[0]

    def later(self, delay, make) -> None:
        self.delays.append(delay)
        make()

    def versions_over(self) -> None:
        self.no_more = True

    def relay_lost(self, error) -> None:
        self.fail(PublisherLost(str(error)))

    def fail(self, error) -> None:
        self.error, self.over = error, True

    def subscribe(self, name, receiver, parameters):
        self.names.append(name.name)
        request = SimpleNamespace(state=RequestState.ESTABLISHED, parameters=parameters)
        request.cancel = lambda: setattr(request, "state", RequestState.CLOSED)
        self.receivers.append(receiver)
        self.requests.append(request)
        return request

    fetch = subscribe

    def version_received(self, location, read, after) -> None:
        self.read.append(read)

    @property
    def fetches(self) -> int:
        return sum(receiver.fetched for receiver in self.receivers)

    def end(self, receiver, via=Via.FETCH) -> None:
        receiver.stream_ended(IncomingStream(0, via), None)


def test_the_manifest_is_fetched_when_the_fill_does_not_bring_it_and_then_given_up() -> None:
    asked = Asked()
    assert asked.fetches == 0
    asked.end(asked.receivers[0], Via.FILL)
    for fetched in range(1, MANIFEST_FETCHES + 1):
        assert asked.fetches == fetched and not asked.over
        asked.end(asked.receivers[-1])
    assert asked.fetches == MANIFEST_FETCHES
    assert not asked.over  # the subscription may still bring it
    asked.receivers[0].subscription_done(PublishDoneCode.TRACK_ENDED, "")
    assert asked.no_more and isinstance(asked.error, PublisherLost)
    assert "no manifest to be had" in str(asked.error) and "TRACK_ENDED" in str(asked.error)


@pytest.mark.parametrize("complete", [True, False])
def test_when_the_subscription_ends_a_complete_manifest_is_the_last(complete: bool) -> None:
    asked = Asked()
    asked.assembly.manifest, asked.assembly.complete = object(), complete
    asked.receivers[0].subscription_done(PublishDoneCode.TRACK_ENDED, "")
    assert (asked.no_more, asked.fetches, asked.error) == (complete, not complete, None)


def test_a_fetch_up_to_the_end_shows_it_only_when_it_was_not_cut_short() -> None:
    asked = Asked()
    asked.assembly.manifest, asked.assembly.complete, asked.assembly.growing = object(), True, True
    asked.receivers[0].subscription_done(PublishDoneCode.GOING_AWAY, "")
    to_the_end = SimpleNamespace(end_of_track=True, properties=())
    for error, over in ((1, False), (None, True)):
        fetch = asked.receivers[-1]
        fetch.fetch_accepted(to_the_end)
        fetch.stream_ended(IncomingStream(0, Via.FETCH), error)
        assert asked.versions.ended is asked.no_more is over


def following(version: int) -> Asked:
    """One that follows a growing publication whose version `version` has come."""
    asked = Asked()
    asked.assembly.manifest, asked.assembly.complete, asked.assembly.growing = object(), True, True
    asked.assembly.version = version
    return asked


def cut(asked: Asked, version: int) -> None:
    opened = SubgroupHeader(0, version, 0, 128)
    stream = IncomingStream(0, Via.SUBSCRIPTION, subgroup=opened)
    asked.receivers[0].stream_ended(stream, int(StreamErrorCode.DELIVERY_TIMEOUT))


@pytest.mark.parametrize("told", ["by its marker", "by PUBLISH_DONE"])
def test_the_end_of_the_track_is_none_before_a_version_whose_stream_was_reset_has_come(
    told,
) -> None:
    asked = following(3)
    cut(asked, 4)
    assert asked.fetches == 1, "at once, and not when the next version comes"
    if told == "by its marker":
        end = ReceivedObject(Location(5, 0), 0, None, ObjectStatus.END_OF_TRACK, b"")
        asked.receivers[0].object_received(end)
    asked.receivers[0].subscription_done(PublishDoneCode.TRACK_ENDED, "")
    assert not asked.versions.ended and not asked.no_more
    asked.assembly.version = 4
    asked.end(asked.receivers[-1])
    assert asked.versions.ended and asked.no_more


def test_an_end_that_names_a_later_version_than_the_last_that_came_is_none() -> None:
    asked = following(3)
    end = ReceivedObject(Location(5, 0), 0, None, ObjectStatus.END_OF_TRACK, b"")
    asked.receivers[0].object_received(end)
    assert not asked.versions.ended
    asked.assembly.version = 4
    assert asked.versions.ended


def test_a_fetch_to_the_end_that_lacks_a_version_shows_no_end() -> None:
    for kind, ended in ((EndOfRange.UNKNOWN, False), (EndOfRange.NON_EXISTENT, True)):
        asked = following(3)
        cut(asked, 4)
        fetch = asked.receivers[-1]
        fetch.fetch_accepted(SimpleNamespace(end_of_track=True, properties=()))
        fetch.range_marker(IncomingStream(0, Via.FETCH), RangeMarker(kind, Location(4, 0)))
        asked.end(fetch)
        assert asked.versions.ended is ended


def test_each_version_that_was_cut_is_fetched_as_often_as_the_first() -> None:
    asked = following(0)
    for version in range(1, 5):
        cut(asked, version)
        assert asked.fetches == version
        asked.assembly.version = version
        asked.end(asked.receivers[-1])


def test_a_subgroup_stream_of_the_subscription_may_end_without_a_version() -> None:
    asked = Asked()
    asked.end(asked.receivers[0], Via.SUBSCRIPTION)
    assert asked.delays == [0.0] and asked.error is None


def test_a_refusal_is_final_for_lack_of_rights_and_repeated_when_the_peer_says_so() -> None:
    asked = Asked()
    asked.receivers[0].request_failed(RequestError(RequestErrorCode.TIMEOUT, retry_after_ms=1500))
    assert asked.delays == [0.0, 1.5] and asked.fetches == 0 and not asked.over
    asked.receivers[1].request_failed(RequestError(RequestErrorCode.UNAUTHORIZED, "no"))
    assert isinstance(asked.error, NotAuthorized)
    asked = Asked()
    asked.receivers[0].request_failed(SessionClosed(0, "gone"))
    assert isinstance(asked.error, PublisherLost)


def test_a_manifest_that_is_too_large_fails_verification() -> None:
    asked = Asked()
    asked.receivers[0].object_too_large(
        IncomingStream(0, Via.FILL), SimpleNamespace(length=(16 << 20) + 1)
    )
    assert isinstance(asked.error, VerificationFailed)


def test_a_manifest_may_be_as_large_as_listing_the_blocks_of_the_tokens_needs() -> None:
    asked = Asked()
    assert (
        asked.receivers[0].max_object_octets == (16 << 20) + ENVELOPE_OCTETS
    )  # for what may follow them
    asked.assembly.descriptor = descriptor(layers=32)
    asked.assembly.keys = [NAMESPACE.anchor_key] * 2000
    assert asked.versions.max_octets == (64 << 10) + 96 * (4 * 2 * 32 * 2000)
    asked.assembly.keys = [NAMESPACE.anchor_key] * (1 << 20)
    assert asked.versions.max_octets == 256 << 20
    asked.assembly.keys = [bytes(32)] * 10  # of a longer one, as an index service says
    assert asked.versions.max_octets == 256 << 20


def test_a_consumer_says_how_large_a_manifest_may_be_and_counts_those_that_are_larger() -> None:
    asked = Asked()
    asked.assembly.terms = NotingTerms(max_manifest_octets=1000)
    asked.assembly.keys = [NAMESPACE.anchor_key] * 2000
    assert asked.versions.max_octets == 1000
    before = REACHED["max_manifest_octets"]
    asked.receivers[0].object_too_large(IncomingStream(0, Via.FILL), SimpleNamespace(length=1001))
    assert "1001 octets is more than the 1000" in str(asked.error)
    assert REACHED["max_manifest_octets"] == before + 1


def test_cancelling_ends_every_request() -> None:
    asked = Asked()
    asked.end(asked.receivers[0], Via.FILL)
    asked.versions.cancel()
    assert [request.state for request in asked.requests] == [RequestState.CLOSED] * 2


# --- "manifest.cose" before "manifest" --------------------------------------------------

SIGNED, PLAIN = b"manifest.cose", b"manifest"


@pytest.mark.parametrize("by_fetch", [False, True])
def test_only_what_does_not_exist_leads_from_the_signed_to_the_plain_manifest(by_fetch) -> None:
    asked = Asked(signed=True)
    if by_fetch:
        asked.end(asked.receivers[0], Via.FILL)
    asked.receivers[-1].request_failed(ABSENT)
    assert asked.names == [SIGNED] * (1 + by_fetch) + [PLAIN] and asked.error is None
    assert {each.state for each in asked.requests[:-1]} == {RequestState.CLOSED}
    # what is said of the other track now is of no account
    for receiver in asked.receivers[:-1]:
        receiver.request_failed(RequestError(RequestErrorCode.UNAUTHORIZED))
        receiver.subscription_done(PublishDoneCode.TRACK_ENDED, "")
        receiver.object_received(version(b"late"))
        asked.end(receiver)
    assert asked.error is None and len(asked.names) == 2 + by_fetch and not asked.came
    asked.receivers[-1].object_received(version(b"plain"))
    assert asked.came == [(b"plain", "manifest", 128)]


@pytest.mark.parametrize("code", sorted(set(RequestErrorCode) - {RequestErrorCode.DOES_NOT_EXIST}))
def test_no_other_refusal_leads_to_the_plain_manifest(code) -> None:
    asked = Asked(signed=True)
    while not asked.over and len(asked.receivers) < 9:
        for receiver in asked.receivers[-2:]:
            receiver.request_failed(RequestError(code))
    assert set(asked.names) == {SIGNED}
    assert isinstance(asked.error, PublisherLost | NotAuthorized)


def test_neither_silence_nor_an_end_leads_to_the_plain_manifest() -> None:
    asked = Asked(signed=True)
    asked.receivers[0].subscription_done(PublishDoneCode.TRACK_ENDED, "")
    while not asked.over:
        asked.end(asked.receivers[-1])
    assert set(asked.names) == {SIGNED} and isinstance(asked.error, PublisherLost)


def test_once_a_signed_manifest_has_come_the_plain_one_is_never_asked_for() -> None:
    asked = Asked(signed=True)
    asked.assembly.manifest = object()
    asked.receivers[0].request_failed(ABSENT)
    assert set(asked.names) == {SIGNED}


def test_who_requires_producers_never_asks_for_the_plain_manifest() -> None:
    asked = Asked(Producers([ProducerKey.generate().public]), signed=True)
    asked.receivers[0].request_failed(ABSENT)
    assert asked.names == [SIGNED]
    assert isinstance(asked.error, VerificationFailed) and "not signed" in str(asked.error)


def test_the_priority_of_a_manifest_is_its_own_or_the_one_of_the_track() -> None:
    asked = Asked(signed=True)
    properties = (KeyValue(PropertyType.DEFAULT_PUBLISHER_PRIORITY, 9),)
    asked.receivers[0].subscribe_accepted(SimpleNamespace(properties=properties, largest=None))
    asked.receivers[0].object_received(version(b"a"))
    asked.receivers[0].object_received(version(b"b", 3))
    assert [(payload, priority) for payload, _, priority in asked.came] == [(b"a", 9), (b"b", 3)]


def version(payload: bytes, priority: int | None = None) -> ReceivedObject:
    return ReceivedObject(Location(0, 0), 0, priority, ObjectStatus.NORMAL, payload)


# --- long ones that cannot be read as they come ------------------------------------------


def test_a_long_signed_manifest_is_read_beside_everything_else_and_missed_only_then() -> None:
    jobs: list = []
    asked = Asked(signed=True, beside=lambda read, told: jobs.append((read, told)))
    short, long = version(bytes(BESIDE_OCTETS - 1)), version(bytes(BESIDE_OCTETS))
    asked.receivers[0].object_received(short)
    assert asked.read == ["manifest 0"] and not jobs
    asked.receivers[0].object_received(long)
    asked.end(asked.receivers[0], Via.FILL)
    asked.receivers[0].subscription_done(PublishDoneCode.TRACK_ENDED, "")
    assert len(asked.read) == len(jobs) == 1 and asked.fetches == 0 and not asked.over
    ((read, told),) = jobs
    told(read())
    assert asked.read == ["manifest 0"] * 2
    assert asked.fetches == 1, "it turned out to be none that helps"


@pytest.mark.parametrize(
    ("groups", "read_then"), [(range(10), [0, 8, 9]), ((0, 9, 8, 7, 6), [0, 9, 8])]
)
def test_of_long_versions_that_come_faster_than_they_are_read_only_the_last_ones_wait(
    groups, read_then
) -> None:
    jobs: list = []
    asked = Asked(signed=True, beside=lambda read, told: jobs.append((read, told)))
    for group in groups:
        asked.receivers[0].object_received(
            version(bytes(max(BESIDE_OCTETS, asked.versions.max_octets)))._replace(
                location=Location(group, 0)
            )
        )
    asked.end(asked.receivers[0], Via.FILL)
    asked.receivers[0].subscription_done(PublishDoneCode.TRACK_ENDED, "")
    assert len(jobs) == 1, "one is read at a time"
    for read, told in jobs:
        assert asked.fetches == 0
        told(read())
    assert asked.read == [f"manifest {group}" for group in read_then] and asked.fetches == 1


def test_what_is_read_beside_others_makes_no_difference_to_what_comes_of_it() -> None:
    jobs: list = []
    asked = Asked(signed=True, beside=lambda read, told: jobs.append((read, told)))
    asked.receivers[0].object_received(version(bytes(BESIDE_OCTETS)))
    asked.end(asked.receivers[0], Via.FILL)
    asked.assembly.manifest = object()
    ((read, told),) = jobs
    told(read())
    assert asked.fetches == 0 and not asked.over, "the subscription stands"
