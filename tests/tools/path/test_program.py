"""The options of `python -m tools.path`, and the program itself."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys

import pytest

from tools.path.link import Path
from tools.path.profiles import PROFILES
from tools.path.program import main, routes

ENDS = "--listen 127.0.0.1:0 --to 127.0.0.1:9 "


def both(text: str) -> tuple[Path, Path]:
    (options,) = routes(shlex.split(ENDS + text))
    return options.paths


def test_without_options_a_route_only_forwards():
    assert both("") == (Path(latency=0.0), Path(latency=0.0))


def test_an_option_is_for_both_directions_and_one_of_a_direction_goes_before_it():
    up, down = both("--delay 50ms --rate 20MB/s --queue 100ms --loss 1% --up-rate 8Mbit/s")
    assert down == Path(latency=0.05, bandwidth=20e6, queue=2_000_000, loss=0.01)
    assert up == Path(latency=0.05, bandwidth=1e6, queue=100_000, loss=0.01)


def test_every_vice_has_an_option():
    up, down = both(
        "--jitter 5ms --police 5MB/s+32KiB --burst 0.1%x20 --reorder 10% --reorder-by 3ms "
        "--duplicate 2% --mtu 1300 --blackout 10s+2s,30s+500ms"
    )
    assert up == down
    assert up == Path(
        latency=0.0,
        jitter=0.005,
        police=5e6,
        police_burst=32 << 10,
        burst=0.001,
        burst_length=20,
        reorder=0.1,
        reorder_by=0.003,
        duplicate=0.02,
        mtu=1300,
        blackouts=((10, 12), (30, 30.5)),
    )


def test_a_policer_may_be_for_each_client_by_itself():
    assert both("--police 5MB/s:each")[1] == Path(latency=0.0, police=5e6, police_each=True)
    with pytest.raises(SystemExit):
        both("--police 5MB/s:all")


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_can_be_taken_and_changed(name):
    assert both(f"--profile {name}") == PROFILES[name]
    assert [each.loss for each in both(f"--profile {name} --loss 0")] == [0.0, 0.0]


def test_the_help_says_what_the_profiles_are(capsys):
    with pytest.raises(SystemExit):
        both("--help")
    said = capsys.readouterr().out
    assert "lte              50 ms, 5 MB/s down, 1.25 up, queue of 200 ms, jitter of 20 ms" in said
    assert all(f"\n  {name} " in said for name in PROFILES)


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        ("--listen 192.0.2.1:4 --to 127.0.0.1:9", "cannot listen on 192.0.2.1:4 for 127.0.0.1:9: "),
        ("--listen 127.0.0.1:0 --to no..host:9", "for no..host:9: "),
    ],
)
def test_an_address_that_cannot_be_had_is_told_at_the_start(ends, says, capsys):
    with pytest.raises(SystemExit):
        main(shlex.split(ends))
    assert says in capsys.readouterr().err


def test_several_routes_stand_side_by_side():
    text = f"{ENDS} --profile lte --and {ENDS} --delay 1ms"
    assert [each.paths[0].latency for each in routes(shlex.split(text))] == [0.025, 0.001]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("--rate 20Mb", "'20Mb' is no rate (a number with one of B/s"),
        ("--delay fast", "'fast' is no time"),
        ("--queue 300ms", "a queue of 0.3 s needs a --rate"),
        ("--loss 300%", "loss must be between 0 and 1"),
        ("--to nowhere", "'nowhere' is no address (such as 127.0.0.1:4443)"),
    ],
)
def test_a_wrong_option_is_refused_with_a_reason(wrong, says, capsys):
    with pytest.raises(SystemExit):
        both(wrong)
    assert says in capsys.readouterr().err


def test_the_program_forwards_and_tells_what_it_did_when_asked_and_at_its_end():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(20)
        command = [sys.executable, "-m", "tools.path", "--listen", "127.0.0.1:0", "--json"]
        command += ["--to", f"127.0.0.1:{server.getsockname()[1]}", "--delay", "1ms"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().rpartition(":")[2])
            server.sendto(b"hello", ("127.0.0.1", port))
            assert server.recv(100) == b"hello"
            process.send_signal(signal.SIGUSR1)
            asked = json.loads(process.stdout.readline())
            process.send_signal(signal.SIGTERM)
            ended = json.loads(process.stdout.readline())
            assert process.wait(20) == 0
        finally:
            process.kill()
            process.wait()
    assert asked == ended
    assert ended["up"]["forwarded"] == 1 and ended["up"]["octets"] == 5
