"""`kvcs-relay --workers N`: several processes, one relay to its clients and its operator."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

import moqt
from moqt.client import connect
from moqt.token_file import bearer, read_token_file
from moqt.values.codes import RequestErrorCode
from tests.e2e.support import BIN, Process, Relay, eventually, make_cache, relay
from tests.moqt.quic.udp.network import Network

EDGES = ("0", "1")
TOKEN = "admin-token-of-the-workers-0123456789"


class Workers:
    """What the processes of a relay say of themselves."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.base = relay.metrics_url.removesuffix("/metrics")

    def asked(self, path: str, data: bytes | None = None):
        request = Request(self.base + path, data, {"Authorization": f"Bearer {TOKEN}"})
        with urlopen(request, timeout=20) as answer:
            return json.loads(answer.read())

    def shown(self, name: str) -> dict[str, float]:
        found = re.findall(
            rf'^kvcs_relay_{name}{{worker="(\w+)"}} (\S+)$', self.relay.metrics(), re.MULTILINE
        )
        return {worker: float(value) for worker, value in found}

    def metric(self, name: str) -> dict[str, float]:
        """The values of all workers, taken after this call began."""
        before = self.shown("metrics_updates_total")
        eventually(
            lambda: (
                (now := self.shown("metrics_updates_total")).keys() >= before.keys()
                and all(now[each] != before[each] for each in before)
            ),
            "fresh metrics",
        )
        return self.shown(name)

    def pids(self) -> list[int]:
        """Of the home, and of the edges."""
        pid = self.relay.process.popen.pid
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return sorted(map(int, text.split()))

    def ready(self) -> bool:
        try:
            with urlopen(f"{self.base}/readyz", timeout=20) as answer:
                return bool(answer.status == 200)
        except HTTPError:
            return False

    async def at_each(self, **settings: object) -> dict[str, moqt.MoqtSession]:
        """A session at each edge; those that have come to one that has one are closed."""
        quic = moqt.QuicConfig(cafile=self.relay.cafile, idle_timeout=600, keep_alive=0.5)
        found: dict[str, moqt.MoqtSession] = {}
        for _ in range(60):
            session = await connect(self.relay.url, quic=quic, **settings)
            name = session.session.transport.connection_id
            entries = (await asyncio.to_thread(self.asked, "/sessions.json"))["sessions"]
            (edge,) = [each["worker"] for each in entries if each["connection"] == name]
            if edge in found:
                session.close()
            else:
                found[edge] = session
            if len(found) == len(EDGES):
                return found
        raise AssertionError("nobody has come to one of the workers")


@pytest.fixture
def workers(tmp_path) -> Iterator[Workers]:
    token = tmp_path / "admin.token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    with relay(tmp_path, "--workers", "2", "--admin-token-file", token) as running:
        yield Workers(running)


def test_what_is_published_at_one_worker_is_read_at_all_and_crosses_once_to_each(
    workers, cache, tmp_path
):
    hub = workers.relay
    publisher = hub.publish(cache)
    publisher.wait_for("publishing")
    for number in range(40):
        out = tmp_path / f"out{number}"
        hub.subscribe(cache, out, name=f"subscribe{number}").finish(0)
        cache.check(out)
        got = workers.metric("objects_in_total")
        if all(got[edge] for edge in EDGES):
            break
    assert all(got[edge] for edge in EDGES), "nobody has come to one of the workers"
    assert got["home"] >= cache.objects
    assert got["0"] == got["1"]
    out = workers.metric("objects_out_total")
    assert out["home"] == got["0"] + got["1"]


def test_a_publication_at_one_worker_is_listed_and_read_at_the_other(workers):
    async def scenario() -> None:
        at = await workers.at_each()
        for here, there in (("0", "1"), ("1", "0")):
            name = (b"demo", here.encode())
            store = at[here].publish_track(name, b"video")
            store.append(0, 0, b"of " + here.encode())
            store.finish_subgroup(0, 0)
            await at[here].publish_namespace(name)
            listing = await at[there].subscribe_namespace((b"demo",))
            assert name in listing.namespaces
            fetched = await at[there].fetch(name, b"video")
            assert [bytes(each.payload) async for each in fetched] == [b"of " + here.encode()]
        for session in at.values():
            session.close()

    asyncio.run(scenario())


