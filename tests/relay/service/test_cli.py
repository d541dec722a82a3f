"""`kvcs-relay` as a real process, and two real sessions through it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import urllib.request

import pytest

import moqt
from moqt.quic.backend import chosen, default
from moqt.quic.certificates import make_self_signed, names_of
from moqt.quic.congestion.bbr_model import Phase
from relay.service.checks import Usage
from relay.service.options import parse_address, parse_size
from relay.service.self_signed import own_addresses, own_names, self_signed_certificate
from tests.relay.service.program import COMMAND, READY, check_sentence, run, running
from tests.relay.star import end_track, everything, publish


def test_it_prints_one_line_when_ready_and_ends_with_0_on_sigterm(tmp_path):
    with running("--listen", "127.0.0.1:0", "--self-signed", tmp_path / "c") as (process, ready):
        assert ready[1].startswith("127.0.0.1:") and not ready[1].endswith(":0")
        assert ready[2] == str(tmp_path / "c" / "cert.pem")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
        assert (out, err, process.returncode) == ("", "", 0)


def test_tracks_cross_a_real_relay_and_survive_their_publisher(tmp_path):
    async def scenario(url, cafile, metrics):
        async with moqt.connect(url, cafile=cafile) as publisher:
            store = publisher.publish_track((b"demo",), b"video")
            await publisher.publish_namespace((b"demo",))
            async with moqt.connect(url, cafile=cafile) as subscriber:
                first = await subscriber.subscribe(
                    (b"demo",),
                    b"video",
                    location_filter=moqt.LocationFilter.next_object(),
                    fill=moqt.LocationFilter.absolute_start(0),
                )
                for g in range(3):
                    for o in range(4):
                        publish(store, g, o, 20_000)
                end_track(store, 3)
                assert {o.location: bytes(o.payload) async for o in first if not o.status} == (
                    everything(3, size=20_000)
                )
        webtransport = url.replace("moqt://", "https://")
        async with moqt.connect(webtransport, cafile=cafile) as subscriber:
            late = await subscriber.subscribe(
                (b"demo",),
                b"video",
                location_filter=moqt.LocationFilter.next_object(),
                fill=moqt.LocationFilter.absolute_start(0),
            )
            assert {o.location: bytes(o.payload) async for o in late if not o.status} == (
                everything(3, size=20_000)
            )
            fetched = await subscriber.fetch((b"demo",), b"video")
            assert {o.location: bytes(o.payload) async for o in fetched} == (
                everything(3, size=20_000)
            )
            with pytest.raises(moqt.RequestError) as refused:
                await subscriber.subscribe((b"nobody",), b"video")
            assert refused.value.code == moqt.RequestErrorCode.DOES_NOT_EXIST
            await asyncio.sleep(0.7)
            return await asyncio.to_thread(lambda: urllib.request.urlopen(metrics).read().decode())

    with running(
        "--listen",
        "127.0.0.1:0",
        "--self-signed",
        tmp_path,
        "--metrics",
        "127.0.0.1:0",
        "--cache-memory",
        "16MiB",
        "--qlog-dir",
        tmp_path / "logs",
        "--keylog-file",
        tmp_path / "keys",
    ) as (_, ready):
        text = asyncio.run(scenario(f"moqt://{ready[1]}/", ready[2], ready[3]))
    assert "kvcs_relay_cache_objects 12.0" in text
    assert "kvcs_relay_sessions_total 3.0" in text
    assert "kvcs_relay_quic_connections_accepted_total 3.0" in text
    assert "kvcs_relay_quic_webtransport_sessions_total 1.0" in text
    phases = re.findall(
        r'^kvcs_relay_quic_congestion_phase_connections{phase="(.*)"} (.*)$', text, re.MULTILINE
    )
    assert phases and {phase for phase, _ in phases} <= {each.value for each in Phase}
    assert re.search(r'^kvcs_relay_quic_rtt_seconds{of="median"} 0\.', text, re.MULTILINE)
    assert float(re.findall(r"^kvcs_relay_quic_window_bytes (.*)$", text, re.MULTILINE)[0]) > 0
    assert "kvcs_relay_quic_packets_spurious_total" in text
    assert f'kvcs_relay_quic_backend{{backend="{chosen(default())}"}} 1.0' in text
    assert len(list((tmp_path / "logs").glob("*_server.sqlog"))) == 3
    assert (tmp_path / "keys").read_text().count("CLIENT_TRAFFIC_SECRET_0") == 3
    [budget] = re.findall(r"^kvcs_relay_cache_budget_bytes (\S+)$", text, re.MULTILINE)
    assert float(budget) == 16 * 2**20


def test_sigterm_sends_goaway_and_waits_for_the_sessions_to_leave(tmp_path):
    async def scenario(process, url, cafile):
        session = await moqt.connect(url, cafile=cafile)
        process.send_signal(signal.SIGTERM)
        for _ in range(200):
            if session.session.goaway is not None:
                break
            await asyncio.sleep(0.02)
        assert session.session.goaway is not None
        assert process.poll() is None  # it waits for us
        with pytest.raises(moqt.RequestError) as refused:
            await session.publish_namespace((b"late",))
        assert refused.value.code == moqt.RequestErrorCode.GOING_AWAY
        session.close()
        await session.wait_closed()

    with running("--listen", "127.0.0.1:0", "--self-signed", tmp_path, "--drain-timeout", "30") as (
        process,
        ready,
    ):
        asyncio.run(scenario(process, f"moqt://{ready[1]}/", ready[2]))
        assert process.wait(timeout=15) == 0


def test_sessions_that_do_not_leave_are_closed_after_the_drain_timeout(tmp_path):
    async def scenario(process, url, cafile):
        session = await moqt.connect(url, cafile=cafile)
        process.send_signal(signal.SIGINT)
        await asyncio.wait_for(session.wait_closed(), 20)

    with running(
        "--listen", "127.0.0.1:0", "--self-signed", tmp_path, "--drain-timeout", "0.5"
    ) as (process, ready):
        asyncio.run(scenario(process, f"moqt://{ready[1]}/", ready[2]))
        assert process.wait(timeout=15) == 0


def test_the_example_of_the_help_works_as_typed(tmp_path):
    result = run("--help")
    assert result.returncode == 0 and result.stderr == ""
    example = re.search(r"Example: kvcs-relay (.*)", result.stdout)[1].split()
    process = subprocess.Popen(
        [*COMMAND, *example],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    try:
        line = process.stdout.readline()
        if not line and "in use" in process.stderr.read():
            pytest.skip("something else listens on the port of the example")
        assert READY.fullmatch(line)
    finally:
        process.kill()
        process.communicate()


def ended(process):
    """What a relay said on standard error until it was asked to stop."""
    process.send_signal(signal.SIGTERM)
    return process.communicate(timeout=20)[1]


def test_the_certificate_is_used_again_at_the_next_start_without_a_word(tmp_path):
    seen = []
    for _ in range(2):
        with running("--listen", "127.0.0.1:0", "--self-signed", tmp_path) as (process, _):
            assert ended(process) == ""
        seen.append([(tmp_path / name).read_bytes() for name in ("cert.pem", "key.pem")])
    assert seen[0] == seen[1]


def test_a_relay_that_cannot_start_leaves_the_certificate_of_another_as_it_is(tmp_path):
    make_self_signed(tmp_path, ["localhost"])
    before = (tmp_path / "cert.pem").read_bytes()
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken,
        socket.socket(socket.AF_INET, socket.SOCK_STREAM) as metrics,
    ):
        for each in (taken, metrics):
            each.bind(("127.0.0.1", 0))
        metrics.listen()
        listen, there = (f"127.0.0.1:{each.getsockname()[1]}" for each in (taken, metrics))
        result = run("--listen", listen, "--self-signed", tmp_path)
        check_sentence(result, 1, listen, "in use")
        result = run("--listen", "127.0.0.1:0", "--metrics", there, "--self-signed", tmp_path)
        check_sentence(result, 1, there, "in use")
    for wrong in (["--auth", tmp_path / "absent"], ["--upstream", "ftp://x"], ["--mtu", "9"]):
        check_sentence(run("--listen", "127.0.0.1:0", "--self-signed", tmp_path, *wrong), 2)
    assert (tmp_path / "cert.pem").read_bytes() == before


def test_a_new_certificate_is_said_and_good_for_the_old_names_too(tmp_path):
    make_self_signed(tmp_path, ["old.example", "192.0.2.7"])
    for again in (False, True):
        with running("--listen", "127.0.0.1:0", "--self-signed", tmp_path) as (process, _):
            said = ended(process)
        if again:
            assert said == ""
        else:
            assert said.count("\n") == 1
            assert "made a new certificate" in said and "not for localhost" in said
            assert f"clients need the new {tmp_path}/cert.pem" in said
    assert {"old.example", "192.0.2.7", "127.0.0.1"} <= set(names_of(tmp_path / "cert.pem"))


def test_a_relay_on_all_addresses_has_a_certificate_for_this_machine(tmp_path):
    async def scenario(port, cafile):
        async with moqt.connect(f"moqt://127.0.0.1:{port}/", cafile=cafile):
            pass

    with running("--listen", "0.0.0.0:0", "--self-signed", tmp_path) as (_, ready):
        host, port = ready[1].split(":")
        assert host == "0.0.0.0"
        asyncio.run(scenario(port, ready[2]))
    names = set(names_of(tmp_path / "cert.pem"))
    assert {"localhost", "127.0.0.1", "::1", *own_names(), *own_addresses()} <= names
    assert "0.0.0.0" not in names


def test_a_name_no_certificate_can_have_is_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(Usage, match="no certificate can be made for the name 'bücher'"):
        self_signed_certificate(tmp_path, "bücher")
    monkeypatch.setattr(socket, "gethostname", lambda: "bücher")
    self_signed_certificate(tmp_path, "127.0.0.1")
    assert names_of(tmp_path / "cert.pem") == ["localhost", "127.0.0.1", "::1"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
def test_a_ready_line_that_cannot_be_written_is_told_as_that(tmp_path):
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [*COMMAND, "--listen", "127.0.0.1:0", "--self-signed", str(tmp_path)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert process.returncode == 1
    assert process.stderr == (
        "kvcs-relay: cannot write to standard output that it is ready: No space left on device\n"
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
@pytest.mark.parametrize("option", ["--print-config", "--check-config", "--help", "--version"])
def test_what_cannot_be_written_to_standard_output_is_one_sentence(option, tmp_path):
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [*COMMAND, "--listen", "127.0.0.1:0", "--self-signed", str(tmp_path), option],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert process.returncode == 1
    assert process.stderr == "kvcs-relay: standard output: No space left on device\n"


def test_a_file_in_the_place_of_the_cache_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    folder = ("--cache-dir", tmp_path / "file")
    result = run("--listen", "127.0.0.1:0", "--self-signed", tmp_path, *folder)
    check_sentence(result, 1, "file is no folder")


def test_an_address_in_use_is_one_sentence(tmp_path):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        result = run("--listen", f"127.0.0.1:{port}", "--self-signed", tmp_path)
    check_sentence(result, 1, f"127.0.0.1:{port}", "in use")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--listen", "nonsense", "--self-signed", "{dir}"], 2, ["nonsense", "HOST:PORT"]),
        (["--listen", "127.0.0.1:0"], 2, ["--cert", "--self-signed"]),
        (["--listen", "127.0.0.1:0", "--cert", "x"], 2, ["--key"]),
        ([], 2, ["--listen"]),
        (["--bogus"], 2, ["--bogus"]),
        (["--listen", ":0", "--self-signed", "{dir}", "--cache-memory", "lots"], 2, ["HOST:PORT"]),
        (["--listen", "[::1]:0", "--self-signed", "{dir}", "--cache-memory", "lots"], 2, ["lots"]),
        (["--listen", "127.0.0.1:0", "--self-signed", "{dir}", "--mtu", "99"], 2, ["--mtu"]),
        (["--listen", "127.0.0.1:0", "--self-signed", "{dir}", "--mtu", "x"], 2, ["integer"]),
        (["--listen", "127.0.0.1:0", "--self-signed", "{dir}", "--congestion", "x"], 2, ["bbr"]),
        (["--listen", "127.0.0.1:0", "--self-signed", "{dir}", "--quic-backend", "x"], 2, ["auto"]),
        (["--listen", "127.0.0.1:0", "--self-signed", "{dir}", "--log-level", "x"], 2, ["debug"]),
        (
            ["--listen", "127.0.0.1:0", "--cert", "{dir}/c", "--key", "{dir}/k"],
            2,
            ["cannot read"],
        ),
        (["--listen", "127.0.0.1:0", "--cert", "{junk}", "--key", "{junk}"], 2, ["no PEM"]),
        (
            ["--listen", "127.0.0.1:0", "--cert", "{pair}/cert.pem", "--key", "{other}/key.pem"],
            2,
            ["does not belong to the certificate"],
        ),
        (["--listen", "127.0.0.1:0", "--self-signed", "{junk}"], 2, ["cannot make"]),
        (["--listen", "192.0.2.1:9", "--self-signed", "{dir}"], 1, ["cannot listen"]),
        (["--listen", "x" * 70 + ":9", "--self-signed", "{dir}"], 1, ["cannot listen", "name"]),
        (
            ["--listen", "127.0.0.1:0", "--self-signed", "{dir}", "--qlog-dir", "{junk}"],
            2,
            ["junk", "exists"],
        ),
        (
            ["--listen", "127.0.0.1:0", "--self-signed", "{dir}", "--upstream", "ftp://x"],
            2,
            ["--upstream", "moqt://"],
        ),
        (
            ["--listen", "[::1]:9", "--self-signed", "{dir}", "--upstream", "moqt://[::1]:9/x"],
            2,
            ["--upstream", "itself"],
        ),
        (["--listen", "127.0.0.1:0", "--self-signed", "{dir}", "--announce-upstream"], 2, ["URL"]),
        (
            ["--listen", "127.0.0.1:0", "--self-signed", "{dir}", "--auth", "{dir}/none"],
            2,
            ["--auth", "none", "No such file"],
        ),
        (
            ["--listen", "127.0.0.1:0", "--self-signed", "{dir}", "--auth", "{junk}"],
            2,
            ["--auth", "junk", "is no JSON"],
        ),
        (
            ["--listen", "127.0.0.1:0", "--self-signed", "{dir}", "--keylog-file", "{dir}/x/y"],
            2,
            ["x/y", "No such file"],
        ),
        (
            ["--listen", "127.0.0.1:0", "--self-signed", "{dir}", "--reset-key", "{junk}"],
            2,
            ["--reset-key", "junk", "chmod 600"],
        ),
        (
            ["--listen", "127.0.0.1:0", "--self-signed", "{dir}", "--reset-key", "{dir}/x/y"],
            2,
            ["--reset-key", "x/y", "No such file"],
        ),
    ],
)
def test_errors_are_one_sentence_with_the_right_exit_status(tmp_path, arguments, code, words):
    junk = tmp_path / "junk"
    junk.write_text("this is no certificate")
    pair, other = tmp_path / "pair", tmp_path / "other"
    make_self_signed(pair)
    make_self_signed(other)
    places = {"dir": tmp_path / "c", "junk": junk, "pair": pair, "other": other}
    filled = [a.format(**places) for a in arguments]
    check_sentence(run(*filled), code, *words)


@pytest.mark.parametrize(
    ("text", "octets"),
    [("65536", 65536), ("1KiB", 1024), ("1.5 MiB", 1536 * 1024), ("2GB", 2 * 10**9), ("1g", 2**30)],
)
def test_sizes(text, octets):
    assert parse_size(text) == octets


@pytest.mark.parametrize("text", ["", "MiB", "-1", "0", "1 parsec", "1e9"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


@pytest.mark.parametrize("text", ["9" * 400, "1048576TiB", "9" * 20 + "TiB"])
def test_a_size_that_nothing_has_is_a_sentence(text):
    with pytest.raises(ValueError, match="positive size below"):
        parse_size(text)


def test_addresses():
    assert parse_address("[::1]:4443") == ("::1", 4443)
    assert parse_address("relay.example:0") == ("relay.example", 0)
    for text in ("::1:4443", "host", "host:", "host:99999", "a:b:1"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            parse_address(text)
