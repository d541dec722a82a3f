"""Asking for the manifest: what is asked for, and when it is given up, without a session."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvcs.names.errors import NotAuthorized, PublisherLost, VerificationFailed
from kvcs.retrieving.manifest_track import MANIFEST_FETCHES, ManifestVersions
from moqt.receiving.receiver import IncomingStream, Via
from moqt.requests import RequestState
from moqt.values.codes import PublishDoneCode, RequestErrorCode
from moqt.values.errors import RequestError, SessionClosed
from tests.kvcs.support import DESCRIPTOR, descriptor, produced

NAMESPACE = produced().namespace


class Asked:
    """A retrieval, a session and an assembly that take note."""

    def __init__(self) -> None:
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
            known_blocks=5,
            descriptor=DESCRIPTOR,
        )
        self.versions = ManifestVersions(self, self.assembly, self)
        self.versions.ask()

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
        assert name.name == b"manifest"
        request = SimpleNamespace(state=RequestState.ESTABLISHED, parameters=parameters)
        request.cancel = lambda: setattr(request, "state", RequestState.CLOSED)
        self.receivers.append(receiver)
        self.requests.append(request)
        return request

    fetch = subscribe

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
    assert asked.receivers[0].max_object_octets == 16 << 20  # for what may follow them
    asked.assembly.descriptor, asked.assembly.known_blocks = descriptor(layers=32), 2000
    assert asked.versions.max_octets == (64 << 10) + 96 * (4 * 2 * 32 * 2000)
    asked.assembly.known_blocks = 1 << 20
    assert asked.versions.max_octets == 256 << 20
    asked.assembly.known_blocks = None
    assert asked.versions.max_octets == 256 << 20


def test_cancelling_ends_every_request() -> None:
    asked = Asked()
    asked.end(asked.receivers[0], Via.FILL)
    asked.versions.cancel()
    assert [request.state for request in asked.requests] == [RequestState.CLOSED] * 2