def test_a_worker_that_is_killed_costs_its_sessions_alone_and_is_started_again(workers):
    async def scenario() -> None:
        at = await workers.at_each()
        for edge, session in at.items():
            await session.publish_namespace((b"demo", edge.encode()))
        _, *edges = workers.pids()
        os.kill(edges[0], signal.SIGKILL)

        def started() -> list[str]:
            return [each for each, times in workers.shown("worker_restarts_total").items() if times]

        await asyncio.to_thread(eventually, started, "it is started again")
        (killed,) = await asyncio.to_thread(started)
        (other,) = set(EDGES) - {killed}
        async with asyncio.timeout(60):
            closed = await at[killed].wait_closed()
        assert closed.transport and "it was restarted" in closed.reason
        await at[other].publish_namespace((b"demo", b"more"))
        await asyncio.to_thread(eventually, workers.ready, "all workers are there")
        again = await workers.at_each()
        listing = await again[killed].subscribe_namespace((b"demo",))
        assert listing.namespaces == {(b"demo", other.encode()), (b"demo", b"more")}
        for session in (*at.values(), *again.values()):
            session.close()

    asyncio.run(scenario())


def test_what_is_published_is_there_again_when_the_home_was_killed(workers, cache, tmp_path):
    hub = workers.relay
    hub.publish(cache).wait_for("publishing")
    home, *_ = workers.pids()
    os.kill(home, signal.SIGKILL)
    eventually(lambda: workers.shown("worker_restarts_total").get("home"), "it is started again")
    hub.subscribe(cache, tmp_path / "out").finish(0)
    cache.check(tmp_path / "out")


def test_a_session_goes_on_when_its_address_changes_to_one_of_another_worker(workers):
    async def scenario() -> None:
        host, _, port = workers.relay.url.removeprefix("moqt://").rpartition(":")
        network = Network((host, int(port)))
        quic = moqt.QuicConfig(cafile=workers.relay.cafile, max_datagram_size=1200)
        async with connect(f"moqt://127.0.0.1:{network.port}/", quic=quic) as session:
            for number in range(100):
                await session.publish_namespace((b"demo", b"%d" % number))
                shown = await asyncio.to_thread(workers.shown, "quic_datagrams_handed_over_total")
                if any(shown.values()):
                    break
                network.rebind()
            assert any(shown.values()), "the kernel has always chosen the same worker"
            await session.publish_namespace((b"demo", b"last"))
            assert session.closed is None
        network.close()

    asyncio.run(scenario())


def test_what_is_pushed_is_kept_by_all_and_is_on_the_disk_after_a_restart(cache, tmp_path):
    options = ("--workers", "2", "--cache-dir", tmp_path / "disk")
    with relay(tmp_path, *options) as hub:
        pushed = hub.publish(cache, "--push", "--json", "--durable").finish(0).json()
        assert pushed["stored"] == "disk"
        hub.subscribe(cache, tmp_path / "out").finish(0)
        cache.check(tmp_path / "out")
        hub.process.signal(signal.SIGTERM)
        hub.process.finish(0)
    with relay(tmp_path, *options) as again:
        again.subscribe(cache, tmp_path / "later", name="later").finish(0)
        cache.check(tmp_path / "later")


