"""Rights that are withdrawn: open requests end, and nothing more is taken from publishers.

What a session may is asked when a request comes (`relay.rights.refusals`). When the policy has
changed, everything that is open is asked about again, with the tokens it has shown
(MOQT "Authorization").
"""

from __future__ import annotations

from moqt.requests import (
    IncomingFetch,
    IncomingPublish,
    IncomingSubscribe,
    IncomingTrackStatus,
)
from moqt.session import Session, session_of
from moqt.values.codes import PublishDoneCode, RequestErrorCode, StreamErrorCode
from moqt.values.errors import RequestError
from relay.audience.downstream import TrackRequest
from relay.core import Relay
from relay.rights.policy import Action
from relay.track import UpstreamTrack

WITHDRAWN = "the right to it was withdrawn"


def recheck(relay: Relay) -> None:
    """End every open request that the policy does not allow any more.

    A subscription ends with PUBLISH_DONE UNAUTHORIZED, a request that waits with
    REQUEST_ERROR UNAUTHORIZED, everything else with a reset, EXPIRED_AUTH_TOKEN.
    """
    for part in relay.parts:
        _recheck(part)


def _recheck(relay: Relay) -> None:
    for session in relay.sessions:
        relay.refusals.believe(session)
    _publishers(relay)
    _prefixes(relay)
    for track in tuple(relay.tracks.values()):
        _publications(relay, track)
        _readers(relay, track)
    for request in tuple(relay.waiting.pending):
        if not relay.refusals.may(request, _action(request), request.namespace):
            relay.counters.requests_revoked += 1
            relay.waiting.done(request)
            relay.refusals.refuse(request, RequestErrorCode.UNAUTHORIZED, WITHDRAWN)


def _action(request: TrackRequest) -> Action:
    match request:
        case IncomingSubscribe():
            return Action.SUBSCRIBE
        case IncomingFetch():
            return Action.FETCH
        case IncomingTrackStatus():
            return Action.TRACK_STATUS


def _publishers(relay: Relay) -> None:
    """Namespaces, and with each the tracks that only it made its session a publisher of."""
    refusals = relay.refusals
    for request in relay.namespaces.published.under(()):
        if refusals.may(request, Action.PUBLISH_NAMESPACE, request.namespace):
            continue
        relay.counters.requests_revoked += 1
        request.revoke(StreamErrorCode.EXPIRED_AUTH_TOKEN)
        for track in relay.tracks_by_namespace.under(request.namespace):
            if not _publishes(relay, session_of(request), track):
                _dismiss(track, session_of(request))


def _publishes(relay: Relay, session: Session, track: UpstreamTrack) -> bool:
    return any(
        request.session is session
        for request in relay.namespaces.published.above(track.name.namespace)
    ) or any(each.published and each.session is session for each in track.subscriptions)


def _prefixes(relay: Relay) -> None:
    refusals = relay.refusals
    for listing, prefix in tuple(relay.namespaces.listings.items()):
        if not refusals.may(listing, Action.SUBSCRIBE_NAMESPACE, prefix):
            relay.counters.requests_revoked += 1
            listing.revoke(StreamErrorCode.EXPIRED_AUTH_TOKEN)
    for wanted, prefix in tuple(relay.offers.wanted.items()):
        if not refusals.may(wanted, Action.SUBSCRIBE_TRACKS, prefix):
            relay.counters.requests_revoked += 1
            wanted.revoke(StreamErrorCode.EXPIRED_AUTH_TOKEN)


def _publications(relay: Relay, track: UpstreamTrack) -> None:
    namespace = track.name.namespace
    for subscription in tuple(track.subscriptions):
        request = subscription.request
        if isinstance(request, IncomingPublish) and not relay.refusals.may(
            request, Action.PUBLISH, namespace
        ):
            relay.counters.requests_revoked += 1
            _dismiss(track, subscription.session)


def _readers(relay: Relay, track: UpstreamTrack) -> None:
    refusals, namespace = relay.refusals, track.name.namespace
    for request in tuple(track.requests):
        if refusals.may(request, _action(request), namespace):
            continue
        relay.counters.requests_revoked += 1
        if isinstance(request, IncomingFetch):
            request.abort(StreamErrorCode.EXPIRED_AUTH_TOKEN)
        elif isinstance(request, IncomingSubscribe):
            request.end(PublishDoneCode.UNAUTHORIZED, WITHDRAWN)
    for offer in tuple(track.offers):
        if not refusals.may(offer, Action.SUBSCRIBE, namespace):
            relay.counters.requests_revoked += 1
            offer.withdraw(PublishDoneCode.UNAUTHORIZED, WITHDRAWN)


def _dismiss(track: UpstreamTrack, session: Session) -> None:
    """Take nothing more of it from `session`."""
    for subscription in [each for each in track.subscriptions if each.session is session]:
        if subscription.request is not None:
            subscription.request.cancel()
        subscription.request_failed(_withdrawn())
    track.ranges.dismiss(session, _withdrawn())


def _withdrawn() -> RequestError:
    return RequestError(RequestErrorCode.UNAUTHORIZED, WITHDRAWN)
