"""moqt.connect and moqt.serve over real sockets on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import pytest
from cryptography import x509

import moqt
from moqt.quic.certificates import make_self_signed
from tests.moqt.inside import octets_queued
from tests.moqt.probe import adapter

NAMESPACE = (b"demo", b"live")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return make_self_signed(tmp_path_factory.mktemp("tls"))


@contextlib.asynccontextmanager
async def serving(certificate, publisher, **options):
    cert, key = certificate
    server = await moqt.serve(
        "127.0.0.1",
        0,
        quic=moqt.QuicConfig(certfile=cert, keyfile=key, **options),
        handler=publisher,
    )
    async with server:
        yield f"moqt://127.0.0.1:{server.port}", server


def over_webtransport(url):
    return url.replace("moqt://", "https://") + "/room?seat=1"


def fill_track(publisher, groups=5, objects=4, size=1000):
    store = moqt.TrackStore(moqt.FullTrackName(NAMESPACE, b"video"))
    publisher.add_track(store)
    fill_store(store, groups, objects, size)
    return store


def fill_store(store, groups, objects, size):
    for g in range(groups):
        for o in range(objects):
            store.append(g, o, bytes([g, o]) * (size // 2), priority=g)
        store.mark_end(moqt.Location(g, objects), moqt.ObjectStatus.END_OF_GROUP)
        store.finish_subgroup(g, 0)
    store.mark_end(moqt.Location(groups, 0), moqt.ObjectStatus.END_OF_TRACK)
    store.finish_subgroup(groups, 0)
    store.finish(moqt.PublishDoneCode.TRACK_ENDED)


async def test_a_subscriber_iterates_over_fill_and_live_objects(certificate):
    publisher = moqt.Publisher()
    store = moqt.TrackStore(moqt.FullTrackName(NAMESPACE, b"video"))
    publisher.add_track(store)
    store.append(0, 0, b"before")
    async with (
        serving(certificate, publisher) as (url, _),
        moqt.connect(url, cafile=certificate[0]) as session,
    ):
        subscription = await session.subscribe(
            NAMESPACE,
            b"video",
            location_filter=moqt.LocationFilter.next_object(),
            fill=moqt.LocationFilter.absolute_start(0),
        )
        first = await anext(subscription)
        assert (first.payload, first.via) == (b"before", moqt.Via.FILL)
        store.append(0, 1, b"after")
        second = await anext(subscription)
        assert (bytes(second.payload), second.via) == (b"after", moqt.Via.SUBSCRIPTION)
        store.finish_subgroup(0, 0)
        store.finish(moqt.PublishDoneCode.TRACK_ENDED)
        assert [o async for o in subscription] == []
        assert subscription.done_code == moqt.PublishDoneCode.TRACK_ENDED


async def test_a_fetch_of_groups_1_to_3_brings_them_in_order(certificate):
    publisher = moqt.Publisher()
    fill_track(publisher)
    async with (
        serving(certificate, publisher) as (url, _),
        moqt.connect(url, cafile=certificate[0]) as session,
    ):
        response = await session.fetch(NAMESPACE, b"video", moqt.LocationFilter.groups(1, 3))
        got = [o.location async for o in response]
        assert got == [(g, o) for g in (1, 2, 3) for o in range(4)]


async def test_namespaces_are_listed_and_withdrawn(certificate):
    publisher = moqt.Publisher()
    async with (
        serving(certificate, publisher) as (url, _),
        moqt.connect(url, cafile=certificate[0]) as session,
    ):
        listing = await session.subscribe_namespace((b"demo",))
        store = fill_track(publisher)
        assert await anext(listing) == (NAMESPACE, True)
        publisher.remove_track(store.name)
        assert await anext(listing) == (NAMESPACE, False)


async def test_cancelling_a_subscribe_leaves_nothing_behind(certificate):
    asked = asyncio.get_running_loop().create_future()

    class Silent(moqt.SessionHandler):
        def subscribe_received(self, request):
            asked.set_result(request)

    handler = Silent()
    async with (
        serving(certificate, handler) as (url, _),
        moqt.connect(url, cafile=certificate[0]) as session,
    ):
        task = asyncio.create_task(session.subscribe(NAMESPACE, b"video"))
        request = await asked
        ended = asyncio.Event()
        request.when_ended(ended.set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(ended.wait(), 5)
        assert not session.session.requests.outgoing
        assert not session.session.data_streams.expected


async def test_an_unread_subscription_stops_the_publisher_and_goes_on_when_read(certificate):
    publisher = moqt.Publisher()
    store = moqt.TrackStore(moqt.FullTrackName(NAMESPACE, b"video"))
    publisher.add_track(store)
    config = moqt.QuicConfig(cafile=certificate[0], session_window=64 << 20)
    async with (
        serving(certificate, publisher) as (url, _),
        moqt.connect(url, quic=config) as session,
    ):
        subscription = await session.subscribe(NAMESPACE, b"video", queue_octets=1 << 20)
        fill_store(store, groups=64, objects=8, size=128 * 1024)
        held = -1
        while octets_queued(subscription) != held:
            held = octets_queued(subscription)
            await asyncio.sleep(0.5)
        assert 1 << 20 < held < 34 << 20
        assert len({o.location async for o in subscription if o.payload}) == 512


async def test_nobody_listening_is_a_connect_error_within_the_timeout():
    with pytest.raises(moqt.ConnectError):
        await moqt.connect("moqt://127.0.0.1:9", timeout=2)


async def test_a_relay_that_does_not_answer_may_be_behind_a_path_that_is_too_narrow():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        with pytest.raises(moqt.ConnectError, match=r"answer within 0\.3 s: .* MTU of 1248"):
            await moqt.connect(f"moqt://127.0.0.1:{silent.getsockname()[1]}", timeout=0.3)


async def test_a_certificate_nobody_trusts_is_refused_in_words(certificate, tmp_path):
    other, _ = make_self_signed(tmp_path)
    async with serving(certificate, moqt.Publisher()) as (url, _):
        with pytest.raises(moqt.ConnectError, match="certificate"):
            await moqt.connect(url, cafile=other, timeout=5)


async def test_a_deadline_that_fails_costs_its_session_and_nothing_else(certificate, monkeypatch):
    def tick(now):
        raise RuntimeError("a fault")

    async with (
        serving(certificate, moqt.Publisher()) as (url, _),
        moqt.connect(url, cafile=certificate[0]) as session,
    ):
        monkeypatch.setattr(session.session, "tick", tick)
        closed = await asyncio.wait_for(session.wait_closed(), 5)
        assert closed.code == moqt.SessionErrorCode.INTERNAL_ERROR


async def test_both_transports_share_a_port_and_a_publisher(certificate):
    publisher = moqt.Publisher()
    fill_track(publisher, groups=3, objects=2, size=100_000)
    async with (
        serving(certificate, publisher) as (url, server),
        moqt.connect(url, cafile=certificate[0]) as native,
        moqt.connect(over_webtransport(url), cafile=certificate[0]) as web,
    ):
        for session in (native, web):
            response = await session.fetch(NAMESPACE, b"video")
            assert len([o async for o in response if o.payload]) == 6
        paths = {accepted.session.transport.path for accepted in server.sessions}
        assert paths == {None, "/room?seat=1"}
        counters = server.endpoint.counters
        assert (counters.connections_accepted, counters.webtransport_sessions) == (2, 1)


async def test_closing_a_webtransport_session_tells_the_peer_why(certificate):
    async with (
        serving(certificate, moqt.Publisher()) as (url, server),
        moqt.connect(over_webtransport(url), cafile=certificate[0]) as session,
    ):
        (accepted,) = server.sessions
        accepted.close(moqt.SessionErrorCode.GOAWAY_TIMEOUT, "time is up")
        closed = await asyncio.wait_for(session.wait_closed(), 5)
        assert (closed.code, closed.reason) == (moqt.SessionErrorCode.GOAWAY_TIMEOUT, "time is up")


async def test_a_server_is_made_and_closed_by_async_with_as_a_session_is(certificate):
    cert, key = certificate
    quic = moqt.QuicConfig(certfile=cert, keyfile=key)
    async with moqt.serve("127.0.0.1", 0, quic=quic, handler=moqt.Publisher()) as server:
        url = f"moqt://127.0.0.1:{server.port}"
        async with moqt.connect(url, cafile=cert) as session:
            assert len(server.sessions) == 1
            await server.close()
            await session.wait_closed()
    assert not server.sessions


async def test_goaway_names_the_new_uri_with_the_scheme_that_each_session_has(certificate):
    cert, _ = certificate
    async with (
        serving(certificate, moqt.Publisher()) as (url, server),
        moqt.connect(url, cafile=cert) as native,
        moqt.connect(over_webtransport(url), cafile=cert) as over_http,
    ):
        server.goaway("moqt://elsewhere.example/room", 1000)
        assert (await native.wait_goaway()).uri == "moqt://elsewhere.example/room"
        assert (await over_http.wait_goaway()).uri == "https://elsewhere.example/room"


async def test_a_server_without_webtransport_refuses_https_in_words(certificate):
    async with serving(certificate, moqt.Publisher(), webtransport=False) as (url, _):
        with pytest.raises(moqt.ConnectError, match="ALPN"):
            await moqt.connect(over_webtransport(url), cafile=certificate[0], timeout=5)


async def test_an_untrusted_certificate_is_refused_over_webtransport_too(certificate, tmp_path):
    other, _ = make_self_signed(tmp_path)
    async with serving(certificate, moqt.Publisher()) as (url, _):
        with pytest.raises(moqt.ConnectError, match="certificate"):
            await moqt.connect(over_webtransport(url), cafile=other, timeout=5)


async def test_an_unread_subscription_over_webtransport_stops_the_publisher(certificate):
    publisher = moqt.Publisher()
    store = moqt.TrackStore(moqt.FullTrackName(NAMESPACE, b"video"))
    publisher.add_track(store)
    config = moqt.QuicConfig(cafile=certificate[0], stream_window=256 << 10, session_window=1 << 20)
    async with (
        serving(certificate, publisher) as (url, _),
        moqt.connect(over_webtransport(url), quic=config) as session,
    ):
        subscription = await session.subscribe(NAMESPACE, b"video", queue_octets=1 << 20)
        fill_store(store, groups=32, objects=8, size=128 * 1024)
        held = -1
        while octets_queued(subscription) != held:
            held = octets_queued(subscription)
            await asyncio.sleep(0.3)
        assert 1 << 20 < held < 4 << 20
        assert len({o.location async for o in subscription if o.payload}) == 256


@pytest.mark.parametrize("over", [str, over_webtransport])
@pytest.mark.parametrize("logged", [False, True])
async def test_a_session_has_the_certificate_that_its_peer_has_shown(
    certificate, tmp_path, over, logged
):
    quic = moqt.QuicConfig(cafile=certificate[0], qlog_dir=tmp_path if logged else None)
    async with (
        serving(certificate, moqt.Publisher()) as (url, server),
        moqt.connect(over(url), quic=quic) as session,
    ):
        shown = session.peer_certificate
        assert shown == x509.load_pem_x509_certificate(certificate[0].read_bytes())
        assert [each.peer_certificate for each in server.sessions] == [None]


@pytest.mark.parametrize("over", [str, over_webtransport])
async def test_quic_and_moqt_events_of_both_ends_are_logged(certificate, tmp_path, over):
    publisher = moqt.Publisher()
    fill_track(publisher, groups=1)
    config = moqt.QuicConfig(cafile=certificate[0], qlog_dir=tmp_path)
    async with (
        serving(certificate, publisher, qlog_dir=tmp_path) as (url, _),
        moqt.connect(over(url), quic=config) as session,
    ):
        response = await session.fetch(NAMESPACE, b"video")
        assert len([o async for o in response if o.payload]) == 4
        transport = adapter(session.session.transport)
    async with asyncio.timeout(10):
        while not transport.terminated:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    logs = sorted(path.name.split("_")[1] for path in tmp_path.iterdir())
    assert logs == ["client.sqlog", "server.sqlog"]
    for path in tmp_path.iterdir():
        events = [json.loads(text) for text in path.read_text().split("\x1e")[2:]]
        kinds = {event["name"].partition(":")[0] for event in events}
        assert "transport" in kinds and any("moqt" in kind for kind in kinds)
        times = [event["time"] for event in events]
        assert times == sorted(times)