def test_rights_hold_whichever_worker_a_client_has_come_to(cache, tmp_path):
    other = make_cache(tmp_path / "other", seed=2)
    principals = tmp_path / "principals.json"
    token = {name: tmp_path / f"{name}.token" for name in ("writer", "reader", "stranger")}
    made = {
        "writer": ("--scope-key-file", cache.scope),
        "reader": ("--scope-key-file", cache.scope, "--read-only"),
        "stranger": ("--scope-key-file", other.scope),
    }
    for name, options in made.items():
        command = (BIN / "kvcs-keygen", "token", token[name], "--principals", principals, *options)
        Process(tmp_path, f"keygen-{name}", *command).finish(0)
    with relay(tmp_path, "--workers", "2", "--auth", principals) as hub:
        workers = Workers(hub)
        hub.publish(cache, "--token-file", token["reader"], name="refused").finish(4)
        publisher = hub.publish(cache, "--token-file", token["writer"])
        publisher.wait_for("publishing")
        hub.subscribe(cache, tmp_path / "out", "--token-file", token["reader"]).finish(0)
        cache.check(tmp_path / "out")

        async def scenario() -> None:
            namespace = (b"kvcs-1",)
            tokens = {
                name: moqt.SessionConfig(setup_tokens=(bearer(read_token_file(path)),))
                for name, path in token.items()
            }
            for who in (moqt.SessionConfig(), tokens["stranger"]):
                for session in (await workers.at_each(session=who)).values():
                    with pytest.raises(moqt.RequestError) as refused:
                        await session.subscribe_namespace(namespace)
                    assert refused.value.code == RequestErrorCode.UNAUTHORIZED
                    session.close()

        asyncio.run(scenario())
        # who is no principal any more loses what is open, at every worker
        principals.write_text(json.dumps({"principals": []}))
        principals.chmod(0o600)
        hub.process.signal(signal.SIGHUP)
        eventually(
            lambda: any(workers.shown("requests_revoked_total")[edge] for edge in EDGES),
            "what is open is looked at again",
        )
        late = ("--token-file", token["reader"])
        hub.subscribe(cache, tmp_path / "late", *late, name="late").finish(4)


def test_workers_drain_together_and_end_with_whoever_started_them(workers):
    async def scenario() -> None:
        at = await workers.at_each()
        workers.relay.process.signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            for session in at.values():
                await session.wait_goaway()
        assert not await asyncio.to_thread(workers.ready)
        for session in at.values():
            session.close()

    asyncio.run(scenario())
    workers.relay.process.finish(0)


def test_no_worker_outlives_the_supervisor(workers):
    pids = workers.pids()
    assert len(pids) == 3
    workers.relay.process.kill()
    for pid in pids:
        eventually(lambda pid=pid: not Path(f"/proc/{pid}/exe").exists(), "the worker ends")


def test_what_all_workers_hold_is_told_and_purged_as_one(workers, cache, tmp_path):
    hub = workers.relay
    hub.publish(cache, "--push").finish(0)
    hub.subscribe(cache, tmp_path / "out").finish(0)
    told = workers.asked("/tracks.json")
    of_home = [each for each in told["tracks"] if each["worker"] == "home"]
    assert {each["worker"] for each in told["tracks"]} > {"home"}
    rest = workers.asked("/tracks.json?limit=2&after=1")
    assert rest["tracks"] == told["tracks"][1:3] and rest["of"] == told["of"]
    assert len(workers.asked("/publications.json")["publications"]) == 1
    purged = workers.asked("/purge?namespace=", b"")
    # an edge may know of one more, that it was asked for and is not there
    assert purged["tracks"] >= len(of_home) and purged["in_use"] == 0
    assert purged["octets"] >= 2 * sum(each["octets"] for each in of_home)
    hub.subscribe(cache, tmp_path / "gone", name="gone").finish(3)


def test_a_port_that_another_relay_of_several_processes_has_is_not_shared(workers, tmp_path):
    address = workers.relay.url.removeprefix("moqt://")
    command = (BIN / "kvcs-relay", "--listen", address, "--self-signed", tmp_path / "other-tls")
    second = Process(tmp_path, "second", *command, "--workers", "2").finish(1)
    assert "cannot listen on" in second.stderr


def test_a_worker_that_cannot_begin_ends_the_relay_with_why(tmp_path):
    options = ("--workers", "2", "--cache-dir", tmp_path / "disk")
    with relay(tmp_path / "first", *options):
        command = (BIN / "kvcs-relay", "--listen", "127.0.0.1:0", "--self-signed", tmp_path / "t")
        second = Process(tmp_path, "second", *command, *options).finish(1)
    assert "--cache-dir" in second.stderr.splitlines()[-1]
