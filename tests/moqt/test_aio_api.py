"""The asyncio face: cancellation anywhere, ends of iteration, bounds, over sessions in memory."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

import moqt
from moqt import aio
from moqt.publisher import Publisher
from moqt.quic.certificates import make_self_signed
from moqt.session import SessionHandler
from moqt.track.store import TrackStore
from moqt.values.codes import ObjectStatus, PublishDoneCode, RequestErrorCode, StreamErrorCode
from moqt.values.config import SessionConfig
from moqt.values.messages import LocationFilter, Parameters
from moqt.values.names import FullTrackName, Location
from moqt.wire.codec import codec_for
from moqt.wire.objects import DatagramObject
from tests.moqt.inside import events_queued, kept, listeners, octets_queued, queued
from tests.moqt.memory import ALPN, Pair, assert_clean

NAMESPACE, TRACK = (b"demo", b"live"), b"video"
NAME = FullTrackName(NAMESPACE, TRACK)
FROM_START = LocationFilter.absolute_start(0)


class Accepting(Publisher):
    def publish_namespace_received(self, request):
        self.incoming = request
        request.accept()


class Link:
    """Two MoqtSessions in memory, moved on by a task of their own."""

    def __init__(self, handler=None, **options):
        self.handler = handler if handler is not None else Accepting()
        self.pair = Pair(Publisher(), self.handler, start=False, **options)
        self.client, self.server = (
            aio.MoqtSession(s) for s in (self.pair.client, self.pair.server)
        )

    async def __aenter__(self):
        for session in (self.pair.client, self.pair.server):
            session.connection_established(ALPN)
        self.task = asyncio.create_task(self._pump())
        return self

    async def __aexit__(self, *_):
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task

    async def _pump(self):
        while True:
            self.pair.run()
            await asyncio.sleep(0)

    async def settle(self):
        for _ in range(5):
            await asyncio.sleep(0)


def stocked(groups=3, objects=4, size=10, ended=True):
    handler = Accepting()
    store = TrackStore(NAME)
    handler.add_track(store)
    stock(store, groups, objects, size, ended)
    return handler, store


def stock(store, groups=3, objects=4, size=10, ended=True):
    for g in range(groups):
        for o in range(objects):
            store.append(g, o, bytes(size))
        store.finish_subgroup(g, 0)
    if ended:
        store.mark_end(Location(groups, 0), ObjectStatus.END_OF_TRACK)
        store.finish_subgroup(groups, 0)
        store.finish(PublishDoneCode.TRACK_ENDED)


async def subscribe(session):
    async with await session.subscribe(NAMESPACE, TRACK, fill=FROM_START) as it:
        return [o async for o in it]


async def fetch(session):
    async with await session.fetch(NAMESPACE, TRACK) as it:
        return [o async for o in it]


async def listing(session):
    async with await session.subscribe_namespace((b"demo",)) as it:
        return await anext(it)


async def publish(session):
    published = await session.publish_namespace((b"mine",))
    try:
        await asyncio.sleep(0)
    finally:
        published.withdraw()


async def tracks(session):
    async with await session.subscribe_tracks((b"demo",)) as it, (await anext(it)).accept():
        await asyncio.sleep(0)


async def status(session):
    return await session.track_status(NAMESPACE, TRACK)


@pytest.mark.parametrize("work", [subscribe, fetch, listing, publish, status, tracks])
async def test_a_task_cancelled_at_any_await_leaves_nothing_behind(work):
    for steps in range(40):
        handler, store = stocked()
        async with Link(handler, seed=steps) as link:
            task = asyncio.create_task(work(link.client))
            for _ in range(steps):
                await asyncio.sleep(0)
            done = task.done()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await link.settle()
            assert_clean(link.pair.client)
            assert_clean(link.pair.server)
            assert not listeners(store) and not kept(handler).listings
            assert link.pair.client_transport.paused == set()
        if done:
            return
    raise AssertionError(f"{work.__name__} never ended by itself")


async def test_waiting_for_a_stream_to_be_granted_can_be_cancelled():
    async with Link() as link:
        await link.client.wait_established()
        link.pair.client_transport.open_stream = lambda *, bidirectional: None
        task = asyncio.create_task(link.client.subscribe(NAMESPACE, TRACK))
        await link.settle()
        assert not task.done() and link.pair.client.requests_waiting == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert_clean(link.pair.client)
        assert link.pair.client.requests.next_id() == 0


async def test_iteration_ends_with_publish_done_and_says_why():
    handler, store = stocked(groups=0, ended=False)
    async with Link(handler) as link:
        it = await link.client.subscribe(NAMESPACE, TRACK)
        stock(store, ended=False)
        store.finish(PublishDoneCode.GOING_AWAY, "later")
        assert len([o async for o in it]) == 12
        assert (it.done_code, it.done_reason) == (PublishDoneCode.GOING_AWAY, "later")
        assert [o async for o in it] == []


async def test_iteration_raises_when_the_session_is_lost_after_what_had_come():
    handler, store = stocked(groups=0, ended=False)
    async with Link(handler) as link:
        it = await link.client.subscribe(NAMESPACE, TRACK)
        stock(store, ended=False)
        await link.settle()
        link.server.close(reason="bye")
        await link.client.wait_closed()
        for _ in range(12):
            await anext(it)
        for _ in range(2):
            with pytest.raises(moqt.SessionClosed):
                await anext(it)


async def test_a_fetch_raises_stream_reset_when_the_rest_is_unknown():
    handler, store = stocked()
    store.authoritative = False
    async with Link(handler) as link:
        it = await link.client.fetch(NAMESPACE, TRACK)
        with pytest.raises(moqt.StreamReset) as reset:
            [o async for o in it]
        assert reset.value.code == StreamErrorCode.UNKNOWN_OBJECT_STATUS


@pytest.mark.parametrize("work", [subscribe, fetch, listing, publish, status, tracks])
async def test_every_request_raises_when_the_session_ends_meanwhile(work):
    class Silent(SessionHandler):
        def subscribe_received(self, request): ...

        fetch_received = track_status_received = subscribe_received
        publish_namespace_received = subscribe_namespace_received = subscribe_received
        subscribe_tracks_received = subscribe_received

    async with Link(Silent()) as link:
        task = asyncio.create_task(work(link.client))
        await link.settle()
        assert not task.done()
        link.client.close()
        with pytest.raises(moqt.SessionClosed):
            await task
        with pytest.raises(moqt.SessionClosed):
            await work(link.client)
        assert_clean(link.pair.client)


@pytest.mark.parametrize("work", [subscribe, fetch, listing, publish, status, tracks])
async def test_every_request_raises_what_the_peer_refused_it_with(work):
    async with Link(SessionHandler()) as link:
        with pytest.raises(moqt.RequestError) as refused:
            await work(link.client)
        assert refused.value.code == RequestErrorCode.NOT_SUPPORTED
        await link.settle()
        assert_clean(link.pair.client)
        assert_clean(link.pair.server)


async def test_an_unread_queue_is_bounded_and_goes_on_when_it_is_read():
    handler, store = stocked(groups=0, ended=False)
    async with Link(handler, stream_window=20_000, max_streams=8) as link:
        it = await link.client.subscribe(NAMESPACE, TRACK, queue_octets=30_000)
        stock(store, groups=40, objects=10, size=5000)
        for _ in range(50):
            await asyncio.sleep(0)
        assert 30_000 < octets_queued(it) < 30_000 + 9 * 20_000
        assert len([o async for o in it if not o.status]) == 400
        assert link.pair.client_transport.paused == set()


async def test_empty_objects_count_in_a_queue_too():
    handler, store = stocked(groups=0, ended=False)
    async with Link(handler, stream_window=1000) as link:
        it = await link.client.subscribe(NAMESPACE, TRACK, queue_octets=10_000)
        stock(store, groups=1, objects=2000, size=0)
        for _ in range(200):
            await asyncio.sleep(0)
        assert len(queued(it)) < 500
        assert len([o async for o in it if not o.status]) == 2000


async def test_datagrams_beyond_the_queues_bound_are_dropped():
    handler, _ = stocked(groups=0, ended=False)
    async with Link(handler) as link:
        it = await link.client.subscribe(NAMESPACE, TRACK, queue_octets=2000)
        codec = codec_for(ALPN)
        for n in range(100):
            link.pair.client.datagram(codec.encode_datagram(DatagramObject(1, n, 0, payload=b"x")))
        assert 7 <= len(queued(it)) <= 9


async def test_an_object_too_large_to_assemble_gives_the_request_up(monkeypatch):
    monkeypatch.setattr(aio.ObjectQueue, "max_object_octets", 1000)
    handler, _ = stocked(size=1001)
    async with Link(handler) as link:
        it = await link.client.fetch(NAMESPACE, TRACK)
        with pytest.raises(moqt.RequestError) as error:
            await anext(it)
        assert error.value.code == RequestErrorCode.EXCESSIVE_LOAD
        await link.settle()
        assert_clean(link.pair.client)
        assert_clean(link.pair.server)


async def test_more_objects_than_may_wait_give_the_request_up(caplog):
    handler, store = stocked(groups=0, ended=False)
    async with Link(handler, client_config=SessionConfig(max_unread_objects=50)) as link:
        it = await link.client.subscribe(NAMESPACE, TRACK)
        stock(store, groups=1, objects=200, size=0)
        await link.settle()
        assert len(queued(it)) == 50
        with pytest.raises(moqt.RequestError, match="more than 50 Objects wait") as error:
            async for _ in it:
                pass
        assert error.value.code == RequestErrorCode.EXCESSIVE_LOAD
        assert link.pair.client.counters.requests_unread == 1
        assert "limit of 50 (max_unread_objects)" in caplog.text
        await link.settle()
        assert_clean(link.pair.client)
        assert_clean(link.pair.server)


async def test_a_listing_nobody_reads_stays_bounded():
    handler = Accepting()
    async with Link(handler) as link:
        it = await link.client.subscribe_namespace(())
        for n in range(200):
            store = TrackStore(FullTrackName((b"%d" % (n % 7),), b"t"))
            handler.add_track(store)
            await link.settle()
            if n % 2:
                handler.remove_track(store.name)
                await link.settle()
        assert len(events_queued(it)) <= 7
        seen = set()
        for _ in range(len(events_queued(it))):
            namespace, present = await anext(it)
            (seen.add if present else seen.discard)(namespace)
        assert seen == it.namespaces == handler.namespaces()


async def test_two_sessions_of_which_one_never_reads_do_not_disturb_each_other():
    handler, store = stocked(groups=0, ended=False)
    async with Link(handler, stream_window=20_000) as stuck, Link(handler) as other:
        lazy = await stuck.client.subscribe(NAMESPACE, TRACK, queue_octets=10_000)
        keen = await other.client.subscribe(NAMESPACE, TRACK)
        stock(store, groups=30, objects=10, size=5000)
        assert len([o async for o in keen if not o.status]) == 300
        assert stuck.pair.server_transport.max_unsent < 400_000
        lazy.cancel()
        await stuck.settle()
        assert_clean(stuck.pair.server)
    assert not listeners(store)


async def test_a_revoked_namespace_is_told():
    handler = Accepting()
    async with Link(handler) as link:
        published = await link.client.publish_namespace((b"mine",))
        handler.incoming.revoke()
        assert isinstance(await asyncio.wait_for(published.ended, 30), moqt.RequestError)
        assert_clean(link.pair.client)


@pytest.mark.parametrize(
    "url", ["http://x", "moqt://", "moqt://u@h", "moqt://h:99999", "moqt://h/ä", "moqt://h/a b"]
)
def test_a_url_that_is_none_is_refused_in_words(url):
    with pytest.raises(moqt.MisuseError):
        moqt.connect(url)


# -- PUBLISH, SUBSCRIBE_TRACKS, redirects, GOAWAY ------------------------------------------


JOIN = Parameters(
    forward=1,
    location_filter=LocationFilter.next_object(),
    fill_parameters=Parameters(location_filter=FROM_START),
)


class Taking(Publisher):
    """Accepts every PUBLISH; `offers` of those that came."""

    def __init__(self):
        super().__init__()
        self.offers = asyncio.Queue()

    def publish_received(self, request):
        self.offers.put_nowait(aio.OfferedTrack(request.name, request))


async def test_offered_tracks_are_iterated_over_taken_and_filled():
    handler, store = stocked(groups=2)
    async with Link(handler) as link:
        paused = Parameters(forward=0)
        async with await link.client.subscribe_tracks((b"demo",), parameters=paused) as offers:
            offer = await anext(offers)
            assert (offer.name, offer.largest) == (NAME, Location(1, 3))
            assert not offer.skipped
            got = [o async for o in offer.accept(update=JOIN)]
            assert len([o for o in got if o.status is ObjectStatus.NORMAL]) == 8
            later = TrackStore(FullTrackName((b"demo", b"x"), b"later"))
            handler.add_track(later)
            offer = await anext(offers)
            subscription = offer.accept()
            assert offer.name == later.name
            answer = await subscription.update(Parameters(forward=1))
            assert answer.parameters.largest_object is None
            later.append(0, 0, b"x")
            assert (await anext(subscription)).location == Location(0, 0)
            subscription.cancel()
        await link.settle()
        assert not kept(handler).wanted
    assert not listeners(store)


async def test_an_offer_the_publisher_takes_back_before_it_was_looked_at_is_not_handed_out():
    handler = Accepting()
    async with Link(handler) as link:
        offers = await link.client.subscribe_tracks(())
        for n in range(2):
            handler.add_track(TrackStore(FullTrackName((b"%d" % n,), b"t")))
        await link.settle()
        next(iter(link.pair.server.requests.outgoing.values())).cancel()
        await link.settle()
        assert (await anext(offers)).name.namespace == (b"1",)
        offers.cancel()


async def test_unread_offers_are_bounded_and_rejected_on_leaving():
    handler = Accepting()
    async with Link(handler) as link:
        offers = await link.client.subscribe_tracks((), max_offers=3)
        for n in range(5):
            handler.add_track(TrackStore(FullTrackName((b"%d" % n,), b"t")))
        await link.settle()
        assert link.pair.client.counters.requests_refused == 2
        offers.cancel()
        await link.settle()
        assert link.pair.client.counters.requests_refused == 5
        assert_clean(link.pair.client)
        assert_clean(link.pair.server)
        with pytest.raises(StopAsyncIteration):
            await anext(offers)


async def test_a_skipped_track_is_told_and_can_be_subscribed_to():
    handler, _ = stocked()
    async with Link(handler) as link:
        offers = await link.client.subscribe_tracks((b"other",))
        (request,) = kept(handler).wanted
        request.skip(FullTrackName((b"other",), b"t"))
        offer = await anext(offers)
        assert offer.skipped and offer.name == FullTrackName((b"other",), b"t")
        with pytest.raises(moqt.MisuseError):
            offer.accept()
        handler.add_track(TrackStore(offer.name))
        subscription = await link.client.subscribe(*offer.name)
        subscription.cancel()


async def test_a_published_track_is_received_and_ends_with_publish_done():
    taking = Taking()
    store = TrackStore(NAME)
    async with Link(taking) as link:
        publishing = asyncio.create_task(link.client.publish(store))
        offer = await taking.offers.get()
        subscription = offer.accept()
        published = await publishing
        store.append(0, 0, b"x")
        assert (await anext(subscription)).location == Location(0, 0)
        published.withdraw()
        assert [o async for o in subscription] == []
        assert subscription.done_code == PublishDoneCode.TRACK_ENDED
        assert await published.ended is None


async def test_a_publish_nobody_wants_raises_uninterested():
    async with Link(Publisher()) as link:
        with pytest.raises(moqt.RequestError) as refused:
            await link.client.publish(TrackStore(NAME))
        assert refused.value.code == RequestErrorCode.UNINTERESTED


async def test_after_goaway_nothing_new_is_asked_for_and_a_drained_session_closes():
    handler, _ = stocked(ended=False)
    async with Link(handler) as link:
        subscription = await link.client.subscribe(NAMESPACE, TRACK)
        link.pair.server.send_goaway("moqt://b.example/", 5000)
        assert (await link.client.wait_goaway()).uri == "moqt://b.example/"
        asked = link.pair.server.counters.requests_received
        with pytest.raises(moqt.RequestError) as refused:
            await fetch(link.client)
        assert refused.value.code == RequestErrorCode.GOING_AWAY
        assert link.pair.server.counters.requests_received == asked, "it was asked all the same"
        link.client.drain()
        await link.settle()
        assert link.client.closed is None
        subscription.cancel()
        assert (await link.client.wait_closed()).code == moqt.SessionErrorCode.NO_ERROR
        with pytest.raises(moqt.SessionClosed):
            await link.client.wait_goaway()


class Redirecting(Publisher):
    def __init__(self, uri, name):
        super().__init__()
        self.to = (uri, name.namespace, name.name)
        self.asked = 0

    def fetch_received(self, request):
        self.asked += 1
        request.redirect(*self.to)


def ask(session, name):
    return session.fetch(name.namespace, name.name)


async def test_a_redirect_is_followed_to_another_session_and_name():
    handler, store = stocked()
    other = FullTrackName((b"moved",), b"away")
    store.name, handler.tracks = other, {other: store}
    async with Link(Redirecting("moqt://b/", other)) as first, Link(handler) as second:
        connected = []

        async def connect(uri):
            connected.append(uri)
            return second.client

        session, response = await moqt.follow(first.client, NAME, ask, connect)
        assert session is second.client and connected == ["moqt://b/"]
        assert len([o async for o in response if not o.status]) == 12


async def test_a_redirect_within_the_session_needs_no_connection():
    _, store = stocked()
    other = FullTrackName((b"moved",), b"away")

    class Renamed(Publisher):
        def fetch_received(self, request):
            if request.name == other:
                request.accept(store)
            else:
                request.redirect("", *other)

    async with Link(Renamed()) as link:
        session, response = await moqt.follow(link.client, NAME, ask, None)
        assert session is link.client
        response.cancel()


async def test_redirects_in_a_circle_or_beyond_the_hops_end_and_close_what_was_opened():
    circle = Redirecting("", NAME)
    async with Link(circle) as link:
        with pytest.raises(moqt.RequestError) as refused:
            await moqt.follow(link.client, NAME, ask, None)
        assert refused.value.code == RequestErrorCode.REDIRECT and circle.asked == 1

    class Onward(Publisher):
        def fetch_received(self, request):
            request.redirect("moqt://b/", request.name.namespace, request.name.name + b"x")

    async with Link(Onward()) as first, Link(Onward()) as second, Link(Onward()) as third:
        sessions = [second.client, third.client]

        async def connect(uri):
            return sessions.pop(0)

        with pytest.raises(moqt.RequestError):
            await moqt.follow(
                first.client, NAME, ask, connect, limits=moqt.FollowLimits(max_hops=2)
            )
        assert second.client.closed is not None and third.client.closed is not None
        assert first.client.closed is None


async def test_a_refusal_with_a_retry_interval_is_repeated_a_bounded_number_of_times():
    class Busy(Publisher):
        asked = 0

        def fetch_received(self, request):
            self.asked += 1
            request.reject(RequestErrorCode.EXCESSIVE_LOAD, "busy", retry_after_ms=0)

    busy = Busy()
    async with Link(busy) as link:
        with pytest.raises(moqt.RequestError) as refused:
            await moqt.follow(link.client, NAME, ask, None, limits=moqt.FollowLimits(max_retries=2))
        assert refused.value.code == RequestErrorCode.EXCESSIVE_LOAD and busy.asked == 3
        with pytest.raises(moqt.RequestError):
            await moqt.follow(link.client, NAME, ask, None, churn=moqt.Churn(1, 3600))
        assert busy.asked == 5


def test_churn_forgets_what_is_long_ago():
    churn = moqt.Churn(2, 10)
    assert [churn.allow(t) for t in (0, 1, 2, 10.5, 10.6)] == [True, True, False, True, False]


# -- over loopback -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return make_self_signed(tmp_path_factory.mktemp("tls"))


@contextlib.asynccontextmanager
async def serving(certificate, handler, **options):
    cert, key = certificate
    quic = moqt.QuicConfig(certfile=cert, keyfile=key, **options)
    async with await moqt.serve("127.0.0.1", 0, quic=quic, handler=handler) as server:
        yield server, f"moqt://127.0.0.1:{server.port}"


async def test_a_session_outlives_its_idle_time_out_and_a_request_works(certificate):
    """Keep-alive: idleness alone must not end a session."""
    handler, _ = stocked()
    quic = moqt.QuicConfig(cafile=certificate[0], idle_timeout=0.6)
    async with (
        serving(certificate, handler, idle_timeout=0.6) as (_, url),
        moqt.connect(url, quic=quic) as session,
    ):
        await asyncio.sleep(1.5)
        assert len(await fetch(session)) == 12


async def test_a_connect_cancelled_at_any_moment_leaves_no_session_and_no_task(certificate):
    async with serving(certificate, Publisher()) as (server, url):
        before = asyncio.all_tasks()
        for delay in (0, 0.001, 0.003, 0.006, 0.01, 0.02, 0.04):
            connecting = moqt.connect(url, cafile=certificate[0])
            task = asyncio.ensure_future(connecting.__aenter__())
            await asyncio.sleep(delay)
            task.cancel()
            try:
                session = await task
            except asyncio.CancelledError:
                continue
            session.close()
            await session.wait_closed()
        async with asyncio.timeout(15):
            while server.sessions:  # noqa: ASYNC110 - nothing tells of their end
                await asyncio.sleep(0.02)
        assert asyncio.all_tasks() - before == set()


async def test_leaving_the_with_block_ends_both_ends(certificate):
    handler, store = stocked(ended=False)
    async with serving(certificate, handler) as (server, url):
        async with moqt.connect(url, cafile=certificate[0]) as session:
            it = await session.subscribe(NAMESPACE, TRACK, fill=FROM_START)
            await anext(it)
            (accepted,) = server.sessions
        closed = await asyncio.wait_for(accepted.wait_closed(), 5)
        assert closed.code == moqt.SessionErrorCode.NO_ERROR and not closed.transport
        assert server.sessions == set() and not listeners(store)
        assert_clean(accepted.session)
        assert_clean(session.session)


async def test_a_failing_fetch_is_told_over_a_real_connection(certificate):
    handler, store = stocked()
    store.authoritative = False  # and nobody to ask
    async with (
        serving(certificate, handler) as (_, url),
        moqt.connect(url, cafile=certificate[0]) as session,
    ):
        it = await session.fetch(NAMESPACE, TRACK)
        async with asyncio.timeout(5):
            with pytest.raises(moqt.StreamReset):
                [o async for o in it]


async def test_goaway_reaches_the_client_and_new_requests_are_refused(certificate):
    handler, _ = stocked()

    class Watcher(Publisher):
        def goaway_received(self, session, goaway):
            told.set_result(goaway)

    told = asyncio.get_running_loop().create_future()
    async with (
        serving(certificate, handler) as (server, url),
        moqt.connect(url, cafile=certificate[0], handler=Watcher()) as session,
    ):
        server.goaway("moqt://elsewhere.example/", 1000)
        assert (await asyncio.wait_for(told, 5)).uri == "moqt://elsewhere.example/"
        with pytest.raises(moqt.RequestError) as refused:
            await fetch(session)
        assert refused.value.code == RequestErrorCode.GOING_AWAY
